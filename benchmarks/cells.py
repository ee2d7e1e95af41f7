"""K cells on one base: cells per hour, together over one after another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Deadline, Effort, Results, Stopwatch
from benchmarks.shapes import LORA, Setting
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import OsEntropy
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.shared_pass import shared_copy, train_together
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import StepReport
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec, TrainingPlan, header_of

CELLS = 8
APART, TOGETHER = f"{CELLS} cells, one after another", f"{CELLS} cells, together"


def cells_per_hour(setting: Setting, steps: int, warmup: int) -> tuple[float, float]:
    """``CELLS`` runs of ``static`` with Poisson batches, each by itself and then all of them on one base.

    Set-up and the first ``warmup`` steps are left out of both.

    Returns: cells of ``steps`` steps an hour, one after another and together.
    """
    base, total, alone = setting.base(), warmup + steps, 0.0
    with tempfile.TemporaryDirectory() as directory:
        for number in range(CELLS):
            watch = Stopwatch(setting.device, warmup, steps)
            folder = Path(directory) / f"alone{number}"
            train(_cell(setting, base, number, total), folder, OsEntropy(), _ticking(watch)).close()
            alone += watch.seconds
        watches = [Stopwatch(setting.device, warmup, steps) for _ in range(CELLS)]
        runs = [
            open_run(_cell(setting, base, number, total), Path(directory) / f"{number}", OsEntropy(), _ticking(watch))
            for number, watch in enumerate(watches)
        ]
        failed = [error for error in train_together(base, runs) if error]
        for run in runs:
            run.ledger.close()
    if failed:
        raise failed[0]
    # All cells make a step of theirs in this time.
    return 3600 * CELLS / (alone * steps), 3600 * CELLS / (watches[-1].seconds * steps)


def _ticking(watch: Stopwatch) -> Callable[[StepReport], None]:
    return lambda _: watch()


def _cell(setting: Setting, base: Any, number: int, steps: int) -> RunSpec:
    model = attach_lora(shared_copy(base), LORA, init_seed=number)
    mechanism = build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))})
    shape, records = setting.shape, setting.poisson_records
    count = len(records.rows)
    plan = TrainingPlan(
        shape.batch / count, float(shape.batch), steps, physical_batch_size=shape.physical, autocast=shape.autocast
    )
    units, entropy = PrivacyUnits.of("record", np.arange(count), 1), OsEntropy()
    return RunSpec(model, records, units, mechanism, plan, header_of(mechanism, units, entropy, delta=1e-5))


def measure_cells(setting: Setting, effort: Effort, results: Results, deadline: Deadline) -> None:
    """Rounds of both, as lines of seconds a cell's step."""
    apart, together = (results.line("cells", setting, name, APART) for name in (APART, TOGETHER))
    steps = effort.steps or 8
    for _ in range(effort.rounds):
        if deadline.left <= 0:
            break
        one_after_another, at_once = cells_per_hour(setting, steps, effort.warmup)
        apart.seconds.append(3600 / one_after_another / steps)
        together.seconds.append(3600 / at_once / steps)
    results.save()
