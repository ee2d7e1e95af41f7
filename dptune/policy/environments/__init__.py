"""DP policy gradient in simulated environments, where a user is one trajectory."""
