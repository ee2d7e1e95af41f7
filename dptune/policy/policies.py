"""Policies and critics as functions of one flat parameter vector, which is what is clipped, noised and released."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


class Function(Protocol):
    """A function (rows, inputs) -> (rows, outputs) of its parameters.

    With a leading dimension of users in both, each user has their own parameters.
    """

    @property
    def size(self) -> int:
        """Number of the function's parameters."""
        ...

    def initial(self, generator: torch.Generator, last_gain: float) -> torch.Tensor:
        """Parameters to start from; public."""
        ...

    def __call__(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs for parameters of shape (size,) or (users, size); further parameters are ignored."""
        ...


@dataclass(frozen=True)
class Perceptron:
    """Layers of these sizes with tanh between them."""

    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of weights and biases."""
        return sum((before + 1) * after for before, after in zip(self.sizes, self.sizes[1:], strict=False))

    def initial(self, generator: torch.Generator, last_gain: float) -> torch.Tensor:
        """Orthogonal weights of gain sqrt(2), ``last_gain`` in the last layer; biases of zero."""
        parts = []
        for layer, (before, after) in enumerate(zip(self.sizes, self.sizes[1:], strict=False), start=2):
            weight = torch.empty(after, before)
            gain = last_gain if layer == len(self.sizes) else math.sqrt(2)
            torch.nn.init.orthogonal_(weight, gain, generator=generator)
            parts += [weight.flatten(), torch.zeros(after)]
        return torch.cat(parts)

    def __call__(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of the network; see ``Function.__call__``."""
        used, users = 0, parameters.shape[:-1]
        for layer, (before, after) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            weight = parameters[..., used : used + before * after].view(*users, after, before)
            bias = parameters[..., used + before * after : used + (before + 1) * after]
            used += (before + 1) * after
            inputs = (inputs.tanh() if layer else inputs) @ weight.mT + bias[..., None, :]
        return inputs


@dataclass(frozen=True)
class Linear:
    """A linear function of the features, for tabular problems.

    Attributes:
        form: "outer" has a weight for every pair of feature and output. "additive" has one for every feature and one
            for every output, the paper's "one-hot state concatenated with action": the features' part cancels in a
            softmax, so that such a policy is the same in all states.
    """

    inputs: int
    outputs: int
    form: Literal["outer", "additive"] = "outer"

    @property
    def size(self) -> int:
        """Number of weights; there are no biases."""
        return self.inputs * self.outputs if self.form == "outer" else self.inputs + self.outputs

    def initial(self, generator: torch.Generator, last_gain: float) -> torch.Tensor:
        """Zeros, which make a uniform policy."""
        return torch.zeros(self.size)

    def __call__(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of the linear map; see ``Function.__call__``."""
        if self.form == "outer":
            weight = parameters[..., : self.size]
            return inputs @ weight.view(*weight.shape[:-1], self.inputs, self.outputs)
        of_features = inputs @ parameters[..., : self.inputs, None]
        return of_features + parameters[..., None, self.inputs : self.size]


@dataclass(frozen=True)
class Policy:
    """A law of actions given features: categorical over the function's outputs, or normal around them.

    A normal one has a log deviation for every dimension, which depends on no feature; these are the last parameters.
    """

    function: Function
    actions: int
    continuous: bool

    @property
    def size(self) -> int:
        """Parameters, log deviations included."""
        return self.function.size + (self.actions if self.continuous else 0)

    def initial(self, seed: int) -> torch.Tensor:
        """(size,) parameters of a policy that is nearly indifferent; the seed is public."""
        start = self.function.initial(torch.Generator().manual_seed(seed), last_gain=0.01)
        return torch.cat([start, torch.zeros(self.actions)]) if self.continuous else start

    def sample(self, parameters: torch.Tensor, features: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """An action for every row of features: (rows,) whole numbers, or (rows, actions).

        Where a row's law is no number, any action: one user's broken sensor must not stop the others' update.
        """
        outputs = self.function(parameters, features)
        if self.continuous:
            deviations = parameters[-self.actions :].exp()
            return (outputs + deviations * torch.randn(outputs.shape, generator=generator)).nan_to_num(0.0, 0.0, 0.0)
        chances = outputs.softmax(dim=-1)
        right = chances.isfinite().all(dim=-1, keepdim=True)
        return torch.multinomial(torch.where(right, chances, 1.0), 1, generator=generator).squeeze(-1)

    def log_probability(self, parameters: torch.Tensor, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """(rows,); all of the policy's methods take a leading dimension of users, as ``Function`` does."""
        outputs = self.function(parameters, features)
        if not self.continuous:
            return outputs.log_softmax(dim=-1).gather(-1, actions[..., None]).squeeze(-1)
        logs = parameters[..., None, -self.actions :]
        squares = ((actions - outputs) * (-logs).exp()).square()
        return -(squares / 2 + logs + math.log(2 * math.pi) / 2).sum(dim=-1)

    def entropy(self, parameters: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """(rows,) entropies of the policy in nats."""
        if self.continuous:
            total = (parameters[..., None, -self.actions :] + math.log(2 * math.pi * math.e) / 2).sum(dim=-1)
            return total.expand(features.shape[:-1])
        logs = self.function(parameters, features).log_softmax(dim=-1)
        return -(logs.exp() * logs).sum(dim=-1)
