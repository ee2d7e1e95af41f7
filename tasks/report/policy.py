"""Writes the page on private reinforcement learning: each policy's return, and the epsilon of its users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.digits import at_most
from tasks.charts.canvas import save
from tasks.charts.looks import looks
from tasks.charts.policy import algorithm_of, by_label, noise_of, reward_looks, rewards, spread, study
from tasks.charts.seed_groups import told_apart
from tasks.report.answer import listed
from tasks.report.numbers import digits4
from tasks.report.page import write

PAGE = "policy.html"
Result = dict[str, Any]


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
