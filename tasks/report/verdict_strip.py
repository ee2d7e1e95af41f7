"""The verdict's last two parts: what is proved of an experiment's runs, and what attacks on them found.

What to use is ``answer``'s. Each sentence says what it rests on, and how far the attacks could have seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dptune.core.digits import at_least, at_most
from tasks.charts.seed_groups import CERTIFIED, Result, distinct_epsilons
from tasks.report.claims import refutable_epsilon, shown_epsilon

Audit = Mapping[str, Any]


def proved(results: Sequence[Result]) -> str:
    """The certified epsilons, their unit and delta, and the mechanisms without one, which stand in backticks."""
    certified = [one for one in results if math.isfinite(float(one[CERTIFIED]))]
    none = dict.fromkeys(f"`{one['mechanism']}`" for one in results if math.isinf(float(one[CERTIFIED])))
    without = f" No guarantee: {', '.join(none)}." if none else ""
    if not certified:
        return f"Nothing is proved.{without}"
    # Each budget's largest, rounded up: no run may have more than the page says.
    least = distinct_epsilons([float(one[CERTIFIED]) for one in certified])
    ends = [*least[1:], math.inf]
    most = [
        max(float(one[CERTIFIED]) for one in certified if low <= float(one[CERTIFIED]) < end)
        for low, end in zip(least, ends, strict=True)
    ]
    shown = [at_most(one) for one in most]
    epsilons = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
    deltas = ", ".join(sorted({at_most(one["delta"]) for one in certified}))
    units = " or ".join(dict.fromkeys(f"one {one['unit']}" for one in certified))
    runs = f"{len(certified)} runs, each" if len(certified) > 1 else "One run:"
    return f"{runs} ε ≤ {epsilons} at δ = {deltas} about {units}.{without}"


def meaning(results: Sequence[Result]) -> str:
    """What the certified epsilons bound: the largest share of right guesses; empty if none is finite.

    From (epsilon, delta), the two errors of a test add up to at least ``2 (1 - delta) / (1 + e**epsilon)``: add the two
    lines of theorem 2.1 of Kairouz, Oh and Viswanath (2015). So from even odds a share of at most
    ``(e**epsilon + delta) / (1 + e**epsilon)`` of guesses is right.
    """
    finite = [one for one in results if math.isfinite(float(one[CERTIFIED]))]
    if not finite:
        return ""
    odds = [(math.exp(-float(one[CERTIFIED])), float(one["delta"])) for one in finite]
    share = max((1 + delta * small) / (1 + small) for small, delta in odds)
    units = " or ".join(dict.fromkeys(f"one {one['unit']}" for one in finite))
    return (
        f"Whoever sees such a run's adapter and starts from even odds guesses whether {units} took part, and is right "
        f"at most {at_most(100 * share)} % of the time."
    )


def attacked(audits: Sequence[Audit]) -> str:
    """Violations; else what attacks on whole runs show, and how many proofs they could have refuted."""
    wrong = sum(len(audit["violations"]) for audit in audits)
    if wrong:
        return f"{wrong} violation{'s' if wrong > 1 else ''}: an attack shows more than is proved."
    if not audits:
        return "Nothing was attacked."
    said = [f"{len(audits)} audit{'s' if len(audits) > 1 else ''}, and no proof is refuted."]
    proofs = [audit for audit in audits if math.isfinite(float(audit[CERTIFIED]))]
    shown = [(audit, value) for audit in audits if (value := shown_epsilon(audit)) is not None]
    if not shown:
        said.append("None attacks a whole run.")
    else:
        able = [refutable for audit in proofs if (refutable := refutable_epsilon(audit)) is not None]
        if len(able) == len(proofs) > 0:  # audits of earlier versions do not say it
            refuted = sum(refutable > 0 for refutable in able)
            said.append(f"Attacks on the whole run could have refuted {refuted} of {len(proofs)} proofs.")
        held = [value for audit, value in shown if audit in proofs]
        others = [value for audit, value in shown if audit not in proofs]
        places = (held, "where a proof holds"), (others, "where nothing is proved")
        parts = [
            f"ε ≥ {at_least(max(values))} {where}{_best_of(values, 'largest')}" for values, where in places if values
        ]
        said.append(f"They show {' and '.join(parts)}.")
    steps = [step for audit in proofs if (step := audit.get("step")) and math.isfinite(float(step["mu_certified"]))]
    if steps:
        best = max(steps, key=lambda step: float(step["mu_audited"]) / float(step["mu_certified"]))
        found = f"μ ≥ {at_least(best['mu_audited'])} of {at_most(best['mu_certified'])} proved"
        said.append(f"On one step they show {found}{_best_of(steps, 'closest')}.")
    games = [audit["whole_run"] for audit in audits if "whole_run" in audit]
    if claims := dict.fromkeys(f"`{one['mechanism']}`" for one in games if one["claim_refuted"]):
        said.append(f"Games on twins of their runs refute what the papers claim of {', '.join(claims)}.")
    return " ".join(said)


def _best_of(several: Sequence[Any], what: str) -> str:
    """Of how many bounds one was picked: the largest of several exceeds the truth oftener than each by itself."""
    return f" (the {what} of {len(several)})" if len(several) > 1 else ""
