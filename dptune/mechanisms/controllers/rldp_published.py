"""RLDP as published (arXiv 2507.22565, Algorithm 1). LEAKS: its controller reads raw per-sample statistics.

The paper has one more defect, outside the controller: noise sigma C_i on each of n pairs is a joint multiplier of
sigma / sqrt(n), but its accountant is given sigma.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dptune.mechanisms.agents.rl import LearnedControl, moved_noise
from dptune.mechanisms.interfaces import Knobs, Observation
from dptune.mechanisms.registry import controller, mechanism
from dptune.privacy.accountants import gdp_clt_epsilon
from dptune.privacy.release import Release

if TYPE_CHECKING:
    import torch

_SMALLEST_RADIUS = 1e-12  # a radius of 0 would add no noise


@controller("rldp_published")
@dataclass
class RldpPublished(LearnedControl):
    """LEAK. Algorithm 1: a controller that reads the raw batch, 3 n norm quartiles and 8 scalars (``raw_features``).

    Releases are counted from 1. After each release t <= ``warmup`` the radius of a pair is the median of all its raw
    norms so far. The agent acts after each release t > ``warmup`` with t mod ``interval`` = 0 (after 112, 224, ... with
    the paper's 50 and 112): it sets C_i = min(exp(a_i), cap) and moves sigma by a damped step. Radii and sigma hold
    from one action to the next, and nothing else moves them. Medians are not capped; actions are.

    The paper leaves some places open. They are read so: a median is over all norms of a pair since step 1, the mean of
    the two middle ones of an even number. State and reward price all past steps at the present sigma, as line 14 is
    printed (the ledger prices each at its own). The loss of a batch is its mean over tokens; each unit's loss is first
    the mean over its records. The Fisher moments pool all pairs. The state is normalised by running mean and deviation.
    A radius is at least 1e-12. An empty batch moves nothing, and a decision after one sees the last batch that was not
    empty. A decision that falls on a release that a killed run lost is not made up for. What the agent's networks leave
    open is in ``dptune.mechanisms.agents.sac``.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    _warm: list[Any] = field(default_factory=list, init=False, repr=False)  # norms of the batches so far
    _raw: Any = field(default=None, init=False, repr=False)  # norms and mean loss of the last batch with units

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

    @property
    def first_action(self) -> int:
        """The first multiple of the interval after the warm-up (line 20)."""
        return (self.warmup // self.interval + 1) * self.interval

    def knobs(self, initial: Knobs) -> Knobs:
        """The knobs as the last median or action set them."""
        self._noise = self._noise or initial.noise_multiplier
        self._start_noise = initial.noise_multiplier
        return Knobs(self._radii or initial.radii, self._noise)

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, tokens: torch.Tensor, knobs: Knobs) -> Knobs:
        """LEAK. Keep the raw norms and the mean token loss of this batch; its own knobs stay as they were."""
        if len(norms):
            loss = float((losses * tokens).sum() / tokens.sum().clamp(min=1))
            self._raw = (norms.cpu(), loss)
            self._warm.append(norms.cpu())
        return knobs

    def observe(self, observation: Observation) -> None:
        """Lines 14 to 42, for the batch that ``peek`` kept. The released values themselves are not read."""
        import torch

        release = observation.releases
        # Lines 16 to 18: after each release of the warm-up, the last one included.
        if release <= self.warmup and self._warm:
            medians = torch.cat(self._warm).quantile(0.5, dim=0)
            self._radii = tuple(medians.clamp(min=_SMALLEST_RADIUS).tolist())
        if release >= self.warmup:
            self._warm = []
        # Lines 20 to 42, with the sigma that this release used.
        if self.acts_at(release) and self._raw is not None:
            norms, loss = self._raw
            used = Release(self._facts.sample_rate, observation.released.knobs.noise_multiplier)
            epsilon = gdp_clt_epsilon(Counter({used: release}), self._facts.delta)
            spent = epsilon / self._facts.epsilon if self._facts.epsilon else 0.0
            self.act(raw_features(norms, loss, epsilon), -loss, epsilon, spent)

    def apply(self, action: list[float], spent: float) -> None:
        """Set the radii by equation 10, and sigma by the damped step of equations 11 to 15."""
        self._radii = tuple(min(math.exp(max(min(value, 50.0), -50.0)), self.radius_cap) for value in action[:-1])
        self._noise = moved_noise(self._noise, self._start_noise, action[-1], spent)

    def state_dict(self) -> dict[str, Any]:
        """The state, for checkpoints. Private: it holds raw norms and losses."""
        import torch

        state = super().state_dict()
        if self._warm:
            state["warm.norms"] = torch.cat(self._warm)
        if self._raw is not None:
            state |= {"raw.norms": self._raw[0], "raw.loss": self._raw[1]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        super().load_state_dict(state)
        self._warm = [state["warm.norms"]] if "warm.norms" in state else []
        self._raw = (state["raw.norms"], state["raw.loss"]) if "raw.norms" in state else None


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


def raw_features(norms: torch.Tensor, loss: float, epsilon: float) -> torch.Tensor:
    """LEAK. The published state of a batch, 3 pairs + 8 numbers.

    Quartiles of the norms of every pair: all lower ones, all medians, all upper ones. Then u = -log perplexity, epsilon
    spent, variance of the norms, mean loss, mean and variance of the squared norms ("Fisher"), skewness and kurtosis of
    the norms (3 is not subtracted).

    Args:
        norms: (units, pairs) float64 gradient norms, units > 0.
        loss: mean token loss of the batch.
    """
    import torch

    quartiles = norms.quantile(norms.new_tensor([0.25, 0.5, 0.75]), dim=0).flatten()
    flat = norms.flatten()
    centred = flat - flat.mean()
    variance = centred.square().mean()
    deviation = variance.sqrt().clamp(min=1e-12)
    fisher = flat.square()
    scalars = [
        norms.new_tensor(-loss),
        norms.new_tensor(epsilon),
        variance,
        norms.new_tensor(loss),
        fisher.mean(),
        fisher.var(correction=0),
        (centred / deviation).pow(3).mean(),
        (centred / deviation).pow(4).mean(),
    ]
    return torch.cat([quartiles, torch.stack(scalars)])
