"""Compares each mechanism's claim with the truth: claimed, proved and audited epsilons of the same runs.

A mechanism's claim is by the accountant of its paper. The ledgers price plain DP-SGD by the central limit (Bu et al.
2020), as RLDP's paper does, which claims too little. Those who use DP-SGD claim what Renyi DP proves (Mironov 2017):
``as_users_claim`` shows that in its place, unless a run was calibrated by the central limit. It also names the
accountant, because claims by different accountants do not compare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dptune.privacy.accountants import rdp_epsilon
from dptune.privacy.accounting.mixture_figures import has_limit, limit_epsilon
from dptune.privacy.ledger_file import read_ledger
from tasks.audit.registry import bounds
from tasks.charts.seed_groups import PUBLISHED, Result, SeedGroup
from tasks.experiment.cell_list import is_plain

#: Deltas of the certified curve: from the least that a chart shows to one at which most runs have epsilon 0.
_DELTAS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.4, 0.9)
#: Marks of a claim's accountant: the central limit, which is no bound, and Renyi DP.
BY_CLT, BY_RDP = "CLT", "RDP"
_NOTHING = 1e-9  # an accountant's rounding of epsilon 0


@dataclass(frozen=True)
class Claim:
    """One mechanism at one budget.

    Attributes:
        group: the mechanism's cells, one for each seed.
        limit: epsilon in the limit of high dimension, for noise that is not Gaussian: a diagnostic, no bound.
        shown: the largest lower bound on a run's epsilon that its planted canaries prove; None without audit.
        step: the white-box audit of one private step that shows most; None without it.
        refutable: the largest certified epsilon that the canaries could have refuted, 0 if none; None where no audit
            says it.
    """

    group: SeedGroup
    limit: float | None
    shown: float | None
    step: dict[str, Any] | None
    refutable: float | None = None


def claims(
    groups: Sequence[SeedGroup], audits: Sequence[dict[str, Any]], limits: Mapping[str, float | None]
) -> list[Claim]:
    """A row for every group that has a budget, ordered by budget, then by certified epsilon.

    Args:
        audits: audits of some or all cells.
        limits: the result of ``limit_of`` by the label of the cell; cells without one are left out.
    """
    made = {audit["label"]: audit for audit in audits}
    rows = [_claim(group, made, limits) for group in groups if group.results[0]["budget_epsilon"] is not None]
    return sorted(rows, key=_order)


def shown_epsilon(audit: Mapping[str, Any]) -> float | None:
    """The largest lower bound on a run's epsilon that its planted canaries prove; None without such an attack."""
    found = [float(audit[attack]["epsilon_audited"]) for attack in bounds() if attack in audit]
    return max(found, default=None)


def refutable_epsilon(audit: Mapping[str, Any]) -> float | None:
    """The largest certified epsilon that such an attack could have refuted; 0 if not even the run's own, and None where
    the audit does not say.
    """
    name = "epsilon_refutable"
    return max((float(audit[attack][name]) for attack in bounds() if name in audit.get(attack, {})), default=None)


def limit_of(ledger: Path) -> float | None:
    """Epsilon of a ledger's releases in the limit of high dimension; None if their noise has no such limit."""
    contents = read_ledger(ledger)
    return limit_epsilon(contents.composition, contents.header.delta) if has_limit(contents.composition) else None


def privacy_curve(ledger: Path) -> list[tuple[float, float]]:
    """Certified epsilon of a ledger's releases at several deltas, as pairs; empty where nothing is certified.

    Each epsilon is the accountant's own, so the run's true curve lies below every point. Epsilons fall; the last pair
    is of the smallest of these deltas at which epsilon is 0.
    """
    contents = read_ledger(ledger)
    if not math.isfinite(contents.epsilons.certified):
        return []
    deltas = sorted({*_DELTAS, contents.header.delta})
    pairs = [(replace(contents.header, delta=delta).price(contents.composition).certified, delta) for delta in deltas]
    zero = min((delta for epsilon, delta in pairs if epsilon <= _NOTHING), default=1.0)
    return [pair for pair in pairs if math.isfinite(pair[0]) and pair[1] <= zero]


def as_users_claim(result: Result, ledger: Path) -> Result:
    """The result with the accountant of its claim, and of a run of plain DP-SGD with the claim of Renyi DP.

    A run that was calibrated by its published accountant keeps it, as the paper does that compares with DP-SGD so.

    Returns: a copy in which ``claimed_by`` is ``BY_CLT`` or ``BY_RDP``; it is left out where the claim is infinite or
        by a paper's own accountant. For plain DP-SGD ``epsilon_published`` is Renyi DP's, of its learning curve too,
        and ``epsilon_clt`` is the central limit's.
    """
    contents = read_ledger(ledger)
    if contents.header.published_accountant != "gdp_clt" or math.isinf(float(result[PUBLISHED])):
        return result
    if result["accounting"] == "published" or not is_plain(result) or len(contents.composition) != 1:
        return result | {"claimed_by": BY_CLT}
    (release,) = contents.composition
    points = [
        point | {PUBLISHED: rdp_epsilon(Counter({release: point["releases"]}), contents.header.delta)}
        if point["releases"]
        else point
        for point in result["history"]
    ]
    claimed = rdp_epsilon(contents.composition, contents.header.delta)
    return result | {PUBLISHED: claimed, "claimed_by": BY_RDP, "epsilon_clt": result[PUBLISHED], "history": points}


def audit_as_users_claim(audit: Mapping[str, Any], result: Result) -> dict[str, Any]:
    """The audit of such a run with the same claim, which a game that refutes the central limit's does not refute."""
    if "epsilon_clt" not in result:
        return dict(audit)
    games = {"whole_run": audit["whole_run"] | {"claim_refuted": None}} if "whole_run" in audit else {}
    return {**audit, PUBLISHED: result[PUBLISHED], **games}


def _order(claim: Claim) -> tuple[float, float]:
    first = claim.group.results[0]
    return first["budget_epsilon"], float(first["epsilon_certified"])


def _claim(group: SeedGroup, audits: Mapping[str, dict[str, Any]], limits: Mapping[str, float | None]) -> Claim:
    first = group.results[0]
    mine = [audits[result["label"]] for result in group.results if result["label"] in audits]
    shown = [found for audit in mine if (found := shown_epsilon(audit)) is not None]
    steps = [audit["step"] for audit in mine if "step" in audit]
    return Claim(
        group=group,
        limit=limits.get(first["label"]),
        shown=max(shown, default=None),
        refutable=max((one for audit in mine if (one := refutable_epsilon(audit)) is not None), default=None),
        step=max(steps, key=lambda step: float(step["epsilon_audited"]), default=None),
    )
