"""Clippers: what is done to each unit's gradient before the sum."""
