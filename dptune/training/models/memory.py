"""Memory that this machine has left, and the refusal of a model that does not fit, before its weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dptune.core.errors import ConfigError
from dptune.training.models.quantization import BYTES_EACH

_AVAILABLE = "MemAvailable:"
#: Limits of the container that the process runs in: of control groups, version 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> int:
    """Bytes that a process can still have without swapping, at most; the machine's memory where it does not say."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith(_AVAILABLE)]
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # "max"
            found.append(int(Path(limit).read_text(encoding="ascii")))
    return min(found)


def check_memory(source: str, needed: float, smaller: Mapping[str, float] | None = None) -> None:
    """Raise ConfigError for a model whose weights alone take more memory than is left.

    Args:
        needed: bytes of its weights.
        smaller: bytes that they take with other settings, by setting. The fix names those that would do.
    """
    if needed > (left := available_memory()):
        problem = (
            f"{source!r} needs {needed / 2**30:.1f} GiB of memory for its weights, and {left / 2**30:.1f} are left"
        )
        enough = [setting for setting, size in (smaller or {}).items() if size <= left]
        fix = f"use {', '.join((*enough, 'a smaller model'))}, or a machine with more memory"
        raise ConfigError("model.source", problem, fix=fix)


def smaller_forms(numbers: int, dtype: str, *, four_bits: bool) -> dict[str, float]:
    """Bytes of so many weights that are held in ``dtype``, if they were held in fewer bits, by setting.

    Args:
        four_bits: whether 4 bits are possible: for adapters on a model that writes.

    >>> smaller_forms(100, "float32", four_bits=True)
    {'model.dtype: bfloat16': 200, 'model.load_in_4bit': 56.25}
    """
    halved = {"model.dtype: bfloat16": 2 * numbers} if dtype == "float32" else {}
    return {**halved, **({"model.load_in_4bit": BYTES_EACH * numbers} if four_bits else {})}
