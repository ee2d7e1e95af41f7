"""White-box audits of the mean update: each kind of critic at z = 1, the smallest of the studies' questions."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from dptune.audit.updates import audit_updates
from dptune.audit.verdict import CHECKS, certificate, judged
from dptune.errors import DptuneError
from dptune.files import write_json
from dptune.policy.method import Dppg
from dptune.privacy.entropy import OsEntropy
from tasks.identity import code_digest
from tasks.paths import POLICY
from tasks.settings.policy import PolicySettings

_CONFIDENCE = 0.95
#: Chance that sound updates fail the study, over all checks of all critics.
FALSE_ALARMS = 0.001
#: (critic, updates): what a critic learned of users shows itself in the update after.
ATTACKED = (("private", 1), ("none", 1), ("public", 2), ("raw", 2))


def audits(settings: PolicySettings) -> list[dict[str, Any]]:
    """A row for each kind of critic; kept while code and trials stay the same.

    Raises: DptuneError if an attack shows more than is certified; sound updates do so with chance ``FALSE_ALARMS``.
    """
    kept, key = POLICY / "audits.json", audit_key(settings)
    if kept.exists() and (content := json.loads(kept.read_text(encoding="utf-8")))["key"] == key:
        rows: list[dict[str, Any]] = content["rows"]
        return rows
    rows = [_audit(critic, updates, settings) for critic, updates in ATTACKED] if settings.audit_trials else []
    for row in rows:
        if row["accusation"]:
            raise DptuneError(f"critic {row['critic']}: {row['accusation']}. Fix: find the error.")
    write_json(kept, {"key": key, "rows": rows})
    return rows


def audit_key(settings: PolicySettings) -> str:
    """Changes with whatever decides the rows: the code of updates and of their audits, and the settings."""
    return f"{code_digest('policy.audit')} {settings.audit_trials} {settings.delta}"


def _audit(critic: Any, updates: int, settings: PolicySettings) -> dict[str, Any]:
    method = Dppg(noise_multiplier=1.0, critic=critic)
    trials = (
        settings.audit_trials if updates == 1 else min(settings.audit_trials, max(1000, settings.audit_trials // 10))
    )
    found = audit_updates(
        method,
        trials=trials,
        confidence=_CONFIDENCE,
        delta=settings.delta,
        entropy=OsEntropy(),
        updates=updates,
    )
    certified = certificate(method.planned(updates), settings.delta)
    verdict = judged(found, certified, FALSE_ALARMS, checks=CHECKS * len(ATTACKED))
    row = {**asdict(method), **found.to_dict(), **verdict.to_dict(), **method.price(settings.delta).to_dict()}
    return {key: str(value) if value == math.inf else value for key, value in row.items()} | {
        "accusation": verdict.accusation
    }
