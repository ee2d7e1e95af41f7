"""Attacks on finished cells."""
