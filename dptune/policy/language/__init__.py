"""DP policy gradient with a language model as the policy, where a user is one prompt and its continuation."""
