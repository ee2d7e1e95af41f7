"""Reads a user's own records: from files, from the ``datasets`` library or from Python."""
