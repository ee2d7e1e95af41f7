"""Private prediction: the guarantee covers answers instead of weights (PMixED, arXiv 2403.15638)."""
