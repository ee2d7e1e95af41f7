"""DP fine-tuning: base model and LoRA, per-sample gradients, Poisson batches, the loop, checkpoints."""
