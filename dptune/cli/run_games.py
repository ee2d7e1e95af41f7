"""``dptune audit --whole-run``: games on the twin of a run, beside what all its releases are certified for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dptune.cli.console import notice, show
from dptune.core.digits import at_least, at_most

if TYPE_CHECKING:
    from dptune.mechanisms.mechanism import Mechanism
    from dptune.mechanisms.planning import Schedule


def audit_whole_run(
    mechanism: Mechanism, schedule: Schedule, games: int, confidence: float, false_alarms: float, as_json: bool
) -> None:
    """Play whole runs, print the figures and the curve; status 1 and a sentence if the certificate is refuted."""
    from dptune.audit.run_twin import audit_twin
    from dptune.cli.figures import of_schedule

    found = audit_twin(mechanism, schedule, games=games, confidence=confidence, false_alarms=false_alarms)
    figures = of_schedule(mechanism, schedule) | found.to_dict()
    show(figures | {"curve": list(found.curve)} if as_json else figures, as_json)
    if not as_json:
        for row in found.curve:
            if row["epsilon"] and not (row["delta_in_shown"] or row["delta_out_shown"]):
                continue  # nothing was shown so far out
            parts = [
                f"unit {world} {at_least(row[f'delta_{world}_shown'] or 0.0)} of "
                f"{'no finite delta' if (most := row[f'delta_{world}_certified']) is None else at_most(most)}"
                for world in ("in", "out")
            ]
            typer.echo(f"delta shown of certified at epsilon {row['epsilon']:g}: {', '.join(parts)}")
    if found.claim_refuted:
        notice("warning", f"{found.claim_refuted}.")
    if found.accusation:
        notice("Accused", f"{found.accusation}.")
        raise typer.Exit(1)
