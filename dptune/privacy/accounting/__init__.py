"""Accounting: the laws of privacy loss and the bounds that accountants are made of."""
