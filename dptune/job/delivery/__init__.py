"""Delivery: the folder that is handed on, its card, and the check that everything in it agrees."""
