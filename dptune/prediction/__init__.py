"""Private prediction: answers are protected in place of weights (PMixED, arXiv 2403.15638)."""
