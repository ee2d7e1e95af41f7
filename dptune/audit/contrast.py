"""The two figures of an accusation: what an attack showed, and what was certified or claimed below it."""

from __future__ import annotations

import math

from dptune.core.digits import at_least, at_most

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
