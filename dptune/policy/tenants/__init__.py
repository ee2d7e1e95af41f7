"""A hyper-policy over complete fine-tuning runs, where a user is a tenant."""
