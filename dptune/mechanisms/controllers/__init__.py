"""Controllers: what sets radius, noise and geometry of the next step, from past releases."""
