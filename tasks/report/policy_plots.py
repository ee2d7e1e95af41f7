"""Draws pictures of a study of private reinforcement learning: return over users, and return against noise."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from dptune.policy.environments.environment import RIVERSWIM
from dptune.policy.environments.riverswim import value
from tasks.drawing import colour, legend_below, save

Result = dict[str, Any]


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


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return fmean(values), pstdev(values)


def noise_of(result: Result) -> float | None:
    """The noise multiplier z; None for a baseline that is not private."""
    return None if result["method"] is None else float(result["method"]["noise_multiplier"])


def draw_study(results: list[Result], path: Path) -> None:
    """Draw curves over users with their spread over seeds, final returns against z, and Riverswim's regret."""
    regrets = results[0]["environment"] == RIVERSWIM
    figure, axes = plt.subplots(1, 3 if regrets else 2, figsize=(15 if regrets else 11, 5), constrained_layout=True)
    _draw_curves(axes[0], results)
    _draw_noise(axes[1], results)
    if regrets:
        best = value(**results[0]["options"])
        axes[0].axhline(best, color="grey", linestyle=":", label="optimal value")
        _draw_regret(axes[2], results, best)
    figure.suptitle(f"{results[0]['study']}: {results[0]['environment']}, SIMULATED users")
    legend_below(figure, axes[0])
    save(figure, path)


def _draw_curves(axis: Axes, results: list[Result]) -> None:
    for shade, (label, mine) in enumerate(by_label(results).items()):
        users, curves = _curves(mine)
        style = "-" if mine[0]["kind"] == "dppg" else "--"
        axis.plot(users, curves.mean(axis=0), style, color=colour(shade), label=label)
        if len(curves) > 1:
            low, high = (curves.mean(axis=0) + sign * curves.std(axis=0) for sign in (-1, 1))
            axis.fill_between(users, low, high, color=colour(shade), alpha=0.15, linewidth=0)
    steps = results[0]["training"]["steps"]
    axis.set(xlabel=f"users so far (of at most {steps} steps each)", ylabel="mean return, simulated episodes")
    axis.grid(alpha=0.3)


def _curves(results: list[Result]) -> tuple[list[int], Any]:
    users = [point["users"] for point in results[0]["points"]]
    return users, np.array([[point["mean_return"] for point in result["points"]] for result in results])


def _draw_noise(axis: Axes, results: list[Result]) -> None:
    """Draw a line for every group of runs that differ in z alone."""
    lines: dict[str, list[Result]] = {}
    for result in results:
        if result["method"] is not None:
            lines.setdefault(_but_for_noise(result), []).append(result)
    for shade, mine in enumerate(lines.values()):
        noises = sorted({noise_of(result) or 0.0 for result in mine})
        points = [[result["final_return"] for result in mine if noise_of(result) == noise] for noise in noises]
        means, spreads = zip(*(spread(values) for values in points), strict=True)
        axis.errorbar(noises, means, yerr=spreads, fmt="o-", capsize=3, color=colour(shade), label=_line_name(mine))
    for label, mine in by_label([result for result in results if noise_of(result) is None]).items():
        mean = fmean(result["final_return"] for result in mine)
        axis.axhline(mean, color="grey", linestyle="--")
        axis.annotate(
            f"{label}, not private", (0.01, mean), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
        )
    axis.set(xlabel="noise multiplier z", ylabel="final return")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def _but_for_noise(result: Result) -> str:
    """A key that is equal for runs that differ in noise and seed alone."""
    method = {key: value for key, value in result["method"].items() if key != "noise_multiplier"}
    training = {key: value for key, value in result["training"].items() if key != "seed"}
    return json.dumps([result["kind"], method, training, result["extra"]], sort_keys=True)


def _line_name(results: list[Result]) -> str:
    groups = ", ".join(dict.fromkeys(result["group"] for result in results))
    return f"{groups}: {algorithm_of(results[0])}, K {results[0]['training']['users']}"


def _draw_regret(axis: Axes, results: list[Result], best: float) -> None:
    for shade, mine in enumerate(by_label(results).values()):
        users, curves = _curves(mine)
        gaps = np.diff([0, *users]) * (best - curves.mean(axis=0))
        axis.plot(users, np.cumsum(gaps), "-" if mine[0]["kind"] == "dppg" else "--", color=colour(shade))
    axis.set(xlabel="episodes", ylabel="cumulative regret")
    axis.grid(alpha=0.3)


def draw_rewards(results: list[Result], path: Path) -> None:
    """Draw the mean reward of language models over prompts: a colour for each budget, a line style for each K."""
    figure, axis = plt.subplots(figsize=(9, 4.5), constrained_layout=True)
    budgets = list(dict.fromkeys(result["budget_epsilon"] for result in results))
    sizes = sorted({result["users"] for result in results})
    for result in results:
        prompts = [point["updates"] * result["users"] for point in result["curve"]]
        name = "no noise" if result["budget_epsilon"] is None else f"epsilon {result['budget_epsilon']:g}"
        style, shade = ("-", "--", ":", "-.")[sizes.index(result["users"]) % 4], budgets.index(result["budget_epsilon"])
        rewards = [point["reward"] for point in result["curve"]]
        axis.plot(prompts, rewards, style, marker="o", color=colour(shade), label=f"{name}, K {result['users']}")
    axis.set(xlabel="prompts so far", ylabel="mean reward, held-out public prompts", xscale="symlog")
    axis.grid(alpha=0.3)
    figure.suptitle("RLHF in small, SYNTHETIC prompts")
    legend_below(figure, axis)
    save(figure, path)
