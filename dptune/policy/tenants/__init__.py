"""DP policy gradient on complete fine-tuning runs, where a user is a tenant: a holder of records."""
