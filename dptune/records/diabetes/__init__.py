"""Diabetes table: everything that only the UCI table of hospital encounters needs, its synthetic stand-in included."""
