"""Noises that are added to a clipped sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.additive_noise import AdditiveNoise
from dptune.mechanisms.registry import noise
from dptune.privacy.entropy import Entropy, continued, signed_tail

if TYPE_CHECKING:
    import torch


#: Bounds of the noise multiplier. Below, float32 would round the noise away; above, noisy sums would overflow after
#: their charge.
LEAST_NOISE, MOST_NOISE = 1e-9, 1e9
#: Outputs lie on multiples of this share of the standard deviation (of a Laplace noise: of its mean absolute value).
#: Machine noise is itself a lattice of doubles; without a coarser public grid the low bits of noise + sum tell on which
#: sum the lattice was shifted (Mironov 2012, for Laplace). The grid costs nothing: rounding is post-processing of the
#: ideal mechanism.
_GRID = 2.0**-20
#: Number of coordinates whose float64 intermediates still fit in a core's cache.
_BLOCK = 1 << 15
#: Number of coordinates that get their noise at a time: whole blocks, and more than usual adapters have.
PIECE = 1 << 22
_WORKERS = 2


@noise("gaussian")
@dataclass(frozen=True)
class Gaussian(AdditiveNoise):
    """Independent normal noise, standard deviation ``noise_multiplier * scale`` in every coordinate of a block.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clip radius (the paper's sigma).
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

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
        """Add the noise in float64, round to a public grid (see ``_GRID``), then cast to float32."""
        deviations = [noise_multiplier * scale for scale in scales]
        device = sums[0].device
        return noisy_sums(lambda count: standard_normal(entropy, count, device), sums, deviations, deviations)


@noise("none")
@dataclass(frozen=True)
class NoNoise(AdditiveNoise):
    """Adds no noise, so that every epsilon is infinite."""

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    noise_multiplier: float = field(default=0.0, init=False)
    family: str = field(default="none", init=False)
    claims: tuple[tuple[str, float], ...] = field(default=(), init=False)

    def deviation(self, noise_multiplier: float) -> float:
        """Returns 0: there is no noise."""
        return 0.0

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Returns the sums as they are, in float32."""
        return [total.float() for total in sums]


def noisy_sums(
    draw: Callable[[int], torch.Tensor], sums: list[torch.Tensor], scales: list[float], spreads: list[float]
) -> list[torch.Tensor]:
    """``rounded_sums`` with noise that is drawn for all blocks as one vector, a piece at a time.

    So no copy of a large model is needed in float64. A piece is whole blocks of ``draw_by_quantile``, so that on a CPU
    a fixed seed gives the same noise in pieces as at once.

    Args:
        draw: draws so many independent values in float64.
    """
    import torch

    sizes = [total.numel() for total in sums]
    if sum(sizes) <= PIECE:
        return rounded_sums(sums, draw(sum(sizes)).split(sizes), scales, spreads)  # one draw: calls cost more
    found = [torch.empty(size, dtype=torch.float32, device=sums[0].device) for size in sizes]
    for piece in _pieces(sizes):
        parts = [sums[block][start:end] for block, start, end in piece]
        counts, own = [len(part) for part in parts], [block for block, _, _ in piece]
        noise = draw(sum(counts)).split(counts)
        noisy = rounded_sums(parts, noise, [scales[block] for block in own], [spreads[block] for block in own])
        for (block, start, end), values in zip(piece, noisy, strict=True):
            found[block][start:end] = values
    return found


def _pieces(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Block, beginning and end of the parts of each piece of ``PIECE`` coordinates, of blocks one after the other."""
    piece: list[tuple[int, int, int]] = []
    left = PIECE
    for block, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + left)
            piece.append((block, start, end))
            left, start = left - (end - start), end
            if not left:
                yield piece
                piece, left = [], PIECE
    if piece:
        yield piece


def rounded_sums(
    sums: list[torch.Tensor], noise: tuple[torch.Tensor, ...], scales: list[float], spreads: list[float]
) -> list[torch.Tensor]:
    """Compute ``sum + scale * noise`` of every block in float64, rounded to a public grid; returns float32.

    The grid of a block is ``spread * _GRID`` wide.
    """
    import torch

    steps = [spread * _GRID for spread in spreads]
    values = torch._foreach_mul(noise, scales)  # one call for all blocks: one for each of dozens is slow
    torch._foreach_add_(values, [total.double() for total in sums])
    torch._foreach_div_(values, steps)
    torch._foreach_round_(values)
    torch._foreach_mul_(values, steps)
    return list(torch.cat(values).float().split([len(value) for value in values]))


def standard_normal(entropy: Entropy, count: int, device: torch.device) -> torch.Tensor:
    """Draw ``count`` standard normals in float64 by the inverse distribution function, without gaps in the tails."""
    import torch

    return draw_by_quantile(lambda signs, tail: torch.special.ndtri(tail).mul_(signs).neg_(), entropy, count, device)


def draw_by_quantile(
    quantile: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], entropy: Entropy, count: int, device: torch.device
) -> torch.Tensor:
    """Draw ``count`` float64 values of ``quantile(signs, tail)``, whose arguments, from ``signed_tail``, it may
    overwrite.

    On the CPU it works in blocks that fit in the cache. The caller's thread draws the entropy in order, so that a fixed
    seed gives fixed noise, while workers compute the quantiles. An accelerator gets the words, and does the rest.
    """
    import torch

    def fill(block: torch.Tensor, parts: Iterable[NDArray[np.float64]]) -> None:
        signs, tail = (torch.from_numpy(part) for part in parts)
        block.copy_(quantile(signs, tail))

    if device.type != "cpu":
        return quantile(*signed_tail_on(device, entropy, count))
    values = torch.from_numpy(np.empty(count))  # numpy asks for huge pages, which saves a fifth of the time
    if count <= _BLOCK:
        with _one_thread_per_operation():
            fill(values, signed_tail(entropy, count))
        return values
    waiting: deque[Future[None]] = deque()
    with _one_thread_per_operation(), ThreadPoolExecutor(_WORKERS) as pool:
        for block in values.split(_BLOCK):
            if len(waiting) > _WORKERS:
                waiting.popleft().result()
            waiting.append(pool.submit(fill, block, signed_tail(entropy, len(block))))
        for last in waiting:
            last.result()
    return values


def signed_tail_on(device: torch.device, entropy: Entropy, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``signed_tail``, bit for bit, with its arithmetic on a device; the host does not wait for it.

    The words come from the system's entropy on the host: a generator of the device's own would have to be one that
    nobody can predict.
    """
    words = entropy.words(count)
    places, tails = continued(words, entropy)
    bits = on_device(words.view(np.int64), device)
    signs = (bits & 1).double().mul_(-2.0).add_(1.0)
    tail = ((bits >> 1) & (2**63 - 1)).double().add_(0.5).mul_(2.0**-64)
    if len(places):
        tail.index_copy_(0, on_device(places, device), on_device(tails, device))
    return signs, tail


def on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on a device of a vector of int64 or float64, which a GPU fetches while the host goes on."""
    import torch

    assert values.dtype in (np.int64, np.float64)
    buffer = torch.empty(
        len(values),
        dtype=torch.float64 if values.dtype == np.float64 else torch.int64,
        pin_memory=device.type == "cuda",
    )
    buffer.numpy()[:] = values
    return buffer.to(device, non_blocking=buffer.is_pinned())


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Limit torch to one thread an operation: on blocks this small, several would mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
