"""Digits of privacy figures for readers: no bound looks better than it is, and no accusation shows equal figures."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

#: Digits that floating-point arithmetic gets right: 2.0000000000000004 is a 2.
_MEANT = Context(prec=12)


def at_most(value: float | str, digits: int = 3) -> str:
    """What was paid, an upper bound, with some significant digits: rounded up, so that 2.001 never reads 2."""
    return _text(float(value), Context(prec=digits, rounding=ROUND_CEILING))


def percent_at_most(share: float) -> str:
    """A share in percent, an upper bound, rounded up; with so many digits that less than all never reads 100.

    Example:
        >>> percent_at_most(0.8807), percent_at_most(0.99966), percent_at_most(1.0)
        ('88.1', '99.97', '100')
    """
    texts = (at_most(100 * share, digits) for digits in range(3, _MOST_DIGITS))
    return next((text for text in texts if float(text) < 100), "100")


def at_least(value: float | str, digits: int = 3) -> str:
    """What an attack showed, a lower bound, with some significant digits: rounded down."""
    return _text(float(value), Context(prec=digits, rounding=ROUND_FLOOR))


def _text(number: float, context: Context) -> str:
    if not math.isfinite(number):
        return str(number).replace("inf", "∞")
    return f"{float(context.plus(_MEANT.plus(Decimal(number)))):.{context.prec}g}"


# The two figures of an accusation: what an attack showed, and what was certified or claimed below it.


#: Further digits are those of rounding in arithmetic, which ``at_least`` and ``at_most`` leave out.
_MOST_DIGITS = 12


def shown_above(shown: float, stated: float, digits: int = 3) -> tuple[str, str]:
    """Text of a bound that an attack showed, rounded down, and of the lower one that was stated, rounded up.

    They have so many more digits that the first still reads as the higher one: "shows 2, but 2 is certified" accuses
    nobody.

    Args:
        stated: the certified or claimed value, finite and below ``shown``.
        digits: the number of significant digits if these are enough.
    """
    if math.isinf(shown):
        return at_least(shown, digits), at_most(stated, digits)
    for count in range(digits, _MOST_DIGITS + 1):
        lower, upper = at_least(shown, count), at_most(stated, count)
        if float(lower) > float(upper):
            return lower, upper
    return repr(float(shown)), repr(float(stated))
