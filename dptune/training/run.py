"""State of a run, and its step in two halves.

knobs    = mechanism.knobs()                 # from past releases only                               begin
ledger.charge(mechanism.release(knobs, q))   # on disk before the noisy value exists; may refuse
batch    = units.draw(q)                     # by the sampler, secret coins; may be empty (bands: of one group)
released = mechanism.privatise(per-sample gradients of the batch, knobs)                           # complete
optimizer.step(released.gradient)
controller.observe(released)

Between the halves, ``loop`` computes the gradients of one run, or ``together`` those of many runs on one base.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import total_norms
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs, Observation, Released
from dptune.mechanisms.mechanism import Mechanism, clipped_sums
from dptune.mechanisms.planning import sampled
from dptune.privacy.accounting.renyi_filter import renyi_cost
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder, fresh_start
from dptune.training.checkpoints import Progress, save_checkpoint
from dptune.training.data import Bins, drawn_units
from dptune.training.evaluation import mean_loss
from dptune.training.gradients.frozen_layers import FrozenLayers
from dptune.training.gradients.parameter_groups import Block, PairModules
from dptune.training.models.model import assert_trained
from dptune.training.optimizers import apply_average, average_weights, moments, set_rate, tell_noise
from dptune.training.privacy_units import PrivacyUnits, Turn, split_batch
from dptune.training.ranks import Order, Ranks
from dptune.training.spec import RunSpec, TrainingPlan, mark_used

_PUBLIC_RECORDS = 32  # number of public records on which a controller's public loss is computed


@dataclass
class StepReport:
    """What a step hands to whoever logs. ``private`` must not leave a run with private telemetry.

    Attributes:
        step: 1-based optimiser step.
        releases: length of the ledger.
        ledger: the run's ledger; its ``composition`` is a copy of the charges so far, so read it within ``on_step``.
        knobs: radii, noise multiplier and the controller's figures; as public as what it reads.
        public: functions of the configuration and of releases.
        private: functions of raw records (batch loss, clipped fraction).
    """

    step: int
    releases: int
    ledger: Ledger = field(repr=False)
    knobs: dict[str, float]
    public: dict[str, float]
    private: dict[str, float] = field(repr=False)

    @property
    def composition(self) -> Composition:
        """What the ledger holds now, as a copy."""
        return Counter(self.ledger.composition)


@dataclass(frozen=True)
class Step:
    """The first half of a step: charged and drawn, not yet made. Private.

    Attributes:
        knobs: the knobs that it was charged with.
        batch: indices of the records of each drawn unit.
        planted: the auditor's slots that were drawn.
        row: number of its release in the ledger, from 0.
    """

    knobs: Knobs
    batch: list[NDArray[np.int64]] = field(repr=False)
    planted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    row: int = 0


@dataclass
class RankRun:
    """A run as one of its processes (ranks) sees it; ``open_rank`` makes it.

    Attributes:
        pairs: the modules that train: LoRA pairs, and a classifier's head after them.
        own_units: those whose coins this rank tosses.
        fingerprint: checksum of the frozen weights.
        frozen: layers below the first that trains, whose states are computed once, if there are any.
    """

    spec: RunSpec
    pairs: list[Block]
    own_units: PrivacyUnits
    entropy: Entropy
    ranks: Ranks
    fingerprint: str
    frozen: FrozenLayers | None = field(default=None, kw_only=True, repr=False)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All weights that the run trains."""
        return [parameter for pair in self.pairs for parameter in pair.parameters]

    def batch_of(self, order: Order) -> list[NDArray[np.int64]]:
        """This rank's part of an ordered batch: for each drawn unit the records that it brings. Private."""
        if order.drawn is not None:
            return self.own_units.bring(order.drawn, self.entropy)
        return self.own_units.draw(order.sample_rate, self.entropy, order.turn)


@dataclass
class Run(RankRun):
    """An open run, whose ledger this process has locked: rank 0's. ``open_run`` makes it.

    Attributes:
        restarts: lengths of the ledger at which correlated noise began anew.
        bins: which batches of an epoch units enter, for sampler balls_in_bins; None for others. Private.
        computing: whether gradients are being computed, for several runs at once: an error then is not this run's own.
    """

    ledger: Ledger
    optimizer: torch.optim.Optimizer
    directory: Path
    on_step: Callable[[StepReport], None]
    initial: dict[str, torch.Tensor] = field(repr=False)
    step: int
    restarts: list[int] = field(default_factory=list)
    bins: Bins | None = field(default=None, repr=False)
    computing: bool = False

    def begin(self) -> Step | None:
        """Choose the knobs, charge the release, draw the batch; None when the run is over, its weights then saved.

        Raises: BudgetError, LedgerError.
        """
        mechanism, plan = self.spec.mechanism, self.spec.plan
        if self.ledger.releases >= plan.steps:
            return None
        knobs = _affordable(mechanism, self.ledger, plan)
        if knobs is None and self.step and mechanism.controller.adaptive:
            self.save()
            return None
        knobs = knobs or mechanism.knobs()
        row = self.ledger.releases
        release = sampled(mechanism.release(knobs, plan.sample_rate, row), plan.law, mechanism)
        turn = Turn.of(self.ledger.header.run_id, mechanism.bands, row, mechanism.dealt_by)
        self.ledger.charge(release)
        mark_used(self.spec, self.ledger.header.run_id)
        drawn = drawn_units(release, row, len(self.spec.units), self.bins, self.entropy)
        order = Order(knobs, mechanism.statistics(knobs), release.sample_rate, turn, drawn)
        self.ranks.broadcast(order)
        self.ranks.copy(self.weights)
        return Step(knobs, *split_batch(self.batch_of(order)), row)

    def complete(self, step: Step, gradients: Iterable[Gradients]) -> None:
        """Clip, sum, add noise, move the weights, and save them where the plan says so.

        Args:
            gradients: gradients of the step's batch, micro-batch by micro-batch; each unit is in exactly one.
        """
        report = _complete(self, step, self._computed(gradients))
        self.step += 1
        self.on_step(report)
        if self.step % self.spec.plan.checkpoint_every == 0 or self.ledger.releases == self.spec.plan.steps:
            self.save()

    def _computed(self, gradients: Iterable[Gradients]) -> Iterator[Gradients]:
        """Yield the gradients, with ``computing`` set while the next ones are made."""
        self.computing = True
        for batch in gradients:
            self.computing = False
            yield batch
            self.computing = True
        self.computing = False

    def fail(self, error: Exception) -> None:
        """Report an error of the run's own, and close the ledger of a run that ``error`` ended."""
        if not self.computing:
            self.spec.on_failure(error)
        self.ledger.close()

    def end(self) -> None:
        """Let the other ranks go, check that the run did what it should have done, and put the average in place.

        Raises: BudgetError if no weights were saved; RuntimeError if adapters did not move.
        """
        self.ranks.broadcast(None)
        if self.step == 0:
            raise BudgetError(
                f"{self.directory}: every release is charged and no checkpoint was written before the process died. "
                f"Fix: {fresh_start(self.directory)}. Checkpoint more often then (training.checkpoint_every)."
            )
        # B starts at zero, so without noise A has no gradient at the first step.
        if self.spec.mechanism.private or self.step > 1:
            assert_trained(self.spec.model, self.initial, self.fingerprint)
        apply_average(self.spec.plan.rule, self.optimizer, self.weights)
        if self.spec.mechanism.noise.correlated is not None:
            self.spec.mechanism.noise.correlated.forget()

    def save(self) -> None:
        """Write the checkpoint of the last complete step.

        Raises: DivergedError, OSError.
        """
        if self.spec.auditor is not None:
            self.spec.auditor.on_save()
        controller, ledger = self.spec.mechanism.controller.state_dict(), self.ledger
        drawn = ledger.releases >= self.spec.plan.steps  # nothing is drawn any more
        secret = "" if self.bins is None or drawn else self.bins.kept
        progress = Progress(
            ledger.header.run_id, self.step, ledger.releases, ledger.chain, controller, self.restarts, secret
        )
        save_checkpoint(RunFolder(self.directory).checkpoint, self.spec.model, self.optimizer, progress)


def contribute(rank: RankRun, order: Order, gradients: Iterable[Gradients]) -> None:
    """Do a step's work of a rank other than 0: send the clipped sums of its batch to rank 0."""
    raw, zeros = RawStatistics(), _zeros(rank.pairs)
    clipper, watched = rank.spec.mechanism.clipper, raw.watching(gradients)
    rank.ranks.total(clipped_sums(clipper, order.statistics, watched, zeros, order.knobs))
    rank.ranks.total([raw.sums(order.knobs, zeros[0])])


def seed_dropout(entropy: Entropy, step: int) -> None:
    """Seed dropout from secret entropy: known masks would tie the records of a batch together."""
    torch.manual_seed(secrets.randbits(63) if not entropy.leaks else step)


def _affordable(mechanism: Mechanism, ledger: Ledger, plan: TrainingPlan) -> Knobs | None:
    """The controller's knobs, with more noise where the filter asks for it; None when the budget is used up.

    Decided before the batch is drawn, from releases alone. The filter keeps in reserve what the remaining steps
    cost at the most noise that a controller may choose, so that a run can always finish.
    """
    knobs, renyi_filter = mechanism.knobs(), ledger.header.renyi_filter
    if renyi_filter is not None and mechanism.controller.adaptive:
        wanted = mechanism.effective_noise_multiplier(knobs)
        quietest = mechanism.most_noise()
        later = plan.steps - ledger.releases - 1
        reserve = later * renyi_cost(renyi_filter.order, plan.sample_rate, quietest)
        assert ledger.spent is not None  # there is a filter
        spent = ledger.spent + reserve
        allowed = renyi_filter.raise_noise_multiplier(wanted, plan.sample_rate, spent)
        if not math.isfinite(allowed):
            return None
        knobs = mechanism.at_effective_noise_multiplier(knobs, allowed)
    release = mechanism.release(knobs, plan.sample_rate, ledger.releases)
    return knobs if ledger.admits(sampled(release, plan.law, mechanism)) else None


def _complete(run: Run, step: Step, gradients: Iterable[Gradients]) -> StepReport:
    spec, ledger, knobs = run.spec, run.ledger, step.knobs
    mechanism, plan = spec.mechanism, spec.plan
    raw = RawStatistics()
    zeros = _zeros(run.pairs)
    planted = run.spec.auditor.gradients(mechanism, step.planted, zeros) if run.spec.auditor else []
    batches = chain(raw.watching(gradients), planted)
    released = mechanism.privatise(
        batches, zeros, knobs, plan.expected_batch_size, run.entropy, run.ranks.total, step.row
    )
    if run.spec.auditor:
        run.spec.auditor.watch(mechanism, released, zeros, plan.expected_batch_size, step.row, _turns(run, step.row))
    learning_rate = plan.learning_rate_at(run.step, step.row)
    tell_noise(run.optimizer, released, [len(pair.parameters) for pair in run.pairs], plan.expected_batch_size)
    _apply(run.pairs, released.gradient, run.optimizer, learning_rate)
    first = plan.rule.first_averaged(plan.steps, mechanism.bands)
    average_weights(plan.rule, run.optimizer, run.weights, step.row, first)
    moved = {
        "noise_multiplier": knobs.noise_multiplier,
        **{f"radius_{index}": radius for index, radius in enumerate(released.knobs.radii)},
        **mechanism.controller.metrics(),  # read before ``observe``: these belong to this release
    }
    mechanism.controller.observe(_observation(run, released))
    public = {"learning_rate": learning_rate}
    private = _summary(run.ranks.total([raw.sums(released.knobs, zeros[0])])[0], released.knobs)
    # Without noise the sum is as private as the records.
    norm = float(torch.cat(released.gradient).norm())
    (public if mechanism.private else private)["gradient_norm"] = norm
    return StepReport(run.step + 1, ledger.releases, ledger, moved, public, private)


def _turns(run: Run, row: int) -> NDArray[np.bool_]:
    """(slots,) whether each of the auditor's slots could be drawn in a row."""
    units, mechanism = run.spec.units, run.spec.mechanism
    turn = Turn.of(run.ledger.header.run_id, mechanism.bands, row, mechanism.dealt_by)
    slots = len(units.members) + np.arange(len(units.planted))
    return np.ones(len(slots), dtype=bool) if turn is None else units.of_turn(turn, slots)


def _observation(run: Run, released: Released) -> Observation:
    renyi_filter, ledger = run.ledger.header.renyi_filter, run.ledger
    if renyi_filter is not None and ledger.spent is not None and run.spec.mechanism.controller.adaptive:
        spent = ledger.spent / renyi_filter.budget
    else:
        spent = ledger.releases / run.spec.plan.steps
    return Observation(
        releases=ledger.releases,
        released=released,
        spent=spent,
        public_loss=lambda: _public_loss(run),
        adapter_figures=lambda: _adapter_figures(run),
    )


def _public_loss(run: Run) -> float:
    if run.spec.public is None:
        raise ConfigError("controller", "follows the loss on public records, and none were given", fix="give them")
    sample = replace(run.spec.public, rows=run.spec.public.rows[:_PUBLIC_RECORDS])
    autocast, called = run.spec.plan.autocast_dtype, f"the first {len(sample.rows)} public records"
    return mean_loss(run.spec.model, sample, _PUBLIC_RECORDS, autocast=autocast, called=called)


@torch.no_grad()
def _adapter_figures(run: Run) -> dict[str, list[float]]:
    """Norms of B A (of a head: of its weights) and of the optimiser's moments (0 if it has none), for every pair:
    functions of released values.
    """
    figures: dict[str, list[float]] = {"product": [], "momentum": [], "second_moment": []}
    for pair in run.pairs:
        if isinstance(pair, PairModules):
            # ||B A||^2 = trace of (A A^T)(B^T B): two small matrices in place of a large one.
            down, up = pair.down.weight.double(), pair.up.weight.double()
            figures["product"].append(float(((down @ down.T) * (up.T @ up)).sum().clamp(min=0).sqrt()))
        else:
            figures["product"].append(float(torch.stack([weight.norm() for weight in pair.parameters]).norm()))
        for name in ("momentum", "second_moment"):
            norms = [one.norm() for one in moments(run.optimizer, pair.parameters, name)] or [torch.zeros(())]
            figures[name].append(float(torch.stack(norms).norm()))
    return figures


def _zeros(pairs: list[Block]) -> list[torch.Tensor]:
    """A flat float64 zero vector for each pair: one number in memory, for a model's own weights are many."""
    zero = torch.zeros((), dtype=torch.float64, device=pairs[0].parameters[0].device)
    return [zero.expand(pair.size) for pair in pairs]


@dataclass
class RawStatistics:
    """Un-noised figures of one batch, for research telemetry only; nothing in a run reads them."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)

    def watching(self, gradients: Iterable[Gradients]) -> Iterator[Gradients]:
        """Yield the micro-batches unchanged, and keep their norms and losses."""
        for batch in gradients:
            self.losses.append(batch.losses())
            self.norms.append(batch.norms())
            yield batch

    def sums(self, knobs: Knobs, like: torch.Tensor) -> torch.Tensor:
        """(3,) number of units, sum of their losses, and number of clipped (unit, radius) pairs."""
        if not self.losses:
            return like.new_zeros(3)
        norms, losses = torch.cat(self.norms), torch.cat(self.losses)
        if len(knobs.radii) == 1:
            norms = total_norms(norms)[:, None]
        clipped = (norms > norms.new_tensor(knobs.radii)).sum() if knobs.radii else losses.new_zeros(())
        return torch.stack([losses.new_tensor(float(len(losses))), losses.sum(), clipped.double()])


def _summary(raw: torch.Tensor, knobs: Knobs) -> dict[str, float]:
    """Size of the batch, mean loss of its units, and the share of (unit, radius) that was clipped."""
    units, losses, clipped = raw.tolist()
    if not units:
        return {"batch_units": 0.0}
    figures = {"batch_units": units, "batch_loss": losses / units}
    return figures | {"clipped_fraction": clipped / (units * len(knobs.radii))} if knobs.radii else figures


def _apply(
    pairs: list[Block], gradients: list[torch.Tensor], optimizer: torch.optim.Optimizer, learning_rate: float
) -> None:
    for pair, gradient in zip(pairs, gradients, strict=True):
        start = 0
        for parameter in pair.parameters:
            parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).to(parameter.dtype)
            start += parameter.numel()
    set_rate(optimizer, learning_rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
