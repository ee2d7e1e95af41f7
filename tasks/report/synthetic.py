"""Writes the page on a synthetic corpus: its guarantee, its figures and its first texts. It reads no private record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import altair as alt

from dptune.core.digits import at_most
from dptune.core.files import read_json
from dptune.job.delivery.card import NO_GUARANTEE, has_guarantee, why_not
from dptune.job.result import RunResult
from dptune.job.sampling import Sampled
from tasks.charts.canvas import Figure, Panel, save, values
from tasks.charts.looks import BLUE, looks
from tasks.paths import AUDITS
from tasks.report.claims import shown_epsilon
from tasks.report.numbers import digits4
from tasks.report.page import write

#: How many texts the page shows.
SHOWN = 10
_FIGURES = {
    "texts": "texts",
    "mean_tokens": "mean length in tokens",
    "mean_characters": "mean length in characters",
    "share_duplicates": "texts that equal an earlier one",
    "share_ended": "texts that the model ended itself",
    "drawn_again": "empty texts that were drawn again",
}


def write_page(found: Sampled, result: RunResult, file: Path) -> str:
    """Write the page and the picture beside ``file``, which holds the texts. Returns the sentence that answers first.

    Args:
        result: of the cell that wrote the texts.
    """
    name, header = file.stem, found.adapter.contents.header
    figure = lengths(name, [list(row.values())[-1] for row in found.rows])
    save(figure, file.with_suffix(".png"))
    opening = answer(found, result.mechanism)
    write(
        "synthetic.html.j2",
        file.with_suffix(".html"),
        [figure],
        looks([result.mechanism]),
        opening=[opening],
        name=name,
        result=result,
        header=header,
        guaranteed=has_guarantee(found.adapter.epsilon),
        epsilons=found.adapter.contents.epsilons,
        audited=audited(name),
        figures_of_texts=shown_figures(found.figures),
        settings=found.settings,
        prompts=found.prompts,
        notes=found.notes,
        first=found.rows[:SHOWN],
        count=len(found.rows),
    )
    return opening


def answer(found: Sampled, mechanism: str) -> str:
    """The sentence that opens the page: how many texts there are, and what is guaranteed."""
    count, contents = len(found.rows), found.adapter.contents
    texts = f"{count:,} SYNTHETIC text{'s' if count != 1 else ''}"
    if not has_guarantee(found.adapter.epsilon):
        return f"{texts} with {NO_GUARANTEE}: `{mechanism}` has no certified ε ({why_not(contents.epsilons.leaks)})."
    cost = f"certified ε = {at_most(found.adapter.epsilon)} at δ = {at_most(contents.header.delta)}"
    return f"{texts} with the guarantee of `{mechanism}`: {cost}, however many are drawn."


def shown_figures(figures: Mapping[str, float]) -> dict[str, str]:
    """The card's figures by what readers call them."""
    shares = ("share_duplicates", "share_ended")
    counts = ("texts", "drawn_again")
    return {
        said: f"{100 * figures[key]:.3g} %"
        if key in shares
        else f"{figures[key]:,.0f}"
        if key in counts
        else digits4(figures[key])
        for key, said in _FIGURES.items()
    }


def audited(run: str) -> float | None:
    """The largest lower bound that an audit of the run shows; None if it was not audited, or nothing was planted."""
    file = AUDITS / run / "audit.json"
    return shown_epsilon(read_json(file)) if file.exists() else None


# Lengths of synthetic texts. The texts alone are drawn: no private record is beside them.


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
