"""K cells on one base: cells per hour, together over one after another."""

from __future__ import annotations

from benchmarks.measure import Deadline, Effort, Results
from benchmarks.shapes import Setting
from benchmarks.steps import CannotRunError

CELLS = 8
APART, TOGETHER = f"{CELLS} cells, one after another", f"{CELLS} cells, together"


def cells_per_hour(setting: Setting, steps: int, warmup: int) -> tuple[float, float]:
    """LEFT OPEN until ``dptune.training.together`` is there.

    To measure, in this order and in one process: ``CELLS`` runs of ``static`` (``benchmarks.steps.private``), one
    after another, then the same cells by ``train_together``, with the same records, steps and seeds. Set-up and
    the first ``warmup`` steps are left out of both, as ``benchmarks.measure.Stopwatch`` does.

    Returns: cells of ``steps`` steps an hour, one after another and together.
    """
    raise CannotRunError("not measured: dptune.training.together is not in this version")


def measure_cells(setting: Setting, effort: Effort, results: Results, deadline: Deadline) -> None:
    """Rounds of both, as lines of seconds a cell's step."""
    apart, together = (results.line("cells", setting, name, APART) for name in (APART, TOGETHER))
    steps = effort.steps or 8
    for _ in range(effort.rounds):
        if deadline.left <= 0:
            break
        try:
            one_after_another, at_once = cells_per_hour(setting, steps, effort.warmup)
        except CannotRunError as error:
            apart.failed = together.failed = str(error)
            break
        apart.seconds.append(3600 / one_after_another / steps)
        together.seconds.append(3600 / at_once / steps)
    results.save()
