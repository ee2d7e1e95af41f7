"""Claims of mechanisms and the truth: claimed, proved and audited epsilons of the same runs, in rows and in words.

A mechanism's claim is by the accountant of its paper. The ledgers price plain DP-SGD by the central limit (Bu et al.
2020), as RLDP's paper does, which claims too little. Those who use DP-SGD claim what Renyi DP proves (Mironov 2017):
``as_users_claim`` shows that in its place, unless a run was calibrated by the central limit. It also names the
accountant, because claims by different accountants do not compare.

The words are what a certified epsilon covers, and the verdict's last two parts: what is proved, and what attacks
found and how far they could have seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dptune.core.digits import at_least, at_most, percent_at_most, shown_above
from dptune.core.settings import RECORD
from dptune.job.delivery.privacy_section import covered, has_guarantee, why_not
from dptune.privacy.accountants import Epsilons, rdp_epsilon
from dptune.privacy.accounting.mixture_figures import has_limit, limit_epsilon
from dptune.privacy.ledger_file import read_ledger
from tasks.audit.registry import bounds
from tasks.charts.seed_groups import CERTIFIED, PUBLISHED, Result, SeedGroup, distinct_epsilons
from tasks.experiment.cell_list import is_plain
from tasks.report.numbers import listing

#: Deltas of the certified curve: from the least that a chart shows to one at which most runs have epsilon 0.
_DELTAS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.9)
#: Marks of a claim's accountant: the central limit, which is no bound, and Renyi DP.
BY_CLT, BY_RDP = "CLT", "RDP"
#: What a cell's certified epsilon covers, by its telemetry: of an adapter, and of a model's own weights.
GUARANTEE, _OF_OWN_WEIGHTS = (
    {telemetry: covered(telemetry, subject) for telemetry in ("research", "private")}
    for subject in ("the adapter", "the trained weights")
)
Audit = Mapping[str, Any]
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


def proved(results: Sequence[Result]) -> str:
    """The certified epsilons, their unit and delta, and the mechanisms without one, which stand in backticks."""
    certified = [one for one in results if math.isfinite(float(one[CERTIFIED]))]
    none = dict.fromkeys(f"`{one['mechanism']}`" for one in results if math.isinf(float(one[CERTIFIED])))
    without = f" No guarantee: {', '.join(none)}." if none else ""
    if not certified:
        return f"Nothing is proved.{without}"
    epsilons = listing([at_most(max(float(one[CERTIFIED]) for one in budget)) for budget in _budgets(certified)], "or")
    deltas = ", ".join(sorted({at_most(one["delta"]) for one in certified}))
    units = " or ".join(dict.fromkeys(f"one {one['unit']}" for one in certified))
    runs = f"{len(certified)} runs, each" if len(certified) > 1 else "One run:"
    return f"{runs} ε ≤ {epsilons} at δ = {deltas} about {units}.{without}"


def meaning(results: Sequence[Result], curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """What the proofs bound: each budget's largest share of right guesses; empty if no epsilon is finite.

    From (epsilon, delta), the two errors of a test add up to at least ``2 (1 - delta) / (1 + e**epsilon)``: add the two
    lines of theorem 2.1 of Kairouz, Oh and Viswanath (2015). So from even odds a share of at most
    ``(e**epsilon + delta) / (1 + e**epsilon)`` of guesses is right, by every point of a certified curve.

    Args:
        curves: certified curves by label, as ``privacy_curve``; a run without one has its own epsilon and delta.
    """
    finite = [one for one in results if math.isfinite(float(one[CERTIFIED]))]
    if not finite:
        return ""
    shares = [
        f"{percent_at_most(max(_right(one, curves) for one in budget))} % "
        f"(ε = {at_most(max(float(one[CERTIFIED]) for one in budget))})"
        for budget in _budgets(finite)
    ]
    units = " or ".join(dict.fromkeys(f"one {one['unit']}" for one in finite))
    return (
        f"Whoever sees such a run's adapter and starts from even odds guesses whether {units} took part, and can be "
        f"right in at most {listing(shares, 'or')} of cases."
    )


def _right(result: Result, curves: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """The largest share of right guesses that a run's certified curve allows."""
    own = (float(result[CERTIFIED]), float(result["delta"]))
    odds = [(math.exp(-epsilon), delta) for epsilon, delta in [own, *curves.get(str(result["label"]), ())]]
    return min((1 + delta * small) / (1 + small) for small, delta in odds)


def of_one_person(results: Sequence[Result]) -> str:
    """What a proof about one record says of a person with several; empty where another unit is protected."""
    if not any(math.isfinite(float(one[CERTIFIED])) and one["unit"] == RECORD for one in results):
        return ""
    more = "A person with k records may lose k times that epsilon, at a larger delta"
    return f"{more}: `data.unit` names a column of persons to protect."


def by_clt(results: Sequence[Result]) -> dict[str, str]:
    """What the central limit would claim at each budget, by mechanism, where it is not what is claimed."""
    found: dict[str, list[float]] = {}
    for result in results:
        if "epsilon_clt" in result:
            found.setdefault(f"`{result['mechanism']}`", []).append(float(result["epsilon_clt"]))
    return {name: listing(list(map(at_most, distinct_epsilons(own)))) for name, own in found.items()}


def _budgets(certified: Sequence[Result]) -> list[list[Result]]:
    """The results of each budget, the smallest first. Calibration leaves a little of a budget, so that they differ."""
    least = distinct_epsilons([float(one[CERTIFIED]) for one in certified])
    ends = zip(least, [*least[1:], math.inf], strict=True)
    return [[one for one in certified if low <= float(one[CERTIFIED]) < end] for low, end in ends]


def attacked(audits: Sequence[Audit]) -> list[str]:
    """Violations; else what each kind of attack shows beside what is proved, in a sentence each."""
    wrong = sum(len(audit["violations"]) for audit in audits)
    if wrong:
        return [f"{wrong} violation{'s' if wrong > 1 else ''}: an attack shows more than is proved."]
    if not audits:
        return ["Nothing was attacked."]
    proofs = [audit for audit in audits if math.isfinite(float(audit[CERTIFIED]))]
    steps = [step for audit in proofs if (step := audit.get("step")) and math.isfinite(float(step["mu_certified"]))]
    games = [audit["whole_run"] for audit in audits if "whole_run" in audit]
    whole = [one for one in games if math.isfinite(float(one.get("mu_certified", math.inf)))]  # not in earlier versions
    refuted = dict.fromkeys(f"`{one['mechanism']}`" for one in games if one["claim_refuted"])
    return [
        f"{len(audits)} audit{'s' if len(audits) > 1 else ''}, and no proof is refuted.",
        *([f"One step: attacks show {_closest(steps)}."] if steps else []),
        *(["Neither a step nor a whole run was attacked (`audit.step_trials: 0`)."] if not (steps or games) else []),
        *([f"Whole runs, on twins with made-up records: {_closest(whole)}."] if whole else []),
        *([f"The claimed epsilon of {', '.join(refuted)} is refuted there."] if refuted else []),
        _by_secrets(audits, proofs),
    ]


def _by_secrets(audits: Sequence[Audit], proofs: Sequence[Audit]) -> str:
    """What secrets that were planted in the runs themselves show, and whether that is evidence."""
    shown = [(audit, value) for audit in audits if (value := shown_epsilon(audit)) is not None]
    if not shown:
        return "No secret was planted in the runs themselves."
    able = [refutable for audit in proofs if (refutable := refutable_epsilon(audit)) is not None]
    most = ""
    if len(able) == len(proofs) > 0:  # audits of earlier versions do not say it
        most = (
            f" If all were found, {sum(refutable > 0 for refutable in able)} of {len(proofs)} proofs would be refuted."
        )
    held = [value for audit, value in shown if audit in proofs]
    others = [value for audit, value in shown if audit not in proofs]
    if not any(value > 0 for _, value in shown):
        weak = ", even where nothing is proved: too weak an attack to be evidence" if others else ""
        return f"Planted secrets show nothing, ε ≥ 0 on every run{weak}.{most}"
    places = (held, "where a proof holds"), (others, "where nothing is proved")
    parts = [
        f"ε ≥ {at_least(max(values))} {where}" + (f" ({best})" if (best := _best_of(values, "largest")) else "")
        for values, where in places
        if values
    ]
    return f"Planted secrets show {' and '.join(parts)}.{most}"


def _closest(several: Sequence[Mapping[str, Any]]) -> str:
    """How near attacks come to what is proved of the run where they come nearest, and what chance has to do with it."""
    best = max(several, key=lambda one: float(one["mu_audited"]) / float(one["mu_certified"]))
    shown, stated = float(best["mu_audited"]), float(best["mu_certified"])
    picked = f", {of_several}" if (of_several := _best_of(several, "closest")) else ""
    if shown <= stated:
        part = math.floor(100 * shown / stated)
        return f"{part} % of the distance that is proved (μ {at_least(shown)} of {at_most(stated)}{picked})"
    texts = shown_above(shown, stated)
    some = f"one such bound in {round(1 / (1 - float(best['confidence'])))}" if "confidence" in best else "such a bound"
    return (
        f"more than the distance that is proved (μ {texts[0]} of {texts[1]}{picked}), as {some} may be, by chance; the "
        "test that would accuse the proof does not"
    )


def _best_of(several: Sequence[Any], what: str) -> str:
    """Words that say from how many bounds this one was picked: the largest of several is above the truth oftener."""
    return f"the {what} of {len(several)}" if len(several) > 1 else ""


def shared_guarantees(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sentences that open the page of these cells; of none where no cell has a certified epsilon."""
    if not any(has_guarantee(float(one["epsilon_certified"])) for one in results):
        return ["No guarantee: no cell has a certified epsilon."]
    return sorted({_opening(one) for one in results})


def own_conditions(result: Mapping[str, Any]) -> str:
    """What a cell's guarantee says beyond the sentence that opens its page."""
    return str(result["guarantee"]).removeprefix(_opening(result)).strip()


def _opening(result: Mapping[str, Any]) -> str:
    own = _OF_OWN_WEIGHTS[str(result["telemetry"])]
    return own if str(result.get("guarantee", "")).startswith(own) else GUARANTEE[str(result["telemetry"])]


def guarantee(
    telemetry: str,
    prices: Epsilons,
    inherited: bool = False,
    together: tuple[float, float] | None = None,
    plugins: tuple[str, ...] = (),
    *,
    train: str = "lora",
) -> str:
    """A few sentences on what a run's certified epsilon covers.

    Args:
        inherited: whether the run started from another run's hyper-policy.
        together: epsilon and delta of this run together with those of its cell that were set aside; None without any.
        plugins: the plug-ins that hold code of the mechanism.
        train: what trained, as the header of the ledger names it.
    """
    if not has_guarantee(prices.certified):
        return f"No guarantee: {why_not(prices.leaks)}."
    more = " It includes what the run of its hyper-policy spent." if inherited else ""
    if plugins:
        more += f" It holds if plug-ins do what they say: {', '.join(plugins)}."
    if together:
        more += (
            " Runs of this cell that were set aside released about the same records: with them, "
            f"epsilon is {at_most(together[0], 4)} and delta {at_most(together[1])} (basic composition)."
        )
    return (GUARANTEE if train == "lora" else _OF_OWN_WEIGHTS)[telemetry] + more
