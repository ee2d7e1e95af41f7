"""Places on the devices of the machine that a worker runs on: at most so many cells on each at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import gethostname

from dptune.errors import DptuneError
from dptune.files import locked, private_directory

_SECONDS = 0.5


@contextmanager
def free_place(devices: Sequence[str], cells: int, folder: Path) -> Iterator[str]:
    """Wait for a place on one of ``devices``, each of which has ``cells``; yields the device.

    A place is a locked file, so a killed worker's is free at once. A slot of a Prefect server would be taken until
    its lease ends, and with a temporary server, which ends no leases, for ever.
    """
    private_directory(folder)
    with ExitStack() as stack:
        yield _take(stack, [(device, place) for place in range(cells) for device in devices], folder)


def _take(stack: ExitStack, places: list[tuple[str, int]], folder: Path) -> str:
    while True:
        for device, place in places:
            with suppress(DptuneError):
                stack.enter_context(locked(folder / f"{gethostname()}-{_physical(device)}-{place}"))
                return device
        time.sleep(_SECONDS)


def _physical(device: str) -> str:
    """The first device that a worker sees may be another one than that of its neighbour."""
    kind, _, index = device.partition(":")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if kind == "cuda" and visible:
        index = visible.split(",")[int(index or 0)].strip()
    return f"{kind}-{index or 0}"


def wait_until_unlocked(file: Path, seconds: float) -> None:
    """Wait while another process holds ``file``, but no longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(DptuneError), locked(file):
            return
        time.sleep(_SECONDS)
