"""One cell: fine-tune, evaluate, price, and write down. Runs as a process of its own and can be killed at any time.

python -m tasks.finetune CELL.json [--device cuda:0] [--parent MLFLOW_RUN] [--flow-run PREFECT_RUN]
torchrun --nproc-per-node 4 -m tasks.finetune CELL.json          # one run on four GPUs
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from dptune.audit.crafted import CraftedCanaries, audited
from dptune.errors import ConfigError
from dptune.files import locked, private_directory, sha256, write_json
from dptune.mechanisms.rl import LearnedControl
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger import Ledger, LedgerContents, LedgerError, read_ledger
from dptune.progress import Meter
from dptune.training.data import Tokens
from dptune.training.evaluation import perplexity
from dptune.training.loop import StepReport, follow, train
from dptune.training.model import save_adapter
from dptune.training.ranks import LostRankError, Ranks, joined, own_device
from tasks.cells import Cell
from tasks.job import Job, prepare
from tasks.paths import CRAFTED
from tasks.plots import draw_curves
from tasks.results import History, child_run, named, publish, result_of
from tasks.stage import run_stage
from tasks.tracking import ChildRun


def run_cell(
    cell: Cell,
    device: str,
    parent: str | None = None,
    flow_run: str = "none",
    entropy: Entropy | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Run a cell to its end, resuming whatever its folder holds; returns what result.json says.

    The last line of the ledger is written after everything else is safe, so a finished ledger means a
    finished cell. Of several ranks this is number 0, which alone evaluates, reports and writes.
    """
    directory = private_directory(cell.directory)
    with locked(directory / "lock"):
        if ranks.told(not _finished(directory)):
            _train_cell(cell, directory, device, parent, flow_run, entropy or OsEntropy(), ranks)
        publish(directory, parent)
        (directory / "checkpoint.safetensors").unlink(missing_ok=True)
        return dict(json.loads((directory / "result.json").read_text(encoding="utf-8")))


def help_cell(cell: Cell, device: str, ranks: Ranks) -> None:
    """What the other ranks do while rank 0 is in ``run_cell``."""
    if ranks.told(None):
        entropy = OsEntropy()
        job = prepare(cell, torch.device(device), entropy)
        follow(job.model, job.train, job.units, job.mechanism, job.plan, entropy, ranks)


def _train_cell(
    cell: Cell, directory: Path, device: str, parent: str | None, flow_run: str, entropy: Entropy, ranks: Ranks
) -> None:
    started = time.monotonic()
    job = prepare(cell, torch.device(device), entropy)
    ranks.check(job.mechanism)
    canaries = _crafted(cell, directory)
    mechanism = audited(job.mechanism, canaries) if canaries else job.mechanism
    child, history = child_run(job, parent, flow_run), History(directory, job.plan.steps)
    try:
        before = _evaluate(job, final=True)
        meter = Meter(cell.label, total=job.plan.steps, unit="releases", keep=True)
        with (
            meter,
            train(
                job.model,
                job.train,
                job.units,
                mechanism,
                job.plan,
                job.header,
                directory,
                entropy,
                on_step=_observer(job, child, meter, history, canaries),
                public=job.validation,
                ranks=ranks,
            ) as ledger,
        ):
            after = _evaluate(job, final=True)
            _save_adapter(job.model, directory)
            contents = _contents(ledger)
            _save_policy(job, contents, directory)
            _write_crafted(canaries, directory)
            used = device if ranks.world == 1 else f"{ranks.world} ranks, this one on {device}"
            result = result_of(job, contents, before, after, history, time.monotonic() - started, used)
            result["adapter_sha256"] = adapter_digest(directory)
            draw_curves([result], directory / "curves.png")
            write_json(directory / "result.json", result)
            if child:
                child.flush()
            ledger.finish()
    except BaseException:
        if child:
            child.end("FAILED")
        raise


def _crafted(cell: Cell, directory: Path) -> CraftedCanaries | None:
    """The auditor's canaries: their coins are tossed once a run; a resumed run goes on with what was seen."""
    if cell.crafted == 0:
        return None
    known = read_crafted(directory)
    if known is not None:
        return known
    canaries = CraftedCanaries.toss(cell.crafted)
    _write_crafted(canaries, directory)
    return canaries


def _write_crafted(canaries: CraftedCanaries | None, directory: Path) -> None:
    if canaries is not None:
        private_directory(CRAFTED.parent)
        coins, scores = canaries.included.astype(int).tolist(), canaries.scores.tolist()
        write_json(crafted_file(directory), {"included": coins, "scores": scores, "watched": canaries.watched})


def crafted_file(directory: Path) -> Path:
    """Where coins and scores of a cell's crafted canaries lie: with the other secrets, never in a cache."""
    return CRAFTED / f"{directory.name}.json"


def read_crafted(directory: Path) -> CraftedCanaries | None:
    """What ``crafted_file`` holds; None if there is none."""
    file = crafted_file(directory)
    if not file.exists():
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    return CraftedCanaries(np.array(stored["included"], dtype=bool), np.array(stored["scores"]), stored["watched"])


def _contents(ledger: Ledger) -> LedgerContents:
    return LedgerContents(ledger.header, ledger.composition, ledger.releases, ledger.chain, complete=False)


def _observer(
    job: Job, child: ChildRun | None, meter: Meter, history: History, canaries: CraftedCanaries | None
) -> Callable[[StepReport], None]:
    """Called after each step: logs it, and at times evaluates."""
    every, total = job.cell.training.evaluate_every, job.plan.steps

    def observe(report: StepReport) -> None:
        meter.update(report.releases)
        metrics = {**report.public, "noise_multiplier": report.knobs["noise_multiplier"]}
        if job.cell.telemetry == "research":
            metrics |= report.private
        looks = report.releases % every == 0 or report.releases == total
        if history.add_knobs(report.releases, report.knobs) or looks:
            metrics |= report.knobs
        if looks:
            point = _evaluate(job, final=False) | named(job.header.price(report.composition))
            metrics |= point
            _write_crafted(canaries, job.cell.directory)
            history.add_point({"step": report.step, "releases": report.releases, **point})
        if child:
            child.log(report.step, metrics)

    return observe


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


def _save_adapter(model: Any, directory: Path) -> None:
    partial, final = directory / ".adapter.partial", directory / "adapter"
    shutil.rmtree(partial, ignore_errors=True)
    save_adapter(model, partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def adapter_digest(directory: Path) -> str:
    """Ties a result, and thus its ledger, to the weights beside it."""
    return sha256(directory / "adapter" / "adapter_model.safetensors")


def _save_policy(job: Job, contents: LedgerContents, directory: Path) -> None:
    """A learned hyper-policy, which another run can start from (``init_from``)."""
    controller = job.mechanism.controller
    if isinstance(controller, LearnedControl):
        header = contents.header
        policy = controller.saved_policy(
            job.cell.label, header.run_id, header.unit, contents.composition, contents.epsilons.leaks
        )
        if policy is not None:
            policy.write(directory / "controller")


def _finished(directory: Path) -> bool:
    ledger, result = directory / "ledger.jsonl", directory / "result.json"
    try:
        return result.exists() and read_ledger(ledger).complete
    except LedgerError:
        return False  # resuming mends a torn last line, and refuses anything worse with its reason


def main(
    cell: Annotated[Path, typer.Argument(help="cell.json of the run")],
    device: Annotated[str | None, typer.Option(help="torch device; default cpu, under torchrun the own GPU")] = None,
    parent: Annotated[str | None, typer.Option(help="MLflow run id of the experiment")] = None,
    flow_run: Annotated[str, typer.Option(help="Prefect flow run id")] = "none",
) -> None:
    """Run one cell."""

    def work() -> None:
        try:
            spec = Cell.model_validate_json(cell.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(cell), f"is no cell ({error})", fix="let the flow write it") from None
        try:
            with joined() as ranks:
                if ranks.rank:
                    help_cell(spec, device or own_device(), ranks)
                else:
                    run_cell(spec, device or own_device(), parent, flow_run, ranks=ranks)
        except LostRankError as error:
            sys.exit(f"error: {error}")

    run_stage(work)


if __name__ == "__main__":
    # Tracebacks must not print local variables: they hold records.
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
