"""Limits how many cells run on a device of this machine at a time, across all flows and checkouts."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import gethostname

from dptune.errors import DptuneError
from dptune.files import locked, private_directory

_SECONDS = 0.5
_log = logging.getLogger("dptune.places")  # the flow's own log, and so its terminal's
_own: list[str] = []  # devices of the places that this process holds


def places_folder() -> Path:
    """Folder of the locked files, one for all checkouts and flows: DPTUNE_PLACES, or in the temporary folder."""
    given = os.environ.get("DPTUNE_PLACES")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"dptune-places-{os.getuid()}"


@contextmanager
def free_place(devices: Sequence[str], cells: int, folder: Path | None = None) -> Iterator[str]:
    """Wait for a free place on one of ``devices``, each of which has ``cells`` places. Yields the device.

    A place is a locked file, so the place of a killed process is free at once. A concurrency slot of a Prefect server
    would stay taken until its lease ends, and flows that share a temporary server's database would free each other's.

    Args:
        folder: folder of the locked files; None takes ``places_folder``.
    """
    folder = folder or places_folder()
    private_directory(folder)
    with ExitStack() as stack:
        device = _take(stack, [(device, place) for place in range(cells) for device in devices], folder)
        _own.append(device)
        stack.callback(_own.remove, device)
        yield device


def with_threads(environment: Mapping[str, str], places: int) -> dict[str, str]:
    """``environment``, with a place's share of this machine's cores as its number of threads where it has none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // places)), **environment}


def _take(stack: ExitStack, places: list[tuple[str, int]], folder: Path) -> str:
    said = False
    while True:
        for device, place in places:
            with suppress(DptuneError):
                stack.enter_context(locked(folder / f"{gethostname()}-{_physical(device)}-{place}"))
                return device
        if not (_own or said):
            _log.warning("other flows on this machine hold all %d places (locks in %s): waiting", len(places), folder)
            said = True
        time.sleep(_SECONDS)


def _physical(device: str) -> str:
    """The physical name of a device: "cuda:0" is another GPU in a process with other CUDA_VISIBLE_DEVICES."""
    kind, _, index = device.partition(":")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if kind == "cuda" and visible:
        index = visible.split(",")[int(index or 0)].strip()
    return f"{kind}-{index or 0}"
