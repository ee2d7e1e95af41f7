"""Computes the gradients of one batch for a clipper, on a run's own model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dptune.privacy.entropy import uniform
from dptune.training.data import by_width, micro_batches, public_widths
from dptune.training.federated import local_update
from dptune.training.per_sample import PairGradients, per_sample_gradients
from dptune.training.run import RankRun


@dataclass(frozen=True)
class BatchGradients:
    """A ``GradientSource`` for the batch that a run drew. Private.

    Attributes:
        batch: indices of the records of each drawn unit.
    """

    run: RankRun
    batch: list[NDArray[np.int64]] = field(repr=False)

    def of_losses(self) -> Iterator[PairGradients]:
        """Yield per-sample gradients, one micro-batch at a time, by ``public_widths`` from the widest to the least."""
        run, device, plan = self.run, self.run.pairs[0].parameters[0].device, self.run.spec.plan
        tokens, rows = run.spec.tokens, plan.physical_batch_size
        for width, units in by_width(self.batch, tokens, public_widths(tokens.width, plan.expected_batch_size, rows)):
            for part in micro_batches(units, rows):
                ids, mask = tokens.batch(part.records, device, height=rows, width=width)
                owners = part.owners_of(len(ids), device)
                yield per_sample_gradients(
                    run.spec.model,
                    run.pairs,
                    ids,
                    mask,
                    owners,
                    part.units,
                    autocast=plan.autocast_dtype,
                    checkpointing=plan.gradient_checkpointing,
                )

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
