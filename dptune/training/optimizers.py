"""Optimisers of a run, each with the state that it keeps; and the running mean of a run's weights.

An optimiser is declared once, in ``OPTIMIZERS``: how it is made, the state that it keeps for each weight, and whether
it needs the noise of each gradient. Checkpoints save, check and restore what is declared; controllers read the moments
that are declared. The mean of the weights is kept in ``optimizer.state`` too, so that one checkpoint holds all of it. A
run keeps its own optimiser: other ranks have none, and runs that are stacked on one base model share no state.

A new optimiser takes two files: an entry here, and its name in ``dptune.core.settings.Optimizer``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dptune.core.errors import ConfigError
from dptune.core.settings import Optimizer, UpdateRule
from dptune.mechanisms.clippers.clipping import PairBlocks
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism

_log = logging.getLogger(__name__)

_BETAS = (0.9, 0.999)
#: The least number under the root of ``adam_bc``: without noise it is Adam.
_LEAST = 1e-20
_RATIO = "rate_ratio"  # of a parameter group's rate to the run's


@dataclass(frozen=True)
class State:
    """A tensor that an optimiser keeps for each weight.

    Attributes:
        name: key in ``optimizer.state``.
        number: whether it is one number; else it has the weight's shape.
        dtype: its type; None: the weight's.
        least: least value that a run leaves.
        counts: "steps" for the number of steps, "part of steps" for a count of at most as many.
        moment: "momentum" or "second_moment" if controllers may read it as such; empty if not.
    """

    name: str
    number: bool = False
    dtype: torch.dtype | None = None
    least: float = -math.inf
    counts: Literal["", "steps", "part of steps"] = ""
    moment: Literal["", "momentum", "second_moment"] = ""

    def problem(self, value: torch.Tensor, weight: torch.Tensor, step: int) -> str | None:
        """A clause on a value that no run leaves after ``step`` steps; None if it is as declared."""
        if value.shape.numel() != 1 if self.number else value.shape != weight.shape:
            return f"has another type or shape ({self.name})"
        if value.dtype != (self.dtype or weight.dtype):
            return f"has another type or shape ({self.name})"
        if self.counts and (float(value) > step or (self.counts == "steps" and float(value) != step)):
            return f"belongs to another step than {step} ({self.name})"
        return f"is less than it can be ({self.name})" if bool((value < self.least).any()) else None


@dataclass(frozen=True)
class OptimizerKind:
    """An optimiser: how it is made, and what it keeps.

    Attributes:
        make: function from weights, learning rate and update rule to the optimiser.
        made: class of what ``make`` returns; no two optimisers share it.
        state: what it keeps for each weight after a step.
        needs_noise: whether it needs the noise of each gradient: ``tell_noise`` then sets ``variance`` in its parameter
            groups, of which it must have one for each weight.
        check: warns of settings that work badly, or raises ConfigError, before anything is charged.
    """

    make: Callable[[list[torch.Tensor], float, UpdateRule], torch.optim.Optimizer]
    made: type[torch.optim.Optimizer]
    state: tuple[State, ...]
    needs_noise: bool = False
    check: Callable[[UpdateRule, int], None] = lambda rule, steps: None


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


def _check_noise_floor(rule: UpdateRule, steps: int) -> None:
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


def _adamw(weights: list[torch.Tensor], learning_rate: float, rule: UpdateRule) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=learning_rate, betas=_BETAS, weight_decay=0.0, foreach=True)


def _adam_bc(weights: list[torch.Tensor], learning_rate: float, rule: UpdateRule) -> torch.optim.Optimizer:
    return AdamBC(weights, learning_rate, rule.noise_floor)


def _sgd(weights: list[torch.Tensor], learning_rate: float, rule: UpdateRule) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=learning_rate, momentum=rule.momentum, foreach=True)


_STEP = State("step", number=True, dtype=torch.float32, least=1.0, counts="steps")
_ADAM = (_STEP, State("exp_avg", moment="momentum"), State("exp_avg_sq", least=0.0, moment="second_moment"))
_NOISE = State("noise_sq", number=True, dtype=torch.float64, least=0.0)
OPTIMIZERS: dict[Optimizer, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, torch.optim.AdamW, _ADAM),
    "adam_bc": OptimizerKind(_adam_bc, AdamBC, (*_ADAM, _NOISE), needs_noise=True, check=_check_noise_floor),
    "sgd": OptimizerKind(_sgd, torch.optim.SGD, (State("momentum_buffer", moment="momentum"),)),
}
#: State of the mean of each weight, from its first step on.
AVERAGED = (
    State("average", dtype=torch.float64),
    State("average_count", number=True, dtype=torch.int64, least=1.0, counts="part of steps"),
)


def make_optimizer(
    rule: UpdateRule, weights: list[torch.Tensor], learning_rate: float, head: Sequence[torch.Tensor] = ()
) -> torch.optim.Optimizer:
    """The optimiser of these weights.

    Args:
        head: those of them that are a classifier's head, whose rate is ``head_rate_ratio`` times the others'
            (``set_rate``).
    """
    optimizer = OPTIMIZERS[rule.optimizer].make(weights, learning_rate, rule)
    if head and rule.head_rate_ratio != 1:
        _split(optimizer, {id(weight) for weight in head}, rule.head_rate_ratio)
    return optimizer


def _split(optimizer: torch.optim.Optimizer, head: set[int], ratio: float) -> None:
    """Give the head's weights parameter groups of their own. Those of a single weight stay, and keep their order."""
    for group in list(optimizer.param_groups):
        own = [weight for weight in group["params"] if id(weight) in head]
        others = [weight for weight in group["params"] if id(weight) not in head]
        if own and others:
            group["params"] = others
            optimizer.add_param_group({**group, "params": own, _RATIO: ratio})
        elif own:
            group[_RATIO] = ratio


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_RATIO, 1.0)


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """The declaration of an optimiser that ``make_optimizer`` made."""
    return next(kind for kind in OPTIMIZERS.values() if type(optimizer) is kind.made)


def moments(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor], moment: str) -> list[torch.Tensor]:
    """The state of these weights that is declared as "momentum" or "second_moment"; empty before a first step."""
    names = [one.name for one in kind_of(optimizer).state if one.moment == moment]
    states = [optimizer.state[weight] for weight in weights]
    return [state[name] for state in states for name in names if name in state]


def check_rule(rule: UpdateRule, mechanism: Mechanism, steps: int) -> None:
    """Warn of settings that work badly.

    Raises: ConfigError if the optimiser needs the noise of each gradient, and ``mechanism`` does not state it.
    """
    kind = OPTIMIZERS[rule.optimizer]
    if kind.needs_noise and (not isinstance(mechanism.clipper, PairBlocks) or mechanism.controller.raw_inputs):
        problem = f"{rule.optimizer} needs the noise of each LoRA pair, which {mechanism.name} does not state"
        others = " or ".join(name for name, one in OPTIMIZERS.items() if not one.needs_noise)
        raise ConfigError("optimizer", problem, fix=f"use {others}")
    kind.check(rule, steps)


def tell_noise(
    optimizer: torch.optim.Optimizer, released: Released, weights_each: Sequence[int], expected_batch_size: float
) -> None:
    """Set the variance of the noise in the gradient of each weight, for an optimiser that needs it.

    Args:
        weights_each: number of weights of each pair, in the order of the optimiser's.
    """
    if kind_of(optimizer).needs_noise:
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
