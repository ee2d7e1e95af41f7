"""Agents: controllers that learn by reinforcement, and their hyper-policies on disk."""
