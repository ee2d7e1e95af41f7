"""The private training loop of one run; ``run`` holds the two halves of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.interrupts import stop_request
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.privacy.entropy import Entropy, uniform
from dptune.privacy.ledger import Ledger
from dptune.training.data import Tokens, by_width
from dptune.training.gradients.frozen_layers import FrozenLayers, frozen_layers
from dptune.training.gradients.layer_gradients import layer_gradients
from dptune.training.gradients.parameter_groups import Block, LayerModules
from dptune.training.gradients.per_sample import PairGradients, per_sample_gradients
from dptune.training.gradients.step_memory import checkpointed, micro_batches, public_widths
from dptune.training.losses import model_losses
from dptune.training.models.model import set_modes, train_adapters
from dptune.training.ranks import Ranks
from dptune.training.run import RankRun, StepReport, contribute, seed_dropout
from dptune.training.run_start import open_rank, open_run
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

    A resumed run takes the same units with the same keys, in the same order. With several bands, and with bins, that is
    a part of the guarantee: a unit's key says in which steps it can be drawn, and one that got another key could be
    drawn once more than is charged. ``tune`` and the pipeline check it by digests of records and keys; here the caller
    answers for it.

    With sampler balls_in_bins the checkpoint holds the secret by which units choose their batches, until the last one
    is drawn; a run that was killed goes on with the same choices, and not without its checkpoint.

    A run whose controller moves the noise may use up its budget early; it then ends with fewer releases. Ctrl-C and
    SIGTERM stop a run at the end of a step, with a checkpoint, by a KeyboardInterrupt.

    Returns: the ledger, still open: the caller finishes it when the run's results are safe.

    Raises: ConfigError, LedgerError, CheckpointError, BudgetError, LostRankError; RuntimeError if adapters did not
        move.
    """
    run = open_run(spec, directory, entropy, on_step, ranks)
    seed_dropout(entropy, run.step)
    try:
        run.frozen = _frozen(run)
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
    rank.frozen = _frozen(rank)
    train_adapters(spec.model)
    while (order := ranks.broadcast(None, rank.weights[0].device)) is not None:
        ranks.copy(rank.weights)
        contribute(rank, order, gradients_of(rank, rank.batch_of(order)))


def _frozen(run: RankRun) -> FrozenLayers | None:
    """The layers whose states are computed once. A client's local training and checkpointed layers go without."""
    plan, tokens = run.spec.plan, run.spec.tokens
    if plan.gradient_checkpointing or run.spec.mechanism.clipper.federation is not None:
        return None
    return frozen_layers(
        run.spec.model,
        run.pairs,
        tokens,
        rows=plan.physical_batch_size,
        widths=public_widths(tokens.width, plan.expected_batch_size, plan.physical_batch_size),
        visits=plan.sample_rate * plan.steps,
        autocast=plan.autocast_dtype,
    )


def gradients_of(run: RankRun, batch: list[NDArray[np.int64]]) -> Iterator[Gradients]:
    """The vectors of a batch that the run's clipper clips, micro-batch by micro-batch. Private."""
    return run.spec.mechanism.clipper.gradients(BatchGradients(run, batch))


# A client's local training, for federated DP-LoRA.


def local_update(
    model: Any,
    pairs: Sequence[Block],
    tokens: Tokens,
    records: NDArray[np.int64],
    *,
    rows: int,
    steps: int,
    learning_rate: float,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
) -> PairGradients:
    """A client's update before clipping: minus the change of its adapters. The model is left as it was.

    Local SGD without momentum on the mean loss, ``rows`` records a step, in order and from the start again. Private.

    Args:
        records: indices of the client's records, at least one.
        rows: physical batch size; every batch has this shape.
        checkpointing: as ``per_sample_gradients`` has it.

    Returns: one unit, whose loss is that of the first step.
    """
    parameters = [parameter for pair in pairs for parameter in pair.parameters]
    start = [parameter.detach().clone() for parameter in parameters]
    device, first = parameters[0].device, None
    try:
        for step in range(steps):
            chosen = _slice(records, step, rows)
            ids, mask = tokens.batch(chosen, device, height=rows)
            with checkpointed(model, enabled=checkpointing):
                with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                    loss = model_losses(model, ids, mask)[: len(chosen)].mean()
                gradients = torch.autograd.grad(loss, parameters)
            first = loss.detach() if first is None else first
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= learning_rate * gradient
        changes = [before - parameter.detach() for before, parameter in zip(start, parameters, strict=True)]
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, start, strict=True):
                parameter.copy_(before)
    flat = iter(change.flatten().float() for change in changes)
    assert first is not None
    return PairGradients([torch.cat([next(flat) for _ in pair.parameters])[None] for pair in pairs], first[None])


def _slice(records: NDArray[np.int64], step: int, rows: int) -> NDArray[np.int64]:
    """The records of a step: at most ``rows``, starting again after the last record."""
    start = (step * rows) % len(records)
    return records[start : start + rows]


# Computes the gradients of one batch for a clipper, on a run's own model.


@dataclass(frozen=True)
class BatchGradients:
    """A ``GradientSource`` for the batch that a run drew. Private.

    Attributes:
        batch: indices of the records of each drawn unit.
    """

    run: RankRun
    batch: list[NDArray[np.int64]] = field(repr=False)

    def of_losses(self) -> Iterator[Gradients]:
        """Yield per-sample gradients, one micro-batch at a time, by ``public_widths`` from the widest to the least."""
        run, device, plan = self.run, self.run.pairs[0].parameters[0].device, self.run.spec.plan
        tokens, rows, below = run.spec.tokens, plan.physical_batch_size, run.frozen
        own_weights = isinstance(run.pairs[0], LayerModules)
        compute: Callable[..., Gradients] = layer_gradients if own_weights else per_sample_gradients
        for width, units in by_width(self.batch, tokens, public_widths(tokens.width, plan.expected_batch_size, rows)):
            if below is not None and units:
                below.fill(np.concatenate(units).tolist(), tokens, rows, width, plan.autocast_dtype)
            for part in micro_batches(units, rows):
                ids, mask = tokens.batch(part.records, device, height=rows, width=width)
                owners = part.owners_of(len(ids), device)
                with nullcontext() if below is None else below.kept(part.records.tolist(), rows, width):
                    found = compute(
                        run.spec.model,
                        run.pairs,
                        ids,
                        mask,
                        owners,
                        part.units,
                        autocast=plan.autocast_dtype,
                        checkpointing=plan.gradient_checkpointing,
                    )
                yield found

    def of_local_training(self, steps: int, learning_rate: float) -> Iterator[PairGradients]:
        """Local updates, one micro-batch for every drawn unit that has records."""
        run = self.run
        for members in self.batch:
            if not len(members):
                continue  # a client without records sends nothing
            # The order is new in every round; otherwise a client's last records would never be used.
            records = members[np.argsort(uniform(run.entropy, len(members)))]
            yield local_update(
                run.spec.model,
                run.pairs,
                run.spec.tokens,
                records,
                rows=run.spec.plan.physical_batch_size,
                steps=steps,
                learning_rate=learning_rate,
                autocast=run.spec.plan.autocast_dtype,
                checkpointing=run.spec.plan.gradient_checkpointing,
            )
