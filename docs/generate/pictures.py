"""Pictures of the documentation's pages, drawn when the site is built, with numbers from dptune's own accountants.

Each is a pair of SVG files, for light and for dark pages. Only README's two pairs lie in git. ``python -m
docs.generate.pictures`` draws those, and writes numbers.json: what is slow to compute. measured.json holds what runs of
``python -m benchmarks.real`` found; ``--numbers`` writes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from dptune.audit.games.step import audit_step
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, calibrated, price
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import epsilons, gdp_epsilon
from dptune.privacy.accounting.loss_profile import profile_of
from dptune.privacy.accounting.strategy import relative_error
from dptune.privacy.calibration import sampling
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.release import Release
from dptune.privacy.selection import renyi_selection_epsilon, selection_epsilon
from dptune.privacy.selection_law import SelectionLaw

FOLDER = Path(__file__).parents[1] / "pictures"
NUMBERS = Path(__file__).with_name("numbers.json")
MEASURED = Path(__file__).with_name("measured.json")
#: The pictures of README.md, which has no build.
README = ("four-epsilons", "real-model")
#: Colours that colour-blind readers can tell apart (Okabe and Ito), on light and on dark pages.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_THEMES = {"light": ("#333333", "#dddddd"), "dark": ("#dddddd", "#555555")}
_DELTA = 1e-5
_TRIALS = 4000
#: The rows of E2E's training file, and batches of them.
_UNITS, _BATCHES = 42_061, (64, 256, 1024, 4096)
#: Expected numbers of candidates of the picture about choosing, and the noise of a single run of the same budget.
CANDIDATES = (2, 3, 5, 10, 20, 30)
_SINGLE = 0.8099


def draw_steps(axes: Any, ink: str) -> None:
    """Epsilon against the number of steps, as certified and as a central-limit accountant publishes it."""
    axis = axes[0]
    steps = np.unique(np.geomspace(10, 10_000, 25).astype(int))
    for colour, noise in ((ORANGE, 0.7), (BLUE, 1.0), (GREEN, 2.0)):
        prices = [_price(0.01, noise, int(count)) for count in steps]
        axis.plot(
            steps, [one.certified for one in prices], color=colour, label=f"certified, noise multiplier {noise:g}"
        )
        axis.plot(steps, [one.published for one in prices], "--", color=colour, linewidth=1)
    axis.plot([], [], "--", color=ink, linewidth=1, label="published (central limit)")
    axis.set(xscale="log", yscale="log", xlabel="steps", ylabel="epsilon", title="Sample rate 0.01, delta 1e-5")
    axis.legend(frameon=False, labelcolor=ink)


def draw_real(axes: Any, ink: str) -> None:
    """What a real model keeps at each certified epsilon, and what its runs would claim by the central limit."""
    axis, found = axes[0], json.loads(MEASURED.read_text(encoding="utf-8"))["sst2"]
    runs = sorted(found["runs"], key=lambda run: float(run["certified"]))
    means = [float(np.mean(run["scores"])) for run in runs]
    above = [max(run["scores"]) - mean for run, mean in zip(runs, means, strict=True)]
    below = [mean - min(run["scores"]) for run, mean in zip(runs, means, strict=True)]
    certified = [run["certified"] for run in runs]
    axis.errorbar(certified, means, yerr=[below, above], fmt="o-", color=BLUE, capsize=3, label="certified (proved)")
    claimed = [run["published"] for run in runs]
    axis.plot(claimed, means, "o", markerfacecolor="none", color=ORANGE, label="what a central-limit accountant claims")
    for run, mean in zip(runs, means, strict=True):
        axis.annotate(f"{mean:.1f}", (run["certified"], mean), (6, -11), textcoords="offset points")
    for score, said in found["floors"].items():
        axis.axhline(float(score), color=ink, linewidth=0.8, linestyle=":")
        axis.annotate(said, (1.0, float(score)), (0, 3), xycoords=("axes fraction", "data"), ha="right",
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axis.set(xscale="log", xlabel="epsilon", ylabel=found["score"], title=found["title"], ylim=(48, 90))
    ticks = sorted({*certified, *claimed})
    axis.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False, labelcolor=ink, loc="center right")


def draw_sampling(axes: Any, ink: str) -> None:
    """Epsilon of one epoch's worth of steps against the sample rate, and that of the same steps without sampling."""
    axis = axes[0]
    rates = np.geomspace(0.001, 1, 25)
    for colour, noise in ((ORANGE, 0.7), (BLUE, 1.0), (GREEN, 2.0)):
        axis.plot(
            rates, [_price(float(rate), noise, 100).certified for rate in rates], color=colour, label=f"{noise:g}"
        )
    axis.set(
        xscale="log", yscale="log", xlabel="sample rate", ylabel="epsilon, certified", title="100 steps, delta 1e-5"
    )
    axis.legend(frameon=False, labelcolor=ink, title="noise multiplier").get_title().set_color(ink)


def draw_neighbours(axes: Any, ink: str) -> None:
    """Two neighbouring tables, and what one step on each releases."""
    owners = ["c1", "c2", "c2", "c3", "c1", "c4", "c2", "c3"]
    colours = {"c1": BLUE, "c2": ORANGE, "c3": GREEN, "c4": PURPLE}
    for axis, title, gone in ((axes[0], "A table", None), (axes[1], "Its neighbour", "c2")):
        for row, owner in enumerate(owners):
            there = owner != gone
            axis.barh(-row, 1, height=0.8, color=colours[owner] if there else "none", edgecolor=ink, linewidth=0.7)
            label = f"{owner}: a record" if there else "empty slot"
            axis.text(0.5, -row, label, ha="center", va="center", color="white" if there else ink, fontsize=9)
        axis.set_title(title)
        axis.set_axis_off()
    across = np.linspace(-4, 5, 91)
    for place, noise in ((2, 1.0), (3, 3.0)):
        axis, spread = axes[place], noise
        for colour, centre, label in ((GREEN, 0.0, "neighbour"), (ORANGE, 1.0, "table")):
            heights = np.exp(-0.5 * ((across - centre) / spread) ** 2)
            axis.fill_between(across, heights, color=colour, alpha=0.35, label=label)
            axis.plot(across, heights, color=colour)
        axis.set(
            ylim=(0, 1.35),
            yticks=[],
            xlabel="what one step releases",
            title=f"noise {noise:g}: epsilon {gdp_epsilon(1 / noise, _DELTA):.2f}",
        )
        axis.legend(frameon=False, labelcolor=ink, loc="upper center", ncols=2, fontsize=8)


def draw_epsilons(axes: Any, ink: str) -> None:
    """The four epsilons of one step of three mechanisms, whose noise is calibrated to the same published claim."""
    axis = axes[0]
    figures = [(name, *four_epsilons(name)) for name in ("static", "rldp", "rldp_published")]
    edge = 60.0
    marks = (
        ("published", "o", PURPLE),
        ("noise only", "D", BLUE),
        ("certified", "s", GREEN),
        ("audited, at least", "^", ORANGE),
    )
    for row, (_, *values) in enumerate(figures):
        for shift, (value, (label, mark, colour)) in enumerate(zip(values, marks, strict=True)):
            height = -row + 0.24 - 0.16 * shift
            axis.plot(
                min(value, edge), height, ">" if np.isinf(value) else mark, color=colour, label=None if row else label
            )
            text = "infinity" if np.isinf(value) else f"{value:.3g}"
            axis.annotate(text, (min(value, edge), height), (7, -3), textcoords="offset points", color=ink, fontsize=8)
    axis.set_yticks([0, -1, -2], [name for name, *_ in figures])
    axis.set(xscale="log", xlim=(0.4, 140), ylim=(-2.6, 0.6), xlabel="epsilon at delta 1e-5")
    axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"], minor=False)
    axis.set_title("One step, 12 LoRA pairs, noise multiplier 2")
    axis.legend(frameon=False, labelcolor=ink, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, fontsize=8)


def draw_cancelling(axes: Any, ink: str) -> None:
    """Noise of ``banded`` in the sum of all gradients over that of independent noise, against the size of batches."""
    axis = axes[0]
    for colour, (epsilon, found) in zip((ORANGE, BLUE, GREEN), kept_numbers()["cancelling"].items(), strict=True):
        axis.plot(_BATCHES, [left for left, _ in found], "o-", color=colour, label=epsilon)
        for batch, (left, bands) in zip(_BATCHES, found, strict=True):
            axis.annotate(str(bands), (batch, left), (0, 5), textcoords="offset points", color=ink, fontsize=8)
    axis.axhline(1, linestyle="--", color=ink, linewidth=1)
    axis.set(xscale="log", ylim=(0, 1.1), xlabel="batch, of 42,061 units", ylabel="noise over independent noise")
    axis.set_xticks(_BATCHES, [str(batch) for batch in _BATCHES], minor=False)
    axis.set_title("Three epochs, delta 1e-5; beside each point its bands")
    axis.legend(frameon=False, labelcolor=ink, title="epsilon, certified").get_title().set_color(ink)


def kept_numbers() -> dict[str, Any]:
    """What ``slow_numbers`` returned when it was last run."""
    return json.loads(NUMBERS.read_text(encoding="utf-8"))


def slow_numbers() -> dict[str, Any]:
    """Numbers that are slow to compute, by the picture that shows them."""
    cancelling = {f"{epsilon:g}": [noise_left(batch, epsilon) for batch in _BATCHES] for epsilon in (0.5, 2.0, 8.0)}
    return {"cancelling": cancelling, "choosing": noise_of_choosing()}


@cache
def noise_left(batch: int, epsilon: float) -> tuple[float, int]:
    """Noise in the sum of all gradients over that of independent noise at the same certified epsilon, and the bands.

    Of strategies for all steps alike (``objective: mean``), as the literature has them.
    """
    rate, steps = sampling(_UNITS, batch, 3)
    schedule = Schedule(rate, steps, _DELTA)
    noises = {}
    for name in ("static", "banded"):
        build_with = partial(_with_noise, name)
        noises[name] = calibrated(build_with, epsilon, schedule, "certified").mechanism
    banded = noises["banded"]
    left = banded.noise.noise_multiplier * relative_error(banded.coefficients, steps, "last")
    return left / noises["static"].noise.noise_multiplier, banded.bands


def _with_noise(name: str, multiplier: float) -> Mechanism:
    options = {"objective": "mean"} if name == "banded" else {}
    return build(name, {"noise_multiplier": multiplier, "max_grad_norm": 1.0, "pairs": 1, **options})


def draw_choosing(axes: Any, ink: str) -> None:
    """Noise multiplier of every candidate against their expected number, for a search of epsilon 2."""
    axis, curves = axes[0], kept_numbers()["choosing"]
    for label, colour in zip(curves, (BLUE, GREEN, ORANGE, PURPLE), strict=True):
        axis.plot(CANDIDATES, curves[label], "o-", markersize=3, color=colour, label=label)
    axis.axhline(_SINGLE, color=ink, linewidth=1, linestyle=":")
    axis.annotate(
        "one run, nothing chosen", (CANDIDATES[-1], _SINGLE), (0, -11), textcoords="offset points", ha="right"
    )
    axis.set(xscale="log", xlabel="expected candidates", ylabel="noise multiplier", ylim=(0.7, 1.9))
    axis.set_xticks(CANDIDATES, [f"{count:g}" for count in CANDIDATES])
    axis.set_xticks([], minor=True)
    axis.set_title("Epsilon 2 for the whole search, delta 1e-5")
    axis.legend(frameon=False, labelcolor=ink, loc="upper left", fontsize=8)


@cache
def noise_of_choosing() -> dict[str, list[float]]:
    """Noise multipliers of candidates for 102 steps on 4320 units with batches of 64, by how the choice is counted."""
    noises = np.geomspace(0.75, 1.9, 12)
    runs = [Counter({Release(64 / 4320, float(noise)): 102}) for noise in noises]
    profiles = [profile_of(run) for run in runs]

    def solved(spent: Sequence[float]) -> float:
        return float(np.exp(np.interp(np.log(2), np.log(spent)[::-1], np.log(noises)[::-1])))

    laws = [SelectionLaw.of(count) for count in CANDIDATES]
    return {
        "best of a random number (dptune)": [
            solved([selection_epsilon(profile, law, _DELTA) for profile in profiles]) for law in laws
        ],
        "the same, one shift": [
            solved([selection_epsilon(profile, law, _DELTA, "one_shift") for profile in profiles]) for law in laws
        ],
        "the same, published Renyi bound": [
            solved([renyi_selection_epsilon(run, law, _DELTA) for run in runs]) for law in laws
        ],
        "that many runs, all shown": [
            solved([epsilons(Counter({r: n * count for r, n in run.items()}), _DELTA).certified for run in runs])
            for count in CANDIDATES
        ],
    }


@cache
def _price(rate: float, noise: float, steps: int) -> Any:
    return epsilons(Counter({Release(rate, noise): steps}), _DELTA)


@cache
def four_epsilons(name: str) -> tuple[float, float, float, float]:
    """Published, noise only, certified and audited epsilon of one step at noise multiplier 2, for 12 pairs.

    The audit has a fixed seed, so that the picture is the same each time; audits of users have none.
    """
    mechanism = build(name, {"noise_multiplier": 2.0, "pairs": 12})
    prices = price(mechanism, Schedule(1.0, 1, _DELTA))
    found = audit_step(mechanism, trials=_TRIALS, confidence=0.95, delta=_DELTA, entropy=FixedSeed(1))
    return prices.published, prices.noise_only, prices.certified, found.epsilon_audited


PICTURES: dict[str, tuple[Callable[[Any, str], None], tuple[float, float], list[float]]] = {
    "epsilon-steps": (draw_steps, (6.4, 3.8), [1]),
    "epsilon-sampling": (draw_sampling, (6.4, 3.8), [1]),
    "neighbours": (draw_neighbours, (9.0, 2.8), [1, 1, 1.6, 1.6]),
    "choosing": (draw_choosing, (6.4, 3.8), [1]),
    "four-epsilons": (draw_epsilons, (6.8, 3.4), [1]),
    "real-model": (draw_real, (6.8, 3.4), [1]),
    "cancelling": (draw_cancelling, (6.4, 3.8), [1]),
}


def draw(
    folder: Path = FOLDER, names: Sequence[str] = tuple(PICTURES), themes: Sequence[str] = tuple(_THEMES)
) -> list[Path]:
    """Draw pictures, and return the files."""
    matplotlib.use("Agg")
    written = []
    for name in names:
        picture, size, widths = PICTURES[name]
        for theme in themes:
            ink, line = _THEMES[theme]
            with plt.rc_context(_style(ink, line)):
                figure, axes = plt.subplots(
                    1, len(widths), figsize=size, width_ratios=widths, squeeze=False, constrained_layout=True
                )
                picture(axes[0], ink)
                written.append(folder / f"{name}-{theme}.svg")
                figure.savefig(written[-1], transparent=True, metadata={"Date": None})
                plt.close(figure)
    return written


def _style(ink: str, line: str) -> Any:
    coloured = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), ink)
    return coloured | {
        "axes.edgecolor": line,
        "axes.grid": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "font.size": 9,
        "svg.fonttype": "none",  # text stays text, in the reader's own font
        "svg.hashsalt": "dptune",
    }


if __name__ == "__main__":
    NUMBERS.write_text(json.dumps(slow_numbers(), indent=1) + "\n", encoding="utf-8")
    for path in draw(names=README):
        print(path.name)
