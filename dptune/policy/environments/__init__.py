"""Policies that learn in simulated environments, where a user is one trajectory."""
