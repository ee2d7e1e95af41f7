"""Differentially private policy gradient with trust regions (Rio, Barlier and Colin 2025)."""
