"""Checkpoints that were damaged: refused by name, before any weight is taken."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_resume import kill, killed_after
from tiny_models import adapted, trainable

from dptune.privacy.ledger import Ledger
from dptune.training.checkpoints import CheckpointError, load_checkpoint

Stored = tuple[dict[str, torch.Tensor], dict[str, Any]]
VALUES: tuple[Any, ...] = (-1, 0, 1, 3, 99, 2.0, True, None, "", "2", [], {}, {"radii": [float("nan")]}, 10**40)
#: What one number, or one tensor, may become.
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "NaN": lambda tensor: torch.full_like(tensor, float("nan")),
    "infinite": lambda tensor: torch.full_like(tensor, float("inf")),
    "longer": lambda tensor: torch.cat([tensor.flatten(), tensor.flatten()]),
    "of whole numbers": lambda tensor: tensor.to(torch.int64).add(7),
    "gone": lambda tensor: None,
}


def restored(folder: Path) -> Any:
    model = adapted()
    before = {name: weight.clone() for name, weight in trainable(model).items()}
    ledger = Ledger.resume(folder / "ledger.jsonl", Counter())
    try:
        return load_checkpoint(folder / "checkpoint.safetensors", model, torch.optim.AdamW(model.parameters()), ledger)
    except CheckpointError:
        assert all(torch.equal(weight, before[name]) for name, weight in trainable(model).items())
        raise
    finally:
        ledger.close()


@pytest.fixture
def folder(tmp_path: Path, opened: list[Ledger]) -> Path:
    kill(tmp_path, opened, on_step=killed_after(3))
    return tmp_path


def stored(path: Path) -> Stored:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["progress"])  # noqa: SIM118


def test_what_a_run_wrote_is_accepted(folder: Path) -> None:
    assert restored(folder).step == 2


def test_no_damage_to_what_it_says_is_accepted(folder: Path) -> None:
    """Seed 40, 200 changes of tensors and of the run's standing; each is refused, and no weight was touched."""
    path, coins = folder / "checkpoint.safetensors", random.Random(40)
    tensors, progress = stored(path)
    for _ in range(200):
        changed, says = dict(tensors), dict(progress)
        if coins.random() < 0.5:
            key, kind = coins.choice(sorted(tensors)), coins.choice(sorted(TENSORS))
            made = TENSORS[kind](tensors[key])
            changed = {name: one for name, one in tensors.items() if name != key} | (
                {} if made is None else {key: made}
            )
        else:
            key = coins.choice(sorted(progress))
            says[key] = coins.choice([value for value in VALUES if value not in (progress[key], {})])
        save_file(changed, path, metadata={"progress": json.dumps(says)})
        with pytest.raises(CheckpointError, match="Fix: "):
            restored(folder)


def test_no_damage_to_its_bytes_gives_a_traceback(folder: Path) -> None:
    """Seed 41, 200 files that were cut, or whose header was written over. (Other bytes are numbers, any of them.)"""
    path, coins = folder / "checkpoint.safetensors", random.Random(41)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for _ in range(200):
        place = coins.randrange(header)
        cut = good[: coins.randrange(len(good))]
        flipped = good[:place] + bytes([good[place] ^ coins.randrange(1, 256)]) + good[place + 1 :]
        path.write_bytes(coins.choice((cut, flipped)))
        try:
            restored(folder)
        except CheckpointError as error:
            explains(error)


def explains(error: CheckpointError) -> None:
    assert "Fix: " in str(error)
