"""Trajectories: a mechanism and its transcription, driven through the same gradients and the same words.

Gradients are hostile (zeros, subnormal, huge, NaN, infinite, heavy-tailed, drifting). Batches are empty at the start,
in the middle and right before the kill. Micro-batches are cut anew at every step. In the middle the process dies after
a charge: a new mechanism gets what the old one saved, through JSON where it is not a tensor, and one row is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mechanism_steps import zeros
from transcribed_coordinates import GeoClip
from transcriptions import Transcription, Words

from dptune.mechanisms.interfaces import Observation, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build, takes_noise
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

SIZES, BATCH, STEPS, KILL = (3, 1, 4), 16.0, 48, 25
#: Sizes of some batches; all others are drawn.
FIXED = {1: 0, 2: 3, 16: 0, 17: 0, KILL - 1: 0, KILL: 1, KILL + 4: 0}


@dataclass(frozen=True)
class Case:
    """A mechanism with its options, and what transcribes it.

    Attributes:
        name: registered name.
        transcribed: makes the transcription, from the sizes of the pairs, B and z.
        options: entry of params.yaml.
        batch: expected batch size B.
    """

    name: str
    transcribed: Callable[..., Transcription]
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: float = BATCH

    def mechanism(self) -> Mechanism:
        noise = {"noise_multiplier": 1.0} if takes_noise(self.name, self.options) else {}
        made = build(self.name, noise | {"pairs": len(SIZES)} | dict(self.options))
        made.start(RunFacts(SIZES, torch.device("cpu"), self.batch, 0.01, STEPS, 2.0, 1e-5))
        return made


def batches(seed: int, expected: float) -> Iterator[torch.Tensor]:
    """(units, parameters) gradients of every step; of odd seeds the first batch is empty."""
    rng, size = np.random.default_rng(seed), sum(SIZES)
    for step in range(STEPS):
        count = FIXED.get(step, int(rng.poisson(expected)))
        if step == 0:
            count = 0 if seed % 2 else 1
        scale = 0.2 * math.exp(2.0 * math.sin(step / 9))
        rows = scale * rng.standard_normal((count, size)) * np.exp(rng.standard_normal((count, 1))) + 0.05
        if count > 4:
            rows[0] = 0.0
            kind = step % 7
            rows[1] *= {1: 1e-20, 2: 1e20, 3: 1e-42}.get(kind, 1.0)
            if kind in (4, 5):
                rows[1, 3] = math.nan if kind == 4 else math.inf
            if kind == 6:
                rows[1] = 3.0
        yield torch.tensor(rows, dtype=torch.float32)


def micro_batches(rows: torch.Tensor, step: int) -> list[PairGradients]:
    """A batch in one piece, or in three."""
    count = len(rows)
    cuts = [0, count] if step % 3 == 0 else sorted({0, count // 3, count // 2, count})
    pieces = [rows[start:end] for start, end in pairwise(cuts) if end > start]
    return [PairGradients([part.clone() for part in piece.split(list(SIZES), dim=1)], torch.zeros(len(piece)))
            for piece in pieces]  # fmt: skip


def relative(ours: Any, theirs: Any) -> float:
    """The largest difference over the largest entry; infinite for other sizes."""
    ours, theirs = (np.asarray(one, dtype=np.float64).ravel() for one in (ours, theirs))
    if ours.shape != theirs.shape:
        return math.inf
    if not len(ours) or np.array_equal(ours, theirs):
        return 0.0
    return float(np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), 1e-300))


def saved(mechanism: Mechanism) -> dict[str, Any]:
    """The controller's state as a checkpoint keeps it."""
    state = mechanism.controller.state_dict()
    tensors = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    return json.loads(json.dumps({key: value for key, value in state.items() if key not in tensors})) | tensors


def differences(case: Case, seed: int, steps: int = STEPS) -> dict[str, float]:
    """The largest relative difference over the first ``steps``, of each quantity that a step has."""
    mechanism, reference = case.mechanism(), case.transcribed(SIZES, case.batch, 1.0)
    ours, theirs, worst = Words(seed + 100), Words(seed + 100), dict[str, float]()

    def note(name: str, difference: float) -> None:
        worst[name] = max(worst.get(name, 0.0), difference)

    if isinstance(reference, GeoClip):
        reference.begin(mechanism.controller.state_dict()["subspace"].tolist())
    for step, rows in zip(range(steps), batches(seed, case.batch), strict=False):
        if step == KILL:
            state = saved(mechanism)
            mechanism = case.mechanism()
            mechanism.controller.load_state_dict(state)
            reference.resumed()
        knobs, parts = mechanism.knobs(), micro_batches(rows, step)
        exact = None if mechanism.controller.raw_inputs else mechanism.exact_sums(parts, zeros(SIZES), knobs)
        row = step + (step >= KILL)  # a row was charged and lost
        released = mechanism.privatise(parts, zeros(SIZES), knobs, case.batch, ours, row=row)
        gradient = reference.step(rows.tolist(), theirs)
        note("radii", relative(released.knobs.radii, reference.radii_used) if reference.radii_used else 0.0)
        if exact is not None:
            note("sums", relative(torch.cat(exact), [value for block in reference.exact for value in block]))
        note("deviations", relative(released.deviations, reference.deviations_used))
        note("gradient", relative(torch.cat(released.gradient), gradient))
        if reference.released_counts is not None:
            note("statistics", relative(released.statistics, reference.released_counts))
        mechanism.controller.observe(Observation(step + 1, released, 0.1, lambda: 3.0, dict))
        now = mechanism.controller.state_dict()
        if isinstance(reference, GeoClip):
            reference.adopt(now["subspace"].tolist())
            note("directions", reference.residual)
        for key, value in reference.state().items():
            note(key, relative(now[key], value))
    return worst
