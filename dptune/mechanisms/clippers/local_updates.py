"""Federated DP-LoRA: clients train locally, and each client's whole update is clipped (Liu et al. 2025).

The unit of privacy is the client, not the record: its epsilon protects all records of one client together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.gradient_interfaces import Federation, Gradients, GradientSource
from dptune.mechanisms.registry import clipper, mechanism


@clipper("local_updates")
@dataclass(frozen=True)
class LocalUpdates(Flat):
    """Clips the update of each drawn client, made by local SGD from the current adapters, to C over all pairs.

    Guarantee: one client more or less moves the sum of updates by at most C. Noise is added to that sum, never to
    weights, whose sensitivity nothing bounds.

    Attributes:
        clients: simulated clients; records (whole units) are dealt out to them at random, publicly.
        clients_per_round: expected number in a round.
        local_steps: SGD steps of a client in a round.
        local_learning_rate: learning rate of those steps.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    clients: int = 100
    clients_per_round: float = 20.0
    local_steps: int = 4
    local_learning_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients < 2:
            raise ConfigError("clients", f"{self.clients} is below 2", fix="use 100")
        if not 0 < self.clients_per_round <= self.clients:
            raise ConfigError("clients_per_round", f"{self.clients_per_round} is not in (0, clients]", fix="use 20")
        if self.local_steps < 1:
            raise ConfigError("local_steps", f"{self.local_steps} is below 1", fix="use 4")
        if not (math.isfinite(self.local_learning_rate) and self.local_learning_rate > 0):
            raise ConfigError("local_learning_rate", f"{self.local_learning_rate} is not positive", fix="use 0.1")

    @property
    def federation(self) -> Federation:
        """The simulated clients, whose updates are clipped."""
        return Federation(self.clients, self.clients_per_round)

    def gradients(self, source: GradientSource) -> Iterator[Gradients]:
        """The clients' updates: minus the change that their local training makes."""
        return source.of_local_training(self.local_steps, self.local_learning_rate)


mechanism(
    "dp_lora_fed",
    clipper="local_updates",
    clips="each client's update after local steps (DP-LoRA, Liu et al. 2025; its unit of privacy is the client)",
    adds="Gaussian noise on the sum of updates, radius times multiplier",
)
