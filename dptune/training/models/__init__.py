"""Models: base models and what is trained on them, LoRA adapters and heads."""
