"""Samplers: their laws, and what releases on their batches cost."""
