"""Writes a cell's history and its result, and sends them to MLflow."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dptune.core.digits import at_most
from dptune.core.files import jsonable, naming, sha256, write_text
from dptune.job.result import RunResult, charged
from dptune.mechanisms.agents.rl import LearnedControl, learning_of
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder, Spending, earlier_runs, spending_of
from dptune.records.parquet_file import read_about
from dptune.training.models.model_names import name_of
from dptune.training.models.own_weights import own_weights
from tasks.charts.seed_groups import PUBLISHED as CLAIMED
from tasks.experiment.adapter_model import write_model
from tasks.experiment.cells import PUBLISHED, Cell
from tasks.experiment.preparation import PreparedCell
from tasks.identity import code_digest
from tasks.metrics import allowed
from tasks.mlflow.cell_run import CellRun, main_metrics, steps_table
from tasks.mlflow.entities import InputData, model_name
from tasks.mlflow.tracking import LATER, NOTE, ChildRun, flow_tag, git_commit, optional, timed, training_hash
from tasks.paths import EVAL, PUBLIC_VALIDATION, TRAIN
from tasks.report.claims import as_users_claim, guarantee

_LOAD = """What trained, with its card and its ledger: `mlflow.pyfunc.load_model("runs:/{run}/{model}")`. Its `predict`
takes texts, and gives the log-likelihood of each. `dptune verify` checks card, ledger and weights in the model's
`artifacts/adapter`."""
_MODEL = ".mlflow_model"  # a folder in the run's, as long as it is sent
_MOST_KNOBS = 400  # number of rows of knobs that a run keeps for pictures


def set_aside_of(directory: Path) -> list[Spending]:
    """What each earlier run of this cell spent before it was set aside."""
    return [spent for folder in earlier_runs(directory) if (spent := spending_of(folder))]


class History:
    """Two files that grow during a run: points of the learning curves, and values of the knobs."""

    def __init__(self, directory: Path, steps: int) -> None:
        self._points, self._knobs = RunFolder(directory).history, RunFolder(directory).knobs
        self._every = max(1, steps // _MOST_KNOBS)
        self._last: dict[str, float] = {}

    def add_point(self, point: dict[str, float]) -> None:
        """Append a point of the learning curves."""
        _append(self._points, point)

    def add_knobs(self, releases: int, knobs: dict[str, float]) -> bool:
        """Append the knobs if they changed, at most 400 rows a run. Returns whether they were appended."""
        if knobs == self._last or (self._last and releases % self._every):
            return False
        self._last = dict(knobs)
        _append(self._knobs, {"releases": releases, **knobs})
        return True

    def points(self) -> list[dict[str, Any]]:
        """All points of the learning curves, those of earlier processes included."""
        return _rows(self._points)

    def knobs(self) -> list[dict[str, Any]]:
        """All rows of knobs, those of earlier processes included."""
        return _rows(self._knobs)


def _append(path: Path, point: dict[str, float]) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(jsonable(point)) + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows so far; a line that a killed process left unfinished is skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def result_of(
    prepared: PreparedCell,
    contents: LedgerContents,
    before: dict[str, float],
    after: dict[str, float],
    history: History,
    seconds: float,
    device: str,
) -> RunResult:
    """The result of a finished cell, before its scores and its adapter are there."""
    cell, spec, prices = prepared.cell, prepared.spec, contents.epsilons
    aside = set_aside_of(cell.directory)
    epsilon = prices.certified + sum(one.epsilon for one in aside)
    together = (epsilon, cell.delta + sum(one.delta for one in aside)) if aside else None
    given = charged(contents, spec.mechanism, spec.plan) | {"units": len(spec.units)}  # with an auditor's slots
    return RunResult(
        **given,
        label=cell.label,
        model=cell.model_name,
        model_about=about_model(prepared),
        seed=cell.seed,
        agent=isinstance(spec.mechanism.controller, LearnedControl),
        learning=learning_of(spec.mechanism, spec.plan.steps),
        task=cell.task.kind,
        guarantee=guarantee(
            cell.telemetry, prices, bool(spec.header.inherited), together, spec.header.plugins, train=spec.header.train
        ),
        set_aside=[jsonable({"epsilon_certified": one.epsilon}) | {"folder": one.folder} for one in aside],
        public_data=read_about(PUBLIC_VALIDATION)["label"],
        synthetic=bool(prepared.about["synthetic"]),
        before=before,
        after=after,
        history=history.points(),
        pairs=list(prepared.pairs),
        crafted=cell.crafted,
        knobs=history.knobs(),
        seconds=round(seconds, 1) if timed(cell.telemetry) else None,
        device=device,
        code=code_digest("experiment.finetune"),
    )


def about_model(prepared: PreparedCell) -> str:
    """What a cell's base model is: name, number of parameters, and what its weights are a rounding of."""
    cell, model = prepared.cell, prepared.spec.model
    own = own_weights(model) is not None
    base = model if own else model.get_base_model()
    # transformers counts weights in 4 bits by what they stand for, and the adapters among them.
    size = base.num_parameters() - (0 if own else base.num_parameters(only_trainable=True))
    said = f"{name_of(cell.model.source)}: {size / 1e6:.3g} million parameters"
    return ", ".join(filter(None, (said, cell.model.weights.rounding, "4 bits" if cell.model.load_in_4bit else None)))


def run_name(model: str, mechanism: str, epsilon: float | None, seed: int) -> str:
    """The name of a cell's run for readers, such as ``static eps 2 seed 0 (small)``."""
    budget = "" if epsilon is None else f" eps {epsilon:g}"
    return f"{mechanism}{budget} seed {seed} ({model})"


def child_run(prepared: PreparedCell, parent: str | None, flow_run: str) -> CellRun | None:
    """The cell's run in MLflow, started or continued; None without a parent."""
    if parent is None:
        return None
    cell, spec = prepared.cell, prepared.spec
    params = {
        "model": cell.model.source,
        "model_about": about_model(prepared),
        "mechanism": cell.mechanism,
        **{f"mechanism.{key}": value for key, value in cell.options.items()},
        "budget_epsilon": cell.epsilon,
        "delta": cell.delta,
        "accounting": cell.accounting,
        "seed": cell.seed,
        "unit": spec.units.kind,
        "units": len(spec.units),
        "noise_multiplier": spec.mechanism.noise.noise_multiplier,
        "sample_rate": spec.plan.sample_rate,
        "steps": spec.plan.steps,
        "pairs": spec.mechanism.pairs,
        "crafted": cell.crafted,
        **{f"lora.{key}": value for key, value in asdict(cell.lora).items()},
        **{f"training.{key}": value for key, value in asdict(cell.training).items()},
    }
    tags = {
        "telemetry": cell.telemetry,
        "data": prepared.about["label"],
        "data_kind": "SYNTHETIC" if prepared.about["synthetic"] else "real",
        "git_commit": git_commit(),
        "cell": cell.label,
        **training_hash(cell.telemetry),
        **flow_tag(cell.telemetry, flow_run),
    }
    if not RunFolder(cell.directory).cell.exists():  # the run was not started by a flow; its model needs it
        write_text(RunFolder(cell.directory).cell, cell.model_dump_json(indent=2))
    name = run_name(cell.model_name, cell.mechanism, cell.epsilon, cell.seed)
    run = CellRun(parent, name, RunFolder(cell.directory).mlflow_run, params, tags, timed=timed(cell.telemetry))
    run.inputs(input_data(prepared))
    return run


def publish(directory: Path, parent: str | None) -> None:
    """Send a finished cell's results to MLflow, once; after a crash, whatever was not sent yet.

    Where MLflow takes nothing, a warning says so, and the next flow tries again.
    """
    marker = directory / PUBLISHED
    if parent in (None, LATER) or marker.exists():
        return
    result = RunResult.read(RunFolder(directory).result)
    with optional(f"the results of {result.label}"):
        if run_id := _send_results(directory, str(parent), result):
            write_text(marker, run_id)


def _send_results(directory: Path, parent: str, result: RunResult) -> str | None:
    """Send all results of a cell. Returns the id of its run, or None if MLflow does not have all of them."""
    folder = RunFolder(directory)
    contents = read_ledger(folder.ledger)
    when = {"timed": timed(result.telemetry), "kept": False}  # all of this can be made again
    name = run_name(result.model, result.mechanism, result.budget_epsilon, result.seed)
    child = ChildRun(parent, name, folder.mlflow_run, {}, {}, **when)
    claimed = as_users_claim(result.to_dict(), folder.ledger)[CLAIMED]  # the report's number, not the ledger's
    epsilons = {**contents.epsilons.to_dict(), CLAIMED: float(claimed)}
    child.log(contents.releases, main_metrics(allowed(result.after, result.telemetry) | epsilons))
    shown = {key.replace("_", " ", 1): at_most(value) for key, value in epsilons.items()}
    load = _LOAD.format(run=child.run_id, model=model_name(result.label))
    described = {"guarantee": result.guarantee, NOTE: f"{result.guarantee}\n\n{load}"}
    child.tag({"ledger_run_id": contents.header.run_id, **described, **shown})
    files = [folder.ledger, folder.result, directory / "curves.png", steps_table(directory)]
    # A hyper-policy that leaks holds statistics of raw gradient norms; it stays in the run's private folder.
    files += [folder.controller] if folder.controller.exists() and not result.leaks else []
    for made in filter(None, files):
        child.artifact(made)
    if result.task == "classify":  # MLflow's model of a cell scores texts
        return child.run_id if child.end() else None
    model = directory / _MODEL
    shutil.rmtree(model, ignore_errors=True)
    try:
        card = write_model(directory, model)
        child.flush()
        child.model(model, model_name(result.label), card)
        return child.run_id if child.end() else None
    finally:
        shutil.rmtree(model, ignore_errors=True)


# The data sets of a cell for MLflow: descriptions with digests, and no rows.


_DIGITS = 16


def input_data(prepared: PreparedCell) -> list[InputData]:
    """What the cell reads: training records, public validation records, and, if telemetry allows it, held-out records.

    Public. The digest of private records is keyed by the secret salt of the training file, so that nobody can test a
    guess of the records with it. Under private telemetry it is of their public description alone.
    """
    cell, units = prepared.cell, len(prepared.spec.units)
    private = _digest(cell, prepared.about)
    profile = {"unit": cell.unit, "units": units, "synthetic": bool(prepared.about["synthetic"])}
    found = [InputData(str(prepared.about["label"]), private, "training", TRAIN.as_posix(), profile)]
    if timed(cell.telemetry):
        held_out = f"{prepared.about['label']}, held out"
        found.append(InputData(held_out, private, "evaluation", EVAL.as_posix(), {"unit": cell.unit}))
    public = read_about(PUBLIC_VALIDATION)
    about = {"synthetic": bool(public.get("synthetic"))}
    return [
        *found,
        InputData(
            str(public["label"]), sha256(PUBLIC_VALIDATION)[:_DIGITS], "validation", PUBLIC_VALIDATION.as_posix(), about
        ),
    ]


def _digest(cell: Cell, about: dict[str, Any]) -> str:
    return cell.inputs["data"][:_DIGITS] if timed(cell.telemetry) else _of_description(about)


def _of_description(about: dict[str, Any]) -> str:
    """A digest of what is said of data in public: its label, its source and its unit."""
    told = {key: about.get(key) for key in ("label", "source", "unit", "synthetic")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:_DIGITS]
