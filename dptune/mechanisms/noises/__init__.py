"""Noises: what is added to the clipped sum."""
