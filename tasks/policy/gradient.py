"""Run of private reinforcement learning in an environment, or of a baseline, in a process of its own.

python -m tasks.policy.gradient data/policy/runs/<run>/job.json
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.core.declarations import plain
from dptune.core.errors import ConfigError
from dptune.core.files import jsonable, private_directory, write_json
from dptune.core.progress import Meter
from dptune.policy.method import NAME, PUBLISHED_ACCOUNTANT, Dppg
from dptune.policy.schedules import PolicyTraining
from dptune.privacy.accountants import Epsilons
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from tasks.identity import code_digest, name_digest
from tasks.paths import POLICY
from tasks.settings.policy import PolicySettings, StudyRun, expanded
from tasks.settings.strict import StrictModel
from tasks.stage import run_command

_log = logging.getLogger("dptune.policy")
#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 1


class PolicyCell(StrictModel):
    """Everything that decides the result of a run. Public.

    Attributes:
        study: name of the study in params.yaml.
        label: label of the run in its study.
        group: label without the swept value; runs of a group are drawn as one line.
        kind: "dppg", or the baseline "ucb_vi", "ppo" or "a2c".
        environment: id of the environment.
        options: options of the environment.
        method: options of ``Dppg``; None for a baseline that is not private.
        accounting: "certified" or "published".
        training: options of ``PolicyTraining``.
        extra: further options of a baseline.
        delta: delta of all epsilons.
        version: ``VERSION`` of the code that made the cell.
    """

    study: str
    label: str
    group: str
    kind: str
    environment: str
    options: dict[str, Any]
    method: dict[str, Any] | None
    accounting: str
    training: dict[str, Any]
    extra: dict[str, float]
    delta: float
    version: int = 1

    @property
    def name(self) -> str:
        """Readable name of the run, such as ``cartpole.private.z1.0.seed0``."""
        return f"{self.study}.{self.label}.seed{self.training['seed']}"

    @property
    def directory(self) -> Path:
        """Folder of the run under data/policy/runs; another one if anything that decides the result changes."""
        training = plain(PolicyTraining(**self.training))
        method = plain(Dppg(**self.method)) if self.method is not None else None
        content = plain(self) | {"training": training, "method": method}
        return POLICY / "runs" / f"{self.name}-{name_digest(content)}"


def policy_cells(settings: PolicySettings) -> list[PolicyCell]:
    """Make the cells of all runs: of every study, with every seed."""
    return [
        _cell(settings, name, run, seed)
        for name, study in settings.studies.items()
        for run in expanded(study, settings.delta)
        for seed in settings.seeds
    ]


def _cell(settings: PolicySettings, study: str, run: StudyRun, seed: int) -> PolicyCell:
    environment = settings.studies[study]
    return PolicyCell(
        study=study,
        label=run.label,
        group=run.group,
        kind=run.kind,
        environment=environment.environment,
        options=environment.options,
        method=asdict(run.method) if run.method else None,
        accounting=run.accounting,
        training=asdict(run.training) | {"seed": seed},
        extra=dict(run.extra),
        delta=settings.delta,
        version=VERSION,
    )


def check_environments(settings: PolicySettings) -> None:
    """Check the environments of all studies before anything runs.

    Raises: ConfigError naming the study whose environment is unknown or needs an extra.
    """
    from dptune.policy.environments.baselines import check_installed
    from dptune.policy.environments.environment import Environment

    for name, study in settings.studies.items():
        try:
            Environment(study.environment, study.options)
            if {run.kind for run in expanded(study, settings.delta)} & {"ppo", "a2c"}:
                check_installed()
        except ConfigError as error:
            raise ConfigError(f"policy.studies.{name}.{error.field}", error.problem, fix=error.fix) from None


def run_cell(cell: PolicyCell) -> dict[str, Any]:
    """Train, or resume the run in the cell's folder, and write result.json.

    Returns: what result.json says. Public.
    """
    training = PolicyTraining(**cell.training)
    directory = private_directory(cell.directory)
    with Meter(cell.name, total=training.updates, unit="updates") as meter:
        points = _RUNNERS[cell.kind](cell, training, directory, meter)
    returns = [point["mean_return"] for point in points]
    last_quarter = returns[-max(1, len(returns) // 4) :]
    result = {
        **cell.model_dump(mode="json"),
        "name": cell.name,
        "seed": training.seed,
        "users": training.updates * training.users,
        "points": points,
        "final_return": sum(last_quarter) / len(last_quarter),
        "leaks": [],
        "code": code_digest("policy.gradient"),
        **_prices(cell, directory),
    }
    write_json(RunFolder(directory).result, result)
    return result


def _prices(cell: PolicyCell, directory: Path) -> dict[str, Any]:
    """Epsilons and leaks by the run's ledger; infinite for a baseline, which is not private and has no ledger."""
    if cell.method is None:
        return dict(jsonable(Epsilons(math.inf, math.inf, math.inf).to_dict()))
    prices = read_ledger(RunFolder(directory).ledger).epsilons
    return {**jsonable(prices.to_dict()), "leaks": list(prices.leaks)}


def _dppg(cell: PolicyCell, training: PolicyTraining, directory: Path, meter: Meter) -> list[dict[str, Any]]:
    from dptune.policy.environments.environment import Environment
    from dptune.policy.environments.training import Point, train
    from dptune.privacy.entropy import OsEntropy

    assert cell.method is not None
    environment, entropy = Environment(cell.environment, cell.options), OsEntropy()

    def log_point(point: Point) -> None:
        meter.update(point.update)
        _log.info("%s: %d users, mean return %.4g", cell.name, point.users, point.mean_return)

    header = _header(cell, training.updates * training.users, entropy.leaks)
    _, points = train(environment, Dppg(**cell.method), training, header, directory, entropy, log_point)
    return [asdict(point) for point in points]


def _ucb_vi(cell: PolicyCell, training: PolicyTraining, directory: Path, meter: Meter) -> list[dict[str, Any]]:
    from dptune.policy.environments.baselines import UcbVi, run_ucb_vi
    from dptune.policy.environments.environment import RIVERSWIM
    from dptune.privacy.entropy import OsEntropy

    if cell.environment != RIVERSWIM:
        raise ConfigError("baseline", "ucb_vi needs the tables of Riverswim", fix=f"use {RIVERSWIM}")
    assert cell.method is not None
    episodes = training.updates * training.users
    figures: dict[str, Any] = {**cell.options, **cell.extra, "noise_multiplier": cell.method["noise_multiplier"]}
    plan = UcbVi(episodes, seed=training.seed, **figures)
    # A run that died starts again from its first episode, and is charged again.
    with Ledger.open(RunFolder(directory).ledger, _header(cell, episodes, ()), Counter([plan.release()])) as ledger:
        ledger.charge(plan.release())
        values = run_ucb_vi(plan, OsEntropy())
        ledger.finish()
    meter.update(training.updates)
    every = training.evaluate_every * training.users
    return [
        {"update": users // training.users, "users": users, "mean_return": float(values[users - 1]), "deviation": 0.0}
        for users in range(every, episodes + 1, every)
    ]


def _baseline(cell: PolicyCell, training: PolicyTraining, directory: Path, meter: Meter) -> list[dict[str, Any]]:
    import torch

    from dptune.policy.environments.baselines import train_baseline
    from dptune.policy.environments.environment import Environment

    torch.set_num_threads(1)
    steps = training.users * training.steps
    points = train_baseline(
        "ppo" if cell.kind == "ppo" else "a2c",
        Environment(cell.environment, cell.options),
        timesteps=training.updates * steps,
        every=training.evaluate_every * steps,
        episodes=training.evaluate_episodes,
        seed=training.seed,
        discount=training.discount,
        on_point=lambda point: meter.update(point.update // steps),
    )
    return [
        asdict(point) | {"update": point.update // steps, "users": point.users // training.steps} for point in points
    ]


_RUNNERS = {"dppg": _dppg, "ucb_vi": _ucb_vi, "ppo": _baseline, "a2c": _baseline}


def _header(cell: PolicyCell, users: int, leaks: tuple[str, ...]) -> RunHeader:
    return RunHeader(
        mechanism=NAME if cell.kind == "dppg" else cell.kind,
        published_accountant=PUBLISHED_ACCOUNTANT,
        accounting=cell.accounting,
        epsilon=None,
        delta=cell.delta,
        unit="user",
        units=users,
        data=f"synthetic: simulated users of {cell.environment}",
        telemetry="private",
        leaks=leaks,
    )


def main(file: Annotated[Path, typer.Argument(help="job.json of the run, as the flow writes it")]) -> None:
    """Make the run that a file describes."""
    try:
        cell = PolicyCell.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(str(file), "describes no run", fix="run python -m flows.policy") from None
    result = run_cell(cell)
    _log.info("%s: return %.4g", cell.name, result["final_return"])


if __name__ == "__main__":
    run_command(main)
