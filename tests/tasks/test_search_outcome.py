"""Tests of what is kept of a run of a rehearsal once it has ended."""

from __future__ import annotations

from pathlib import Path

from dptune.files import replacing
from dptune.privacy.run_folder import RunFolder
from tasks.search.outcome import forget_weights


def test_no_weights_stay_and_the_ledger_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.adapter.mkdir()
    for path in (folder.checkpoint, folder.adapter / "adapter_model.safetensors", folder.ledger):
        path.write_bytes(b"")
    with replacing(folder.checkpoint) as half:
        name = half.name
    (tmp_path / name).write_bytes(b"weights of a run that was killed while it wrote them")
    forget_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder.ledger.name]
