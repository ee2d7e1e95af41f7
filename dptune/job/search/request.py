"""What a search was asked for, by which it is recognised: in its folder, and in its secret plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dptune.job.preparation import PreparedRun
from dptune.job.search.kinds import versions_of_kinds
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import FREE, as_written_now
from dptune.job.versions import VERSIONS

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
