"""Tunes one shard of an ensemble in a process of its own: shards share neither weights nor random numbers.

python -m tasks.prediction.tune data/ensembles/<ensemble>/plan.json SHARD [--device cuda:0]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dptune.core.errors import ConfigError
from tasks.prediction.ensembles import EnsemblePlan, tune
from tasks.stage import run_command


def main(
    plan: Annotated[Path, typer.Argument(help="plan.json of the ensemble, which the flow writes")],
    shard: Annotated[int, typer.Argument(help="number of the shard, from 0")],
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Tune the adapter of one shard, unless it is tuned already."""
    try:
        read = EnsemblePlan.model_validate_json(plan.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(str(plan), "is not a plan of an ensemble", fix="run python -m flows.prediction") from None
    tune(read, shard, device)


if __name__ == "__main__":
    run_command(main)
