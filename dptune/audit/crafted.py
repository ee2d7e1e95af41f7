"""Canaries that are gradients: an auditor inside the training loop (Nasr et al. 2023; Steinke et al. 2023, section 6).

Each canary is one more unit of privacy. Where its coin says so it enters batches as every unit does, by its own
Poisson coin, and the mechanism clips, sums and noises it with the others. Its gradient is huge in one coordinate of
every LoRA pair, a coordinate of its own, so that it saturates whatever the mechanism clips by. The auditor adds up
what the releases show in that coordinate. They cost utility: use them in runs that are for auditing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import chain
from secrets import SystemRandom
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Gradients, Knobs, Mechanism, Released, RunFacts
from dptune.privacy.entropy import Entropy, poisson_sample

_HUGE = 1e6
_PLAIN = 10.0  # where nothing clips: above what samples put into one coordinate, and no end of the training


@dataclass
class CraftedCanaries:
    """The auditor's side: coins, and what was seen so far. Private.

    Attributes:
        included: (canaries,) what the fair coins said.
        scores: (canaries,) larger where the canary looks included.
        watched: releases that the scores add up.
    """

    included: NDArray[np.bool_] = field(repr=False)
    scores: NDArray[np.float64] = field(repr=False)
    watched: int = 0

    @classmethod
    def toss(cls, count: int) -> CraftedCanaries:
        """New coins from the operating system's entropy. Raises ConfigError for fewer than 2."""
        if count < 2:
            raise ConfigError("canaries.crafted", f"{count} is too few", fix="use hundreds, or 0 for none")
        entropy = SystemRandom()
        return cls(np.array([bool(entropy.getrandbits(1)) for _ in range(count)]), np.zeros(count))

    def watch(self, released: Released) -> None:
        """Add what one release shows, in units of its noise where that is known pair by pair."""
        known = len(released.deviations) == len(released.gradient) and min(released.deviations) > 0
        units = released.deviations if known else (1.0,) * len(released.gradient)
        for part, unit in zip(released.gradient, units, strict=True):
            self.scores += part[: len(self.scores)].double().cpu().numpy() / unit
        self.watched += 1


@dataclass(frozen=True)
class AuditedMechanism(Mechanism):
    """A mechanism whose batches also hold the crafted canaries that were included and drawn.

    The ledger's guarantee is unchanged: canaries are units like all others, so it is about them too.
    """

    canaries: CraftedCanaries = field(kw_only=True)
    _facts: list[RunFacts] = field(default_factory=list, init=False, repr=False, compare=False)

    def start(self, facts: RunFacts) -> None:
        """As the mechanism does. Raises ConfigError if a pair has fewer parameters than there are canaries."""
        count = len(self.canaries.included)
        if min(facts.pair_sizes) < count:
            problem = f"{count} exceeds the {min(facts.pair_sizes)} parameters of the smallest LoRA pair"
            raise ConfigError("canaries.crafted", problem, fix="use fewer")
        self._facts[:] = [facts]
        super().start(facts)

    def privatise(
        self,
        batches: Iterable[Gradients],
        zeros: list[torch.Tensor],
        knobs: Knobs,
        expected_batch_size: float,
        entropy: Entropy,
        total: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
    ) -> Released:
        """The private step on the batch and the canaries in it, which are all units of this process."""
        drawn = poisson_sample(entropy, len(self.canaries.included), self._facts[0].sample_rate)
        drawn = drawn[self.canaries.included[drawn]]
        crafted = [_Crafted.of(drawn, zeros, _HUGE if self.private else _PLAIN)] if len(drawn) else []
        released = super().privatise(chain(batches, crafted), zeros, knobs, expected_batch_size, entropy, total)
        self.canaries.watch(released)
        return released


def audited(mechanism: Mechanism, canaries: CraftedCanaries) -> AuditedMechanism:
    """The same mechanism with canaries in its batches. Raises ConfigError for one that trains locally."""
    if mechanism.local is not None:
        raise ConfigError("canaries.crafted", f"{mechanism.name} clips updates of clients", fix="use 0")
    own: dict[str, Any] = {item.name: getattr(mechanism, item.name) for item in fields(Mechanism)}
    return AuditedMechanism(**own, canaries=canaries)


@dataclass(frozen=True)
class _Crafted:
    """Gradients of drawn canaries: ``dptune.mechanisms.mechanism.Gradients`` with one entry a pair."""

    coordinates: torch.Tensor
    size: float
    zeros: list[torch.Tensor]

    @classmethod
    def of(cls, drawn: NDArray[np.int64], zeros: list[torch.Tensor], size: float) -> _Crafted:
        return cls(torch.from_numpy(drawn).to(zeros[0].device), size, zeros)

    def norms(self) -> torch.Tensor:
        return self.zeros[0].new_full((len(self.coordinates), len(self.zeros)), self.size)

    def losses(self) -> torch.Tensor:
        return self.zeros[0].new_zeros(len(self.coordinates))

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        weights = factors.double() * self.size
        return [
            torch.zeros_like(zero).index_add_(0, self.coordinates, weights[:, pair])
            for pair, zero in enumerate(self.zeros)
        ]

    def matrix(self) -> torch.Tensor:
        rows = []
        for zero in self.zeros:
            part = zero.new_zeros(len(self.coordinates), len(zero))
            part[torch.arange(len(self.coordinates)), self.coordinates] = self.size
            rows.append(part)
        return torch.cat(rows, dim=1)
