"""Where a run's folder holds weights, before and after it is finished."""

from __future__ import annotations

from pathlib import Path

from dptune.privacy.run_folder import RunFolder


def partial_of(folder: RunFolder) -> Path:
    """The folder that holds the adapter until the ledger is finished."""
    return folder.adapter.with_name(".adapter.partial")


def weights_in(run: Path) -> list[Path]:
    """Whatever holds weights in a run's folder: adapter and checkpoint, also where a kill left a half of them."""
    folder = RunFolder(run)
    whole = (folder.adapter, partial_of(folder), folder.checkpoint)
    half = sorted(run.glob(f".{folder.checkpoint.name}.*"))
    return [path for path in (*whole, *half) if path.exists() or path.is_symlink()]
