"""A search over settings whose winner is released with one guarantee for the whole search."""
