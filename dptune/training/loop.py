"""The private training loop of one run; ``run`` holds the two halves of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.mechanisms.interfaces import Gradients
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger, RunHeader
from dptune.training.data import PrivacyUnits, Tokens
from dptune.training.gradients import BatchGradients
from dptune.training.model import train_adapters
from dptune.training.opening import open_run, open_share
from dptune.training.ranks import Ranks
from dptune.training.run import Auditor, Plan, Share, StepReport, contribute, seed_dropout

__all__ = ["Plan", "StepReport", "follow", "train"]


def train(
    model: Any,
    tokens: Tokens,
    units: PrivacyUnits,
    mechanism: Mechanism,
    plan: Plan,
    header: RunHeader,
    directory: Path,
    entropy: Entropy,
    on_step: Callable[[StepReport], None] = lambda report: None,
    public: Tokens | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    auditor: Auditor | None = None,
) -> Ledger:
    """Fine-tune the model's adapters, resuming what ``directory`` holds of the run.

    Guarantee: the final weights are a function of releases that the returned ledger lists, charged before they
    were made, so its certified epsilon is theirs (add/remove one of ``units``). Private: ``tokens``, ``units``'
    members, and every gradient. Public: everything else.

    Args:
        model: PEFT model on its device, as the checkpoint's run started it (same initialisation).
        directory: receives ledger.jsonl and checkpoint.safetensors.
        on_step: called after each step.
        public: public records, for controllers that follow the loss on them.
        ranks: of which this is rank 0; the others call ``follow`` with the same arguments.
        auditor: whose gradients fill the slots of ``units.with_slots``; to the others these slots are empty.

    A run whose controller moves the noise may use up its budget early; it then ends with fewer releases.

    Returns: the ledger, still open: the caller finishes it when the run's results are safe.

    Raises: ConfigError, LedgerError, CheckpointError, BudgetError, LostRankError; RuntimeError if adapters did not
        move.
    """
    run = open_run(model, tokens, units, mechanism, plan, header, directory, entropy, on_step, public, ranks, auditor)
    seed_dropout(entropy, run.step)
    try:
        while (step := run.begin()) is not None:
            train_adapters(model)
            run.complete(step, gradients_of(run, step.batch))
        run.end()
    except BaseException:
        run.ledger.close()
        raise
    return run.ledger


def follow(
    model: Any,
    tokens: Tokens,
    units: PrivacyUnits,
    mechanism: Mechanism,
    plan: Plan,
    entropy: Entropy,
    ranks: Ranks,
) -> None:
    """What the other ranks do while rank 0 is in ``train``, where the arguments are described.

    Guarantee: no coin is tossed for a step before rank 0's ledger holds it, and nothing is kept or written.

    Raises: ConfigError; LostRankError if rank 0 fails.
    """
    share = open_share(model, tokens, units, mechanism, plan, entropy, ranks)
    seed_dropout(entropy, ranks.rank)
    train_adapters(model)
    while (order := ranks.told(None, share.weights[0].device)) is not None:
        ranks.copy(share.weights)
        batch = share.units.draw(plan.sample_rate, entropy)
        contribute(share, order, gradients_of(share, batch))


def gradients_of(run: Share, batch: list[NDArray[np.int64]]) -> Iterator[Gradients]:
    """What the run's clipper clips of a batch, micro-batch by micro-batch. Private."""
    return run.mechanism.clipper.gradients(BatchGradients(run, batch))
