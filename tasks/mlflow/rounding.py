"""Digits of the figures in MLflow: it shows all that a figure has, and 1.999847 for a budget of 2 helps no reader."""

from __future__ import annotations

import math
import re

from dptune.core.digits import at_least, at_most

_DIGITS = 4
_DIGITS_OF_PERPLEXITY = 6
_PRICE = re.compile(r"(^|[._])(epsilon|mu)($|[._])")
#: What attacks showed, and could have shown: lower bounds, which are rounded down.
_SHOWN = re.compile(r"audited$|^audit_(?!.*certified$)")


def legible(name: str, value: float) -> float:
    """A figure as MLflow shows it: an epsilon or mu with four digits, never below what was paid; a perplexity with six.

    The exact values are in the run's files; nothing computes with those of MLflow.
    """
    if not math.isfinite(value):
        return value
    if "perplexity" in name:
        return float(f"{value:.{_DIGITS_OF_PERPLEXITY}g}")
    if not _PRICE.search(name):
        return value
    return float((at_least if _SHOWN.search(name) else at_most)(value, _DIGITS))
