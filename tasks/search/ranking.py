"""How well a rehearsal's ranking carries over: the settings that it tried, each run on the private records too.

It costs what those runs cost, and is for whoever wants to know what a rehearsal on these public records is worth. It
changes no choice: the rehearsal has ended, and its winner is trained, before the first of these runs starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import private_directory
from dptune.job.preparation import PreparedRun
from dptune.job.result import HELD_OUT
from dptune.job.run import Tuned, run
from dptune.job.search.rehearsal import Rehearsed
from dptune.job.search.space import Configuration
from dptune.mechanisms.planning import price
from dptune.privacy.set_aside import FOLDER, earlier_runs
from dptune.privacy.spent_budgets.register import Register
from tasks.search.outcome import figure_of, forget_weights, is_priced

_log = logging.getLogger(__name__)

#: Fewer points have no order that chance would not often give.
_FEWEST = 3


def check_held_out(prepared: PreparedRun) -> None:
    """Raise ConfigError without held-out records."""
    if prepared.evaluation is None:
        raise ConfigError("search.check_ranking", "is true, and no records are held out", fix="change data.parts")


def rank_privately(
    found: Rehearsed, winner: Tuned, prepare: Callable[[Configuration], PreparedRun], register: Register
) -> dict[str, Any]:
    """Run every setting of a rehearsal on the private records, but for the winner, which was. Takes up a stopped call.

    Guarantee: each run is a run of its own, counted in the register from its start, at the epsilon of its plan; their
    sum, with those that were set aside, adds to what the winner costs. Held-out perplexities have none. A run that
    diverged ranks last. No weights stay but the winner's: they would lie, with the proof of one run, beside a page that
    chose among them.

    Args:
        winner: the private run of the rehearsal's best.
        prepare: prepares the run of one setting.

    Returns: points, each a setting, its perplexity in the rehearsal and on held-out private records; their rank
        correlation; number of runs, those that were set aside included, and what they cost together. Runs whose folders
        were removed are in the register alone. In JSON types.
    """
    tried, budget = _distinct(found.tried), found.settings.epsilon
    further, within = len(tried) - 1, private_directory(winner.folder / FOLDER)  # whose presence says: it has begun
    aside = sum(len(earlier_runs(within / _digest(configuration))) for configuration, _ in tried)
    _log.warning(
        "checking the ranking trains %d further settings on the private records, within epsilon %s each and %s "
        "together%s, which adds to the winner's own",
        *(further, at_most(budget, 6), at_most((further + aside) * budget, 6)),
        f" with {aside} that were set aside" if aside else "",
    )
    points: list[tuple[Configuration, float, float]] = []
    costs: list[float] = []
    for configuration, rehearsed in tried:
        prepared = prepare(configuration)
        if prepared.settings == found.settings:
            held_out = winner.perplexity[HELD_OUT][1]
        else:
            mechanism, folder = prepared.mechanism, within / _digest(configuration)
            cost = price(mechanism.mechanism, prepared.schedule.priced, mechanism.renyi_filter).certified
            held_out = _held_out(prepared, folder, register)
            costs += [cost] * (1 + len(earlier_runs(folder)))  # each counts in the register, as planned
        points.append((configuration, rehearsed, held_out))
    return {
        "points": [[configuration, str(rehearsed), str(held_out)] for configuration, rehearsed, held_out in points],
        "correlation": rank_correlation([(rehearsed, held_out) for _, rehearsed, held_out in points]),
        "runs": len(costs),
        "epsilon": str(math.fsum(costs)),
        "delta": len(costs) * winner.ledger.header.delta,
    }


def rank_correlation(points: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's; infinite values rank last. None for fewer than three points, or where all are equal on one side."""
    if len(points) < _FEWEST:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about equal values, of which it gives no number
        found = float(spearmanr(*zip(*points, strict=True)).statistic)
    return found if math.isfinite(found) else None


def _held_out(prepared: PreparedRun, out: Path, register: Register) -> float:
    found = figure_of(prepared, out, lambda: run(prepared, out, register).perplexity[HELD_OUT][1])
    if is_priced(out):
        forget_weights(out)
    return found


def _distinct(tried: Sequence[tuple[Configuration, float]]) -> list[tuple[Configuration, float]]:
    """Each setting once, with the mean of its perplexities: what was drawn twice need not be paid for twice."""
    groups: dict[str, list[tuple[Configuration, float]]] = {}
    for one in tried:
        groups.setdefault(json.dumps(one[0], sort_keys=True), []).append(one)
    return [(own[0][0], math.fsum(found for _, found in own) / len(own)) for own in groups.values()]


def _digest(configuration: Configuration) -> str:
    """The name of a setting's folder. Public, as the setting is."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]
