"""Tasks that tune ensembles for private answers, and score their protocols."""
