"""Text attacks: membership, extraction and prompts, by the losses of a model on texts."""
