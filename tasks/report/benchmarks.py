"""Benchmarks' page: scores as papers print them beside what was measured and certified here.

python -m tasks.report.benchmarks [FOLDER ...] [--experiment NAME ...] [--out data/report/benchmarks.md]

Each folder holds folders of finished runs (data/runs); of an experiment, those count that its last protocol made.
Answers of PMixED are read from data/prediction/results.json, and from data/reports of studies that ran as experiments
of DVC.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import read_json, write_text
from dptune.core.settings import RECORD
from dptune.job.result import RunResult
from dptune.mechanisms.planning import Schedule, calibrated, planned
from dptune.mechanisms.registry import build
from dptune.privacy.run_folder import RunFolder
from tasks.charts.seed_groups import Result, SeedGroup, over_seeds, perplexity_metric
from tasks.paths import ANSWERS, REPORT, REPORTS, RUNS
from tasks.report.tables import ScoreTable, score_table
from tasks.settings.experiment import RULE
from tasks.stage import run_command

CLAIMED = Path(__file__).with_name("claimed.yaml")
PAGE = REPORT / "benchmarks.md"
_PREFIX, _NONE = "benchmark ", "-"
#: The beginning of the real table's label (``dptune.records.diabetes.sources``), and what ``claimed.yaml`` calls it.
_REAL_TABLE, _DIABETES = "UCI Diabetes", "diabetes"
#: Settings of a cell that one experiment may vary.
_VARIED = ("model_name", "model", "mechanism", "options", "epsilon", "seed", "accounting", "plugins", "versions")
#: Parts that all cells of an experiment use; the versions of others are their mechanism's.
_SHARED_PARTS = ("loop", "sampler")
_OPENING = """# Claimed beside certified

You get, for each benchmark, the scores that papers print at the epsilon that they claim, and below them the scores
that were measured here at the epsilon that the ledger of each run certifies. Written by
`python -m tasks.report.benchmarks` from the runs' results.

**Which numbers may be compared.** Models differ, and so do trained weights (papers train all, here adapters) and some
implementations of metrics. So an absolute score here cannot be compared with a paper's. Orderings of
mechanisms, and shares of the score of training without privacy, may be compared.

Papers shuffle their batches, which their accountants and dptune's take for Poisson samples. So nothing certifies the
papers' own runs: the epsilon beside them is the one that their noise would certify under Poisson sampling.
"""


def page(studies: Sequence[FinishedStudy], answers: Sequence[dict[str, Any]] = ()) -> str:
    """The page in Markdown.

    Args:
        studies: finished runs by experiment; those on other data than benchmarks are left out.
        answers: contents of results.json of private prediction.
    """
    claimed = yaml.safe_load(CLAIMED.read_text(encoding="utf-8"))
    parts = [_OPENING]
    ran = {name for study in studies for name in _benchmarks_of(study)} - {""}
    for name in [*claimed, *sorted(ran - claimed.keys())]:
        printed = claimed.get(name, {})
        mine = [study for study in studies if name in _benchmarks_of(study)]
        replied = [one for one in answers if benchmark_of(str(one["data"])) == name]
        parts += [f"\n## {name}\n", *(_printed(printed) if printed else ["No score of a paper is kept for it.\n"])]
        wider = printed.get("wider")
        measured = [line for study in mine for line in _measured(study, wider)]
        parts += measured or ["### Measured here\n", "Nothing was run.\n"]
        parts += _answers(replied)
    return "\n".join(parts).rstrip() + "\n"


def _benchmarks_of(study: FinishedStudy) -> set[str]:
    return {benchmark_of(str(one["data"])) for one in study.results}


def benchmark_of(label: str) -> str:
    """The benchmark, or the real table, that a label of data names, as ``claimed.yaml`` does; empty for other data."""
    if label.startswith(_REAL_TABLE):
        return _DIABETES
    if not label.startswith(_PREFIX):
        return ""
    name, _, details = label.removeprefix(_PREFIX).rstrip(")").partition(" (")
    task = next((part.removeprefix("task ") for part in details.split(", ") if part.startswith("task ")), "")
    return f"{name} {task}".strip()


def _printed(claimed: dict[str, Any]) -> Iterator[str]:
    """The papers' numbers: a line for each model, mechanism and claimed epsilon, and what their texts say of them."""
    yield "### As printed by the papers\n"
    for one in (claimed, *claimed.get("further", ())):
        yield from _printed_table(one)
    if "claims" in claimed:
        keys = ("said", "printed", "where", "tables")
        rows = [[claim[key] for key in keys] for claim in claimed["claims"]]
        yield from _table(["the text says", "printed", "section", "its tables"], rows)
    yield "".join(f"- {note}\n" for note in claimed["notes"])


def _printed_table(claimed: dict[str, Any]) -> Iterator[str]:
    shares = any(float(key) == math.inf for row in claimed["rows"] for key in row["scores"])
    yield from _table(
        [
            "source",
            "model",
            "mechanism",
            "claimed ε",
            "certified ε, if it had been sampled by Poisson",
            *claimed["metrics"],
            *([_share_name("constant" in claimed)] if shares else []),
        ],
        [
            [
                row["source"],
                row["model"],
                row["mechanism"],
                at_most(epsilon, 4),
                _certified(row, epsilon),
                *(f"{value:.10g}" for value in values),
                *([_share_printed(row, values, claimed)] if shares else []),
            ]
            for row in claimed["rows"]
            for epsilon, values in sorted(row["scores"].items(), key=lambda pair: float(pair[0]))
        ],
    )


def _certified(row: dict[str, Any], claimed: float) -> str:
    """What the noise of a row would certify: one figure, or one for each epsilon that the row claims."""
    if float(claimed) == math.inf:
        return "∞"
    found = row.get("certified_if_poisson")
    found = found.get(claimed) if isinstance(found, dict) else found
    return "not known" if found is None else at_most(found, 4)


def _share_printed(row: dict[str, Any], values: Sequence[float], claimed: dict[str, Any]) -> str:
    """The first metric over that of the same table's run without privacy, which another row may hold.

    Of accuracies, what each gains over a constant answer.
    """
    ends = [
        one["scores"][key]
        for one in (row, *claimed["rows"])
        for key in one["scores"]
        if float(key) == math.inf and (one["source"], one["model"]) == (row["source"], row["model"])
    ]
    constant = claimed.get("constant", 0.0)
    return f"{(values[0] - constant) / (ends[0][0] - constant):.2f}" if ends else _NONE


def _share_name(of_gain: bool) -> str:
    return "share of the gain over a constant answer" if of_gain else "share of non-private"


def _measured(study: FinishedStudy, wider: dict[str, Any] | None) -> Iterator[str]:
    """What was measured: a line for each model, mechanism, budget and the epsilon that its noise was set by."""
    results = study.results
    yield f"### Measured here: {study.name}\n"
    metric = perplexity_metric(results)
    groups = over_seeds(results, metric)
    scores = score_table(groups)
    names = list(scores.names) if scores else []
    first = names[0] if names else "perplexity"
    constant = float(results[0]["after"].get("eval_largest_class", 0.0)) if first == "accuracy" else 0.0
    values = _values(groups, scores)
    head = ["model", "mechanism", "ε set by", "budget", "claimed ε", "certified ε", *names, "perplexity"]
    ordered = sorted(groups, key=lambda one: (str(one.first["model"]), one.certified, one.mean))
    share = [f"{_share_name(constant > 0)} ({first})"] if names else []
    last = ["perplexity, ratio", "seeds", "steps", "q", "noise", "seconds"]
    yield from _table([*head, *share, *last], [_line(group, values, groups, constant) for group in ordered])
    facts = [*_facts(study, scores), *(_prices_of_units(results, wider) if wider else ())]
    yield "".join(f"- {fact}\n" for fact in facts)


def _values(groups: Sequence[SeedGroup], scores: ScoreTable | None) -> dict[int, list[tuple[float, float | None]]]:
    """Mean and deviation of each score, and of perplexity at the end, by the group."""
    of_scores = {id(row.group): list(row.values) for row in scores.rows} if scores else {}
    return {
        id(one): [*of_scores.get(id(one), []), (one.mean, one.spread if len(one.values) > 1 else None)]
        for one in groups
    }


def _line(
    group: SeedGroup,
    values: dict[int, list[tuple[float, float | None]]],
    all_of: Sequence[SeedGroup],
    constant: float,
) -> list[str]:
    first, own = group.first, values[id(group)]
    plain = next((one for one in all_of if one.nonprivate and one.first["model"] == first["model"]), None)
    best = values[id(plain)] if plain else [(math.nan, None)]
    share, ratio = (own[0][0] - constant) / (best[0][0] - constant), own[-1][0] / best[-1][0]
    seconds = [float(result["seconds"]) for result in group.results if result["seconds"]]
    return [
        str(first["model"]),
        group.mechanism,
        str(first["accounting"]).replace("_", " ") if first["budget_epsilon"] is not None else _NONE,
        _NONE if first["budget_epsilon"] is None else f"{first['budget_epsilon']:g}",
        at_most(first["epsilon_published"], 4),
        at_most(group.certified, 4),
        *(_with_deviation(*value) for value in own),
        *([f"{share:.2f}" if math.isfinite(share) else _NONE] if len(own) > 1 else []),
        f"{ratio:.2f}" if math.isfinite(ratio) else _NONE,
        str(len(group.results)),
        str(first["planned_releases"]),
        f"{float(first['sample_rate']):.4g}",
        f"{float(first['noise_multiplier']):.4g}",
        f"{sum(seconds) / len(seconds):.0f}" if seconds else _NONE,
    ]


def _facts(study: FinishedStudy, scores: ScoreTable | None) -> Iterator[str]:
    results, first = study.results, study.results[0]
    units = sorted({f"one {one['unit']}, of {one['units']} in training" for one in results})
    sampled = f"{first.get('sampler', 'Poisson')} sampling"  # a result names other samplers alone
    yield f"Unit of privacy: {'; '.join(units)}. Add or remove one; delta {at_most(first['delta'])}; {sampled}."
    most = first.get("final_records")
    which = f"at most {most} held-out records, evenly spread over the file" if most else "all held-out records"
    yield f"Perplexity is of {which}; where labels are learned, exp of their mean loss. Lower is better."
    yield from scores.notes if scores else ()
    several = max(len(one.results) for one in over_seeds(results, perplexity_metric(results)))
    if several < 3:
        yield f"Only {several} seed{'s' if several > 1 else ''}: too few to tell mechanisms apart."
    if study.left_out:
        yield f"{study.left_out} finished runs of this experiment with earlier settings are left out."


def _prices_of_units(results: Sequence[dict[str, Any]], wider: dict[str, Any]) -> Iterator[str]:
    """What a unit that protects more would cost: the noise of `static` at each budget, for the same steps and batch."""
    first = results[0]
    batch, steps, delta = first["sample_rate"] * first["units"], int(first["planned_releases"]), float(first["delta"])
    budgets = sorted({one["budget_epsilon"] for one in results if one["accounting"] == "certified"} - {None})
    if first["unit"] != RECORD or batch > wider["units"]:
        return
    for epsilon in budgets:
        own, other = (
            _noise(epsilon, Schedule(batch / units, steps, delta)) for units in (first["units"], wider["units"])
        )
        yield (
            f"Both units' prices: at epsilon {epsilon:g}, these steps and this batch `static` needs noise {own} "
            f"where a unit is a row, and {other} where it is {wider['unit']} ({wider['units']} in the training file)."
        )


def _noise(epsilon: float, schedule: Schedule) -> str:
    found = calibrated(lambda noise: build("static", {"noise_multiplier": noise}), epsilon, schedule, "certified")
    return at_most(next(iter(planned(found.mechanism, schedule))).noise_multiplier, 4)


def _answers(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows of private prediction on the same held-out records."""
    for one in found:
        rows = [row for row in one["rows"] if "perplexity_pooled" in row]
        yield f"### Answers of PMixED, and models on the same records: {one['name']}\n"
        yield from _table(
            ["answers of", "unit", "certified ε", "perplexity, pooled", "perplexity, mean of blocks"],
            [
                [
                    str(row["label"]),
                    str(row["unit"]),
                    at_most(row["epsilon_certified"], 4),
                    _digits(float(row["perplexity_pooled"])),
                    _digits(float(row["perplexity_per_block"])),
                ]
                for row in sorted(rows, key=lambda row: float(row["perplexity_pooled"]))
            ],
        )
        yield f"{one['records']} held-out records; delta {at_most(one['delta'])}.\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def _digits(value: float) -> str:
    return f"{value:.4g}"


def _with_deviation(mean: float, deviation: float | None) -> str:
    return _digits(mean) + (f" ± {deviation:.2g}" if deviation is not None else "")


@dataclass(frozen=True)
class FinishedStudy:
    """The finished runs of an experiment.

    Attributes:
        name: the experiment's.
        results: of the runs that have the settings of the last one to finish; mechanisms, budgets and seeds vary.
        left_out: number of runs of that name with other settings, which an earlier version of the experiment made.
    """

    name: str
    results: tuple[Result, ...]
    left_out: int = 0


def read_studies(folders: Sequence[Path]) -> list[FinishedStudy]:
    """The studies whose finished runs lie in folders of runs, by name. Raises: ConfigError for what is no folder."""
    found: dict[str, list[_Run]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("folder", f"{folder} is not a folder", fix="give data/runs of a study")
        for path in sorted(folder.iterdir()):
            run = RunFolder(path)
            if run.is_finished and run.result.exists() and run.cell.exists():
                one = _Run(read_json(run.cell), RunResult.read(run.result).to_dict(), run.result.stat().st_mtime)
                found.setdefault(str(one.cell["experiment"]), []).append(one)
    return [_study(name, runs) for name, runs in sorted(found.items())]


@dataclass(frozen=True)
class _Run:
    cell: dict[str, Any]
    result: Result
    finished: float


def _study(name: str, runs: Sequence[_Run]) -> FinishedStudy:
    """Runs of another protocol are left out, and so are those of a mechanism's earlier settings."""
    kept = _like_the_last(runs, lambda run: "all", _protocol)
    kept = _like_the_last(kept, _place, lambda run: {key: run.cell[key] for key in run.cell if key != "seed"})
    told = (run.result | {"final_records": run.cell["training"].get("final_records")} for run in kept)
    return FinishedStudy(name, tuple(told), len(runs) - len(kept))


def _like_the_last(
    runs: Sequence[_Run], place: Callable[[_Run], str], settings: Callable[[_Run], dict[str, Any]]
) -> list[_Run]:
    """Runs of each place that have the settings of the one that finished last."""
    last: dict[str, _Run] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        last[place(run)] = run
    return [run for run in runs if settings(run) == settings(last[place(run)])]


def _place(run: _Run) -> str:
    """What a line of a table stands for: model, mechanism and budget."""
    return json.dumps([run.cell[key] for key in ("model_name", "mechanism", "accounting", "epsilon")])


def _protocol(run: _Run) -> dict[str, Any]:
    """What all runs of an experiment share: records, task, schedule, adapters, versions of shared parts."""
    shared = {key: value for key, value in run.cell.items() if key not in _VARIED}
    training = {key: value for key, value in run.cell["training"].items() if key not in ("learning_rate", *RULE)}
    inputs = {key: value for key, value in run.cell["inputs"].items() if key not in ("policy", "plugins", "model")}
    versions = [run.cell.get("versions", {}).get(part) for part in _SHARED_PARTS]  # None: of before parts had versions
    return shared | {"training": training, "inputs": inputs, "versions": versions}


def answers_by_study(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What private prediction wrote last for each experiment, of those files that exist; none where it was skipped."""
    present = sorted((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime)
    contents = [read_json(file) for file in present]
    return {str(one["name"]): one for one in contents if "rows" in one}


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="folders of runs; data/runs by default")] = None,
    answers: Annotated[list[Path] | None, typer.Option(help="results.json of private prediction")] = None,
    experiments: Annotated[list[str] | None, typer.Option("--experiment", help="all by default")] = None,
    out: Annotated[Path, typer.Option(help="the page")] = PAGE,
) -> None:
    """Write the page of benchmarks from finished runs."""
    answered = answers_by_study(answers or [ANSWERS, *REPORTS.glob("*/prediction/results.json")])
    studies = {study.name: study for study in read_studies(folders or [RUNS])}
    if unknown := sorted({*(experiments or ())} - {*answered, *studies}):
        raise ConfigError("--experiment", f"{unknown[0]!r} has no finished run", fix="give the name of one that ran")
    chosen = experiments or sorted({*answered, *studies})
    write_text(
        out,
        page([studies[one] for one in chosen if one in studies], [answered[one] for one in chosen if one in answered]),
    )
    typer.echo(str(out))


if __name__ == "__main__":
    run_command(main)
