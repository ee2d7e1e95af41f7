"""Private reinforcement learning."""
