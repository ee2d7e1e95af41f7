"""Dots of utility: a line for each mechanism, best first, where all have one epsilon or none.

Bars are one standard deviation over seeds. Mechanisms without a guarantee stand below the others, on a shade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from tasks.charts.canvas import SHADE, Panel, faded, marks, values
from tasks.charts.looks import GREY, INK, Look
from tasks.charts.seed_groups import SeedGroup
from tasks.metrics import title_of

_FAR = 2.0  # times the width that everything else takes
_LINE, _AROUND = 34, 70  # pixels
_EDGE, _WORDS = 0.05, 0.35  # shares of the axis left free beside its marks, and for words


def dots(
    rows: Sequence[dict[str, Any]],
    reference: Sequence[SeedGroup],
    before: float | None,
    metric: str,
    looks: dict[str, Look],
    tooltip: Sequence[alt.Tooltip],
    title: str = "",
) -> Panel:
    """A panel of rows that have mechanism, finite, perplexity, low and high.

    Args:
        reference: training without privacy, if there is any.
        before: perplexity of the public model; None if it is not known.
    """
    shown = [row for row in rows if all(math.isfinite(row[name]) for name in ("perplexity", "low", "high"))]
    ordered = sorted(shown, key=lambda row: (not row["finite"], row["perplexity"]))
    names = list(dict.fromkeys(row["mechanism"] for row in ordered))
    y = alt.Y("mechanism:N", sort=names, title=None, axis=alt.Axis(labelLimit=150, grid=False))
    ends = [value for row in ordered for value in (row["low"], row["high"])] + [group.mean for group in reference]
    far_off = before is not None and before - max(ends) > _FAR * (max(ends) - min(ends)) > 0
    low, high = min(ends), max([*ends, *([before] if before is not None and not far_off else [])])
    # Right of the last line there is room for words that no line crosses.
    room = _WORDS if any(not row["finite"] for row in ordered) else _EDGE
    span = high - low or abs(high) or 1.0
    domain = [low - _EDGE * span, high + room * span]
    x = alt.X("perplexity:Q", scale=alt.Scale(zero=False, nice=False, domain=domain), title=title_of(metric))
    layers: list[Any] = []
    if open_ones := [row for row in ordered if not row["finite"]]:
        band = alt.Chart(values([{"mechanism": row["mechanism"], "text": "no guarantee"} for row in open_ones]))
        layers.append(band.mark_rect(color=SHADE[0], opacity=0.7).encode(y=y))
        said = band.mark_text(color=GREY[0], fontSize=11, align="right", dx=-6)
        layers.append(said.encode(y=y, x=alt.value("width"), text="text:N"))
    lines = [(group.mean, f"without privacy: {group.mean:.4g}", [7, 4], -20) for group in reference]
    if before is not None and far_off:
        far = alt.Chart(values([{"text": f"public model, untuned: {before:.4g}, far above this"}]))
        layers.append(
            far.mark_text(align="right", color=INK[0], fontSize=11).encode(
                x=alt.value("width"), y=alt.value(-8), text="text:N"
            )
        )
    elif before is not None:
        lines.append((before, f"public model, untuned: {before:.4g}", [2, 3], -6))
    middle = (low + high) / 2
    for place, name, dash, height in lines:
        line = alt.Chart(values([{"perplexity": place, "text": name}]))
        layers.append(line.mark_rule(color=GREY[0], strokeDash=dash, strokeWidth=1.5).encode(x=x))
        text = line.mark_text(align="left" if place < middle else "right", color=INK[0], fontSize=11)
        layers.append(text.encode(x=x, y=alt.value(height), text="text:N"))
    points = alt.Chart(values(ordered)).encode(x=x, y=y)
    encoding = marks({name: looks[name] for name in looks if name in names})
    layers += [
        points.mark_rule(strokeWidth=1.5).encode(encoding["stroke"], x="low:Q", x2="high:Q", opacity=faded(0.9)),
        points.mark_point(size=90, strokeWidth=1.8).encode(**encoding, opacity=faded(), tooltip=list(tooltip)),
    ]
    return Panel(alt.layer(*layers), title, _AROUND + _LINE * len(names))
