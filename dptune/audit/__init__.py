"""Attacks that check the ledger: lower bounds on epsilon that hold whether or not its proof is right."""
