"""Policies and critics as functions of one flat parameter vector, the vector that is clipped, noised and released."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


class Function(Protocol):
    """A function of inputs, (rows, inputs) -> (rows, outputs), with its parameters as one vector.

    Parameters and inputs may have a leading dimension of users; then each user has their own parameters.
    """

    @property
    def size(self) -> int:
        """Number of the function's parameters."""
        ...

    def initial(self, generator: torch.Generator, last_gain: float) -> torch.Tensor:
        """Draw (size,) initial parameters; ``last_gain`` scales the last layer. Public."""
        ...

    def __call__(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs for parameters of shape (size,) or (users, size); parameters beyond ``size`` are ignored."""
        ...


@dataclass(frozen=True)
class Perceptron:
    """A network of fully connected layers with these sizes, inputs first, and tanh between them."""

    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of weights and biases."""
        return sum((before + 1) * after for before, after in zip(self.sizes, self.sizes[1:], strict=False))

    def initial(self, generator: torch.Generator, last_gain: float) -> torch.Tensor:
        """Draw orthogonal weights of gain sqrt(2), or ``last_gain`` in the last layer, with biases of zero."""
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
        inputs: number of features.
        outputs: number of outputs.
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
        """Zeros, which give a uniform policy; neither argument is used."""
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
    """A distribution of actions given features: categorical with a function's outputs as logits, or normal around them.

    The log standard deviations of a normal policy are its last parameters, one for each dimension of an action; they
    do not depend on the features.

    Attributes:
        function: function that gives logits or means.
        actions: number of choices, or of dimensions of a continuous action.
        continuous: whether actions are normal rather than categorical.
    """

    function: Function
    actions: int
    continuous: bool

    @property
    def size(self) -> int:
        """Number of parameters, log standard deviations included."""
        return self.function.size + (self.actions if self.continuous else 0)

    def initial(self, seed: int) -> torch.Tensor:
        """Draw (size,) parameters of a policy that is nearly indifferent between actions; the seed is public."""
        start = self.function.initial(torch.Generator().manual_seed(seed), last_gain=0.01)
        return torch.cat([start, torch.zeros(self.actions)]) if self.continuous else start

    def sample(self, parameters: torch.Tensor, features: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Sample an action for every row of features: (rows,) whole numbers, or (rows, actions).

        A row whose probabilities are not finite gets an arbitrary action: an exception because of one user's features
        would stop the others' update, and so tell of that user.
        """
        outputs = self.function(parameters, features)
        if self.continuous:
            deviations = parameters[-self.actions :].exp()
            return (outputs + deviations * torch.randn(outputs.shape, generator=generator)).nan_to_num(0.0, 0.0, 0.0)
        chances = outputs.softmax(dim=-1)
        right = chances.isfinite().all(dim=-1, keepdim=True)
        return torch.multinomial(torch.where(right, chances, 1.0), 1, generator=generator).squeeze(-1)

    def log_probability(self, parameters: torch.Tensor, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """(rows,) log-probabilities of ``actions``; as in ``Function``, all may have a leading dimension of users."""
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
