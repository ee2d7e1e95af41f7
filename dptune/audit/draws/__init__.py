"""Draws of batches: tests of a sampler, or of a loader, against the law that is claimed of it."""
