"""Memory that this machine has left, and the refusal of a model that does not fit, before its weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

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


def sizes_of(model: Any, *, quantised: bool) -> tuple[int, float]:
    """Number of parameters, and the bytes that they take.

    Args:
        quantised: whether linear layers will be held in 4 bits, though the model has none of its weights yet.
    """
    head = model.get_output_embeddings()
    linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    small = {id(weight) for weight in linear if head is None or weight is not head.weight} if quantised else set()
    count, size = 0, 0.0
    for weight in model.parameters():
        numbers = weight.numel() * (2 if hasattr(weight, "quant_state") else 1)  # two of 4 bits are one of its numbers
        count += numbers
        size += numbers * (BYTES_EACH if id(weight) in small or numbers > weight.numel() else weight.element_size())
    return count, size


def smaller_forms(model: Any, dtype: str, *, gguf: bool, head: bool) -> dict[str, float]:
    """Bytes of a model's weights if they were held in fewer bits, by the setting that does so.

    Args:
        model: all of it, in ``dtype``; it may have no memory behind its weights.
        gguf: whether it comes of a GGUF file, whose conversion to bfloat16 takes more than float32 does.
        head: whether it is a classifier, which takes no 4 bits.
    """
    numbers, in_4bit = sizes_of(model, quantised=True)
    halved = {"model.dtype: bfloat16": 2 * numbers} if dtype == "float32" and not gguf else {}
    return {**halved, **({} if head else {"model.load_in_4bit": in_4bit})}
