"""The identity of a base model in a folder, by which a run knows whether it goes on with the same weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dptune.job.base_model import _digest_of_folder

_MIB = 2**20


@pytest.mark.parametrize("place", [0, 4 * _MIB, 8 * _MIB - 1])
def test_another_layer_is_another_base(tmp_path: Path, place: int) -> None:
    file, config = tmp_path / "model.safetensors", SimpleNamespace(to_dict=lambda: {"n_layer": 8})
    weights = bytearray(8 * _MIB)
    file.write_bytes(weights)
    before = _digest_of_folder(tmp_path, config)
    weights[place : place + _MIB // 4] = bytes([1]) * len(weights[place : place + _MIB // 4])
    file.write_bytes(weights)
    assert _digest_of_folder(tmp_path, config) != before
