"""Weights in a run's folder, before and after it is finished."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dptune.core.files import sha256
from dptune.privacy.run_folder import RunFolder


def partial_of(folder: RunFolder) -> Path:
    """The folder that holds the adapter until the ledger is finished."""
    return folder.adapter.with_name(".adapter.partial")


@contextmanager
def written_adapter(model: Any, folder: RunFolder) -> Iterator[Path]:
    """Context that gives the partial folder with the run's adapter in it; an error within it removes the folder.

    On a full disk, what stays would make the next try fail too.
    """
    from dptune.training.models.model import save_adapter  # torch takes seconds, and ``weights_in`` needs none

    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_adapter(model, partial)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def adapter_digest(run: Path) -> str:
    """Digest of the adapter's weights, which ties the result and the ledger to them."""
    return sha256(RunFolder(run).adapter / "adapter_model.safetensors")


def weights_in(run: Path) -> list[Path]:
    """Whatever holds weights in a run's folder: adapter and checkpoint, also where a kill left a half of them."""
    folder = RunFolder(run)
    whole = (folder.adapter, partial_of(folder), folder.checkpoint)
    half = sorted(run.glob(f".{folder.checkpoint.name}.*"))
    return [path for path in (*whole, *half) if path.exists() or path.is_symlink()]
