"""Tokens: records as token ids."""
