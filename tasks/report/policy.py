"""Page on private reinforcement learning: each policy's return with its charts, and the epsilon of its users."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import altair as alt
import numpy as np

from dptune.core.digits import at_most
from dptune.policy.environments.environment import RIVERSWIM
from dptune.policy.environments.riverswim import value
from tasks.charts.canvas import Figure, Panel, faded, marks, save, values
from tasks.charts.looks import GREY, INK, Look, looks
from tasks.charts.seed_groups import told_apart
from tasks.report.answer import listed
from tasks.report.numbers import digits4
from tasks.report.page import write

PAGE = "policy.html"
Result = dict[str, Any]
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])


@dataclass(frozen=True)
class Row:
    """The runs of one label, averaged over seeds.

    Attributes:
        critic: kind of the learner's critic.
        noise: the noise multiplier z; None for a baseline that is not private.
        users: number of users of an update.
        met: number of users in all.
        mean, deviation: mean and standard deviation of the final return.
        values: the final return of each seed.
    """

    label: str
    kind: str
    critic: str
    noise: float | None
    users: int
    updates: int
    met: int
    seeds: int
    mean: float
    deviation: float
    epsilon_published: str
    epsilon_noise_only: str
    epsilon_certified: str
    leaks: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Section:
    """A study on the page: its rows, and the figure of its name."""

    name: str
    environment: str
    rows: list[Row]


def write_page(results: list[Result], delta: float, extra: dict[str, Any], directory: Path) -> None:
    """Write policy.html and a picture for every study.

    Args:
        extra: results of the other parts by name; a part that is absent has no section.
    """
    shown = looks(result["label"] for result in results)
    budgets = reward_looks(extra.get("rlhf", []))
    figures, sections = [], []
    for name in dict.fromkeys(result["study"] for result in results):
        mine = [result for result in results if result["study"] == name]
        figures.append(study(mine, {label: look for label, look in shown.items() if label in by_label(mine)}))
        sections.append(Section(name, mine[0]["environment"], rows_of(mine)))
    if "rlhf" in extra:
        figures.append(rewards(extra["rlhf"]))
    for figure in figures:
        save(figure, directory / f"{figure.name}.png")
    opening = [sentence for section in sections if (sentence := answer(section))]
    write(
        "policy.html.j2",
        directory / PAGE,
        figures,
        shown | budgets,
        sections=sections,
        opening=opening,
        delta=delta,
        **extra,
    )


def answer(section: Section) -> str:
    """The best certified run of a study and what is as good at the same epsilon, beside the best that is not private.

    Empty if none is certified.
    """
    certified = [row for row in section.rows if math.isfinite(float(row.epsilon_certified))]
    if not certified:
        return ""
    best = certified[0]
    equal = [
        row for row in certified if math.isclose(*(float(one.epsilon_certified) for one in (row, best)), rel_tol=0.01)
    ]
    tied = [row for row in equal if row is best or not told_apart(best.values, row.values)]
    where = f"{section.name}, at certified ε = {at_most(best.epsilon_certified)}"
    said = _verdict(best, tied, alone=len(equal) == 1)
    baselines = [row for row in section.rows if row.noise is None]
    beside = f", against {digits4(baselines[0].mean)} for `{baselines[0].label}` without privacy" if baselines else ""
    return f"{where}: {said}{beside}."


def _verdict(best: Row, tied: list[Row], *, alone: bool) -> str:
    if best.seeds < 2 and not alone:
        return f"`{best.label}` has the highest return, {digits4(best.mean)}, which one seed does not prove"
    if len(tied) > 1:
        low, high = digits4(min(row.mean for row in tied)), digits4(best.mean)
        between = low if low == high else f"{low} to {high}"
        return f"{listed([row.label for row in tied])} cannot be told apart over {best.seeds} seeds: return {between}"
    return f"`{best.label}` {'returns' if alone else 'is best: return'} {digits4(best.mean)}"


def rows_of(results: list[Result]) -> list[Row]:
    """One row for each label, ordered by mean return, the best first."""
    rows = [_row(label, mine) for label, mine in by_label(results).items()]
    return sorted(rows, key=lambda row: -row.mean)


def _row(label: str, results: list[Result]) -> Row:
    first = results[0]
    mean, deviation = spread([result["final_return"] for result in results])
    method = first["method"]
    return Row(
        label=label,
        kind=algorithm_of(first),
        critic=method["critic"] if method and first["kind"] == "dppg" else "",
        noise=noise_of(first),
        users=first["training"]["users"],
        updates=first["training"]["updates"],
        met=first["users"],
        seeds=len(results),
        mean=mean,
        deviation=deviation,
        epsilon_published=first["epsilon_published"],
        epsilon_noise_only=first["epsilon_noise_only"],
        epsilon_certified=first["epsilon_certified"],
        leaks=tuple(first["leaks"]),
        values=tuple(result["final_return"] for result in results),
    )


# The charts: return over users, return against noise, regret, and rewards of language models.


def by_label(results: list[Result]) -> dict[str, list[Result]]:
    """Group runs by label: those of a group differ in the seed alone."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["label"], []).append(result)
    return groups


def algorithm_of(result: Result) -> str:
    """Name of the run's algorithm for readers of the page."""
    if result["kind"] != "dppg":
        return str(result["kind"]).upper().replace("_", "-")
    return {"ppo": "deep DPPG", "l2": "DPPG-L2", "kl": "DPPG-KL"}[result["training"]["algorithm"]]


def spread(numbers: list[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return fmean(numbers), pstdev(numbers)


def noise_of(result: Result) -> float | None:
    """The noise multiplier z; None for a baseline that is not private."""
    return None if result["method"] is None else float(result["method"]["noise_multiplier"])


def study(results: list[Result], shown: dict[str, Look]) -> Figure:
    """Curves over users with their spread over seeds, final returns against z, and Riverswim's regret."""
    first = results[0]
    best = value(**first["options"]) if first["environment"] == RIVERSWIM else None
    panels = [
        Panel(
            _curves(results, shown, best),
            f"mean return over users (of at most {first['training']['steps']} steps each)",
            280,
        )
    ]
    panels += [Panel(_noise(results, shown), "final return against the noise multiplier z", 280)]
    panels += [Panel(_regret(results, shown, best), "cumulative regret over episodes", 280)] if best is not None else []
    note = "Bands and bars: one standard deviation over seeds. Dashed: not private."
    return Figure(first["study"], f"{first['study']}: {first['environment']}, SIMULATED users", tuple(panels), 3, note)


def _points(results: list[Result]) -> tuple[list[int], Any]:
    users = [point["users"] for point in results[0]["points"]]
    return users, np.array([[point["mean_return"] for point in result["points"]] for result in results])


def _curves(results: list[Result], shown: dict[str, Look], best: float | None) -> Any:
    rows = []
    for label, mine in by_label(results).items():
        users, curves = _points(mine)
        mean, deviation = curves.mean(axis=0), curves.std(axis=0)
        for place, count in enumerate(users):
            low, high = float(mean[place] - deviation[place]), float(mean[place] + deviation[place])
            rows.append(_named(label, mine) | {"x": count, "value": float(mean[place]), "low": low, "high": high})
    base = alt.Chart(values(rows)).encode(x=alt.X("x:Q", title="users so far", axis=_AXIS), y=_Y)
    band = base.mark_area(opacity=0.15).encode(
        alt.Fill("mechanism:N", legend=None, scale=_hues(shown)),
        y=alt.Y("low:Q", title=None, scale=_SCALE),
        y2="high:Q",
    )
    layers = [band, _line(base, shown)]
    return alt.layer(*([_rule(best, "optimal value")] if best is not None else []), *layers)


_SCALE = alt.Scale(zero=False)
_Y = alt.Y("value:Q", title=None, scale=_SCALE)
_AXIS = alt.Axis(grid=False, tickCount=6, format="~s")


def _named(label: str, results: Sequence[Result]) -> dict[str, Any]:
    return {"mechanism": label, "private": "yes" if results[0]["kind"] == "dppg" else "no"}


def _hues(shown: dict[str, Look]) -> alt.Scale:
    return alt.Scale(domain=list(shown), range=[look.light for look in shown.values()])


def _line(base: alt.Chart, shown: dict[str, Look]) -> alt.Chart:
    dash = alt.StrokeDash("private:N", legend=None, scale=alt.Scale(domain=["yes", "no"], range=[[1, 0], [6, 3]]))
    tooltip = ["mechanism:N", alt.Tooltip("x:Q", title="users"), alt.Tooltip("value:Q", format=".4~g")]
    line = base.mark_line(strokeWidth=1.8).encode(marks(shown)["stroke"], dash, opacity=faded(0.9), tooltip=tooltip)
    return line


def _rule(height: float, text: str) -> alt.LayerChart:
    line = alt.Chart(values([{"value": height, "text": text}]))
    label = line.mark_text(align="left", baseline="bottom", x=4, dy=-2, color=INK[0], fontSize=11)
    return line.mark_rule(color=GREY[0], strokeDash=[2, 3]).encode(y=_Y) + label.encode(y=_Y, text="text:N")


def _noise(results: list[Result], shown: dict[str, Look]) -> Any:
    """A line for every group of runs that differ in z alone, and one across for what is not private."""
    lines: dict[str, list[Result]] = {}
    for result in (result for result in results if result["method"] is not None):
        lines.setdefault(but_for_noise(result), []).append(result)
    rows = []
    for mine in lines.values():
        for noise in sorted({noise_of(result) or 0.0 for result in mine}):
            equal = [result for result in mine if noise_of(result) == noise]
            mean, deviation = spread([result["final_return"] for result in equal])
            ends = {"low": mean - deviation, "high": mean + deviation}
            rows.append(
                {"mechanism": equal[0]["label"], "line": line_name(mine), "x": float(noise), "value": mean} | ends
            )
    x = alt.X(
        "x:Q",
        title="noise multiplier z",
        scale=alt.Scale(zero=False, nice=False, padding=16),
        axis=alt.Axis(grid=False),
    )
    base = alt.Chart(values(rows)).encode(x=x, y=_Y)
    across = by_label([result for result in results if result["method"] is None])
    tooltip = ["mechanism:N", "line:N", alt.Tooltip("x:Q", title="z"), alt.Tooltip("value:Q", format=".4~g")]
    encoding = marks(shown)
    return alt.layer(
        *(_rule(fmean(one["final_return"] for one in mine), f"{label}, not private") for label, mine in across.items()),
        base.mark_line(color=GREY[0], strokeWidth=1).encode(detail="line:N"),
        base.mark_rule(strokeWidth=1.5).encode(encoding["stroke"], y=alt.Y("low:Q", title=None), y2="high:Q"),
        base.mark_point(size=80).encode(**encoding, opacity=faded(), tooltip=tooltip),
    )


def line_name(results: Sequence[Result]) -> str:
    """The runs that differ in noise alone, in words: their groups, algorithm and users of an update."""
    groups = ", ".join(dict.fromkeys(result["group"] for result in results))
    return f"{groups}: {algorithm_of(results[0])}, K {results[0]['training']['users']}"


def but_for_noise(result: Result) -> str:
    """A key that is equal for runs that differ in noise and seed alone."""
    method = {key: value for key, value in result["method"].items() if key != "noise_multiplier"}
    training = {key: value for key, value in result["training"].items() if key != "seed"}
    return json.dumps([result["kind"], method, training, result["extra"]], sort_keys=True)


def _regret(results: list[Result], shown: dict[str, Look], best: float) -> Any:
    rows = []
    for label, mine in by_label(results).items():
        users, curves = _points(mine)
        regret = np.cumsum(np.diff([0, *users]) * (best - curves.mean(axis=0)))
        rows += [_named(label, mine) | {"x": x, "value": float(y)} for x, y in zip(users, regret, strict=True)]
    return _line(alt.Chart(values(rows)).encode(x=alt.X("x:Q", title="episodes", axis=_AXIS), y=_Y), shown)


def reward_looks(results: list[Result]) -> dict[str, Look]:
    """The look of each budget of the language models."""
    return looks(_budget(result) for result in results)


def rewards(results: list[Result]) -> Figure:
    """Mean reward of language models over prompts: a colour for each budget, dashes for each K."""
    shown = reward_looks(results)
    sizes = sorted({result["users"] for result in results})
    rows = [
        {
            "mechanism": _budget(result),
            "line": str(result["label"]),
            "size": str(result["users"]),
            "x": point["updates"] * result["users"],
            "value": float(point["reward"]),
        }
        for result in results
        for point in result["curve"]
    ]
    scale = alt.Scale(domain=[str(one) for one in sizes], range=[_DASHES[n % len(_DASHES)] for n in range(len(sizes))])
    dash = alt.StrokeDash("size:N", scale=scale, legend=alt.Legend(title="K") if len(sizes) > 1 else None)
    x = alt.X("x:Q", title="prompts so far", scale=alt.Scale(type="symlog"), axis=_AXIS)
    base = alt.Chart(values(rows)).encode(x=x, y=_Y, detail="line:N")
    tooltip = [
        alt.Tooltip("line:N", title="run"),
        alt.Tooltip("x:Q", title="prompts"),
        alt.Tooltip("value:Q", title="reward", format=".3f"),
    ]
    encoding = marks(shown)
    chart = alt.layer(
        base.mark_line(strokeWidth=1.8).encode(encoding["stroke"], dash, opacity=faded(0.85)),
        base.mark_point(size=50).encode(**encoding, opacity=faded(), tooltip=tooltip),
    )
    title = f"RLHF in small: mean reward on held-out public prompts, users' prompts of {results[0]['data']}"
    return Figure("rlhf", title, (Panel(chart, "", 280),))


def _budget(result: Result) -> str:
    return "nonprivate" if result["budget_epsilon"] is None else f"epsilon {result['budget_epsilon']:g}"
