"""Numbers for readers: as many digits as mean something, and a mechanism's four epsilons as ticks on one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from dptune.core.digits import at_least, at_most

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


def listing(values: Sequence[str], word: str = "and") -> str:
    """Values as a sentence lists them.

    Example:
        >>> listing(["1", "2", "8"], "or")
        '1, 2 or 8'
    """
    *first, last = values
    return f"{', '.join(first)} {word} {last}" if first else last


def gap(high: str, low: str) -> str:
    """What lies between two numbers as they are shown, with the decimals of the finer one: a reader can check it.

    Example:
        >>> gap("2.263", "2.247")
        '0.016'
    """
    decimals = max(len(one.partition(".")[2]) for one in (high, low))
    return f"{float(high.replace(',', '')) - float(low.replace(',', '')):.{decimals}f}"


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


#: What a table calls each epsilon, by the class of its tick in page.css.
TICKS = {"claimed": "claimed", "noise": "noise only", "proved": "proved", "shown": "shown"}
_ROOM = 0.9  # share of the line that finite epsilons take; the arrow stands at its end


def ruler_end(rows: Sequence[Mapping[str, float | None]]) -> float:
    """The largest finite epsilon of the rows that share a scale; 1 if there is none."""
    finite = [value for row in rows for value in row.values() if value is not None and math.isfinite(value)]
    return max(finite, default=0.0) or 1.0


def ruler(epsilons: Mapping[str, float | None], end: float) -> Markup:
    """A picture in a line of text, in the reader's colours.

    Args:
        epsilons: by the names of ``TICKS``; None where nothing was measured.
        end: epsilon at the right end of the scale.
    """
    drawn, infinite = [Markup('<line class="axis" x1="0" x2="100%" y1="9" y2="9"/>')], []
    for name, value in epsilons.items():
        if value is None:
            continue
        if math.isinf(value):
            infinite.append(TICKS[name])
            continue
        place = f"{100 * _ROOM * min(1.0, value / end):.2f}%"
        said = f"{TICKS[name]}: ε {'≥' if name == 'shown' else '≤'} {(at_least if name == 'shown' else at_most)(value)}"
        low, high = (4, 14) if name == "noise" else (1, 17)
        if name == "shown":  # everything below is ruled out
            bar = Markup('<rect class="shown" x="0" width="{}" y="7" height="4"><title>{}</title></rect>')
            drawn.append(bar.format(place, said))
        drawn.append(
            Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"><title>{}</title></line>').format(
                name, place, place, low, high, said
            )
        )
    if infinite:
        said = f"{', '.join(infinite)}: ε = ∞"
        drawn.append(
            Markup('<text class="endless" x="100%" y="14" text-anchor="end">→<title>{}</title></text>').format(said)
        )
    return Markup('<svg class="ruler" width="100%" height="18" role="img" aria-label="{}">{}</svg>').format(
        "; ".join(f"{TICKS[name]} {at_most(value)}" for name, value in epsilons.items() if value is not None),
        Markup("").join(drawn),
    )
