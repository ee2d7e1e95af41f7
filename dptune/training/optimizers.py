"""Optimisers of a run, and the running mean of its weights; ``dptune.update_rule`` says which there are.

The state of both is kept for each weight in ``optimizer.state``, so that one checkpoint holds it all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dptune.errors import ConfigError
from dptune.mechanisms.clipping import PairBlocks
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.update_rule import Optimizer, UpdateRule

_log = logging.getLogger(__name__)

_BETAS = (0.9, 0.999)
#: The least number under the root of ``adam_bc``: without noise it is Adam.
_LEAST = 1e-20
#: Names of the state of each weight after a step, by optimiser.
STATE: dict[Optimizer, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "adam_bc": ("step", "exp_avg", "exp_avg_sq", "noise_sq"),
    "sgd": ("momentum_buffer",),
}
#: Names of the state of the mean of each weight, from its first step on.
AVERAGED = ("average", "average_count")


def make_optimizer(rule: UpdateRule, weights: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """The optimiser of these weights."""
    if rule.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=learning_rate, momentum=rule.momentum, foreach=True)
    if rule.optimizer == "adam_bc":
        return AdamBC(weights, learning_rate, rule.noise_floor)
    return torch.optim.AdamW(weights, lr=learning_rate, betas=_BETAS, weight_decay=0.0, foreach=True)


def name_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The name of an optimiser that ``make_optimizer`` made."""
    if isinstance(optimizer, AdamBC):
        return "adam_bc"
    return "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"


def check_rule(rule: UpdateRule, mechanism: Mechanism, steps: int) -> None:
    """Warn of a low floor of ``adam_bc``. Raises: ConfigError where it cannot know the noise of a pair's gradient."""
    if rule.optimizer != "adam_bc":
        return
    if not isinstance(mechanism.clipper, PairBlocks) or mechanism.controller.raw_inputs:
        problem = f"adam_bc needs the noise of each LoRA pair, which {mechanism.name} does not state"
        raise ConfigError("optimizer", problem, fix="use adamw or sgd")
    spread = 3 * math.sqrt(3 / min(steps, 2 / (1 - _BETAS[1])))
    if rule.noise_floor < spread:
        _log.warning(
            "noise_floor %g is below %.2g, three deviations of the noise in Adam's second moment over %d steps: "
            "single coordinates may take steps of up to %.3g times Adam's",
            rule.noise_floor,
            spread,
            steps,
            rule.noise_floor**-0.5,
        )


class AdamBC(torch.optim.Optimizer):
    """Adam without the noise in its second moment (DP-AdamBC; Tang et al. 2024, arXiv 2312.14334).

    m and v are Adam's. The step is learning_rate m^ / sqrt(max(v^ - Phi, floor Phi)), where m^ and v^ have Adam's own
    corrections, and Phi is the part of v^ that the noise makes on average: the same moving average as v, of the known
    variance of the noise in each released gradient. So it is right for noise that differs from step to step, as
    correlated noise does. Every weight is a parameter group, whose ``variance`` ``tell_noise`` sets before each step.
    """

    def __init__(self, weights: Iterable[torch.Tensor], learning_rate: float, floor: float) -> None:
        super().__init__([{"params": [one]} for one in weights], {"lr": learning_rate, "floor": floor, "variance": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)

    def _move(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["noise_sq"] = torch.zeros((), dtype=torch.float64)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - _BETAS[0])
        state["exp_avg_sq"].mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        state["noise_sq"].mul_(_BETAS[1]).add_((1 - _BETAS[1]) * group["variance"])
        first, second = (1 - beta ** float(state["step"]) for beta in _BETAS)
        noise = float(state["noise_sq"]) / second
        root = (state["exp_avg_sq"] / second - noise).clamp_(min=max(group["floor"] * noise, _LEAST)).sqrt_()
        weight.addcdiv_(state["exp_avg"], root, value=-group["lr"] / first)


def tell_noise(
    optimizer: torch.optim.Optimizer, released: Released, weights_each: Sequence[int], expected_batch_size: float
) -> None:
    """Tell ``adam_bc`` the variance of the noise in the gradient of each weight; other optimisers do not ask.

    Args:
        weights_each: number of weights of each pair, in the order of the optimiser's.
    """
    if isinstance(optimizer, AdamBC):
        pairs = zip(released.deviations, weights_each, strict=True)
        variances = [(deviation / expected_batch_size) ** 2 for deviation, weights in pairs for _ in range(weights)]
        for group, variance in zip(optimizer.param_groups, variances, strict=True):
            group["variance"] = variance


@torch.no_grad()
def average_weights(
    rule: UpdateRule, optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor], row: int, first: int
) -> None:
    """Take the weights after release ``row`` into their mean, in float64, from release ``first`` on.

    The mean is as public as the weights, and training never reads it.
    """
    if rule.average == "none" or row < first:
        return
    for weight in weights:
        state = optimizer.state[weight]
        if "average" not in state:
            state["average"] = torch.zeros_like(weight, dtype=torch.float64)
            state["average_count"] = torch.zeros((), dtype=torch.int64)
        state["average_count"] += 1
        count = int(state["average_count"])
        decay = rule.average_decay
        share = 1 / count if rule.average == "tail" else (1 - decay) / (1 - decay**count)
        state["average"] += share * (weight.double() - state["average"])


@torch.no_grad()
def apply_average(rule: UpdateRule, optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> None:
    """Put the mean in the weights' place, at a run's end; weights of which there is none stay."""
    for weight in weights if rule.average != "none" else ():
        if "average" in optimizer.state[weight]:
            weight.copy_(optimizer.state[weight]["average"])
