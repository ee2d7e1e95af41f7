"""Two worlds whose records share nothing but what is public, and whose every release is the same.

Whatever differs between what they deliver was read past the ledger. Random ids and salts are the same too, so that a
digest of records under a random key differs as well.
"""

from __future__ import annotations

import itertools
import secrets
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from dptune.mechanisms.mechanism import Mechanism


def same_release(patch: pytest.MonkeyPatch) -> None:
    """Let steps release fixed numbers, whatever the records are; count ids and salts from 0."""

    def noised(
        self: Mechanism, sums: list[torch.Tensor], scales: Any, noise: float, entropy: Any, row: int
    ) -> tuple[list[torch.Tensor], float]:
        return [torch.linspace(-1, 1 + row, len(one), dtype=one.dtype) for one in sums], 1.0

    numbers = itertools.count()
    patch.setattr(Mechanism, "_noised", noised)
    patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    patch.setattr(secrets, "token_hex", lambda length=32: f"{next(numbers):0{2 * length}x}")


def told(folder: Path) -> dict[str, tuple[bytes, int, float]]:
    """All that someone learns who gets a folder: content, mode and time of everything in it, by name."""
    return {
        path.relative_to(folder).as_posix(): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
            path.stat().st_mtime,
        )
        for path in sorted(folder.rglob("*"))
    }


def differences(one: dict[str, tuple[bytes, int, float]], other: dict[str, tuple[bytes, int, float]]) -> str:
    """The files in which two worlds differ, with the first lines that do; empty where nothing tells them apart."""
    found = [f"{name} is in one alone" for name in sorted(set(one) ^ set(other))]
    for name in sorted(set(one) & set(other)):
        if one[name] != other[name]:
            lines = zip(one[name][0].splitlines(), other[name][0].splitlines(), strict=False)
            found.append(f"{name}: {next((pair for pair in lines if pair[0] != pair[1]), 'mode, time or length')}")
    return "\n".join(found)
