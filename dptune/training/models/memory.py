"""Memory that this machine has left, and the refusal of a model that does not fit, before its weights are read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dptune.core.errors import ConfigError

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


def check_memory(source: str, needed: int) -> None:
    """Raise ConfigError for a model whose weights alone take more memory than is left.

    Args:
        needed: bytes of its weights.
    """
    if needed > (left := available_memory()):
        problem = (
            f"{source!r} needs {needed / 2**30:.1f} GiB of memory for its weights, and {left / 2**30:.1f} are left"
        )
        fix = "use model.dtype: bfloat16 or model.load_in_4bit, a smaller model, or a machine with more memory"
        raise ConfigError("model.source", problem, fix=fix)
