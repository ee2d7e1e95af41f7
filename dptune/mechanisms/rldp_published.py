"""RLDP as published (arXiv 2507.22565, Algorithm 1). LEAKS: its controller reads raw per-sample statistics.

The paper has one more defect, outside the controller: noise sigma C_i on each of n pairs is a joint multiplier of
sigma / sqrt(n), but its accountant is given sigma.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dptune.mechanisms.interfaces import Knobs, Observation
from dptune.mechanisms.registry import controller, mechanism
from dptune.mechanisms.rl import LearnedControl, moved_noise
from dptune.privacy.accountants import gdp_clt_epsilon
from dptune.privacy.release import Release

if TYPE_CHECKING:
    import torch


@controller("rldp_published")
@dataclass
class RldpPublished(LearnedControl):
    """LEAK. A controller that reads the raw batch: 3 n norm quartiles and 8 scalars (see ``raw_features``).

    An action (n + 1 numbers) sets C_i = min(exp(a_i), cap) and moves sigma; after ``warmup`` steps each C_i is the
    median of its raw norms. The epsilon that the controller reads is Algorithm 1's, which prices all past steps at
    the current sigma. The paper reads its last micro-batch; here that is the whole Poisson batch.
    """

    _warm: list[Any] = field(default_factory=list, init=False, repr=False)
    _raw: Any = field(default=None, init=False, repr=False)

    @property
    def adaptive(self) -> bool:
        """Returns True: actions move sigma."""
        return True

    @property
    def raw_inputs(self) -> tuple[str, ...]:
        """Names of the un-noised statistics that it reads."""
        return (
            "raw medians of gradient norms (warm-up radii)",
            "raw quartiles and moments of gradient norms (state)",
            "raw batch loss (state and reward)",
            *self.inherited_leaks,
        )

    def feature_size(self, pairs: int) -> int:
        """Length of the state: three quartiles a pair and 8 scalars."""
        return 3 * pairs + 8

    def action_size(self, pairs: int) -> int:
        """Length of an action: one number a radius, one for sigma."""
        return pairs + 1

    def knobs(self, initial: Knobs) -> Knobs:
        """The knobs as the last action set them."""
        self._noise = self._noise or initial.noise_multiplier
        self._start_noise = initial.noise_multiplier
        return Knobs(self._radii or initial.radii, self._noise)

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, knobs: Knobs) -> Knobs:
        """LEAK. Keep the raw statistics of this batch."""
        if len(norms):
            self._raw = (norms.cpu(), losses.cpu())
            self._warm.append(norms.cpu())
        return knobs

    def observe(self, observation: Observation) -> None:
        """Warm up, then act every ``interval`` releases. The released values themselves are not read."""
        import torch

        after = observation.releases - self.warmup
        if after >= 0 and self._warm:  # a resumed run may have skipped the release itself
            self._radii = tuple(torch.cat(self._warm).median(dim=0).values.clamp(min=1e-12).tolist())
        if after >= 0:
            self._warm = []
        if after > 0 and after % self.interval == 0 and self._raw is not None:
            epsilon = self._epsilon(observation.releases)
            norms, losses = self._raw
            features = raw_features(norms, losses, epsilon)
            spent = epsilon / self._facts.epsilon if self._facts.epsilon else 0.0
            self.act(features, -float(losses.mean()), spent)

    def apply(self, action: list[float], spent: float) -> None:
        """Set the radii by equation 10, and sigma by the damped step."""
        self._radii = tuple(min(math.exp(max(min(value, 50.0), -50.0)), self.radius_cap) for value in action[:-1])
        self._noise = moved_noise(self._noise, self._start_noise, action[-1], spent)

    def _epsilon(self, releases: int) -> float:
        past = Counter({Release(self._facts.sample_rate, self._noise): releases})
        return gdp_clt_epsilon(past, self._facts.delta)

    def state_dict(self) -> dict[str, Any]:
        """The state, for checkpoints. Private: it holds raw norms and losses."""
        import torch

        state = super().state_dict()
        if self._warm:
            state["warm.norms"] = torch.cat(self._warm)
        if self._raw is not None:
            state |= {"raw.norms": self._raw[0], "raw.losses": self._raw[1]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        super().load_state_dict(state)
        self._warm = [state["warm.norms"]] if "warm.norms" in state else []
        self._raw = (state["raw.norms"], state["raw.losses"]) if "raw.norms" in state else None


mechanism(
    "rldp_published",
    clipper="per_pair",
    controller="rldp_published",
    options={"pair_radius": 0.1, "noise_unit": "pair", "stabiliser": 1e-6},
    clips="each LoRA pair to its own moving radius (RLDP as published, arXiv 2507.22565)",
    adds="Gaussian noise on each pair, its radius times a moving sigma",
    adapts="a SAC agent that reads raw norms and losses",
    costs="all privacy",
    verdict="NOT sound: raw statistics steer it, and sigma is really sigma / sqrt(pairs)",
)


def raw_features(norms: torch.Tensor, losses: torch.Tensor, epsilon: float) -> torch.Tensor:
    """LEAK. The published state of a batch, 3 pairs + 8 numbers.

    Quartiles of the norms of every pair; then u = -log perplexity, epsilon spent, variance of the norms, mean loss,
    mean and variance of the squared norms ("Fisher"), skewness and kurtosis of the norms.

    Args:
        norms: (units, pairs) gradient norms, units > 0.
        losses: (units,) mean losses.
    """
    import torch

    quartiles = norms.quantile(norms.new_tensor([0.25, 0.5, 0.75]), dim=0).flatten()
    flat, loss = norms.flatten(), losses.mean()
    centred = flat - flat.mean()
    variance = centred.square().mean()
    deviation = variance.sqrt().clamp(min=1e-12)
    fisher = flat.square()
    scalars = [
        -loss,
        loss.new_tensor(epsilon),
        variance,
        loss,
        fisher.mean(),
        fisher.var(correction=0),
        (centred / deviation).pow(3).mean(),
        (centred / deviation).pow(4).mean(),
    ]
    return torch.cat([quartiles, torch.stack(scalars)])
