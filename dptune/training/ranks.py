"""Run on several devices, a process ("rank") for each, by torch's distributed package; torchrun starts them.

rank 0                                        the others
------                                        ----------
choose the knobs, charge the ledger           wait
tell the order, send the weights         ->   take them
draw a batch of its own units                 draw a batch of their own units
clipped sums of it                       <-   clipped sums of it
add noise once, move the weights              wait

Guarantee: that of the same run in one process. Units are dealt to ranks by a public rule and every unit has a coin of
its own, so the union of the ranks' batches is a Poisson batch of all units; the sum over ranks is its clipped sum; one
rank adds noise to it, once, after the charge. For another sampler rank 0 draws the batch of all units, and tells their
numbers. Everything else that ranks are told is a function of releases and of public data. What they send, exact sums,
is private and not encrypted: the network between them must be trusted.

The other ranks keep no state (no optimiser, controller, ledger or checkpoint), so they cannot drift apart and have
nothing to resume. All traffic is through Gloo in host memory, for GPUs too: it is the size of the adapters, a rank
that waits for a long evaluation occupies no device, and a rank that dies is noticed by its closed connection.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.mechanisms.interfaces import Knobs, Statistics
from dptune.mechanisms.mechanism import Mechanism
from dptune.training.privacy_units import Turn

_LONGEST_WAIT = timedelta(hours=12)  # longer than any evaluation of a living rank; a dead one is noticed at once


class LostRankError(RuntimeError):
    """Raised if another rank ended, or cannot be reached."""


@dataclass(frozen=True)
class Order:
    """The order that rank 0 sends to all ranks for a charged step. Public but for ``drawn``.

    Attributes:
        knobs: knobs to clip with.
        statistics: statistics to sum beside the gradients.
        sample_rate: the rate that was charged, to draw with.
        turn: the group of units to draw from; None draws from all.
        drawn: numbers of the units in the batch, where rank 0 draws for all ranks; None: each rank tosses the coins of
            its own units. Private, as the sums that ranks send.
    """

    knobs: Knobs
    statistics: Statistics | None
    sample_rate: float
    turn: Turn | None
    drawn: NDArray[np.int64] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run; ``Ranks()`` is a process alone, for which every method does nothing.

    All ranks must call the same methods in the same order. Every method raises LostRankError if a rank is gone.
    """

    rank: int = 0
    world: int = 1

    def check(self, mechanism: Mechanism) -> None:
        """Raise ConfigError if the mechanism needs the whole batch in one place."""
        if self.world > 1 and mechanism.controller.raw_inputs:
            raise ConfigError(
                f"mechanisms.{mechanism.name}.controller",
                f"reads raw statistics of the whole batch ({', '.join(mechanism.controller.raw_inputs)}), "
                f"but each of {self.world} ranks sees only a part of it",
                fix="run it in one process",
            )

    def agree(self, facts: dict[str, object]) -> None:
        """Raise ConfigError, on every rank, unless all of them have the same facts."""
        if self.world == 1:
            return
        everybodys: list[Any] = [None] * self.world
        with _lost_rank_errors(self):
            dist.all_gather_object(everybodys, facts)
        different = sorted(name for name in facts if any(other[name] != facts[name] for other in everybodys))
        if different:
            raise ConfigError("ranks", f"differ in {', '.join(different)}", fix="give all of them the same run")

    def broadcast(self, value: Any, device: torch.device | None = None) -> Any:
        """Send rank 0's value to every rank, with tensors on ``device``; returns it."""
        if self.world == 1:
            return value
        # An object with a tensor of cuda:0 would be unpickled onto cuda:0, whatever the rank's device is.
        message = [_pack(value) if self.rank == 0 else None]
        with _lost_rank_errors(self):
            dist.broadcast_object_list(message, src=0)
        return value if self.rank == 0 else _unpack(message[0], device)

    @torch.no_grad()
    def copy(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy rank 0's weights into those of every rank, in place."""
        if self.world == 1:
            return
        flat = torch.cat([weight.flatten() for weight in weights]).cpu()
        with _lost_rank_errors(self):
            dist.broadcast(flat, src=0)
        if self.rank:
            for weight, new in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.copy_(new.view_as(weight))

    def total(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum over all ranks. The result is right on rank 0 alone; on other ranks it must not be used. Private.

        ``FLOAT64_MARGIN`` covers its rounding as it covers that of one process: adding two sums of n units of norm C
        in all rounds by at most 2^-53 n C in l2, so world - 1 additions change what one unit moves by less than
        1e-9 C while (world - 1) n < 4e6; and each rank, with fewer units, has rounded less before.
        """
        if self.world == 1:
            return sums
        flat = torch.cat(sums).cpu()
        with _lost_rank_errors(self):
            dist.reduce(flat, dst=0)
        return list(flat.to(sums[0].device).split([part.numel() for part in sums]))


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the ranks that torchrun started, and leave them at the end of the context; else yield a lone process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def own_device() -> str:
    """The GPU that torchrun assigns to this process, or the CPU if there is none."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if local is not None and torch.cuda.is_available() else "cpu"


@contextmanager
def _lost_rank_errors(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"rank {ranks.rank}: another rank ended ({str(error).splitlines()[0]}). "
            "Fix: see what that rank says; the same torchrun command resumes the run."
        ) from error


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(message: bytes | None, device: torch.device | None) -> Any:
    assert message is not None
    # Unpickling runs code of the sender, which is our own rank 0.
    return torch.load(io.BytesIO(message), map_location=device, weights_only=False)
