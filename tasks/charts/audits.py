"""What attacks found: certified, published and audited privacy of every cell, and trade-offs of membership attacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from dptune.core.digits import at_least, at_most
from dptune.privacy.accountants import gdp_delta
from tasks.audit.registry import bounds, parts
from tasks.charts.canvas import BAD, BAR, SHADE, Figure, Panel, faded, marks, titled, values
from tasks.charts.curves import dashed
from tasks.charts.looks import BLUE, GREY, INK, Look
from tasks.charts.seed_groups import CERTIFIED, PUBLISHED, Result, budget_of

Audit = dict[str, Any]
#: Pairs of epsilon and delta, epsilon falling.
Curve = Sequence[tuple[float, float]]
_MOST_CURVES, _MOST_CELLS = 20, 24
_MOST_POINTS = 80  # of a curve: dense where the axis is wide
_LEAST_DELTA, _POINTS = 1e-10, 60
_DOTS = 12  # a curve of more points is a line
_ROOM, _LEAST_END = 1.12, 0.5  # the widest mark leaves some room; no axis is shorter
_HEIGHT = 190  # pixels
_NONE: Mapping[str, str] = {}
_PROVED = "The true curve lies under the blue line, which is proved, and above the red corner, which attacks show."
_RUN = "Broken red line: up to the largest certified ε that they could have refuted."
_STEP = "Broken red curve: the Gaussian whose μ it shows."


def run_profiles(
    audits: Sequence[Audit], curves: Mapping[str, Curve], *, synthetic: bool, names: Mapping[str, str] = _NONE
) -> Figure:
    """A panel for each audited cell: its whole run's delta against epsilon, proved above and attacked below.

    A run has one true curve. It lies under the certified curve, and above the red corner: an attack that shows epsilon
    at delta shows that the true curve is above delta up to this epsilon. A red corner over the blue ground is a bug.

    Args:
        curves: certified curve of a cell by its label, as ``tasks.report.claims.privacy_curve``; without one, only the
            certified epsilon at the audit's delta is drawn.
        names: of cells by their labels.
    """
    drawn = audits[:_MOST_CELLS]
    panels = []
    for audit in drawn:
        attacks = [
            # The largest is the tables' number; audits of earlier versions lack it.
            _Corner(what, *(float(audit[part].get(key, 0)) for key in ("epsilon_audited", "epsilon_refutable")))
            for part, what in bounds().items()
            if part in audit
        ]
        prices = float(audit[PUBLISHED]), float(audit[CERTIFIED])
        panel = _profile(*prices, float(audit["delta"]), attacks, curves.get(audit["label"], ()))
        panels.append(Panel(panel, names.get(audit["label"], audit["label"]), _HEIGHT))
    title = f"The whole run: proved, and shown by attacks at confidence {audits[0]['confidence']:g}"
    return Figure("audit", titled(title, synthetic=synthetic), tuple(panels), note=_note(audits, _RUN))


def step_profiles(audits: Sequence[Audit], *, synthetic: bool, names: Mapping[str, str] = _NONE) -> Figure | None:
    """The same for one step of each mechanism; None if no step was audited."""
    attacked = [audit for audit in audits if "step" in audit]
    if not attacked:
        return None
    panels = []
    for audit in attacked[:_MOST_CELLS]:
        step = audit["step"]
        # Its audit stores no largest value; the table says from which mu on it would have refuted the ledger.
        attack = _Corner("the white-box attack", float(step["epsilon_audited"]), None)
        prices, delta = (float(step[PUBLISHED]), float(step[CERTIFIED])), float(audit["delta"])
        certified, shown = (_gaussian(float(step[name])) for name in ("mu_certified", "mu_audited"))
        panel = _profile(*prices, delta, [attack], certified, shown)
        panels.append(Panel(panel, names.get(audit["label"], audit["label"]), _HEIGHT))
    title = f"One step, its unit drawn for certain: proved, and shown at confidence {audits[0]['confidence']:g}"
    return Figure("audit_step", titled(title, synthetic=synthetic), tuple(panels), note=_note(attacked, _STEP))


@dataclass(frozen=True)
class _Corner:
    """What one attack shows of epsilon, and the largest certified one that it could have refuted; None if not known."""

    what: str
    shown: float
    most: float | None


def _note(audits: Sequence[Audit], of_attack: str) -> str:
    left_out = len(audits) - _MOST_CELLS
    said = f"{_PROVED} {of_attack} Upright tick: ε claimed. Grey ground: no guarantee."
    return f"{said} {left_out} more cells are in the table only." if left_out > 0 else said


def _gaussian(mu: float) -> Curve:
    """Epsilon and delta of one Gaussian release with this mu, where both can be drawn; empty if mu is 0 or infinite."""
    if not 0 < mu < math.inf:
        return ()
    pairs = ((float(epsilon), gdp_delta(mu, float(epsilon))) for epsilon in np.linspace(0, 8 * mu + mu * mu, _POINTS))
    return tuple(pair for pair in pairs if pair[1] >= _LEAST_DELTA)


def _profile(
    published: float,
    certified: float,
    delta: float,
    attacks: Sequence[_Corner],
    curve: Curve,
    shown: Curve = (),
) -> Any:
    """Draw one panel: certified curve, claim, what attacks show, and the Gaussian curve of the audited mu."""
    reached = [attack.shown for attack in attacks] + [attack.most for attack in attacks if attack.most is not None]
    numbers = [published, certified, *reached, *(epsilon for epsilon, _ in curve)]
    end = _ROOM * max([_LEAST_END, *filter(math.isfinite, numbers)])
    scale = alt.Scale(type="log", domain=[_LEAST_DELTA, 1], nice=False, clamp=True)
    label = "datum.value == 1 ? '1' : format(datum.value, '~e')"
    axis = alt.Axis(title="δ", labelExpr=label, values=[1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1])
    y = alt.Y("delta:Q", scale=scale, axis=axis)
    x = alt.X("epsilon:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=alt.Axis(title="ε", tickCount=5))
    tooltip = [alt.Tooltip("what:N", title=" "), alt.Tooltip("shown:N", title="ε"), alt.Tooltip("at:N", title="δ")]

    def layer(rows: Sequence[dict[str, Any]]) -> alt.Chart:
        return alt.Chart(values([{"floor": _LEAST_DELTA} | row for row in rows])).encode(x=x, y=y)

    points = [_row("certified (proved)", epsilon, at, at_most) for epsilon, at in curve]
    corners = [_row(f"shown by {one.what}", one.shown, delta, at_least) for one in attacks]
    limits = [
        _row(f"largest that {one.what} could have refuted", one.most, delta, at_least) | {"from": one.shown}
        for one in attacks
        if one.most is not None and one.most > one.shown
    ]
    layers: list[Any] = []
    if math.isinf(certified):
        ground = alt.Chart(values([{"epsilon": 0.0, "end": end, "floor": _LEAST_DELTA, "delta": 1.0}]))
        layers.append(ground.mark_rect(color=SHADE[0]).encode(x=x, x2="end:Q", y=y, y2="floor:Q"))
        text = alt.Chart(values([{"epsilon": end, "delta": 1.0, "text": "no guarantee"}]))
        layers.append(
            text.mark_text(align="right", dx=-6, dy=12, color=GREY[0], fontSize=11).encode(x=x, y=y, text="text:N")
        )
    if points:
        layers.append(layer(points).mark_area(color=BAR[0], opacity=0.45, clip=True).encode(y2="floor:Q"))
    if shown:
        line = layer([{"epsilon": epsilon, "delta": at} for epsilon, at in shown])
        layers.append(line.mark_line(color=BAD[0], strokeDash=[4, 3], strokeWidth=1.6, clip=True))
    layers.append(
        layer([row | {"zero": 0.0} for row in corners])
        .mark_rect(color=BAD[0], opacity=0.3)
        .encode(x2="zero:Q", y2="floor:Q", tooltip=tooltip)
    )
    if points:
        line = layer(points)
        layers.append(line.mark_line(color=BLUE[0], strokeWidth=2, clip=True))
        size = 22 if len(points) <= _DOTS else 4
        layers.append(line.mark_circle(color=BLUE[0], size=size, clip=True).encode(tooltip=tooltip))
    if limits:
        reach = layer(limits)
        layers.append(reach.mark_rule(color=BAD[0], strokeDash=[3, 3], strokeWidth=1.6).encode(x2="from:Q"))
        layers.append(reach.mark_tick(color=BAD[0], thickness=2, height=12).encode(tooltip=tooltip))
    claim = [_row("published (claimed)", published, delta, at_most)] if math.isfinite(published) else []
    if claim:
        layers.append(layer(claim).mark_tick(color=INK[0], thickness=2.5, height=18).encode(tooltip=tooltip))
    if math.isfinite(certified):
        proof = layer([_row("certified (proved)", certified, delta, at_most)])
        layers.append(proof.mark_point(color=BLUE[0], filled=True, size=70, opacity=1).encode(tooltip=tooltip))
    layers.append(
        layer(corners)
        .mark_point(size=60, strokeWidth=2.2, color=BAD[0], filled=False, shape="triangle-right")
        .encode(tooltip=tooltip)
    )
    return alt.layer(*layers)


def _row(what: str, epsilon: float, delta: float, text: Callable[[float], str]) -> dict[str, Any]:
    return {"what": what, "epsilon": epsilon, "delta": delta, "shown": text(epsilon), "at": f"{delta:g}"}


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
