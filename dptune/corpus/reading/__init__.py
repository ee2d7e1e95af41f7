"""Records of one's own, from files, from the ``datasets`` library or from Python."""
