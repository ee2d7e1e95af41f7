"""Settings shared by every test."""

from __future__ import annotations

from hypothesis import settings

# Two cores under load: a deadline would only measure the neighbours.
settings.register_profile("dptune", deadline=None, max_examples=40, database=None, print_blob=True)
settings.load_profile("dptune")
