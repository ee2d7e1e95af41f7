"""A run's ledger, new or resumed: a run that died goes on under the schedule it began with, or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptune.files import write_json
from dptune.privacy.ledger import Ledger, LedgerError, RunHeader
from dptune.privacy.release import Composition

LEDGER, SCHEDULE = "ledger.jsonl", "schedule.json"


def open_ledger(directory: Path, header: RunHeader, planned: Composition, schedule: Mapping[str, Any]) -> Ledger:
    """The ledger of the run in ``directory``.

    Args:
        schedule: whatever decides who is met in which update, plain JSON types. Public.

    Raises: BudgetError; LedgerError for a ledger of another schedule, whose users are numbered otherwise: some would be
        met twice.
    """
    path = directory / LEDGER
    told = json.loads(json.dumps({"schedule": schedule, "run": {**header.to_dict(), "run_id": ""}}))
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / SCHEDULE, told)
        return Ledger.create(path, header, planned)
    if json.loads((directory / SCHEDULE).read_text(encoding="utf-8")) != told:
        raise LedgerError(f"{path}: was started with another schedule. Fix: use another directory.")
    return Ledger.resume(path, planned)
