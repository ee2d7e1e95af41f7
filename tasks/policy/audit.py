"""White-box audits of DP policy gradient's mean update, with each kind of critic at noise multiplier z = 1."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from dptune.audit.games.updates import audit_updates
from dptune.audit.verdict import CHECKS, certificate, judged
from dptune.core.errors import DptuneError
from dptune.core.files import read_json, write_json
from dptune.policy.method import Dppg
from dptune.privacy.entropy import OsEntropy
from tasks.paths import POLICY
from tasks.settings.policy import PolicySettings

#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 1
_CONFIDENCE = 0.95
#: Probability that sound updates are accused, over all checks of all critics.
FALSE_ALARMS = 0.001
#: (critic, number of updates). A critic that was trained on users shows it in the second update only.
ATTACKED = (("private", 1), ("none", 1), ("public", 2), ("raw", 2))


def audits(settings: PolicySettings) -> list[dict[str, Any]]:
    """Audit each kind of critic, or read the results from a file if version and settings are still the same.

    Returns: a row of figures for each kind of critic.

    Raises: DptuneError if an attack shows more than is certified; for sound updates with probability ``FALSE_ALARMS``.
    """
    file, key = POLICY / "audits.json", audit_key(settings)
    if file.exists() and (content := read_json(file))["key"] == key:
        rows: list[dict[str, Any]] = content["rows"]
        return rows
    rows = [_audit(critic, updates, settings) for critic, updates in ATTACKED] if settings.audit_trials else []
    for row in rows:
        if row["accusation"]:
            raise DptuneError(f"critic {row['critic']}: {row['accusation']}. Fix: find the error.")
    write_json(file, {"key": key, "rows": rows})
    return rows


def audit_key(settings: PolicySettings) -> str:
    """Key of the results, which changes with the version of these audits and with the settings that decide them."""
    return f"{VERSION} {settings.audit_trials} {settings.delta}"


def _audit(critic: Any, updates: int, settings: PolicySettings) -> dict[str, Any]:
    method = Dppg(noise_multiplier=1.0, critic=critic)
    trials = (
        settings.audit_trials if updates == 1 else min(settings.audit_trials, max(1000, settings.audit_trials // 10))
    )
    result = audit_updates(
        method,
        trials=trials,
        confidence=_CONFIDENCE,
        delta=settings.delta,
        entropy=OsEntropy(),
        updates=updates,
    )
    certified = certificate(method.planned(updates), settings.delta)
    verdict = judged(result, certified, FALSE_ALARMS, checks=CHECKS * len(ATTACKED))
    row = {**asdict(method), **result.to_dict(), **verdict.to_dict(), **method.price(settings.delta).to_dict()}
    return {key: str(value) if value == math.inf else value for key, value in row.items()} | {
        "accusation": verdict.accusation
    }
