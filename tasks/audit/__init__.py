"""Tasks that attack finished cells and compare what the attacks show with the cells' ledgers."""
