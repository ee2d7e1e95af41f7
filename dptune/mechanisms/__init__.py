"""Mechanisms: what happens between per-sample gradients and the optimiser.

A mechanism is a clipper, a noise and a controller (``mechanism.py``); ``registry.py`` names the combinations.
"""
