"""Plan and journal of a search, both secret: which candidates there are, and what became of each.

The plan says how many candidates there are and which, drawn once, before the first run. A search that is killed goes on
with the same plan: a number drawn again, or a candidate left out because it was slow or failed, would change the law
that is priced. ``asked_of`` is what a search is asked for, by which it is recognised in its folder and in its plan.

The journal says which candidates began to train, and what became of those that ended.
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
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dptune.core.errors import DptuneError
from dptune.core.files import PRIVATE_FILE, DamagedFileError, fsync_directory, not_a_file, read_json, write_json
from dptune.job.preparation import PreparedRun
from dptune.job.search.kinds import CandidateKind, versions_of_kinds
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import FREE, as_written_now
from dptune.mechanisms.versions import VERSIONS
from dptune.privacy.certificate import commitment_of
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger_file import GENESIS, encode, seal

PLAN = "plan.json"


class PlanError(DptuneError):
    """A plan that does not go with its certificate, or with what is asked."""


@dataclass(frozen=True)
class Drawn:
    """A candidate: a random name for its folder, the number of its kind, and its configuration. Secret."""

    name: str
    kind: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is drawn once. Secret, but for ``id`` and ``commitment``.

    Attributes:
        kinds: the configuration and noise options of each kind, so that a resumed search prices nothing again.
        asked: what the plan was drawn for, as ``asked_of`` says it under ``salt``; nothing else is trained by it.
    """

    id: str
    salt: str
    kinds: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    candidates: tuple[Drawn, ...]
    asked: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, search: SearchSettings, kinds: Sequence[CandidateKind], entropy: Entropy) -> Plan:
        """Draw the number of candidates and each of them, with replacement."""
        drawn = []
        for _ in range(search.law.draw(entropy)):
            number, options = search.space.draw(entropy)
            drawn.append(Drawn(secrets.token_hex(8), number, dict(options)))
        known = tuple((dict(kind.configuration), dict(kind.noise)) for kind in kinds)
        return cls(secrets.token_hex(8), secrets.token_hex(32), known, tuple(drawn))

    @property
    def commitment(self) -> str:
        """The digest that the certificate shows before any result is known."""
        return commitment_of(bytes.fromhex(self.salt), {"candidates": [asdict(one) for one in self.candidates]})

    def write(self, folder: Path) -> None:
        """Write the plan, mode 0600, durable before anything else is."""
        write_json(folder / PLAN, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read a plan. Raises: DamagedFileError."""

        def make(found: dict[str, Any]) -> Plan:
            return cls(
                found["id"],
                found["salt"],
                tuple((dict(configuration), _noise(noise)) for configuration, noise in found["kinds"]),
                tuple(Drawn(**one) for one in found["candidates"]),
                dict(found.get("asked", {})),
            )

        return read_json(folder / PLAN, make)


def _noise(noise: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in noise.items()}


#: Not compared: a setting of earlier versions that changed no result, and what ``check_versions`` looks at.
_GONE = {"cut_records", VERSIONS}


def asked_of(prepared: PreparedRun, asked: SearchSettings, salt: str) -> dict[str, Any]:
    """All that decides a search's result, in JSON types: settings, records and versions of parts.

    Private: with the salt, the digest of the records tests a guess of all of them.
    """
    settings = {name: value for name, value in asdict(prepared.settings).items() if name not in FREE}
    found = {
        "model": prepared.base.identity,
        "records": prepared.digest(salt),
        "keys": prepared.digest_of_keys(salt),
        "unit": prepared.units.kind,
        "search": asked.to_json(),
        VERSIONS: versions_of_kinds(asked, prepared.settings),
        **settings,
    }
    return dict(json.loads(json.dumps(found)))


def changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The names of what differs, as a list in a text; empty where nothing does. Earlier versions knew no ``keys``."""
    known = {"keys": now.get("keys"), **as_written_now(known)}
    return ", ".join(sorted(name for name in {*now, *known} - _GONE if now.get(name) != known.get(name)))


JOURNAL = "candidates.jsonl"
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
        self.path = working / JOURNAL
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
        (path := working / JOURNAL).unlink(missing_ok=True)
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
