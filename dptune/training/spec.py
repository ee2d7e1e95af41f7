"""The specification of a run: model, records, units, mechanism, schedule, and the header of its ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.core.settings import StepSettings, TrainingSampler, UpdateRule
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Booked
from dptune.privacy.run_header import RunHeader
from dptune.privacy.samplers.sampler import Sampler, sampler_of_run
from dptune.training.data import Tokens
from dptune.training.privacy_units import PrivacyUnits


@dataclass(frozen=True)
class TrainingPlan(StepSettings):
    """The public schedule of a run.

    Attributes:
        sample_rate: q, the probability with which each unit enters each batch.
        expected_batch_size: q times units; divides every sum, never the realised size.
        steps: releases to make; charges of a killed process count among them.
        rule: optimiser, schedule of the learning rate, and average of the weights.
        sampler: how units get into batches.
        max_batch: most units of a batch of truncated_poisson, which needs it; None for other samplers.
    """

    sample_rate: float
    expected_batch_size: float
    steps: int
    rule: UpdateRule = field(default_factory=UpdateRule)
    sampler: TrainingSampler = "poisson"
    max_batch: int | None = None

    @property
    def law(self) -> Sampler:
        """The sampler with its numbers, as releases name it. Raises: ConfigError as ``sampler_of_run``."""
        return sampler_of_run(self.sampler, self.sample_rate, self.steps, self.expected_batch_size, self.max_batch)

    def learning_rate_at(self, step: int, row: int | None = None) -> float:
        """Linear warm-up over the steps in the weights, then what the schedule has at a release.

        Args:
            row: number of the release, from 0, which runs ahead of ``step`` after a kill; None is ``step``.
        """
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return (
            self.learning_rate
            * warm
            * self.rule.rate_share(step if row is None else row, self.steps, self.warmup_steps)
        )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The torch dtype of ``autocast``."""
        return getattr(torch, self.autocast) if self.autocast else None


@dataclass(frozen=True)
class RunSpec:
    """All that a run needs; ``train(spec, directory, entropy)`` carries it out.

    Private: ``tokens``, and members and keys of ``units``. Public: everything else, ``public`` included.

    Attributes:
        model: a PEFT model on its device with its adapters as the run starts from them, or the result of ``train_own``.
            The run trains it, so that a model serves one run. What weights have learned before from private records is
            in no ledger but their own.
        tokens: the records.
        units: the assignment of records to units, which the guarantee is about.
        mechanism: built for this model (``registry.of_model``). Its controller learns during the run, so that a
            mechanism serves one run.
        plan: the schedule, for this number of units.
        header: the first line of the run's ledger. It must describe this very run, or ``train`` refuses.
        public: public records, for controllers that follow the loss on them.
        auditor: the auditor whose gradients fill the slots of ``units.with_slots``.
        on_failure: called at once with an error of the run's own, before other runs of its pass go on: with what a step
            raises, and neither with what computing its gradients raises, nor with what opening the run does.
        booked: makes the context in which a new ledger gets its first line, when nothing can refuse the run any more.
    """

    model: Any = field(repr=False)
    tokens: Tokens
    units: PrivacyUnits
    mechanism: Mechanism
    plan: TrainingPlan
    header: RunHeader
    public: Tokens | None = None
    auditor: Auditor | None = None
    booked: Booked = nullcontext
    on_failure: Callable[[Exception], None] = field(default=lambda error: None, repr=False)


#: Attribute of a model, controller or noise that names the run that it serves.
OWNER = "_dptune_run"


def refuse_used(spec: RunSpec, run_id: str = "") -> None:
    """Refuse a model or a mechanism that another run than ``run_id`` has trained in this process.

    What they learned there comes from releases that the ledger of this run does not hold.

    Raises: ConfigError.
    """
    for field_name, part in _used_up(spec):
        if getattr(part, OWNER, run_id) != run_id:
            problem = "was trained by another run, whose releases this ledger does not hold"
            raise ConfigError(field_name, problem, fix="make a new model and mechanism for every run")


def mark_used(spec: RunSpec, run_id: str) -> None:
    """Note, for ``refuse_used``, whose releases the model and the controller follow from now on; copies keep it."""
    for _, part in _used_up(spec):
        object.__setattr__(part, OWNER, run_id)  # a controller may be frozen


def _used_up(spec: RunSpec) -> list[tuple[str, Any]]:
    """The parts that keep something of a run; correlated noise keeps its past, which no second run may have."""
    parts = [("model", spec.model), ("mechanism", spec.mechanism.controller)]
    if spec.mechanism.noise.correlated is not None:
        parts.append(("mechanism", spec.mechanism.noise))
    return parts


def header_of(
    mechanism: Mechanism,
    units: PrivacyUnits,
    entropy: Entropy,
    *,
    delta: float,
    epsilon: float | None = None,
    accounting: str = "certified",
    **more: Any,
) -> RunHeader:
    """Make the header of a run from mechanism, units, entropy and budget; ``more`` sets other fields."""
    return RunHeader(
        mechanism=mechanism.name,
        published_accountant=mechanism.published_accountant,
        accounting=accounting,
        epsilon=epsilon,
        delta=delta,
        unit=units.kind,
        units=len(units),
        leaks=entropy.leaks,
        inherited=tuple(mechanism.controller.inherited.items()),
        plugins=mechanism.plugins,
        **more,
    )


class Auditor(Protocol):
    """An observer that puts its own gradients into slots of a run's units, and sees all of the run's releases."""

    def start(
        self, mechanism: Mechanism, pair_sizes: Sequence[int], planted: NDArray[np.bool_], sample_rate: float
    ) -> None:
        """Check that the run has the auditor's slots. Raises ConfigError, before anything is charged."""
        ...

    def on_open(self, releases: int) -> None:
        """Called once, when this process has locked the run's ledger, which holds ``releases`` releases.

        Raises: DptuneError if those were made with other coins.
        """
        ...

    def on_save(self) -> None:
        """Called before each checkpoint is written: what the auditor saw so far outlives this process."""
        ...

    def gradients(self, mechanism: Mechanism, drawn: NDArray[np.int64], zeros: list[torch.Tensor]) -> list[Gradients]:
        """Gradients of the drawn slots for a batch; the mechanism clips them like all others."""
        ...

    def watch(
        self,
        mechanism: Mechanism,
        released: Released,
        zeros: list[torch.Tensor],
        divisor: float,
        row: int,
        turns: NDArray[np.bool_],
    ) -> None:
        """See one release.

        Args:
            divisor: the expected batch size.
            row: number of the release in its ledger, from 0.
            turns: (slots,) whether each slot could be drawn in it; with correlated noise, those of one group.
        """
        ...
