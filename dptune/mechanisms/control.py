"""Controllers: how the knobs move from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dptune.mechanisms.mechanism import Knobs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Constant:
    """The knobs never move; nothing is read."""

    adaptive: bool = field(default=False, init=False)
    raw_inputs: tuple[str, ...] = field(default=(), init=False)

    def knobs(self, initial: Knobs) -> Knobs:
        """The initial knobs."""
        return initial

    def observe(self, released: list[torch.Tensor]) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
