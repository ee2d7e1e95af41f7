"""What MLflow has not taken yet: lines of a file in the run's folder, until a server takes them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from dptune.core.files import PRIVATE_FILE

_log = logging.getLogger(__name__)


class Unsent:
    """Entries for MLflow in their order, those of earlier processes first. As private as the run's telemetry.

    An entry is a table with ``params`` and ``tags`` (to start a run), with ``metrics``, ``step`` and ``time``, with
    ``tags``, with ``inputs``, with ``artifact``, or with ``model``, ``name`` and ``note``. Sending one twice changes
    nothing: MLflow knows a metric by its step and time, and a data set by its name and digest.
    """

    def __init__(self, file: Path, *, kept: bool = True) -> None:
        """Read what ``file`` holds.

        Args:
            kept: write what is added to the file too. What can be made again from other files need not be.
        """
        self._file, self._kept = file, kept
        self.entries = _read(file)

    def add(self, entry: dict[str, Any]) -> None:
        """Keep an entry; where the disk takes nothing, in memory alone."""
        self.entries.append(entry)
        if not self._kept:
            return
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            self._kept = False
            _log.warning("%s: cannot be written (%s); metrics are kept only in memory", self._file, error.strerror)

    def clear(self) -> None:
        """Forget the entries: MLflow has them."""
        self._file.unlink(missing_ok=True)
        self.entries = []


def _read(file: Path) -> list[dict[str, Any]]:
    """The entries of a file; a line that a killed process left unfinished is skipped."""
    entries = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
