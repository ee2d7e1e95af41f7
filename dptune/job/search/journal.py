"""The journal of a search's candidates: which of them began to train, and what became of those that ended. Secret.

It lies in the working folder and beside the candidates' own folders, so that a folder that was removed is missed. The
guarantee is about candidates of which each is drawn once: one that was trained and removed, and trains again with fresh
noise, would be another draw, which whoever removed it may have wanted better. So these orders hold:

    first line of the candidate's ledger  before "begun" here     before its first release
    its weights                           before "outcome" here   before the last line of its ledger
    "noise" here                          before the score's charge

Every line is durable before what follows it. A process that is killed between any two leaves files that go on; a file
or folder that is missing, or lines that were cut off, leave files that no kill leaves, and the search is refused:

    begun, and no ledger              the folder was removed
    a release, and not begun          lines of the journal were cut off
    a release, and no checkpoint      the checkpoint was removed
    an ended ledger, and no outcome   lines of the journal were cut off
    a charged score, and no noise     lines of the journal were cut off; the charge is never undone
    an outcome                        nothing else of a loser is needed; of the winner all files are, by their digests

What was charged stays in the register whatever is refused: a search counts there as a whole, from its start. It cannot
notice an owner who takes back the working folder, or a candidate's folder together with the journal's last lines, to an
earlier state: files hold no secret from their owner. The last line of a candidate that failed, cut off alone, is not
noticed either, for nothing else says that it failed. Nobody else sees the journal: it is made before the first
candidate, and grows in place, so that the folder's own times and number of entries, which other users can see, stay as
they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptune.core.files import PRIVATE_FILE, DamagedFileError, fsync_directory, not_a_file
from dptune.privacy.ledger_file import GENESIS, encode, seal

FILE = "candidates.jsonl"
#: What a search that lost something needs. It is not begun again in silence, for that would spend again.
FIX = "restore it from a copy; or give another folder, which spends again"


class LostError(DamagedFileError):
    """A search that cannot go on, for something that it kept is gone or damaged."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; the search counts as spent. Fix: {FIX}.")


class Journal:
    """The journal of one search, open for adding; one process has it at a time.

    Attributes:
        begun: names of the candidates that have a ledger.
        noise: by the names of candidates whose score was drawn, the draw before it is scaled.
        outcomes: of those that ended, by their names: ``score`` (None for one that failed), ``why`` it failed, and
            ``files``, the digests of what it would deliver.
    """

    def __init__(self, working: Path, search: str) -> None:
        """Read the journal, without a last line whose write was cut off: nothing relies on such a one.

        Raises: LostError naming the line that is not what was written there.
        """
        self.path = working / FILE
        self.begun: set[str] = set()
        self.noise: dict[str, float] = {}
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._chain = GENESIS
        if other := not_a_file(self.path):
            raise LostError(self.path, f"is {other}, not a file")
        if not self.path.exists():
            raise LostError(self.path, "is missing, which says what became of the candidates")
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, raw in enumerate(whole.splitlines(keepends=True), start=1):
            try:
                record = json.loads(raw)
                stated = record.pop("chain")
                line, self._chain = seal(encode(record), self._chain)
                if (stated, raw) != (self._chain, line) or (number == 1) != (record == {"search": search}):
                    raise ValueError
                if number > 1:
                    self._count(record)
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                raise LostError(self.path, f"line {number} is not what was written there") from None
        if not whole:
            raise LostError(self.path, "is empty")
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))

    @classmethod
    def create(cls, working: Path, search: str) -> Journal:
        """Begin the journal of a search of which nothing ran yet."""
        (path := working / FILE).unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
        line, _ = seal(encode({"search": search}), GENESIS)
        _append(path, line)
        fsync_directory(working)
        return cls(working, search)

    def begin(self, name: str) -> None:
        """Write down that a candidate has a ledger. Durable when this returns; once."""
        if name not in self.begun:
            self._add({"candidate": name, "begun": True})

    def keep_noise(self, name: str, noise: float) -> None:
        """Write down the noise of a candidate's score, once. Durable when this returns."""
        if name not in self.noise:
            self._add({"candidate": name, "noise": noise})

    def end(self, name: str, score: float | None, why: str, files: Mapping[str, str] | None = None) -> None:
        """Write down what became of a candidate, once: an outcome never changes. Durable when this returns."""
        if name not in self.outcomes:
            self._add({"candidate": name, "outcome": {"score": score, "why": why, "files": dict(files or {})}})

    def _add(self, record: dict[str, Any]) -> None:
        line, chain = seal(encode(record), self._chain)
        _append(self.path, line)
        self._chain = chain
        self._count(record)

    def _count(self, record: dict[str, Any]) -> None:
        if "outcome" in record:
            self.outcomes[record["candidate"]] = record["outcome"]
        elif "noise" in record:
            self.noise[record["candidate"]] = float(record["noise"])
        elif record["begun"]:
            self.begun.add(record["candidate"])


def _append(path: Path, line: bytes) -> None:
    """Add a line, durable when this returns. Raises: OSError naming the file, in which nothing of it stays."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    length = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(28, "No space left on device", str(path))
        os.fsync(descriptor)
    except OSError as error:
        os.ftruncate(descriptor, length)
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
