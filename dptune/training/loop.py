"""The private training loop of one run; ``run`` holds the two halves of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dptune.mechanisms.interfaces import Gradients
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.stopping import stop_request
from dptune.training.gradients import BatchGradients
from dptune.training.model import set_modes, train_adapters
from dptune.training.opening import open_rank, open_run
from dptune.training.ranks import Ranks
from dptune.training.run import RankRun, StepReport, contribute, seed_dropout
from dptune.training.spec import RunSpec


def train(
    spec: RunSpec,
    directory: Path,
    entropy: Entropy,
    on_step: Callable[[StepReport], None] = lambda report: None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Ledger:
    """Fine-tune the adapters of ``spec.model``, resuming what ``directory`` holds of the run.

    Guarantee: the final weights are a function of releases that the returned ledger lists, charged before they
    were made, so its certified epsilon is theirs (add/remove one of ``spec.units``). Private: ``spec.tokens``, the
    units' members and keys, and every gradient. Public: everything else.

    Args:
        spec: the run's specification, with freshly initialised adapters, even if the run is resumed.
        directory: receives ledger.jsonl and checkpoint.safetensors.
        entropy: source of coins and noise.
        on_step: called after each step.
        ranks: the processes of the run, of which this is rank 0. The others call ``follow`` with the same ``spec``, in
            which an auditor's slots are empty.

    A resumed run takes the same units with the same keys, in the same order. With several bands that is a part of the
    guarantee: a unit's key says in which steps it can be drawn, and one that got another key could be drawn once more
    than is charged. ``tune`` and the pipeline check it by digests of records and keys; here the caller answers for it.

    A run whose controller moves the noise may use up its budget early; it then ends with fewer releases. Ctrl-C and
    SIGTERM stop a run at the end of a step, with a checkpoint, by a KeyboardInterrupt.

    Returns: the ledger, still open: the caller finishes it when the run's results are safe.

    Raises: ConfigError, LedgerError, CheckpointError, BudgetError, LostRankError; RuntimeError if adapters did not
        move.
    """
    run = open_run(spec, directory, entropy, on_step, ranks)
    seed_dropout(entropy, run.step)
    try:
        with stop_request() as asked:
            try:
                modes = train_adapters(spec.model)
                while not asked() and (step := run.begin()) is not None:
                    set_modes(modes)  # whoever looked at the last step may have changed them
                    run.complete(step, gradients_of(run, step.batch))
                if not asked():
                    run.end()
                elif run.step:
                    run.save()
            except Exception as error:
                run.fail(error)
                if not asked():  # else the stop goes first: a search would go on with its next candidate
                    raise
    except BaseException:
        run.ledger.close()
        raise
    return run.ledger


def follow(spec: RunSpec, entropy: Entropy, ranks: Ranks) -> None:
    """Take part in a run as one of the other ranks, while rank 0 is in ``train`` with the same ``spec``.

    Guarantee: no coin is tossed for a step before rank 0's ledger holds it, and nothing is kept or written.

    Raises: ConfigError; LostRankError if rank 0 fails.
    """
    rank = open_rank(spec, entropy, ranks)
    seed_dropout(entropy, ranks.rank)
    train_adapters(spec.model)
    while (order := ranks.broadcast(None, rank.weights[0].device)) is not None:
        ranks.copy(rank.weights)
        batch = rank.own_units.draw(order.sample_rate, entropy, order.turn)
        contribute(rank, order, gradients_of(rank, batch))


def gradients_of(run: RankRun, batch: list[NDArray[np.int64]]) -> Iterator[Gradients]:
    """The vectors of a batch that the run's clipper clips, micro-batch by micro-batch. Private."""
    return run.spec.mechanism.clipper.gradients(BatchGradients(run, batch))
