"""Cells of the grid: which there are, how they are made ready, trained and told of."""
