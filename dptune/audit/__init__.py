"""Attacks that check the ledger: lower bounds on epsilon that hold whatever the proof says."""
