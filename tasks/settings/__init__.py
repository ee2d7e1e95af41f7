"""Every model of params.yaml, and how the file is read."""
