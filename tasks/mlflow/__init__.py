"""MLflow: what is logged there, its page, and what it has not taken yet."""
