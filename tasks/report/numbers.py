"""Numbers for readers: as many digits as mean something, and more where a pointer rests."""

from __future__ import annotations

import math

from markupsafe import Markup

from dptune.core.digits import at_least

DIVERGED = "diverged"
_LARGE, _HUGE, _MOST_PLACES = 10_000, 1e9, 6


def digits4(value: float | str) -> str:
    """Four significant digits, as a perplexity has; whole numbers from 10,000 on."""
    number = float(value)
    if not math.isfinite(number):
        return DIVERGED
    if abs(number) >= _LARGE:
        return f"{number:,.0f}" if abs(number) < _HUGE else f"{number:.3g}"
    places = 3 - math.floor(math.log10(abs(number))) if number else 3
    return f"{number:.{min(places, _MOST_PLACES)}f}"


def digits2(value: float) -> str:
    """Two significant digits, as a difference or an error has."""
    return f"{value:.2g}" if math.isfinite(value) else DIVERGED


def spread_text(spread: float, mean: float) -> str:
    """A deviation with the decimals of its mean."""
    decimals = len(digits4(mean).partition(".")[2])
    return f"{spread:.{decimals}f}" if math.isfinite(spread) else DIVERGED


def whole_percent(share: float) -> int:
    """A share in percent, rounded down: 100 % has lost nothing."""
    return math.floor(100 * share + 1e-9)


def could_refute(epsilon: float | str) -> str:
    """The largest certified epsilon that an attack could have refuted; in words, where it is 0."""
    return at_least(float(epsilon)) if float(epsilon) > 0 else "cannot refute"


def exact(value: float | str) -> Markup:
    """A perplexity of four digits, with four decimals under the pointer."""
    return Markup('<data value="{0}" title="{0}">{1}</data>').format(f"{float(value):.4f}", digits4(value))
