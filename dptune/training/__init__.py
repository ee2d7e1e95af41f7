"""DP fine-tuning: base model and LoRA, per-sample gradients, Poisson batches, the loop, checkpoints."""

import logging

# PEFT imports bitsandbytes where it is installed, which then says in every process that a kernel could be faster.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
