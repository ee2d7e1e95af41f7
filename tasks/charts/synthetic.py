"""Lengths of synthetic texts. The texts alone are drawn: no private record is beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import altair as alt

from tasks.charts.canvas import Figure, Panel, values
from tasks.charts.looks import BLUE

_MOST_BARS = 24


def lengths(name: str, texts: Sequence[str]) -> Figure:
    """How many texts are how long, in characters.

    Args:
        name: of the figure, and the stem of its picture.
    """
    counted = [len(text) for text in texts]
    width = _width(max(counted) - min(counted) + 1)
    found = Counter(length // width * width for length in counted)
    rows = [
        {"from": start, "to": start + width, "length": _range(start, start + width - 1), "texts": count, "zero": 0}
        for start, count in sorted(found.items())
    ]
    x = alt.X("from:Q", title="characters of a text", scale=alt.Scale(zero=False, nice=False, padding=8))
    y = alt.Y("texts:Q", title="texts", axis=alt.Axis(tickMinStep=1, format="~g"))
    tooltip = [alt.Tooltip("length:N", title="characters"), alt.Tooltip("texts:Q", title="texts")]
    bars = alt.Chart(values(rows)).mark_bar(color=BLUE[0], binSpacing=1)
    drawn = bars.encode(x=x, x2="to:Q", y=y, y2="zero:Q", tooltip=tooltip)
    return Figure(name, "Lengths of the SYNTHETIC texts", (Panel(drawn, "", 300),))


def _width(span: int) -> int:
    """The least of 1, 2, 5, 10, 20, ... characters with which so wide a range needs no more than ``_MOST_BARS``."""
    least = span / _MOST_BARS
    power = 10 ** max(0, math.floor(math.log10(least))) if least > 1 else 1
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _range(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else f"{first}"
