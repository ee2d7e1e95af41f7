"""A controller's agent with 18 parameters, the same for every LoRA pair of whatever model.

It is so small that DP policy gradient can train it over tenants: the signal of K clipped updates over the norm of their
noise is at most K / (z sqrt(parameters)). It reads features in fixed public
scales, never a running mean. It does not learn inside a run, which has too few actions to learn from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

FEATURES = ("constant", "signal", "direction", "radius", "weight", "adapter", "moments", "time")
OUTPUTS = ("log radius", "log weight")
#: Number of parameters: a weight for every feature and output, feature by feature; then each output's log deviation.
PARAMETERS = len(FEATURES) * len(OUTPUTS) + len(OUTPUTS)

_START = 0.5  # standard deviation of an untrained agent's actions
_LOG_DEVIATIONS = (-5.0, 2.0)
_LARGEST_FEATURE = 3.0
_LARGEST_PARAMETER = 1e3
_PER_PAIR = 7  # columns of ``Rldp`` that have an entry for every pair: signal, ..., second moment


def initial_parameters() -> torch.Tensor:
    """Parameters (18,) of the untrained agent, whose actions lie around 0 whatever it sees. Public."""
    return torch.cat([torch.zeros(PARAMETERS - len(OUTPUTS)), torch.full((len(OUTPUTS),), math.log(_START))])


def pair_features(flat: torch.Tensor) -> torch.Tensor:
    """Features (pairs, 8) float32, each within +-3, from the state of ``Rldp`` in design A.

    Args:
        flat: (7 pairs + 4,): per pair signal, direction, log radius, log weight, log norms of Adam's momentum, of B A
            and of the second moment; then log noise multiplier, share of the releases, of the budget, public loss.
    """
    pairs = (len(flat) - 4) // _PER_PAIR
    signal, direction, radius, weight, momentum, adapter, second = flat[: _PER_PAIR * pairs].double().view(-1, pairs)
    columns = [
        torch.ones_like(signal),
        signal,
        direction,
        (radius - math.log(0.1)) / 2,
        weight + math.log(pairs) / 2,
        adapter / 2,
        (momentum - second / 2 - 1.5) / 2,
        torch.full_like(signal, 2 * float(flat[_PER_PAIR * pairs + 1]) - 1),
    ]
    table = torch.stack(columns, dim=1).nan_to_num(0.0, _LARGEST_FEATURE, -_LARGEST_FEATURE)
    return table.clamp(-_LARGEST_FEATURE, _LARGEST_FEATURE).float()


@dataclass
class FixedScaling:
    """A replacement of ``Normaliser`` that applies ``pair_features`` and learns nothing."""

    count: int = 0

    @property
    def size(self) -> int:
        """Number of features of a pair."""
        return len(FEATURES)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Map a state of ``Rldp`` to the features of its pairs, see ``pair_features``."""
        return pair_features(features)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns no tensors: nothing is learned."""
        return {}

    def load(self, tensors: Mapping[str, Any], count: int, features: int) -> None:
        """Do nothing: there is no state to load."""


class LinearAgent:
    """The linear Gaussian policy a_ij = sum_k x_ik W_kj + s_j n, for pair i with features x_i, output j, n normal.

    It has the interface of ``SoftActorCritic``; its randomness comes from a public seed and is part of its state.
    """

    def __init__(self, seed: int) -> None:
        self.parameters = initial_parameters()
        self._generator = torch.Generator().manual_seed(seed)

    def act(self, state: torch.Tensor) -> torch.Tensor:
        """Sample an action (2 pairs,), the log radii and then the log weights, for a state (pairs, 8)."""
        weights = self.parameters[: -len(OUTPUTS)].view(len(FEATURES), len(OUTPUTS))
        deviations = self.parameters[-len(OUTPUTS) :].clamp(*_LOG_DEVIATIONS).exp()
        means = state @ weights
        return (means + deviations * torch.randn(means.shape, generator=self._generator)).T.flatten()

    def remember(self, state: torch.Tensor, action: torch.Tensor, reward: float, next_state: torch.Tensor) -> None:
        """Do nothing: the agent does not learn inside a run."""

    def improve(self) -> None:
        """Do nothing: the agent does not learn inside a run."""

    def policy(self) -> dict[str, torch.Tensor]:
        """The parameters, as a table of tensors."""
        return {"parameters": self.parameters.clone()}

    def load_policy(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Start from trained parameters. Raises ValueError if they are none."""
        if set(weights) != {"parameters"}:
            raise ValueError(
                f"it holds {', '.join(sorted(weights)) or 'nothing'}, not the parameters of a linear agent"
            )
        parameters = weights["parameters"]
        if parameters.shape != (PARAMETERS,):
            raise ValueError(f"it has parameters of shape {tuple(parameters.shape)}, not ({PARAMETERS},)")
        if not bool((parameters.abs() <= _LARGEST_PARAMETER).all()):
            raise ValueError(f"its parameters are not all within +-{_LARGEST_PARAMETER:g}")
        self.parameters = parameters.detach().float().clone()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as a flat table of tensors."""
        return self.policy() | {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        self.load_policy({"parameters": state["parameters"]})
        self._generator.set_state(state["generator"])
