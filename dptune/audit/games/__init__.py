"""Attack games: bounds on epsilon from trials of a private step, or of whole runs, with a unit in and out."""
