"""Private answers of ensembles."""
