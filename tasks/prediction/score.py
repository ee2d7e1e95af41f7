"""Scores a part of the held-out records on one ensemble, in a process of its own.

python -m tasks.prediction.score data/ensembles/<ensemble>/scores-<digest>/scoring.json PART PARTS [--device cuda:0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dptune.core.errors import ConfigError
from tasks.prediction.scores import ScoringPlan, score_part
from tasks.stage import run_command


def main(
    plan: Annotated[Path, typer.Argument(help="scoring.json, which the flow writes")],
    part: Annotated[int, typer.Argument(help="number of the part, from 0")],
    parts: Annotated[int, typer.Argument(help="number of parts")],
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Score every PARTS-th record, but for those that are scored already."""
    try:
        read = ScoringPlan.model_validate_json(plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(str(plan), "is not a plan of scores", fix="run python -m flows.prediction") from None
    score_part(read, part, parts, device)


if __name__ == "__main__":
    run_command(main)
