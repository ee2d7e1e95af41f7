"""A language model as a policy, where a user is one prompt and one continuation."""
