"""Noise of large models, which is drawn and added piece by piece: the same numbers, and less memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch

from dptune.mechanisms.noises import banded, gaussian
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed

OPTIONS: dict[str, dict[str, Any]] = {
    "gaussian": {"noise": "gaussian"},
    "laplace": {"noise": "laplace", "clipper": "l1"},
    "plrvo": {"noise": "plrvo"},
    "plrvo shared": {"noise": "plrvo", "shared": True},
    "lmo_dp": {"noise": "lmo_dp"},
    "banded": {"noise": "banded_gaussian", "given": (1.0, 0.5, 0.25)},
}
BLOCK = gaussian._BLOCK
SIZES = (BLOCK - 7, 3, 2 * BLOCK + 11, BLOCK)


def in_pieces_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(gaussian, "PIECE", size)
    monkeypatch.setattr(banded, "PIECE", size)


def rows(name: str) -> list[torch.Tensor]:
    """Two rows of noisy sums, flat."""
    noise, entropy = build("static", {"noise_multiplier": 1.5, **OPTIONS[name]}).noise, FixedSeed(3)
    sums = [torch.full((size,), 0.25 * place, dtype=torch.float64) for place, size in enumerate(SIZES)]
    scales, found = (1.0, 2.0, 0.5, 3.0), []
    for row in range(2):
        noisy = (
            noise.correlated.add_row(sums, scales, 1.5, entropy, row)[0]
            if noise.correlated
            else noise.add(sums, scales, 1.5, entropy)
        )
        assert all(one.dtype == torch.float32 for one in noisy)
        assert tuple(map(len, noisy)) == SIZES
        found.append(torch.cat(noisy))
    return found


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plrvo shared"])
def test_pieces_give_the_numbers_of_one_draw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(name)
    for blocks in (1, 2, 3):
        in_pieces_of(monkeypatch, blocks * BLOCK)
        assert all(map(torch.equal, rows(name), whole))


def test_a_shared_scale_is_drawn_once_for_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows("plrvo shared")
    in_pieces_of(monkeypatch, BLOCK)
    assert all(map(torch.equal, rows("plrvo shared"), whole))


def test_adding_noise_takes_less_than_a_copy_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's memory, which tracemalloc sees: words and noise. At once noise alone would take as much as the sum."""
    in_pieces_of(monkeypatch, 2 * BLOCK)
    noise, sums = build("static", {"noise_multiplier": 1.0}).noise, [torch.zeros(40 * BLOCK, dtype=torch.float64)]
    tracemalloc.start()
    noise.add(sums, (1.0,), 1.0, FixedSeed(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sums[0].nbytes / 2
