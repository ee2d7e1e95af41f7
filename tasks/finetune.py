"""One cell: fine-tune, evaluate, price, and write down. Runs as a process of its own and can be killed at any time.

python -m tasks.finetune CELL.json [--device cuda:0] [--parent MLFLOW_RUN] [--flow-run PREFECT_RUN]
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dptune.corpus.records import Records, read_records
from dptune.errors import ConfigError
from dptune.files import locked, private_directory, write_json, write_text
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build, takes_noise
from dptune.privacy.accountants import Epsilons, epsilons
from dptune.privacy.calibration import calibrate, sampling
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger import LedgerError, RunHeader, read_ledger
from dptune.privacy.release import Composition
from dptune.progress import Meter
from dptune.training.data import PrivacyUnits, Tokens, tokenize
from dptune.training.evaluation import perplexity
from dptune.training.loop import Plan, StepReport, train
from dptune.training.model import BaseModel, Lora, attach_lora, load_base, load_tokenizer, save_adapter
from dptune.training.per_sample import lora_pairs
from tasks.cells import Cell, digests
from tasks.paths import EVAL, PUBLIC_VALIDATION, TRAIN
from tasks.plots import draw_curves
from tasks.stage import run_stage
from tasks.tracking import ChildRun, dvc_hash, git_commit

GUARANTEE = {
    "research": "The guarantee covers the adapter, NOT the curves and metrics computed from private records.",
    "private": "The guarantee covers the adapter and all logged values (releases, public data), not wall-clock times.",
}
_PUBLISHED = "published"
_log = logging.getLogger(__name__)


@dataclass
class Job:
    """A cell made ready to run."""

    cell: Cell
    model: Any
    mechanism: Mechanism
    plan: Plan
    header: RunHeader
    units: PrivacyUnits
    train: Tokens
    evaluation: Tokens
    validation: Tokens
    about: dict[str, Any]


def run_cell(
    cell: Cell, device: str, parent: str | None = None, flow_run: str = "none", entropy: Entropy | None = None
) -> dict[str, Any]:
    """Run a cell to its end, resuming whatever its folder holds; returns what result.json says.

    The last line of the ledger is written after everything else is safe, so a finished ledger means a
    finished cell.
    """
    directory = private_directory(cell.directory)
    with locked(directory / "lock"):
        if not _finished(directory):
            _train_cell(cell, directory, device, parent, flow_run, entropy or OsEntropy())
        _publish(directory, parent)
        (directory / "checkpoint.safetensors").unlink(missing_ok=True)
        return dict(json.loads((directory / "result.json").read_text(encoding="utf-8")))


def _train_cell(cell: Cell, directory: Path, device: str, parent: str | None, flow_run: str, entropy: Entropy) -> None:
    started = time.monotonic()
    job = prepare(cell, torch.device(device), entropy)
    child = _child_run(job, parent, flow_run)
    try:
        before = _evaluate(job, final=True)
        meter = Meter(cell.label, total=job.plan.steps, unit="releases", keep=True)
        with (
            meter,
            train(
                job.model,
                job.train,
                job.units,
                job.mechanism,
                job.plan,
                job.header,
                directory,
                entropy,
                on_step=_observer(job, child, meter, directory / "history.jsonl"),
            ) as ledger,
        ):
            after = _evaluate(job, final=True)
            _save_adapter(job.model, directory)
            prices = ledger.header.price(ledger.composition)
            history = _read_history(directory / "history.jsonl")
            result = _result(job, prices, ledger.releases, before, after, history, time.monotonic() - started, device)
            draw_curves([result], directory / "curves.png")
            write_json(directory / "result.json", result)
            if child:
                child.flush()
            ledger.finish()
    except BaseException:
        if child:
            child.end("FAILED")
        raise


def prepare(cell: Cell, device: torch.device, entropy: Entropy) -> Job:
    """Load model and data, and calibrate the noise to the cell's budget.

    Raises: ConfigError if the data or model are no longer those the cell was made for, or the run would leak
    what private telemetry promises to keep.
    """
    if digests(cell.model) != cell.inputs:
        raise ConfigError(
            "cell.inputs", "data, model or code changed since the cell was made", fix="run the flow again"
        )
    base = BaseModel(cell.model.source, cell.model.revision, cell.model.dtype)
    tokenizer = load_tokenizer(base)
    records = read_records(TRAIN)
    training = cell.training
    model = attach_lora(load_base(base, device), Lora(**cell.lora.model_dump()), cell.seed)
    units = PrivacyUnits.of(cell.unit, records.patient, training.encounters_per_patient)
    sample_rate, steps = sampling(len(units), training.expected_batch_size, training.epochs)
    mechanism = _calibrated(cell, len(lora_pairs(model)), sample_rate, steps)
    leaks = (*entropy.leaks, *mechanism.release(mechanism.knobs(), sample_rate).leaks)
    if cell.telemetry == "private" and leaks:
        raise ConfigError(
            "experiment.telemetry",
            f"private cannot hold for {cell.label}: {'; '.join(leaks)}",
            fix="leave that mechanism out, or use research",
        )
    return Job(
        cell=cell,
        model=model,
        mechanism=mechanism,
        plan=Plan(
            sample_rate=sample_rate,
            expected_batch_size=training.expected_batch_size,
            steps=steps,
            learning_rate=training.learning_rate,
            warmup_steps=training.warmup_steps,
            physical_batch_size=training.physical_batch_size,
            checkpoint_every=training.checkpoint_every,
            autocast=training.autocast,
        ),
        header=RunHeader(
            mechanism=cell.mechanism,
            published_accountant=mechanism.published_accountant,
            accounting=cell.accounting,
            epsilon=cell.epsilon,
            delta=cell.delta,
            unit=cell.unit,
            units=len(units),
            data=str(records.about["label"]),
            telemetry=cell.telemetry,
            leaks=entropy.leaks,
        ),
        units=units,
        train=_tokens(cell, records, tokenizer),
        evaluation=_tokens(cell, read_records(EVAL), tokenizer),
        validation=_tokens(cell, read_records(PUBLIC_VALIDATION), tokenizer),
        about=dict(records.about),
    )


def _tokens(cell: Cell, records: Records, tokenizer: Any) -> Tokens:
    limit = cell.training.max_length
    tokens = tokenize(records.text.to_pylist(), tokenizer, limit)
    if tokens.truncated and cell.telemetry == "research":
        _log.warning("%d of %d records exceed %d tokens and were cut", tokens.truncated, len(tokens.rows), limit)
    return tokens


def _calibrated(cell: Cell, pairs: int, sample_rate: float, steps: int) -> Mechanism:
    options = {**cell.options, "pairs": pairs}
    if cell.epsilon is None or "noise_multiplier" in options or not takes_noise(cell.mechanism, options):
        return build(cell.mechanism, options)

    def priced(noise_multiplier: float) -> float:
        mechanism = build(cell.mechanism, options | {"noise_multiplier": noise_multiplier})
        composition: Composition = Counter({mechanism.release(mechanism.knobs(), sample_rate): steps})
        prices = epsilons(composition, cell.delta, published_accountant=mechanism.published_accountant)
        return prices.certified if cell.accounting == "certified" else prices.published

    return build(cell.mechanism, options | {"noise_multiplier": calibrate(priced, cell.epsilon)})


def _observer(job: Job, child: ChildRun | None, meter: Meter, history: Path) -> Callable[[StepReport], None]:
    """Called after each step: logs it, and at times evaluates."""
    every, total = job.cell.training.evaluate_every, job.plan.steps

    def observe(report: StepReport) -> None:
        meter.update(report.releases)
        metrics = dict(report.public)
        if job.cell.telemetry == "research":
            metrics |= report.private
        if report.releases % every == 0 or report.releases == total:
            point = _evaluate(job, final=False) | _named(job.header.price(report.composition))
            metrics |= point
            _append(history, {"step": report.step, "releases": report.releases, **point})
        if child:
            child.log(report.step, metrics)

    return observe


def _append(history: Path, point: dict[str, float]) -> None:
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: _number(value) for key, value in point.items()}) + "\n")


def _read_history(history: Path) -> list[dict[str, Any]]:
    """The points so far; a line that a killed process left unfinished is skipped."""
    points = []
    for line in history.read_text(encoding="utf-8").splitlines() if history.exists() else []:
        try:
            points.append(json.loads(line))
        except ValueError:
            continue
    return points


def _named(prices: Epsilons) -> dict[str, float]:
    return {
        "epsilon_published": prices.published,
        "epsilon_noise_only": prices.noise_only,
        "epsilon_certified": prices.certified,
    }


def _evaluate(job: Job, *, final: bool) -> dict[str, float]:
    """Perplexities that telemetry allows: public always, held-out records only under research telemetry."""
    rows, dtype = 2 * job.plan.physical_batch_size, job.plan.autocast_dtype
    most = None if final else job.cell.training.evaluate_records
    name = "eval_perplexity" if final else "eval_sample_perplexity"
    figures = {"public_perplexity": perplexity(job.model, _first(job.validation, most), rows, autocast=dtype)}
    if job.cell.telemetry == "research":
        figures[name] = perplexity(job.model, _first(job.evaluation, most), rows, autocast=dtype)
    return figures


def _first(tokens: Tokens, most: int | None) -> Tokens:
    return replace(tokens, rows=tokens.rows[:most])


def _result(
    job: Job,
    prices: Epsilons,
    releases: int,
    before: dict[str, float],
    after: dict[str, float],
    history: list[dict[str, Any]],
    seconds: float,
    device: str,
) -> dict[str, Any]:
    cell = job.cell
    return {
        "label": cell.label,
        "model": cell.model_name,
        "mechanism": cell.mechanism,
        "budget_epsilon": cell.epsilon,
        "seed": cell.seed,
        "unit": cell.unit,
        "units": len(job.units),
        "delta": cell.delta,
        "accounting": cell.accounting,
        "telemetry": cell.telemetry,
        "guarantee": guarantee(cell.telemetry, prices.leaks),
        "data": job.about["label"],
        "synthetic": bool(job.about["synthetic"]),
        "noise_multiplier": job.mechanism.noise.noise_multiplier,
        "sample_rate": job.plan.sample_rate,
        "releases": releases,
        **{key: _number(value) for key, value in _named(prices).items()},
        "leaks": list(prices.leaks),
        "before": {key: _number(value) for key, value in before.items()},
        "after": {key: _number(value) for key, value in after.items()},
        "history": history,
        "seconds": round(seconds, 1) if _timed(cell.telemetry) else None,
        "device": device,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _child_run(job: Job, parent: str | None, flow_run: str) -> ChildRun | None:
    if parent is None:
        return None
    cell = job.cell
    params = {
        "model": cell.model.source,
        "mechanism": cell.mechanism,
        **{f"mechanism.{key}": value for key, value in cell.options.items()},
        "budget_epsilon": cell.epsilon,
        "delta": cell.delta,
        "accounting": cell.accounting,
        "seed": cell.seed,
        "unit": cell.unit,
        "units": len(job.units),
        "noise_multiplier": job.mechanism.noise.noise_multiplier,
        "sample_rate": job.plan.sample_rate,
        "steps": job.plan.steps,
        "pairs": job.mechanism.pairs,
        **{f"lora.{key}": value for key, value in cell.lora.model_dump().items()},
        **{f"training.{key}": value for key, value in cell.training.model_dump().items()},
    }
    tags = {
        "telemetry": cell.telemetry,
        "data": job.about["label"],
        "data_kind": "SYNTHETIC" if job.about["synthetic"] else "real",
        "git_commit": git_commit(),
        "dvc_hash": dvc_hash(TRAIN.parent),
        "prefect_flow_run": flow_run,
    }
    return ChildRun(parent, cell.label, cell.directory / "mlflow_run", params, tags, timed=_timed(cell.telemetry))


def _publish(directory: Path, parent: str | None) -> None:
    """Send a finished cell's results to MLflow, once; after a crash, whatever was not sent yet."""
    marker = directory / _PUBLISHED
    if parent is None or marker.exists():
        return
    contents, result = read_ledger(directory / "ledger.jsonl"), json.loads((directory / "result.json").read_text())
    timed = _timed(result["telemetry"])
    child = ChildRun(parent, result["label"], directory / "mlflow_run", {}, {}, timed=timed)
    final = {f"final_{key}": value for key, value in _named(contents.epsilons).items()}
    child.log(contents.releases, {key: float(value) for key, value in result["after"].items()} | final)
    child.tag({"ledger_run_id": contents.header.run_id, "guarantee": result["guarantee"]})
    for name in ("ledger.jsonl", "adapter", "result.json", "curves.png"):
        child.artifact(directory / name)
    child.end()
    write_text(marker, child.run_id)


def _timed(telemetry: str) -> bool:
    """Whether times may be told: they follow the number of micro-batches, hence the secret size of each batch."""
    return telemetry == "research"


def guarantee(telemetry: str, leaks: tuple[str, ...]) -> str:
    """One sentence on what a run's certified epsilon covers."""
    return f"No guarantee: {'; '.join(leaks)}." if leaks else GUARANTEE[telemetry]


def _save_adapter(model: Any, directory: Path) -> None:
    partial, final = directory / ".adapter.partial", directory / "adapter"
    shutil.rmtree(partial, ignore_errors=True)
    save_adapter(model, partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _finished(directory: Path) -> bool:
    ledger, result = directory / "ledger.jsonl", directory / "result.json"
    try:
        return result.exists() and read_ledger(ledger).complete
    except LedgerError:
        return False  # resuming mends a torn last line, and refuses anything worse with its reason


def main(
    cell: Annotated[Path, typer.Argument(help="cell.json of the run")],
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    parent: Annotated[str | None, typer.Option(help="MLflow run id of the experiment")] = None,
    flow_run: Annotated[str, typer.Option(help="Prefect flow run id")] = "none",
) -> None:
    """Run one cell."""

    def work() -> None:
        try:
            spec = Cell.model_validate_json(cell.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(cell), f"is no cell ({error})", fix="let the flow write it") from None
        run_cell(spec, device, parent, flow_run)

    run_stage(work)


if __name__ == "__main__":
    # Tracebacks must not print local variables: they hold records.
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
