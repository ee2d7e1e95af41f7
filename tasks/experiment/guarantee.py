"""What a cell's certified epsilon covers, in words."""

from __future__ import annotations

from dptune.digits import at_most

GUARANTEE = {
    "research": "The guarantee covers the adapter, NOT the curves and metrics computed from private records.",
    "private": (
        "The guarantee covers the adapter and all published values (releases, public data, an auditor's own secrets), "
        "NOT the times that Prefect's database, logs and files keep, which stay with the owner."
    ),
}


def guarantee(
    telemetry: str,
    leaks: tuple[str, ...],
    inherited: bool = False,
    together: tuple[float, float] | None = None,
    plugins: tuple[str, ...] = (),
) -> str:
    """A few sentences on what a run's certified epsilon covers.

    Args:
        inherited: whether the run started from another run's hyper-policy.
        together: epsilon and delta of this run together with those of its cell that were set aside; None without any.
        plugins: the plug-ins that hold code of the mechanism.
    """
    if leaks:
        return f"No guarantee: {'; '.join(leaks)}."
    more = " It includes what the run of its hyper-policy spent." if inherited else ""
    if plugins:
        more += f" It holds if plug-ins do what they say: {', '.join(plugins)}."
    if together:
        more += (
            " Runs of this cell that were set aside released about the same records: with them, "
            f"epsilon is {at_most(together[0], 4)} and delta {at_most(together[1])} (basic composition)."
        )
    return GUARANTEE[telemetry] + more
