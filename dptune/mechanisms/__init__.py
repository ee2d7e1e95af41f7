"""Mechanisms: what happens between per-sample gradients and the optimiser.

A mechanism is a clipper, a noise and a controller. ``interfaces.py`` says what the three promise each other,
``mechanism.py`` is the private step that they make together, and ``registry.py`` names parts and mechanisms. Every
other file holds parts, registered where they are written, or what they share.
"""
