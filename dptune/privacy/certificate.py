"""The certificate of a search: all that its guarantee depends on, in one public file of two lines.

The first line is written before the first run: the law of the number of candidates, the space, the releases of every
kind of candidate, the score's noise, and a commitment that fixes the secret draws without showing them. The second
names the winner, or says that every candidate failed. Both are chained like a ledger's. ``certified`` is computed from
the file alone. What the file cannot show: that the number was drawn honestly, that nobody read the losers, and that no
other search was made on the same records.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import fsync_directory, not_a_file
from dptune.privacy.accountants import check_delta, smallest_epsilon
from dptune.privacy.accounting.loss_profile import average, gaussian_profile, profile_of
from dptune.privacy.accounting.parts import dearest
from dptune.privacy.ledger_file import GENESIS, LedgerError, encode, seal
from dptune.privacy.release import DEALT_BY_RANK, Composition, Release
from dptune.privacy.selection import BOUNDS, Bound, selection_epsilon
from dptune.privacy.selection_law import SelectionLaw

FORMAT = 1
FILE = "certificate.jsonl"
#: The ledger of the winner's score, beside the certificate, where the score is noisy.
SCORE_LEDGER = "score.jsonl"
#: What a search may tell beside its winner, as in a run's header.
_TELEMETRY = ("research", "private")
#: What a score is computed from: held-out units, the training units, or public records.
SCORED_ON = ("held_out", "train", "public")


@dataclass(frozen=True)
class ScoreTerms:
    """How candidates are scored. Public.

    Attributes:
        on: one of ``SCORED_ON``.
        clip: bound in nats of what one unit adds to the score's sum; 0 where the score is public.
        noise_multiplier: standard deviation of the score's noise over ``clip``; 0 where the score is public.
        units: number of units that are scored.
    """

    on: str
    clip: float
    noise_multiplier: float
    units: int

    def __post_init__(self) -> None:
        if self.on not in SCORED_ON:
            raise ConfigError("search.score.on", f"{self.on!r} is unknown", fix=f"use {' or '.join(SCORED_ON)}")
        for name in ("clip", "noise_multiplier"):
            value = getattr(self, name)
            if self.on != "public" and not (_is_number(value) and value > 0):
                raise ConfigError(f"search.score.{name}", f"{value!r} is not positive", fix="give a number above 0")
        if self.on == "public" and (self.clip, self.noise_multiplier) != (0, 0):
            raise ConfigError("search.score", "is public and has noise", fix="restore the certificate")
        _check_whole("search.score.units", self.units)

    @property
    def release(self) -> Release | None:
        """The release of one noisy score; None where the score is public."""
        if self.on == "public":
            return None
        return Release(1.0, self.noise_multiplier, statistics=("score",))


@dataclass(frozen=True)
class Winner:
    """The candidate that left.

    Attributes:
        options: its configuration, a point of the space.
        adapter_sha256: digest of its weights' file.
        ledger_chain: chain of its ledger.
        score: its noisy or public score.
    """

    options: Mapping[str, Any]
    adapter_sha256: str
    ledger_chain: str
    score: float

    def __post_init__(self) -> None:
        digests = (self.adapter_sha256, self.ledger_chain)
        if not isinstance(self.options, Mapping) or not all(isinstance(one, str) for one in digests):
            raise ConfigError("winner", "is not described by options and digests", fix="restore the certificate")
        if not _is_number(self.score):
            raise ConfigError("winner.score", f"{self.score!r} is not a finite number", fix="restore the certificate")


@dataclass(frozen=True)
class SearchCertificate:
    """A search's first line, and its outcome. Public.

    Attributes:
        id: id of the search, which its candidates' ledgers name.
        epsilon: the budget.
        unit, units, data, telemetry: as in a run's header.
        law: of the number of candidates.
        bound: the bound that was asked for, one of ``selection.BOUNDS``.
        space: the distribution that candidates are drawn from, in JSON types.
        kinds: for each kind of candidate its chance and the releases of its training.
        score: how candidates are scored.
        commitment: SHA-256 of a secret salt and the secret plan.
        leaks: reasons that void the guarantee.
        plugins: code outside dptune that bounds, noises or steers.
        winner: None while the search runs, and where every candidate failed.
        complete: whether the outcome is written.
    """

    id: str
    epsilon: float
    delta: float
    unit: str
    units: int
    data: str
    telemetry: str
    law: SelectionLaw
    bound: Bound
    space: list[dict[str, Any]]
    kinds: tuple[tuple[float, tuple[tuple[Release, int], ...]], ...]
    score: ScoreTerms
    commitment: str
    leaks: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    format: int = FORMAT
    winner: Winner | None = field(default=None, compare=False)
    complete: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not (_is_number(self.epsilon) and self.epsilon > 0):
            raise ConfigError("epsilon", f"{self.epsilon!r} is not a positive number", fix="give the budget")
        if self.bound not in BOUNDS:
            raise ConfigError("search.bound", f"{self.bound!r} is unknown", fix=f"use {' or '.join(BOUNDS)}")
        for name in ("id", "unit", "data", "commitment"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(name, f"{value!r} is not a text", fix="restore the certificate")
        _check_whole("units", self.units)
        if self.telemetry not in _TELEMETRY:
            raise ConfigError("telemetry", f"{self.telemetry!r} is unknown", fix=f"use {' or '.join(_TELEMETRY)}")
        if not self.kinds:
            raise ConfigError("search.space", "holds no kind of candidate", fix="restore the certificate")
        if self.format != FORMAT:
            raise ConfigError("format", f"{self.format!r} is not {FORMAT}", fix="verify it with a newer dptune")

    @property
    def all_leaks(self) -> tuple[str, ...]:
        """``leaks``, and that of a search whose candidates an earlier version dealt into groups by rank."""
        by_rank = any(release.dealt_by == "rank" for _, kind in self.kinds for release, _ in kind)
        return (*self.leaks, DEALT_BY_RANK) if by_rank else self.leaks

    @property
    def certified(self) -> float:
        """The epsilon of the whole search at ``delta``, from this object alone; infinite with leaks."""
        return math.inf if self.all_leaks else self.epsilon_by(self.bound)

    def epsilon_by(self, bound: Bound) -> float:
        """The epsilon by one of the bounds, leaks ignored.

        A unit is on one side of the split, so the training side and the held-out side cost the dearer of the two. A
        held-out unit moves a candidate's noisy score by at most ``clip``, and nothing else.
        """
        return _search_epsilon(self.kinds, self.score, self.law, self.delta, bound)

    @property
    def one_candidate(self) -> float:
        """The largest epsilon of one candidate's training alone. No guarantee for the winner."""
        return max(
            dearest(composition_of(kind), lambda part: smallest_epsilon(part, self.delta)) for _, kind in self.kinds
        )

    def to_dict(self) -> dict[str, Any]:
        """The first line in plain JSON types."""
        shown = {item.name: getattr(self, item.name) for item in fields(self) if item.compare}
        kinds = [[weight, [[release.to_dict(), count] for release, count in kind]] for weight, kind in self.kinds]
        return shown | {
            "law": self.law.to_dict(),
            "kinds": kinds,
            "score": asdict(self.score),
            "leaks": list(self.leaks),
            "plugins": list(self.plugins),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchCertificate:
        """Make a certificate of what ``to_dict`` gave. Raises: ConfigError, or what a wrong type raises."""
        known = {item.name for item in fields(cls) if item.compare}
        if set(data) != known:
            raise ConfigError("certificate", f"keys {sorted(set(data) ^ known)} missing or unknown", fix="restore it")
        return cls(
            **{
                **data,
                "law": SelectionLaw.from_dict(data["law"]),
                "kinds": tuple(
                    (float(weight), tuple((Release.from_dict(release), _count(count)) for release, count in kind))
                    for weight, kind in data["kinds"]
                ),
                "score": ScoreTerms(**data["score"]),
                "leaks": tuple(data["leaks"]),
                "plugins": tuple(data["plugins"]),
            }
        )


@lru_cache(maxsize=64)  # a certificate is priced by its card, its page and its reader
def _search_epsilon(
    kinds: tuple[tuple[float, tuple[tuple[Release, int], ...]], ...],
    score: ScoreTerms,
    law: SelectionLaw,
    delta: float,
    bound: Bound,
) -> float:
    own = score.release if score.on == "train" else None
    training = average(
        [(weight, profile_of(composition_of(kind) + Counter([own] if own else []))) for weight, kind in kinds]
    )
    held_out = [gaussian_profile(1 / score.noise_multiplier)] if score.on == "held_out" else []
    return max(selection_epsilon(side, law, delta, bound) for side in (training, *held_out))


def composition_of(kind: tuple[tuple[Release, int], ...]) -> Composition:
    """The releases of a kind's training."""
    total: Composition = Counter()
    for release, count in kind:
        total[release] += count
    return total


def exceeds(composition: Composition, kind: tuple[tuple[Release, int], ...]) -> bool:
    """Whether a candidate released anything that its kind does not hold.

    Names of statistics are left out where no bound reads them: a controller names its own once the run has started.
    Raw inputs are not: they are leaks.
    """
    return bool(_named_alike(composition) - _named_alike(composition_of(kind)))


def _named_alike(composition: Composition) -> Composition:
    total: Composition = Counter()
    for release, count in composition.items():
        statistics = release.statistics if release.norm == "l1" else ("gradient sum",)
        total[replace(release, statistics=statistics, claims=())] += count
    return total


def write_certificate(path: Path, certificate: SearchCertificate) -> None:
    """Write the first line, durable before anything runs. Raises: LedgerError if the file exists."""
    line, _ = seal(encode({"kind": "search", **certificate.to_dict()}), GENESIS)
    _append(path, line, os.O_CREAT | os.O_EXCL)


def discard_torn_line(path: Path) -> None:
    """Cut off a last line whose write was cut off, as ledgers do; a file without a whole line goes.

    Nothing relies on such a line: no candidate runs before the first is durable, and no winner leaves before the last.
    """
    content = path.read_bytes() if path.exists() else b"\n"
    whole = content.rfind(b"\n") + 1
    if not whole:
        path.unlink()
    elif whole < len(content):
        os.truncate(path, whole)
    else:
        return
    fsync_directory(path.parent)


def write_winner(path: Path, winner: Winner | None) -> None:
    """Write the last line. Raises: LedgerError for a certificate that has one already."""
    contents, chain = _read(path)
    if contents.complete:
        raise LedgerError(f"{path}: the search has ended. Fix: leave it as it is; its cost is final.")
    outcome = {"options": None} if winner is None else asdict(winner)
    line, _ = seal(encode({"kind": "winner", **outcome}), chain)
    _append(path, line, 0)


def read_certificate(path: Path) -> SearchCertificate:
    """Read and check a certificate. Raises: LedgerError naming the line that is torn, edited or out of place."""
    return _read(path)[0]


def _read(path: Path) -> tuple[SearchCertificate, str]:
    if other := not_a_file(path):
        raise LedgerError(f"{path}: is {other}, not a file. Fix: check the path.")
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror}). Fix: check the path.") from None
    found: SearchCertificate | None = None
    chain = GENESIS
    for number, raw in enumerate(lines, start=1):
        record, chain = _check_line(path, number, raw, chain)
        kind = record.pop("kind", None)
        try:
            if number == 1 and kind == "search":
                found = SearchCertificate.from_dict(record)
            elif number == 2 and kind == "winner" and found is not None:
                winner = None if record == {"options": None} else Winner(**record)
                found = replace(found, winner=winner, complete=True)
            else:
                raise ConfigError("certificate", f"line {kind!r} is out of place", fix="restore it")
        except (ConfigError, ArithmeticError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise _bad(path, number, f"does not describe a search: {error}") from None
    if found is None:
        raise LedgerError(f"{path}, line 1: the certificate is empty. Fix: restore it.")
    return found, chain


def _check_line(path: Path, number: int, raw: bytes, chain: str) -> tuple[dict[str, Any], str]:
    if not raw.endswith(b"\n"):
        raise _bad(path, number, "is torn: the write was cut off")
    try:
        record = json.loads(raw)
        stated = record.pop("chain")
        line, chain = seal(encode(record), chain)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise _bad(path, number, "is torn, or is not a line of a certificate") from None
    if stated != chain or raw != line:
        raise _bad(path, number, "was edited: its checksum does not follow from the lines above")
    return record, chain


def _append(path: Path, line: bytes, flags: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o600)
    except FileExistsError:
        raise LedgerError(f"{path}: exists already. Fix: resume its search.") from None
    length = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("short write: is the disk full?")
        os.fsync(descriptor)
    except OSError as error:
        os.ftruncate(descriptor, length)
        raise LedgerError(f"{path}: cannot be written ({error.strerror or error}). Fix: free space.") from error
    finally:
        os.close(descriptor)
    fsync_directory(path.parent)


def commitment_of(salt: bytes, plan: Mapping[str, Any]) -> str:
    """SHA-256 of a secret salt and the plan: it fixes the draws, and whoever gets both can check them."""
    return hashlib.sha256(salt + encode(plan).encode()).hexdigest()


def _bad(path: Path, number: int, reason: str) -> LedgerError:
    return LedgerError(f"{path}, line {number}: {reason}. Fix: restore the file; no epsilon can be computed from it.")


def _count(value: Any) -> int:
    _check_whole("kinds", value)
    return int(value)


def _check_whole(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(name, f"{value!r} is not a whole number above 0", fix="restore the certificate")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
