"""Spent budgets: the register of everything that was published from a data set."""
