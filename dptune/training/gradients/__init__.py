"""Gradients: one per privacy unit, from one backward pass."""
