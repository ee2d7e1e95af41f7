"""Releases of private data and their cost: the ledger, accountants, calibration. Nothing here imports torch."""
