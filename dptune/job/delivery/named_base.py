"""The base model that a deliverable names, by which another model under the same name is recognised. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dptune.core.files import read_json
from dptune.training.models.model_names import ADAPTER, rounding

#: File of a delivered folder. Folders that earlier versions delivered lack it.
BASE = "base.json"
#: What is said of a folder without it.
NO_DIGEST = "an earlier dptune delivered the adapter, without a digest of its base model"


@dataclass(frozen=True)
class NamedBase:
    """The base model of a deliverable, which holds adapters alone. Public.

    Attributes:
        name: a hub id, a package, or the last part of a path.
        revision: the commit of a hub id, or the version of a package; None for a folder or a GGUF file.
        sha256: digest of its configuration and weights, see ``training.weight_files.digest_of_weights``. Of a model
            given from Python, of its numbers in memory (``training.model.frozen_fingerprint``). None where the weights
            were converted while they were loaded, so that no file here holds them.
        in_memory: type of the numbers of a model given from Python, such as "float32", or "4 bits"; None for other
            models.
        kind: GGML's name of the type of most weights of a GGUF file, such as "Q4_1"; None for other models. ``sha256``
            is then that of the file.
    """

    name: str
    revision: str | None
    sha256: str | None
    in_memory: str | None = None
    kind: str | None = None

    @property
    def known_as(self) -> str:
        """Name and revision."""
        return f"{self.name} at {self.revision}" if self.revision else self.name

    @property
    def row(self) -> str:
        """What the card says of it."""
        if self.sha256 is None:
            return f"{self.known_as}; no digest of its weights"
        of = f"its numbers in memory ({self.in_memory})" if self.in_memory else "its configuration and weights"
        row = f"{self.known_as}; SHA-256 of {'its GGUF file' if self.kind else of} {self.sha256}"
        return f"{row}; {rounded}" if self.kind and (rounded := rounding(self.kind)) else row

    def to_dict(self) -> dict[str, Any]:
        """The content of ``BASE``. Only a GGUF file has a kind, so that earlier versions read all other folders."""
        return {name: value for name, value in asdict(self).items() if name != "kind" or value is not None}


def read_base(path: Path) -> NamedBase | None:
    """The base that a delivered folder names; None where an earlier version delivered it.

    Raises: DamagedFileError for a file that names none.
    """
    file = path / BASE
    if not file.is_file():
        return None

    def make(said: dict[str, Any]) -> NamedBase:
        found = NamedBase(**said)
        values = [getattr(found, item.name) for item in fields(found)]
        if not found.name or not all(value is None or isinstance(value, str) for value in values):
            raise ValueError("names no base model")
        return found

    return read_json(file, make, fix="take the whole folder that was delivered")


def base_of(adapter: Path) -> tuple[str, str | None]:
    """Name and revision of the model that delivered weights were tuned on."""
    if (named := read_base(adapter)) is not None:
        return named.name, named.revision
    config = read_json(adapter / ADAPTER)  # of an earlier version, which delivered nothing but adapters
    return str(config.get("base_model_name_or_path")), config.get("revision")
