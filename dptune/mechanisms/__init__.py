"""Mechanisms: what happens between per-sample gradients and the optimiser.

A mechanism is a clipper, a noise and a controller: each room of this package holds the parts of one kind, registered
where they are written. ``interfaces.py`` says what the three promise each other, ``mechanism.py`` is the private step
that they make together, and ``registry.py`` names parts and mechanisms.
"""
