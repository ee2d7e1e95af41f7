"""Digits of privacy figures for readers: no bound looks better than it is."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

#: Digits that floating-point arithmetic gets right: 2.0000000000000004 is a 2.
_MEANT = Context(prec=12)


def at_most(value: float | str, digits: int = 3) -> str:
    """What was paid, an upper bound, with some significant digits: rounded up, so that 2.001 never reads 2."""
    return _text(float(value), Context(prec=digits, rounding=ROUND_CEILING))


def at_least(value: float | str, digits: int = 3) -> str:
    """What an attack showed, a lower bound, with some significant digits: rounded down."""
    return _text(float(value), Context(prec=digits, rounding=ROUND_FLOOR))


def _text(number: float, context: Context) -> str:
    if not math.isfinite(number):
        return str(number).replace("inf", "∞")
    return f"{float(context.plus(_MEANT.plus(Decimal(number)))):.{context.prec}g}"
