"""Texts that a tuned model writes for prompts, and the field's metrics of them against references."""
