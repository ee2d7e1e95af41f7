"""Tasks for the cells of the grid: list them, prepare them, train them, and write down their results."""
