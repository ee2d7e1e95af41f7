"""How well a rehearsal's ranking carries over: the settings that it tried, each run on the private records too.

It costs what those runs cost, and is for whoever wants to know what a rehearsal on these public records is worth. It
changes no choice: the rehearsal has ended, and its winner is trained, before the first of these runs starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shlex
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DivergedError, DptuneError
from dptune.core.files import private_directory, read_json, write_json
from dptune.job.delivery.weights import weights_in
from dptune.job.preparation import PreparedRun
from dptune.job.result import HELD_OUT
from dptune.job.run import Tuned, check_same, run
from dptune.job.search.rehearsal import Rehearsed
from dptune.job.search.space import Configuration
from dptune.mechanisms.planning import price
from dptune.privacy.run_folder import FOLDER, RunFolder, earlier_runs, runs_within, spending_of
from dptune.privacy.spent_budgets.register import Register

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


# How a run of a rehearsal ended, in its folder: written as soon as that is known, and read by whatever comes later.
#
# A run that diverged is not resumed, though with other noise it might end well; and the weights of a run that was only
# to be measured need not stay. A process that dies while it trains is another matter: its run goes on from its
# checkpoint.


#: In a run's folder: its figure, infinite where it diverged.
FILE = "outcome.json"


def unless_diverged(prepared: PreparedRun, out: Path, work: Callable[[], Tuned]) -> Tuned | None:
    """The finished run; None if it diverged, now or in an earlier call.

    Raises: ConfigError if the run in ``out`` diverged with other settings or records, or its ledger is missing.
    """
    if _known(prepared, out) is not None:
        return None
    try:
        return work()
    except DivergedError as error:
        _log.warning("%s", error)
        _keep(out, math.inf)
        return None


def figure_of(prepared: PreparedRun, out: Path, work: Callable[[], float]) -> float:
    """The figure of a run, from ``work`` the first time; infinite if it diverged. Raises: ConfigError likewise."""
    if (known := _known(prepared, out)) is not None:
        return known
    try:
        found = work()
    except DivergedError as error:
        _log.warning("%s", error)
        found = math.inf
    _keep(out, found)
    return found


def check_ended(prepared: PreparedRun, out: Path) -> None:
    """Raise ConfigError unless the run that ended in ``out`` is of these settings and records, and has its ledger."""
    if not RunFolder(out).ledger.exists():  # asked first: a run that lost its ledger is taken for a new one
        problem = f"{out} has ended, and its ledger, the only record of its cost, is missing"
        afresh = f"`dptune set-aside {shlex.quote(str(out))}` lets the next run start afresh and spend again"
        raise ConfigError("out", problem, fix=f"restore it, or {afresh}")
    check_same(prepared, RunFolder(out))


def forget_weights(out: Path) -> None:
    """Remove a run's weights. Its ledger and its result, which price it, stay.

    Raises: DptuneError if they lie behind a link, which is not followed: something else may be there.
    """
    for path in weights_in(out):
        if path.is_symlink():
            problem = f"{path}: is a link, and the weights behind it were not removed"
            raise DptuneError(f"{problem}. Fix: remove both; the next call goes on.")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_priced(out: Path) -> bool:
    """Whether a run's ledger tells what it released; else its weights may be all that says that it did."""
    return (spent := spending_of(out)) is not None and not spent.problem


def forget_losers(winner: Path, *, ended: bool) -> None:
    """Remove the weights of the runs that check a ranking, in the winner's folder, and warn of those that must stay.

    Those of a run that is to go on stay, and those that alone witness releases of which the ledger tells nothing.

    Args:
        ended: whether all of them have ended; else only those that say so, or were set aside.

    Raises: DptuneError as ``forget_weights``.
    """
    for one in runs_within(winner):
        aside = one in earlier_runs(one.with_name(one.name.partition(".")[0]))
        if weights_in(one) and (ended or aside or (one / FILE).exists()) and is_priced(one):
            forget_weights(one)
    if left := [one.name for one in runs_within(winner) if weights_in(one)]:
        _log.warning(
            "%s: weights of settings that were not chosen stay in it (%s): they have not ended, or their ledger is "
            "missing or damaged. Each has the proof of one run, and a page chose among them: do not publish them. With "
            "search.check_ranking, `make search` ends what has its ledger, and keeps only its figure",
            *(winner / FOLDER, ", ".join(left)),
        )


def _known(prepared: PreparedRun, out: Path) -> float | None:
    if not (out / FILE).exists():
        return None
    check_ended(prepared, out)
    return float(read_json(out / FILE)["figure"])


def _keep(out: Path, figure: float) -> None:
    write_json(out / FILE, {"figure": str(figure)})
