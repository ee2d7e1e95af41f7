"""Several processes of one tiny run, with a folder in place of torchrun."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dptune.training.ranks import Ranks

#: For an operation between living ranks. Only a hang reaches it, and then the guard that pytest has.
PATIENCE = timedelta(minutes=15)
# Forked from a process that has no threads and has torch imported already: starting a rank takes no seconds.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["dptune.training.loop", "dptune.mechanisms.registry"])

Work = Callable[..., Any]


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        result: what its work returned.
        error: type and message of what it raised.
        exitcode: negative for a signal.
    """

    result: Any
    error: str
    exitcode: int | None


def together(folder: Path, work: Work, *args: Any, world: int = 2) -> list[Ended]:
    """``work(ranks, *args)`` on every rank; returns when all have ended."""
    folder.mkdir(parents=True)
    processes = [_PROCESSES.Process(target=_rank, args=(rank, world, folder, work, args)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    finally:  # pytest's guard raises in the join
        for process in processes:
            process.kill()
            process.join()
    return [_ended(folder / f"{rank}.pt", process.exitcode) for rank, process in enumerate(processes)]


def results(folder: Path, work: Work, *args: Any, world: int = 2) -> list[Any]:
    """As ``together``, of ranks that must succeed."""
    ended = together(folder, work, *args, world=world)
    assert not any(one.error or one.exitcode for one in ended), ended
    return [one.result for one in ended]


def _ended(file: Path, exitcode: int | None) -> Ended:
    result, error = torch.load(file, weights_only=False) if file.exists() else (None, "")
    return Ended(result, error, exitcode)


def _rank(rank: int, world: int, folder: Path, work: Work, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder.resolve()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
    result, error = None, ""
    try:
        result = work(Ranks(rank, world), *args)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        dist.destroy_process_group()
    torch.save((result, error), folder / f"{rank}.pt")
