"""The secret plan of a search: how many candidates there are and which, drawn once, before the first run.

A search that is killed goes on with the same plan: a number drawn again, or a candidate left out because it was slow or
failed, would change the law that is priced. ``asked_of`` is what a search is asked for, by which it is recognised in
its folder and in its plan.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dptune.core.errors import DptuneError
from dptune.core.files import read_json, write_json
from dptune.job.preparation import PreparedRun
from dptune.job.search.kinds import CandidateKind, versions_of_kinds
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import FREE, as_written_now
from dptune.job.versions import VERSIONS
from dptune.privacy.certificate import commitment_of
from dptune.privacy.entropy import Entropy

FILE = "plan.json"


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
        write_json(folder / FILE, asdict(self))

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

        return read_json(folder / FILE, make)


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
