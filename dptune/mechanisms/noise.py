"""Noises that are added to a clipped sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptune.errors import ConfigError
from dptune.mechanisms.interfaces import AdditiveNoise
from dptune.mechanisms.registry import noise
from dptune.privacy.entropy import Entropy, signed_tail

if TYPE_CHECKING:
    import torch


#: Of the noise multiplier: below it, float32 shows no noise; above it, sums leave its range after a charge.
LEAST_NOISE, MOST_NOISE = 1e-9, 1e9
#: Outputs lie on multiples of this share of the standard deviation. Machine noise is itself a lattice of
#: doubles; without a coarser public grid the low bits of noise + sum tell on which sum the lattice was shifted
#: (Mironov 2012, for Laplace). The grid costs nothing: rounding is post-processing of the ideal mechanism.
_GRID = 2.0**-20
#: Coordinates whose float64 intermediates stay in a core's cache.
_BLOCK = 1 << 15
_WORKERS = 2


@noise("gaussian")
@dataclass(frozen=True)
class Gaussian(AdditiveNoise):
    """Independent normal noise, standard deviation ``noise_multiplier * scale`` in every coordinate of a block.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clip radius (the paper's sigma).
    """

    noise_multiplier: float
    family: str = field(default="gaussian", init=False)
    claims: tuple[tuple[str, float], ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE:
            wrong = "in" if self.noise_multiplier > 0 else "positive: it must lie in"
            raise ConfigError(
                "noise_multiplier",
                f"{self.noise_multiplier} is not {wrong} [{LEAST_NOISE:g}, {MOST_NOISE:g}]",
                fix="calibrate it, or use nonprivate",
            )

    def deviation(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise for a clip radius of 1."""
        return noise_multiplier

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Added in float64, rounded to a public grid, then cast: see ``_GRID``."""
        sizes = [total.numel() for total in sums]
        normals = standard_normal(entropy, sum(sizes), sums[0].device).split(sizes)  # one draw: calls cost more
        deviations = [noise_multiplier * scale for scale in scales]
        return rounded_sums(sums, normals, deviations, deviations)


@noise("none")
@dataclass(frozen=True)
class NoNoise(AdditiveNoise):
    """Nothing is added; no epsilon is finite."""

    noise_multiplier: float = field(default=0.0, init=False)
    family: str = field(default="none", init=False)
    claims: tuple[tuple[str, float], ...] = field(default=(), init=False)

    def deviation(self, noise_multiplier: float) -> float:
        """Zero."""
        return 0.0

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """The sums as they are, in float32."""
        return [total.float() for total in sums]


def rounded_sums(
    sums: list[torch.Tensor], noise: tuple[torch.Tensor, ...], scales: list[float], spreads: list[float]
) -> list[torch.Tensor]:
    """``sum + scale * noise`` of every block in float64, rounded to the public grid of noise with that spread, as
    float32: see ``_GRID``.
    """
    import torch

    steps = [spread * _GRID for spread in spreads]
    values = torch._foreach_mul(noise, scales)  # a call for all blocks: there are dozens
    torch._foreach_add_(values, [total.double() for total in sums])
    torch._foreach_div_(values, steps)
    torch._foreach_round_(values)
    torch._foreach_mul_(values, steps)
    return list(torch.cat(values).float().split([len(value) for value in values]))


def standard_normal(entropy: Entropy, count: int, device: torch.device) -> torch.Tensor:
    """``count`` standard normals in float64, by the inverse distribution function, fine into the tails."""
    import torch

    return drawn(lambda signs, tail: torch.special.ndtri(tail).mul_(signs).neg_(), entropy, count, device)


def drawn(
    quantile: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], entropy: Entropy, count: int, device: torch.device
) -> torch.Tensor:
    """``count`` values in float64 of ``quantile(signs, tail)``, both of ``signed_tail``, which it may overwrite.

    On the CPU in blocks that stay in its cache. Entropy is drawn in order by the caller's thread, so that a fixed seed
    gives fixed noise; workers compute the quantiles beside it.
    """
    import torch

    def fill(block: torch.Tensor, parts: Iterable[NDArray[np.float64]]) -> None:
        signs, tail = (torch.from_numpy(part).to(device) for part in parts)
        block.copy_(quantile(signs, tail))

    if device.type != "cpu" or count <= _BLOCK:
        values = torch.empty(count, dtype=torch.float64, device=device)
        with _one_thread_per_operation():
            fill(values, signed_tail(entropy, count))
        return values
    values = torch.from_numpy(np.empty(count))  # numpy asks for huge pages, which saves a fifth of the time
    waiting: deque[Future[None]] = deque()
    with _one_thread_per_operation(), ThreadPoolExecutor(_WORKERS) as pool:
        for block in values.split(_BLOCK):
            if len(waiting) > _WORKERS:
                waiting.popleft().result()
            waiting.append(pool.submit(fill, block, signed_tail(entropy, len(block))))
        for last in waiting:
            last.result()
    return values


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """On blocks this small, threads inside an operation would wait for each other at every one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
