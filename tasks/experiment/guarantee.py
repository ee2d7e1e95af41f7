"""Guarantee of a cell: what its certified epsilon covers, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dptune.core.digits import at_most
from dptune.job.delivery.card import covered, has_guarantee, why_not
from dptune.privacy.accountants import Epsilons

#: What a cell's certified epsilon covers, by its telemetry: of an adapter, and of a model's own weights.
GUARANTEE, _OF_OWN_WEIGHTS = (
    {telemetry: covered(telemetry, subject) for telemetry in ("research", "private")}
    for subject in ("the adapter", "the trained weights")
)


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
