"""A run's ledger, new or resumed: a run that died goes on under the schedule it began with, or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dptune.errors import ConfigError
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger, LedgerError, RunHeader
from dptune.privacy.release import Composition

LEDGER = "ledger.jsonl"


def open_ledger(
    directory: Path, header: RunHeader, planned: Composition, schedule: Mapping[str, Any], entropy: Entropy
) -> Ledger:
    """The ledger of the run in ``directory``.

    Args:
        schedule: whatever decides who is met in which update, plain JSON types. Public; the ledger keeps its digest.
        entropy: of the run's noise, whose leaks the header must declare.

    Raises: ConfigError, BudgetError; LedgerError for a ledger of another run or schedule, whose users are numbered
        otherwise: some would be met twice.
    """
    if entropy.leaks != header.leaks:
        raise ConfigError("header.leaks", "does not declare the run's entropy", fix="give it entropy.leaks")
    digest = hashlib.sha256(json.dumps(schedule, sort_keys=True).encode()).hexdigest()
    path, header = directory / LEDGER, replace(header, schedule=digest)
    if not path.exists():
        return Ledger.create(path, header, planned)
    ledger = Ledger.resume(path, planned)
    if replace(header, run_id=ledger.header.run_id) != ledger.header:
        ledger.close()
        raise LedgerError(f"{path}: was started with another schedule. Fix: use another directory.")
    return ledger
