"""Pictures of results, as PNG files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dptune.files import naming

Result = dict[str, Any]
EPSILONS = {
    "epsilon_published": "published (claimed)",
    "epsilon_noise_only": "noise only",
    "epsilon_certified": "certified (proved)",
}
_COLOURS = plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2]  # type: ignore[attr-defined]
_STYLES = ("-", "--", ":", "-.")
_LEGEND_ROW = 0.18  # inches
_MOST_NAMES = 3
_DPI = 130


def draw_curves(results: Sequence[Result], path: Path) -> None:
    """Learning curves: a colour for each mechanism, a line style for each budget, a line for each seed."""
    lines = len({(_series(result), result.get("budget_epsilon")) for result in results})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4 + _LEGEND_ROW * (lines // 3)), constrained_layout=True)
    _curve(axes[0], results, "eval_sample_perplexity", "held-out perplexity (sample)")
    _curve(axes[1], results, "public_perplexity", "public-set perplexity")
    legend_below(figure, axes[0])
    save(figure, path)


def draw_epsilons(results: Sequence[Result], path: Path) -> None:
    """The certified epsilon, and the published claim dashed, over releases; cells that share a curve share a line."""
    curves: dict[tuple[Any, ...], list[str]] = {}
    for result in results:
        for key, style in (("epsilon_certified", "-"), ("epsilon_published", "--")):
            points = tuple((point["releases"], _value(point[key])) for point in result["history"])
            finite = tuple(point for point in points if math.isfinite(point[1]))
            if finite:
                names = curves.setdefault((key, style, finite), [])
                names += [name for name in [_budgeted(result)] if name not in names]
    figure, axis = plt.subplots(figsize=(10, 4.5 + _LEGEND_ROW * len(curves)), constrained_layout=True)
    order = list(dict.fromkeys(tuple(names) for names in curves.values()))
    for (key, style, points), names in curves.items():
        label = f"{EPSILONS[key]}: {_listed(names)}"
        axis.plot(*_columns(points), style, color=colour(order.index(tuple(names))), label=label)
    axis.set(xlabel="releases", ylabel="epsilon", title=_title("Epsilon over steps", results))
    axis.grid(alpha=0.3)
    legend_below(figure, axis, columns=1)
    save(figure, path)


def _budgeted(result: Result) -> str:
    budget = result.get("budget_epsilon")
    return _series(result) if budget is None else f"{_series(result)}, budget {budget:g}"


def _listed(names: Sequence[str]) -> str:
    shown = "; ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown}; and {len(names) - _MOST_NAMES} more"


def draw_perplexity(results: Sequence[Result], path: Path) -> None:
    """Perplexity against each of the three epsilons; public model and non-private runs as lines."""
    metric = perplexity_metric(results)
    series = len({_series(result) for result in results})
    figure, axes = plt.subplots(
        1, 3, figsize=(13, 4 + _LEGEND_ROW * (series // 3)), sharey=True, constrained_layout=True
    )
    for axis, (key, title) in zip(axes, EPSILONS.items(), strict=True):
        for index, name in enumerate(sorted({_series(result) for result in results})):
            _series_with_spread(axis, [r for r in results if _series(r) == name], key, metric, name, colour(index))
        for model, perplexity in _before(results, metric).items():
            if not math.isfinite(perplexity):
                continue
            axis.axhline(perplexity, color="grey", linestyle=":", label=f"{model} model, not fine-tuned")
        axis.set(xlabel=f"epsilon, {title}", **({"xscale": "log"} if axis.has_data() else {}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="x", which="both", labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(metric.replace("_", " "))
    figure.suptitle(_title("Perplexity against epsilon", results))
    legend_below(figure, axes[0])
    save(figure, path)


def _series_with_spread(axis: Axes, results: Sequence[Result], key: str, metric: str, name: str, colour: Any) -> None:
    """One point a budget: the mean over seeds, with its standard deviation; a dashed line where epsilon is infinite."""
    groups = [group for group in over_seeds(results, metric) if not math.isnan(group.mean)]
    points = sorted((_value(group.results[0][key]), group.mean, group.spread) for group in groups)
    # A run that diverged has no place on the axis, and Matplotlib no scale for one that only holds such.
    points = [point for point in points if math.isfinite(point[1])]
    finite = [point for point in points if math.isfinite(point[0])]
    if finite:
        epsilons, means, spreads = zip(*finite, strict=True)
        several = any(len(group.results) > 1 for group in groups)
        axis.errorbar(epsilons, means, yerr=spreads if several else None, fmt="o-", color=colour, label=name, capsize=3)
    for _, mean, _spread in (point for point in points if not math.isfinite(point[0])):
        axis.axhline(mean, color=colour, linestyle="--", label=f"{name} (epsilon infinite)")


@dataclass(frozen=True)
class SeedGroup:
    """Cells that differ by their seed alone.

    Attributes:
        mean: of the metric.
        spread: its sample standard deviation; 0 for one seed.
    """

    results: tuple[Result, ...]
    mean: float
    spread: float


def over_seeds(results: Sequence[Result], metric: str) -> list[SeedGroup]:
    """Group cells by everything but their seed, best mean first."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        key = (result["model"], result["mechanism"], result["accounting"], result["budget_epsilon"])
        groups.setdefault(key, []).append(result)
    summaries = []
    for members in groups.values():
        values = [_value(result["after"][metric]) for result in members]
        finite = all(map(math.isfinite, values))
        spread = (statistics.stdev(values) if finite else math.nan) if len(values) > 1 else 0.0
        summaries.append(SeedGroup(tuple(members), statistics.fmean(values), spread))
    return sorted(summaries, key=lambda group: group.mean)


def moves_knobs(result: Result) -> bool:
    """Whether the run's controller moved anything that can be drawn."""
    return len(result.get("knobs", [])) > 1


def draw_controller(result: Result, path: Path) -> None:
    """What the controller did: radii and weights (adapters x steps), noise and reward, epsilon."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 6.5), constrained_layout=True)
    _draw_knobs(figure, axes[0][0], result, "radius_", "clip radius")
    _draw_knobs(figure, axes[0][1], result, "weight_", "relative noise weight")
    _draw_lines(axes[1][0], result)
    for key, title in EPSILONS.items():
        points = [(point["releases"], _value(point[key])) for point in result["history"]]
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            axes[1][1].plot(*_columns(finite), ".-", label=title)
    axes[1][1].set(xlabel="releases", ylabel="epsilon", title="epsilon", yscale="log")
    _finish(axes[1][1])
    figure.suptitle(_title(f"Controller of {result['label']}", [result]))
    save(figure, path)


def _draw_knobs(figure: Any, axis: Axes, result: Result, prefix: str, title: str) -> None:
    """One line for one knob, a heat map for one an adapter."""
    rows = [row for row in result["knobs"] if f"{prefix}0" in row]
    names = [key for key in (rows[0] if rows else {}) if key.startswith(prefix) and key[len(prefix) :].isdigit()]
    axis.set(title=title, xlabel="releases")
    if not rows:
        axis.text(0.5, 0.5, "this mechanism has none", ha="center", va="center", transform=axis.transAxes)
        return
    releases = [row["releases"] for row in rows]
    if len(names) == 1:
        axis.plot(releases, [_value(row[names[0]]) for row in rows], ".-")
        axis.set(yscale="log")
        axis.grid(alpha=0.3)
        return
    table = [[_value(row[name]) for row in rows] for name in names]
    # A knob holds until the next row, so every column is as wide as its stay.
    edges = [*releases, max(result["releases"], releases[-1] + 1)]
    mesh = axis.pcolormesh(edges, range(len(names) + 1), table, shading="flat", norm="log")
    axis.set(yticks=[index + 0.5 for index in range(len(names))], yticklabels=_short(result["pairs"]))
    axis.tick_params(axis="y", labelsize=max(4, 8 - len(names) // 12))
    figure.colorbar(mesh, ax=axis)


def _draw_lines(axis: Axes, result: Result) -> None:
    rows = result["knobs"]
    axis.plot([row["releases"] for row in rows], [row["noise_multiplier"] for row in rows], ".-", label="sigma")
    rewards = [(row["releases"], _value(row["controller_reward"])) for row in rows if "controller_reward" in row]
    if rewards:
        axis.plot(*_columns(rewards), ".-", label="reward")
    axis.set(xlabel="releases", title="noise multiplier and reward")
    _finish(axis)


def _short(pairs: Sequence[str]) -> list[str]:
    """Module paths without what all of them share at the front."""
    parts = [pair.split(".") for pair in pairs]
    shared = 0
    while len(parts) > 1 and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return [".".join(part[shared:]) for part in parts]


def perplexity_metric(results: Sequence[Result]) -> str:
    """Held-out perplexity where telemetry allows it for every cell, else the public set's."""
    held_out = all("eval_perplexity" in result["after"] for result in results)
    return "eval_perplexity" if held_out else "public_perplexity"


def _curve(axis: Axes, results: Sequence[Result], key: str, title: str) -> None:
    mechanisms = list(dict.fromkeys(_series(result) for result in results))
    budgets = list(dict.fromkeys(result.get("budget_epsilon") for result in results))
    named: set[str] = set()
    for result in results:
        points = [(point["releases"], point[key]) for point in result["history"] if key in point]
        name = _budgeted(result)
        if points:
            axis.plot(
                *_columns(points),
                linestyle=_STYLES[budgets.index(result.get("budget_epsilon")) % len(_STYLES)],
                marker=".",
                color=colour(mechanisms.index(_series(result))),
                label=None if name in named else name,
            )
            named.add(name)
    axis.set(xlabel="releases", ylabel=title, title=_title(title, results))
    axis.grid(alpha=0.3)
    if not axis.lines:
        axis.text(0.5, 0.5, "not logged:\ntelemetry is private", ha="center", transform=axis.transAxes)


def _title(text: str, results: Sequence[Result]) -> str:
    return f"{text}, SYNTHETIC data" if any(result["synthetic"] for result in results) else text


def _series(result: Result) -> str:
    return f"{result.get('model', '')} / {result.get('mechanism', '')}"


def _before(results: Sequence[Result], metric: str) -> dict[str, float]:
    return {result["model"]: _value(result["before"][metric]) for result in results if metric in result["before"]}


def _value(number: float | str) -> float:
    return float(number)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def colour(index: int) -> Any:
    """The n-th colour of every picture."""
    return _COLOURS[index % len(_COLOURS)]


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=7)


def legend_below(figure: Any, axis: Axes, columns: int = 3) -> None:
    """One legend under the figure."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def save(figure: Any, path: Path) -> None:
    """Write the PNG and forget the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        figure.savefig(path, dpi=_DPI)
    plt.close(figure)
