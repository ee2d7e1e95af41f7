"""What attacks found: published, certified and audited epsilon of every cell, and trade-offs of membership attacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from dptune.core.digits import at_least, at_most
from tasks.audit.registry import bounds, parts
from tasks.charts.canvas import BAD, BAR, SHADE, Figure, Panel, faded, marks, titled, values
from tasks.charts.curves import dashed
from tasks.charts.looks import GREY, INK, Look
from tasks.charts.seed_groups import CERTIFIED, PUBLISHED, Result, budget_of

Audit = dict[str, Any]
_LARGEST_SHOWN = 1.25  # infinity is drawn at this multiple of the largest finite epsilon
_MOST_CURVES = 20
_MOST_POINTS = 80  # of a curve: dense where the axis is wide
_ROW = 24  # pixels


def ledger_versus_audit(audits: Sequence[Audit], *, synthetic: bool) -> Figure:
    """Published, certified and audited epsilon of every cell; a cross right of the certified bar is a bug."""
    rows = audits
    numbers = [float(audit[key]) for audit in rows for key in (PUBLISHED, CERTIFIED)]
    numbers += [float(audit[part]["epsilon_audited"]) for audit in rows for part in bounds() if part in audit]
    end = _LARGEST_SHOWN * max([1.0, *filter(math.isfinite, numbers)])
    labels = [audit["label"] for audit in rows]
    x = alt.X("value:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=alt.Axis(title="epsilon", tickCount=6))
    y = alt.Y("cell:N", scale=alt.Scale(domain=labels), axis=alt.Axis(title=None, labelLimit=230))
    tooltip = ["cell:N", "what:N", alt.Tooltip("shown:N", title="ε")]
    bars = [_bar(audit, end) for audit in rows]
    chart = alt.layer(
        _layer([bar for bar in bars if bar["shown"] != "∞"], x, y)
        .mark_bar(color=BAR[0], height=14)
        .encode(tooltip=tooltip),
        _layer([bar for bar in bars if bar["shown"] == "∞"], x, y)
        .mark_bar(color=SHADE[0], height=14)
        .encode(tooltip=tooltip),
        _layer([bar for bar in bars if bar["shown"] == "∞"], x, y).mark_text(
            text="∞", align="right", dx=-6, color=GREY[0]
        ),
        _layer([_claim(audit, end) for audit in rows], x, y)
        .mark_tick(color=INK[0], thickness=2.5, height=18)
        .encode(tooltip=tooltip),
        _layer(_shown(rows), x, y)
        .mark_point(size=70, strokeWidth=2.2, color=BAD[0], filled=False)
        .encode(
            shape=alt.Shape(
                "what:N", legend=None, scale=alt.Scale(range=["cross", "triangle-down", "triangle-up", "square"])
            ),
            tooltip=tooltip,
        ),
    )
    title = titled(f"Ledger versus audit, confidence {audits[0]['confidence']:g}", synthetic=synthetic)
    note = "Bar: certified (proved), grey for none. Line: published (claimed). Red: shown by an attack."
    return Figure("audit", title, (Panel(chart, "", _ROW * len(rows)),), note=note)


def _layer(rows: list[dict[str, Any]], x: alt.X, y: alt.Y) -> alt.Chart:
    return alt.Chart(values(rows)).encode(x=x, y=y)


def _bar(audit: Audit, end: float) -> dict[str, Any]:
    return _mark(audit["label"], "certified (proved)", float(audit[CERTIFIED]), end, at_most)


def _claim(audit: Audit, end: float) -> dict[str, Any]:
    return _mark(audit["label"], "published (claimed)", float(audit[PUBLISHED]), end, at_most)


def _shown(audits: Sequence[Audit]) -> list[dict[str, Any]]:
    found = [(audit, part, what) for audit in audits for part, what in bounds().items() if part in audit]
    return [
        _mark(one["label"], f"shown by {what}", float(one[part]["epsilon_audited"]), math.inf, at_least)
        for one, part, what in found
    ]


def _mark(cell: str, what: str, epsilon: float, end: float, text: Callable[[float], str]) -> dict[str, Any]:
    return {
        "cell": cell,
        "what": what,
        "value": min(epsilon, end),
        "shown": text(epsilon),
    }


def rocs(
    audits: Sequence[Audit], results: Mapping[str, Result], looks: dict[str, Look], *, synthetic: bool
) -> Figure | None:
    """True against false positive rate on log axes: of audit canaries and, if attacked, of training records.

    Args:
        results: by label of their cells.

    Returns: None if no audit attacked either.
    """
    panels = []
    for part in (part for part in parts() if part.by_score):
        attacked = [audit for audit in audits if part.key in audit][:_MOST_CURVES]
        if attacked:
            panels.append(Panel(_roc(attacked, part.key, results, looks), part.title, 300))
    title = titled("Membership attacks, calibrated by the public model", synthetic=synthetic)
    return Figure("roc", title, tuple(panels), columns=2, note="Dotted: chance.") if panels else None


def _roc(attacked: Sequence[Audit], side: str, results: Mapping[str, Result], looks: dict[str, Look]) -> Any:
    rows, lowest = [], 0.5
    for audit in attacked:
        figures = audit[side]["shadows" if "shadows" in audit[side] else "calibrated"]
        lowest = min(lowest, 0.5 / max(figures["members"], figures["non_members"]))
        result = results.get(audit["label"], {})
        shared = {"line": audit["label"], "mechanism": str(result.get("mechanism", "")), "auc": f"{figures['auc']:.3f}"}
        shared["budget"] = budget_of(result)
        curve = figures["roc"]
        points = _fewer(list(zip(curve["false_positive_rate"], curve["true_positive_rate"], strict=True)))
        rows += [shared | {"false": float(false), "true": float(true)} for false, true in points]
    rows = [row for row in rows if row["false"] >= lowest and row["true"] >= lowest]  # 0 has no place on a log axis
    scale = alt.Scale(type="log", domain=[lowest, 1], nice=False, clamp=True)
    x = alt.X("false:Q", scale=scale, axis=alt.Axis(title="false positive rate", format="~g", tickCount=4))
    y = alt.Y("true:Q", scale=scale, axis=alt.Axis(title="true positive rate", format="~g", tickCount=4))
    chance = alt.Chart(values([{"false": lowest, "true": lowest}, {"false": 1.0, "true": 1.0}]))
    shown = {name: look for name, look in looks.items() if any(row["mechanism"] == name for row in rows)}
    lines = alt.Chart(values(rows)).mark_line(interpolate="step-after", strokeWidth=1.8)
    return alt.layer(
        chance.mark_line(strokeDash=[2, 3], color=GREY[0], strokeWidth=1.5).encode(x=x, y=y),
        lines.encode(
            marks(shown)["stroke"],
            dashed(rows),
            x=x,
            y=y,
            detail="line:N",
            opacity=faded(0.9),
            tooltip=[alt.Tooltip("line:N", title="cell"), alt.Tooltip("auc:N", title="AUC")],
        ),
    )


def _fewer(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 80 points of a curve that begins at 0, the more of them the lower the rate; the last one is kept."""
    chosen = np.unique(np.geomspace(1, len(points), _MOST_POINTS).astype(int)) - 1
    return [points[place] for place in chosen]
