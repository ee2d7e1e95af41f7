"""Versions of the parts that a run uses, raised by hand where a change moves a released number.

A run that was begun with one version does not go on with another: its later releases would not be what its first were.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptune.core import settings
from dptune.core.errors import ConfigError
from dptune.core.settings import UpdateRule
from dptune.mechanisms.registry import part_names, part_version
from dptune.privacy import accountants, entropy
from dptune.privacy.run_folder import fresh_start, said_within

_log = logging.getLogger(__name__)

#: Key of the versions among the settings that a run's folder keeps.
VERSIONS = "versions"
#: Parts that are one for all runs, and the modules whose ``VERSION`` is theirs.
SHARED = {"loop": settings, "sampler": entropy, "accountant": accountants}


def versions_of(mechanism: str, options: Mapping[str, Any], rule: UpdateRule) -> dict[str, int]:
    """The version of each part that a run uses, by names such as "loop" and "clipper flat".

    >>> versions_of("nonprivate", {}, UpdateRule(average="ema"))["average ema"]
    1
    """
    parts = part_names(mechanism, options)
    unused = {"accountant"} if parts["noise"] == "none" else set()
    rules = (f"optimizer {rule.optimizer}", f"average {rule.average}")
    return (
        {part: int(module.VERSION) for part, module in SHARED.items() if part not in unused}
        | {f"{kind} {name}": part_version(kind, name) for kind, name in parts.items()}
        | {part: settings.VERSIONS[part] for part in rules if part in settings.VERSIONS}  # not "average none"
    )


def raised_versions(earlier: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What changed between the versions of two runs, such as "clipper quantile 1 -> 2"; empty if nothing did.

    A part that one of them does not name has version 1: a new part, or a run of before versions were written down.
    """
    moved = sorted(part for part in earlier.keys() | now.keys() if earlier.get(part, 1) != now.get(part, 1))
    return ", ".join(f"{part} {earlier.get(part, 1)} -> {now.get(part, 1)}" for part in moved)


def check_versions(known: Mapping[str, Any], now: Mapping[str, int], folder: Path, *, ended: bool) -> None:
    """Check that a run or search goes on with the versions of parts that it was begun with.

    Args:
        known: settings that its folder keeps.
        ended: whether nothing more is released; then what has changed is only logged.

    Raises: ConfigError naming each part with another version.
    """
    if not (moved := raised_versions(known.get(VERSIONS, {}), now)):
        return
    problem = f"{folder} was begun with another version of dptune, whose releases are not this one's ({moved})"
    if not ended:
        afresh = f"{fresh_start(folder)}{said_within(folder)}"
        raise ConfigError("out", problem, fix=f"go on with that version, give another folder, or {afresh}")
    _log.warning("%s; it had ended, and is loaded as it is", problem)
