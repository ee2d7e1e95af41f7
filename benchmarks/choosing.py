"""What a private search finds, beside what choosing for free would: ``python -m benchmarks.choosing [--repeats N]``.

On the records, the public model and the space of params.yaml; `dvc repro split validation pretrain` makes them. Each
repeat draws ten points of the space and trains each at the noise of a single run; the best of them by held-out records
is an oracle's choice, which no epsilon counts. Beside it: a search with a noisy score, a rehearsal on public records,
and ``static`` at two fixed rates. All meet the same budget but the oracle. Coins and noise are new in every repeat.
Figures go to data/benchmarks/choosing-N.json, and a repeat that is there is not run again. ``--twin FILE`` rehearses
the same points on the records of another cohort, which stand for public ones of the very kind:
data/splits/train.parquet of a checkout with another ``data.synthetic.seed``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scipy.stats import spearmanr

from dptune.core.errors import DivergedError
from dptune.core.files import write_json
from dptune.core.settings import RECORD
from dptune.job.base_model import Base, open_base
from dptune.job.preparation import PreparedRun, calibrated_schedule, prepare_sides
from dptune.job.run import Tuned, figures_of, run
from dptune.job.search.kinds import settings_of
from dptune.job.search.rehearsal import rehearse_space
from dptune.job.search.search import search
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.job.suggest import read_public, trial
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.spent_budgets.register import Register
from dptune.records.parquet_file import read_records
from dptune.records.reading.read import Sides
from dptune.records.reading.source import RecordSource
from tasks.paths import DATA
from tasks.search.request import model_of, tune_settings
from tasks.search.run import about_records, public_source, read_sides
from tasks.settings.params import Settings, load_settings

#: Fixed settings: the rate that papers' code has, and the one that another cohort's trials found.
FIXED = {"static at 0.005": 0.005, "static at 0.02": 0.02}
_RADIUS, _BATCH = 0.1, 64.0


class Study:
    """What every run of a repeat shares: records, base model and settings of params.yaml, and a folder for the runs."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        _, model = model_of(settings)
        self.asked: SearchSettings = settings.search.asked
        self.chosen: TuneSettings = replace(
            tune_settings(settings, str(about_records()["label"]), None), telemetry="research"
        )
        self.base: Base = open_base(model.source, self.chosen, model.revision)
        self.sides: Sides = read_sides(settings)
        self.unit = None if settings.data.unit == RECORD else settings.data.unit
        self.folder, self._runs = folder, 0

    def held_out(self, settings: TuneSettings) -> float:
        """Held-out perplexity after one run at these settings; infinite if it diverged."""
        self._runs += 1
        out, prepared = self.folder / f"run-{self._runs}", self.prepared(settings)
        try:
            return after(run(prepared, out, Register(out / "spent.jsonl")), prepared)
        except DivergedError:
            return math.inf

    def prepared(self, settings: TuneSettings) -> PreparedRun:
        """A run at these settings on the study's records, checked and calibrated."""
        return prepare_sides(self.sides, self.base, settings, self.unit)


def after(tuned: Tuned, prepared: PreparedRun) -> float:
    """Perplexity of held-out records under a finished run's model."""
    return figures_of(replace(prepared, public=None), tuned.model)["eval_perplexity"]


def repeat(study: Study, points: int) -> dict[str, Any]:
    """All figures of one repeat."""
    figures: dict[str, Any] = {}
    for name, rate in FIXED.items():
        options = {**study.chosen.options, "max_grad_norm": _RADIUS}
        fixed = replace(
            study.chosen, mechanism="static", learning_rate=rate, expected_batch_size=_BATCH, options=options
        )
        figures[name] = study.held_out(fixed)
    figures["points"] = [point(study) for _ in range(points)]
    figures["best of ten, uncounted"] = min(one["held_out"] for one in figures["points"])
    prepared = study.prepared(study.chosen)
    found = search(
        prepared, replace(study.asked, again=True), study.folder / "search", Register(study.folder / "s.jsonl")
    )
    figures["search"] = after(found, prepared)
    figures["search_epsilon"] = found.epsilons.certified
    rehearsed = rehearse_space(public_source(study.sides), study.base, study.chosen, study.asked, len(prepared.units))
    figures["rehearsal"] = study.held_out(rehearsed.settings)
    return figures


def point(study: Study) -> dict[str, Any]:
    """Draw settings from the space, and measure them on public records (a rehearsal) and on held-out private ones."""
    _, configuration = study.asked.space.draw(OsEntropy())
    settings = settings_of(study.chosen, configuration)
    found = rehearsal_at(study, configuration, public_source(study.sides).public)
    return {"configuration": configuration, "public": found, "held_out": study.held_out(settings)}


def rehearsal_at(study: Study, configuration: Mapping[str, Any], rows: Any) -> float:
    """Perplexity of held-out rows of nobody after the run at one point, on the others."""
    settings = settings_of(study.chosen, configuration)
    units = len(study.prepared(study.chosen).units)
    schedule, calibrated = calibrated_schedule(settings, study.base, units)
    records = read_public(RecordSource(rows), study.base, settings)
    return trial(study.base, study.base.load(), settings, schedule, calibrated, records, schedule.learning_rate)


def with_twin(study: Study, path: Path, twin: Path) -> None:
    """Add to each point of a repeat's file what the twin says of it."""
    rows = [{"text": text} for text in read_records(twin).text.to_pylist()]
    found = json.loads(path.read_text(encoding="utf-8"))
    for one in found["points"]:
        if "twin" not in one:
            one["twin"] = rehearsal_at(study, one["configuration"], rows)
    write_json(path, found)


def summary(found: list[dict[str, Any]]) -> list[str]:
    """Means and spreads over repeats, shares of the gap to the oracle, and how far rehearsals rank as held-outs do."""
    lines = []
    for name in (*FIXED, "best of ten, uncounted", "search", "rehearsal"):
        values = [one[name] for one in found]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        each = ", ".join(f"{value:.3f}" for value in values)
        lines.append(f"{name:24} {statistics.mean(values):.3f} +- {spread:.3f}   ({each})")
    for start in FIXED:
        gap = statistics.mean(one[start] - one["best of ten, uncounted"] for one in found)
        for name in ("search", "rehearsal"):
            gained = statistics.mean(one[start] - one[name] for one in found)
            lines.append(
                f"{name} has {gained / gap:.2f} of the gap of {gap:.3f} between {start} and the uncounted best"
            )
    for kind in ("public", "twin"):
        known = [one["points"] for one in found if all(kind in point for point in one["points"])]
        ranks = [spearmanr(*zip(*[(p[kind], p["held_out"]) for p in points], strict=True)) for points in known]
        each = ", ".join(f"{float(rank.statistic):.2f}" for rank in ranks)
        chosen = ", ".join(f"{min(points, key=lambda p: p[kind])['held_out']:.3f}" for points in known)
        lines.append(f"{kind}: rank correlation with held-out perplexities {each}; its choice has {chosen}")
    return lines


def main() -> None:
    """Run the repeats that are missing, and print the summary."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--twin", type=Path)
    given = parser.parse_args()
    settings, found = load_settings(), []
    for number in range(given.repeats):
        path = DATA / "benchmarks" / f"choosing-{number}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with TemporaryDirectory() as folder:
                write_json(path, repeat(Study(settings, Path(folder)), given.points))
        if given.twin is not None:
            with_twin(Study(settings, Path()), path, given.twin)
        found.append(json.loads(path.read_text(encoding="utf-8")))
        print("\n".join(summary(found)), flush=True)


if __name__ == "__main__":
    main()
