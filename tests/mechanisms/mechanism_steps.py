"""Mechanisms without a model: pairs of three sizes, batches made by hand, steps that nobody trains on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.mechanisms.interfaces import Knobs, Observation, Released, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build, takes_noise
from dptune.privacy.entropy import FixedSeed
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

SIZES = (3, 1, 4)
RATE = 0.01
EXPECTED = 16.0


class RepeatedWord:
    """Entropy that repeats one word."""

    leaks = ("test",)

    def __init__(self, word: int) -> None:
        self.word = word

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.full(count, self.word, dtype=np.uint64)


def started(name: str, sizes: Sequence[int] = SIZES, expected: float = EXPECTED, **entry: Any) -> Mechanism:
    """A mechanism that knows its run; its noise multiplier, if it has one, is 1 unless the entry has another."""
    noise = {"noise_multiplier": 1.0} if takes_noise(name, entry) else {}
    mechanism = build(name, noise | {"pairs": len(sizes)} | entry)
    mechanism.start(RunFacts(tuple(sizes), torch.device("cpu"), expected, RATE, 100, 2.0, 1e-5))
    return mechanism


def batch_of(rows: Any, losses: Any = None, sizes: Sequence[int] = SIZES) -> PairGradients:
    """One micro-batch from (units, parameters) gradients, pair after pair."""
    matrix = torch.as_tensor(rows, dtype=torch.float32).reshape(-1, sum(sizes))
    losses = torch.zeros(len(matrix)) if losses is None else torch.as_tensor(losses, dtype=torch.float64)
    return PairGradients(list(matrix.split(list(sizes), dim=1)), losses)


def zeros(sizes: Sequence[int] = SIZES) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.float64) for size in sizes]


def sums(mechanism: Mechanism, batches: list[PairGradients], sizes: Sequence[int] = SIZES) -> list[torch.Tensor]:
    return mechanism.exact_sums(batches, zeros(sizes), mechanism.knobs())


def privatised(
    mechanism: Mechanism, batches: Iterable[PairGradients], seed: int = 0, sizes: Sequence[int] = SIZES, row: int = 0
) -> Released:
    return mechanism.privatise(batches, zeros(sizes), mechanism.knobs(), EXPECTED, FixedSeed(seed), row=row)


def shift(mechanism: Mechanism, one: list[PairGradients], other: list[PairGradients]) -> float:
    """How far apart two batches put the release, in its norm and in units of its noise at multiplier 1."""
    scales = mechanism.scales(mechanism.knobs())
    blocks = zip(sums(mechanism, one), sums(mechanism, other), scales, strict=True)
    return float(torch.cat([(a - b) / scale for a, b, scale in blocks]).norm(p=int(mechanism.clipper.norm[1])))


def observed(released: Released, releases: int = 1, public_loss: float = 3.0, spent: float = 0.1) -> Observation:
    """What a controller is told of a step."""
    figures = {name: [0.5] * len(released.gradient) for name in ("product", "momentum", "second_moment")}
    return Observation(releases, released, spent, lambda: public_loss, lambda: figures)


def plain(knobs: Knobs) -> list[Any]:
    """Knobs as lists that compare exactly."""
    coordinates = vars(knobs.geometry).values() if knobs.geometry else ()
    parts = [value.tolist() if isinstance(value, torch.Tensor) else value for value in coordinates]
    return [knobs.radii, knobs.noise_multiplier, knobs.weights, parts]
