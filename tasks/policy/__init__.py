"""Tasks of private reinforcement learning: runs in environments, on prompts and over tenants, and their audit."""
