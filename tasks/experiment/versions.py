"""Versions of the parts of a cell: they are part of its name, and are raised by hand (see ``tasks.identity``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dptune import step_settings, update_rule
from dptune.mechanisms.registry import part_names, part_version
from dptune.privacy import accountants, entropy
from dptune.update_rule import UpdateRule

#: Parts that are one for all cells, and the modules whose ``VERSION`` is theirs.
SHARED = {"loop": step_settings, "sampler": entropy, "accountant": accountants}


def versions_of(mechanism: str, options: Mapping[str, Any], rule: UpdateRule) -> dict[str, int]:
    """The version of each part that a cell uses, by names such as "loop" and "clipper flat".

    >>> versions_of("nonprivate", {}, UpdateRule(average="ema"))["average ema"]
    1
    """
    parts = part_names(mechanism, options)
    unused = {"accountant"} if parts["noise"] == "none" else set()
    rules = (f"optimizer {rule.optimizer}", f"average {rule.average}")
    return (
        {part: int(module.VERSION) for part, module in SHARED.items() if part not in unused}
        | {f"{kind} {name}": part_version(kind, name) for kind, name in parts.items()}
        | {part: update_rule.VERSIONS[part] for part in rules if part in update_rule.VERSIONS}  # not "average none"
    )


def changes(earlier: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What changed between the versions of two cells, such as "clipper quantile 1 -> 2"; empty if nothing did."""
    if not earlier and now:
        return "it was named by a digest of the code, before parts had versions"
    moved = sorted(part for part in earlier.keys() | now.keys() if earlier.get(part, 1) != now.get(part, 1))
    return ", ".join(f"{part} {earlier.get(part, 1)} -> {now.get(part, 1)}" for part in moved)
