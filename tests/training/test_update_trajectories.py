"""Whole runs, killed and resumed, equal a mechanism's transcription followed by an optimiser in plain loops.

The gradients, the words of the entropy and the release of every step are recorded; the transcription is given the first
two. So the order in the loop is held too: knobs before the batch, noise once, the rate of a step, what a checkpoint
keeps. Weights are float32 in the run and float64 here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import adapted, each_record, make_header, make_plan, records, trainable, weights
from transcribed_coordinates import AdaClip
from transcribed_radii import Quantile
from transcriptions import PerPair, Transcription

from dptune.core.settings import UpdateRule
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.models.model import freeze_down
from dptune.training.run import StepReport
from dptune.training.spec import RunSpec

STEPS, STOP, RATE, WARM_UP, SAMPLE_RATE, NOISE = 16, 7, 0.02, 9, 0.25, 0.7
BATCH = 8 * SAMPLE_RATE


class ProcessGoneError(Exception):
    """The process is gone."""


class AdamW:
    """Adam (Kingma and Ba 2015) without weight decay: a step of m^ / (sqrt(v^) + 1e-8)."""

    def __init__(self, theta: list[float]) -> None:
        self.theta, self.t = list(theta), 0
        self.m, self.v = [0.0] * len(theta), [0.0] * len(theta)

    def step(self, gradient: list[float], variances: list[float], rate: float) -> None:
        self.t += 1
        for j, g in enumerate(gradient):
            self.m[j] = 0.9 * self.m[j] + 0.1 * g
            self.v[j] = 0.999 * self.v[j] + 0.001 * g * g
            root = self.root(self.v[j] / (1 - 0.999**self.t), variances[j], j)
            self.theta[j] -= rate * self.m[j] / (1 - 0.9**self.t) / root

    def root(self, v: float, variance: float, place: int) -> float:
        return math.sqrt(v) + 1e-8


class AdamBC(AdamW):
    """DP-AdamBC (Tang et al. 2024, arXiv 2312.14334): a step of m^ / sqrt(max(v^ - Phi, floor Phi)).

    Phi is the average of the noise's variance that v sees, with the same correction.
    """

    floor = 0.1

    def __init__(self, theta: list[float]) -> None:
        super().__init__(theta)
        self.phi = [0.0] * len(theta)

    def root(self, v: float, variance: float, place: int) -> float:
        self.phi[place] = 0.999 * self.phi[place] + 0.001 * variance
        phi = self.phi[place] / (1 - 0.999**self.t)
        return math.sqrt(max(v - phi, self.floor * phi, 1e-20))


class Momentum(AdamW):
    """SGD: m = 0.9 m + g, a step of m."""

    def step(self, gradient: list[float], variances: list[float], rate: float) -> None:
        for j, g in enumerate(gradient):
            self.m[j] = 0.9 * self.m[j] + g
            self.theta[j] -= rate * self.m[j]


class Recorded:
    """Entropy that keeps its words."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.leaks = inner, inner.leaks
        self.drawn: list[NDArray[np.uint64]] = []

    def words(self, count: int) -> NDArray[np.uint64]:
        self.drawn.append(np.array(self.inner.words(count)))
        return self.drawn[-1]


class Replayed:
    """The same words once more."""

    def __init__(self, drawn: list[NDArray[np.uint64]]) -> None:
        self.drawn = list(drawn)

    def words(self, count: int) -> NDArray[np.uint64]:
        assert len(self.drawn[0]) == count
        return self.drawn.pop(0)


@dataclass(frozen=True)
class Case:
    name: str
    transcribed: Callable[..., Transcription]
    optimiser: type[AdamW]
    rule: UpdateRule
    options: dict[str, Any]


CASES = [
    Case(
        "dp_lora", lambda *a: PerPair(*a, scheme="global"), AdamBC, UpdateRule("adam_bc", noise_floor=0.1),
        {"freeze_down": True},
    ),
    Case("adaclip", AdaClip, AdamW, UpdateRule(), {}),
    Case("quantile", lambda *a: Quantile(*a, z_b=0.5 * NOISE / math.sqrt(0.05)), Momentum, UpdateRule("sgd"), {}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_moves_its_weights_as_transcribed(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[Any, ...]] = []
    real = Mechanism.privatise

    def privatise(self: Mechanism, batches: Any, zeros: Any, knobs: Any, expected: float, entropy: Any, *more: Any,
                  **named: Any) -> Any:  # fmt: skip
        kept, recorded = list(batches), Recorded(entropy)
        released = real(self, kept, zeros, knobs, expected, recorded, *more, **named)
        rows = torch.cat([batch.matrix() for batch in kept]).tolist() if kept else []
        steps.append((rows, recorded.drawn, torch.cat(released.gradient), [len(zero) for zero in zeros]))
        return released

    monkeypatch.setattr(Mechanism, "privatise", privatise)
    after: list[list[float]] = []
    for attempt in range(2):
        model, tokens, entropy = adapted(), records(), FixedSeed(3 + attempt)
        if case.options.get("freeze_down"):
            freeze_down(model)
        theta = torch.cat([weight.flatten() for weight in weights(model).values()]).tolist()
        units = each_record(tokens)
        mechanism = build(case.name, {"noise_multiplier": NOISE, "pairs": len(lora_pairs(model))} | case.options)
        changes = {"learning_rate": RATE, "warmup_steps": WARM_UP, "checkpoint_every": 1}
        plan = replace(make_plan(steps=STEPS, sample_rate=SAMPLE_RATE, **changes), rule=case.rule)
        claimed = {"mechanism": mechanism.name, "published_accountant": mechanism.published_accountant}

        def on_step(report: StepReport, model: Any = model, attempt: int = attempt) -> None:
            after.append(torch.cat([weight.detach().flatten() for weight in trainable(model).values()]).tolist())
            if attempt == 0 and report.step == STOP:
                raise ProcessGoneError  # before its checkpoint: the step is charged, and lost

        spec = RunSpec(model, tokens, units, mechanism, plan, make_header(entropy, units, **claimed), public=tokens)
        try:
            train(spec, tmp_path, entropy, on_step).close()
        except ProcessGoneError:
            assert attempt == 0

    reference, optimiser, saved = None, case.optimiser(theta), None
    for index, (rows, drawn, gradient, sizes) in enumerate(steps):
        reference = reference or case.transcribed(sizes, BATCH, NOISE)
        if index == STOP:
            assert saved is not None
            reference, optimiser = saved
        saved = copy.deepcopy((reference, optimiser))  # what the checkpoint before this step holds
        expected = reference.step(rows, Replayed(drawn))  # type: ignore[arg-type]
        assert gradient.double().tolist() == expected
        used = reference.deviations_used
        per_block = used if len(used) == len(sizes) else used * len(sizes)
        variances = [(one / BATCH) ** 2 for one, size in zip(per_block, sizes, strict=True) for _ in range(size)]
        optimiser.step(expected, variances, RATE * min(1.0, optimiser_steps(index) / WARM_UP))
        np.testing.assert_allclose(after[index], optimiser.theta, rtol=0, atol=2e-6)
    assert any(not rows for rows, *_ in steps), "an empty batch is among them"
    assert len(steps) == STEPS


def optimiser_steps(index: int) -> int:
    """Steps of the weights, which the killed process took back by one."""
    return index + 1 if index < STOP else index
