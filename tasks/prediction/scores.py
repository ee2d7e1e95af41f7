"""Scores of one ensemble, a file for each record: processes share the records, and a kill costs one of them.

python -m tasks.prediction.scores data/ensembles/<ensemble>/scores-<digest>/scoring.json PART PARTS [--device cuda:0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.core.declarations import plain
from dptune.core.errors import DataError
from dptune.core.files import jsonable, private_directory, read_json, write_json
from dptune.prediction.ensemble import load_adapters, read_manifest
from dptune.prediction.predictor import RecordScore, score_records
from dptune.training.data import Tokens
from tasks.identity import name_digest
from tasks.paths import EVAL
from tasks.prediction.ensembles import EnsemblePlan, base_of, scored_protocols, tokens_of
from tasks.settings.params import Settings
from tasks.settings.prediction import Prediction
from tasks.settings.strict import StrictModel, read_plan
from tasks.stage import run_command

SCORING = "scoring.json"
#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 2
_SEED = 0  # of the samples that a published protocol is scored with; public


class ScoringPlan(StrictModel):
    """Everything that decides an ensemble's scores; the ensemble's own plan names the data. Public."""

    ensemble: EnsemblePlan
    prediction: Prediction
    delta: float
    version: int = 1

    @property
    def directory(self) -> Path:
        """The folder of the records' scores, in the ensemble's. Private."""
        return self.ensemble.directory / f"scores-{name_digest(plain(self))}"

    def file(self, number: int) -> Path:
        """The score of one record."""
        return self.directory / f"record-{number:05d}.json"


def scoring_plan(plan: EnsemblePlan, settings: Settings) -> ScoringPlan:
    """Plan the scoring of an ensemble."""
    return ScoringPlan(ensemble=plan, prediction=settings.prediction, delta=settings.experiment.delta, version=VERSION)


def open_scoring(plan: ScoringPlan) -> Path:
    """Make the folder of the scores. Returns: the plan's file."""
    file = private_directory(plan.directory) / SCORING
    write_json(file, plan.model_dump(mode="json"))
    return file


def held_out_tokens(plan: EnsemblePlan, tokenizer: Any, most: int) -> Tokens:
    """The first held-out records of which a token counts that another one precedes.

    Raises: DataError if there is none.
    """
    tokens = tokens_of(plan, EVAL, tokenizer)
    counted = [row for row in tokens.rows[:most] if (row[1:] >= 0).any()]
    if not counted:
        problem = f"none of its first {most} records has a token that follows another one, so nothing can be scored"
        raise DataError(problem, fix="raise prediction.records, or give longer records", file=EVAL)
    return replace(tokens, rows=counted)


def score_part(plan: ScoringPlan, part: int, parts: int, device: str) -> None:
    """Score every ``parts``-th record from number ``part`` that has no score yet."""
    base, ensemble = base_of(plan.ensemble, device), plan.ensemble
    tokens = held_out_tokens(ensemble, base.tokenizer, plan.prediction.records)
    chosen = [number for number in range(part, len(tokens.rows), parts) if not plan.file(number).exists()]
    if not chosen:
        return
    model = base.load()
    adapters = load_adapters(ensemble.directory, read_manifest(ensemble.directory), model, base.device)
    protocols = scored_protocols(plan.prediction, ensemble.models, plan.delta)
    label = f"scoring answers, {ensemble.models} models"
    for number, score in score_records(model, adapters, tokens, protocols, _SEED, chosen, label):
        write_json(plan.file(number), _written(score))


def read_scores(plan: ScoringPlan, count: int) -> list[RecordScore]:
    """The scores of the first ``count`` records.

    Raises: DataError if one is missing or cannot be read.
    """
    return [_read(plan.file(number)) for number in range(count)]


def _written(score: RecordScore) -> dict[str, Any]:
    return {key: jsonable(value) if isinstance(value, Mapping) else value for key, value in asdict(score).items()} | (
        jsonable({"average": score.average})
    )


def _read(file: Path) -> RecordScore:
    try:
        stored = read_json(file)
        laws = {key: _numbers(stored[key]) for key in ("losses", "sampled", "private")}
        return RecordScore(tokens=int(stored["tokens"]), average=float(stored["average"]), **laws)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "once the file is gone, python -m flows.prediction scores this record again"
        raise DataError(f"holds no score of a record ({error})", fix=fix, file=file) from None


def _numbers(stored: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in stored.items()}


def main(
    plan: Annotated[Path, typer.Argument(help="scoring.json, which the flow writes")],
    part: Annotated[int, typer.Argument(help="number of the part, from 0")],
    parts: Annotated[int, typer.Argument(help="number of parts")],
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Score every PARTS-th record, but for those that are scored already."""
    score_part(read_plan(ScoringPlan, plan, "prediction"), part, parts, device)


if __name__ == "__main__":
    run_command(main)
