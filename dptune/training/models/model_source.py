"""ModelSource: where the frozen weights come from, and the folder or hub id by which transformers reads them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import read_json
from dptune.training.models.gguf_file import ORIGIN, converted
from dptune.training.models.model_names import name_of, path_of, revision_of, rounding


@dataclass(frozen=True)
class ModelSource:
    """The source of the frozen weights.

    Attributes:
        source: a hub id, a local directory, a GGUF file, or ``package:NAME``, an installed package that holds either.
        revision: the 40-digit commit of a hub id, or the version of a package, which may be left out; None for a
            directory or a file.
        dtype: dtype of the frozen weights, "float32" or "bfloat16"; in 4 bits, of the products with them.
        load_in_4bit: hold the weights of linear layers in 4 bits (bitsandbytes' NF4).
    """

    source: str
    revision: str | None = None
    dtype: str = "float32"
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "revision", revision_of(self.source, self.revision))

    @cached_property
    def location(self) -> str:
        """The hub id or the folder that transformers reads. A GGUF file is converted at its first use, into a cache.

        Raises: ConfigError for a GGUF file that cannot be read, or is larger than memory.
        """
        path = path_of(self.source)
        if path is not None and path.is_file():
            path = converted(path, self.dtype, partial(check_memory, self.source))
        return self.source if path is None else str(path)

    @property
    def kind(self) -> str | None:
        """GGML's name of the type of most weights of a GGUF file, such as "Q4_1"; None for other models."""
        return self._origin.get("kind")

    @property
    def file_digest(self) -> str | None:
        """SHA-256 of the GGUF file that was converted, whatever lies there now; None for other models."""
        return self._origin.get("sha256")

    @cached_property
    def _origin(self) -> dict[str, Any]:
        path = path_of(self.source)
        return {} if path is None or path.is_dir() else read_json(Path(self.location) / ORIGIN)

    @property
    def rounding(self) -> str | None:
        """What a GGUF file does to the published weights, in words; None where it rounds none, and of other models."""
        return None if self.kind is None else rounding(self.kind)


def model_folder(source: str, dtype: str = "float32") -> str:
    """The folder that ``from_pretrained`` reads of a model that lies in an installed package or a GGUF file.

    Args:
        source: ``package:NAME``, or the path of a GGUF file, which is converted once into the user's cache.
        dtype: dtype of the converted weights, "float32" or "bfloat16".

    Raises: ConfigError for a package or a file that holds no model.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> model_folder(mkdtemp(prefix="checkpoint")).startswith(mkdtemp()[:4])  # a folder stays as it is
        True
    """
    return ModelSource(source, dtype=dtype).location


def named_as(base: ModelSource, model: Any) -> Any:
    """The model, which calls itself what the user called it: adapters' files repeat the name."""
    if base.location != base.source:
        model.name_or_path = model.config._name_or_path = name_of(base.source)
    return model


# Memory that this machine has left, and the refusal of a model that does not fit, before its weights are read.


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
