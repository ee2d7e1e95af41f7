"""Pictures of results, as PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Result = dict[str, Any]
EPSILONS = {
    "epsilon_published": "published (claimed)",
    "epsilon_noise_only": "noise only",
    "epsilon_certified": "certified (proved)",
}
_COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
_DPI = 130


def draw_curves(results: Sequence[Result], path: Path) -> None:
    """Learning curves: loss-side perplexities over steps, one colour a cell."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    _curve(axes[0], results, "eval_sample_perplexity", "held-out perplexity (sample)")
    _curve(axes[1], results, "public_perplexity", "public-set perplexity")
    _legend_below(figure, axes[0])
    _save(figure, path)


def draw_epsilons(results: Sequence[Result], path: Path) -> None:
    """The certified epsilon, and the published claim dashed, over releases."""
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for index, result in enumerate(result for result in results if _finite(result["epsilon_published"])):
        for key, style in (("epsilon_certified", "-"), ("epsilon_published", "--")):
            points = [(point["releases"], _value(point[key])) for point in result["history"]]
            points = [point for point in points if math.isfinite(point[1])]
            label = f"{result['label']}: {EPSILONS[key]}"
            axis.plot(*_columns(points), style, color=_colour(index), label=label)
    axis.set(xlabel="releases", ylabel="epsilon", title=_title("Epsilon over steps", results))
    _finish(axis)
    _save(figure, path)


def draw_perplexity(results: Sequence[Result], path: Path) -> None:
    """Perplexity against each of the three epsilons; public model and non-private runs as lines."""
    metric = perplexity_metric(results)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), sharey=True, constrained_layout=True)
    for axis, (key, title) in zip(axes, EPSILONS.items(), strict=True):
        for index, name in enumerate(sorted({_series(result) for result in results})):
            mine = [result for result in results if _series(result) == name]
            points = sorted((_value(result[key]), _value(result["after"][metric])) for result in mine)
            finite = [point for point in points if math.isfinite(point[0])]
            if finite:
                axis.plot(*_columns(finite), "o-", color=_colour(index), label=name)
            for _, perplexity in (point for point in points if not math.isfinite(point[0])):
                axis.axhline(perplexity, color=_colour(index), linestyle="--", label=f"{name} (epsilon infinite)")
        for model, perplexity in _before(results, metric).items():
            axis.axhline(perplexity, color="grey", linestyle=":", label=f"{model} model, not fine-tuned")
        axis.set(xlabel=f"epsilon, {title}", xscale="log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="x", which="both", labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(metric.replace("_", " "))
    figure.suptitle(_title("Perplexity against epsilon", results))
    _legend_below(figure, axes[0])
    _save(figure, path)


def perplexity_metric(results: Sequence[Result]) -> str:
    """Held-out perplexity where telemetry allows it for every cell, else the public set's."""
    held_out = all("eval_perplexity" in result["after"] for result in results)
    return "eval_perplexity" if held_out else "public_perplexity"


def _curve(axis: Axes, results: Sequence[Result], key: str, title: str) -> None:
    for index, result in enumerate(results):
        points = [(point["releases"], point[key]) for point in result["history"] if key in point]
        if points:
            axis.plot(*_columns(points), ".-", color=_colour(index), label=result["label"])
    axis.set(xlabel="releases", ylabel=title, title=_title(title, results))
    axis.grid(alpha=0.3)
    if not axis.lines:
        axis.text(0.5, 0.5, "not logged:\ntelemetry is private", ha="center", transform=axis.transAxes)


def _title(text: str, results: Sequence[Result]) -> str:
    return f"{text}, SYNTHETIC data" if any(result["synthetic"] for result in results) else text


def _series(result: Result) -> str:
    return f"{result['model']} / {result['mechanism']}"


def _before(results: Sequence[Result], metric: str) -> dict[str, float]:
    return {result["model"]: _value(result["before"][metric]) for result in results if metric in result["before"]}


def _value(number: float | str) -> float:
    return float(number)


def _finite(number: float | str) -> bool:
    return math.isfinite(_value(number))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _colour(index: int) -> Any:
    return _COLOURS[index % len(_COLOURS)]


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=7)


def _legend_below(figure: Any, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
