"""Suggestions of hyper-parameters before a run starts, from public records.

Hyper-parameters that were chosen by looking at the private records would cost privacy that no epsilon counts. Public
records of the same kind may be looked at as often as one likes. A trial trains on them with the noise, batch and number
of steps of the private run, so that it meets the same noise, and costs no privacy.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError, DivergedError
from dptune.core.progress import Meter
from dptune.job.base_model import Base
from dptune.job.estimate import rows_of
from dptune.job.preparation import calibrated_schedule, tokens_of_side, units_of_side
from dptune.job.run_spec import TuneSchedule, max_length_of, schedule_of, training_plan
from dptune.job.settings import TuneSettings
from dptune.mechanisms.descriptions import describe_options
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated, noise_options
from dptune.mechanisms.registry import build, of_model
from dptune.privacy.entropy import OsEntropy
from dptune.records.reading.read import read_sides
from dptune.records.reading.source import Fractions, RecordSource
from dptune.training.data import Tokens
from dptune.training.evaluation import perplexity
from dptune.training.gradients.gradient_check import first_evaluation, rehearse
from dptune.training.gradients.layer_gradients import layer_gradients
from dptune.training.gradients.per_sample import per_sample_gradients
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.gradients.step_memory import micro_batches
from dptune.training.loop import train
from dptune.training.models.own_weights import groups_of, own_weights
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, header_of

_HELD_OUT = 0.2
#: Number of units whose gradient norms are measured.
_MEASURED = 256
_LENGTH_SHARE, _NORM_SHARE = 0.99, 0.1
#: Learning rates of the trials, as multiples of the schedule's.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class PublicRecords:
    """Public records as tokens.

    Attributes:
        tokens: the records that trials train on.
        units: the units of those records.
        evaluation: the other records, on which trials are compared.
    """

    tokens: Tokens = field(repr=False)
    units: PrivacyUnits = field(repr=False)
    evaluation: Tokens = field(repr=False)


@dataclass(frozen=True)
class Suggestion:
    """A schedule for a private run, from public facts alone.

    Attributes:
        schedule: the complete schedule, with the reason of each choice.
        mechanism: the mechanism, calibrated to the budget.
        norms: 10, 50 and 90 % quantiles of the gradient norms of public units at the start; empty if none were given.
        trials: perplexity of held-out public records by learning rate; infinite where a trial diverged.
        perplexity_before: perplexity of the same records without training; None without trials.
    """

    schedule: TuneSchedule
    mechanism: Calibrated
    norms: tuple[float, ...] = ()
    trials: dict[float, float] = field(default_factory=dict)
    perplexity_before: float | None = None

    def space(self, units: int) -> dict[str, Any]:
        """A public space around the schedule, for ``search=``: a third to three times the rate and the radius, and half
        and twice the batch where ``units`` are enough for it and all bands."""
        schedule = self.schedule
        batches = {schedule.expected_batch_size / 2, schedule.expected_batch_size, schedule.expected_batch_size * 2}
        largest = units / self.mechanism.mechanism.bands
        found = {
            "learning_rate": _around(schedule.learning_rate),
            "expected_batch_size": sorted(one for one in batches if 1 <= one <= largest),
        }
        radius = schedule.options.get("max_grad_norm")
        return found | ({} if radius is None else {"options.max_grad_norm": _around(radius)})


def _around(value: Any) -> dict[str, list[float]]:
    number = float(value)  # an option of the command line is text
    return {"log_uniform": [float(f"{number / 3:.3g}"), float(f"{number * 3:.3g}")]}


def suggest(
    base: Base, settings: TuneSettings, units: int, public: RecordSource | None = None, *, trials: bool = False
) -> Suggestion:
    """Choose what ``settings`` leave open for a run on ``units`` private units.

    Args:
        public: records of nobody. From them come ``max_length`` and, for a mechanism that has one, the radius.
        trials: train on them at each of ``FACTORS`` times the schedule's learning rate, and take the best.

    Raises: ConfigError and DataError as ``tune``; ConfigError for task classify, and for trials without public
        records, or with fewer than a batch.
    """
    if settings.task == "classify":
        raise ConfigError("task", "classify has no suggestions yet", fix="choose settings by public labelled records")
    if public is None:
        if trials:
            raise ConfigError("public", "is missing, and trials train on public records", fix="give public records")
        return Suggestion(*calibrated_schedule(settings, base, units))
    records = read_public(public, base, settings)
    reasons: dict[str, str] = {}
    if settings.max_length is None:
        most = max_length_of(settings, base.positions)
        length = length_for(records.tokens, most)
        if length < most:
            reasons["max_length"] = f"{_LENGTH_SHARE:.0%} of the public records are no longer"
        settings, records = replace(settings, max_length=length), _cut(records, length)
    rows = rows_of(settings, base, schedule_of(settings, units, base.parameters, base.positions), records.units.most)
    settings = replace(settings, physical_batch_size=rows)
    weights = base.load()
    model = base.start(settings.seed, shared_copy(weights))
    rehearse(model, groups_of(model), checkpointing=settings.gradient_checkpointing)
    norms = unit_norms(model, records, rows, checkpointing=settings.gradient_checkpointing)
    found = tuple(float(value) for value in np.quantile(norms, [0.1, 0.5, 0.9]))
    if _takes_radius(settings) and "max_grad_norm" not in settings.options:
        radius = float(f"{np.quantile(norms, _NORM_SHARE):.2g}")
        settings = replace(settings, options={**settings.options, "max_grad_norm": radius})
        reasons["max_grad_norm"] = f"{1 - _NORM_SHARE:.0%} of the public gradients are longer: nearly all are clipped"
    schedule, mechanism = calibrated_schedule(settings, base, units)
    measured: dict[float, float] = {}
    before = None
    if trials:
        with first_evaluation(model):
            plan = training_plan(settings, schedule)
            before = perplexity(model, records.evaluation, plan.physical_batch_size, autocast=plan.autocast_dtype)
        rates = [schedule.learning_rate * factor for factor in FACTORS]
        measured = {rate: trial(base, weights, settings, schedule, mechanism, records, rate) for rate in rates}
        best = min(measured, key=lambda rate: measured[rate])
        if not math.isfinite(measured[best]):
            raise DivergedError("every trial diverged. Fix: give a lower learning_rate, of which others are multiples.")
        reasons["learning_rate"] = _why(best, rates)
        schedule = replace(schedule, learning_rate=best)
    schedule = replace(schedule, reasons=schedule.reasons | reasons)
    return Suggestion(schedule, mechanism, found, measured, before)


def read_public(source: RecordSource, base: Base, settings: TuneSettings) -> PublicRecords:
    """Read public records, and hold out a fifth of their units to compare trials. Raises: DataError as ``prepare``."""
    sides = read_sides(replace(source, split=Fractions(1 - _HELD_OUT, _HELD_OUT, 0.0)))
    width = max_length_of(settings, base.positions)
    tokens, evaluation = (tokens_of_side(side, base.tokenizer, width, settings) for side in (sides.train, sides.eval))
    if tokens is None or evaluation is None:
        raise ConfigError("public", "holds too few records to compare trials on", fix="give more of them")
    return PublicRecords(tokens, units_of_side(sides.train, source.unit, settings.records_per_unit), evaluation)


def _cut(records: PublicRecords, length: int) -> PublicRecords:
    """The same records for batches of ``length`` tokens, as reading them again would give them."""
    return replace(records, tokens=_shorter(records.tokens, length), evaluation=_shorter(records.evaluation, length))


def _shorter(tokens: Tokens, length: int) -> Tokens:
    cut = sum(len(row) > length - 1 for row in tokens.rows)
    return replace(tokens, rows=[row[: length - 1] for row in tokens.rows], width=length, truncated=cut)


def length_for(tokens: Tokens, most: int) -> int:
    """The least multiple of 8 that holds 99 % of the records and the padding that every row has, at most ``most``."""
    lengths = [len(row) for row in tokens.rows]
    needed = float(np.quantile(lengths, _LENGTH_SHARE, method="higher")) + 1
    return max(3, min(most, 8 * math.ceil(needed / 8)))


def unit_norms(model: Any, records: PublicRecords, rows: int, *, checkpointing: bool = False) -> NDArray[np.float64]:
    """(units,) l2 norm of the whole gradient of each of the first public units, as a run would clip it."""
    groups, device = groups_of(model), next(model.parameters()).device
    compute: Callable[..., Gradients] = per_sample_gradients if own_weights(model) is None else layer_gradients
    drawn = [one[: records.units.most] for one in islice(records.units.members, _MEASURED) if len(one)]
    norms = []
    for part in micro_batches(drawn, rows):
        ids, mask = records.tokens.batch(part.records, device, height=rows)
        owners = part.owners_of(len(ids), device)
        found = compute(model, groups, ids, mask, owners, part.units, checkpointing=checkpointing)
        norms.append(found.norms().square().sum(1).sqrt())
    return np.asarray(torch.cat(norms).cpu(), dtype=np.float64)


def _takes_radius(settings: TuneSettings) -> bool:
    if any(row[0] == "stabiliser" for row in describe_options(settings.mechanism)):
        return False  # a normalising clipper: AdamW takes the same steps at every radius
    return any(row[0] == "max_grad_norm" for row in describe_options(settings.mechanism))


def _why(best: float, rates: list[float]) -> str:
    if best in (rates[0], rates[-1]):
        return "the best of the trials, at the end of what was tried: try beyond it"
    return f"the best of {len(rates)} trials on public records"


def trial(
    base: Base,
    weights: Any,
    settings: TuneSettings,
    schedule: TuneSchedule,
    calibrated: Calibrated,
    records: PublicRecords,
    learning_rate: float,
) -> float:
    """Perplexity of the held-out public records after the private run's schedule on the others; infinite if it
    diverged.

    Raises: ConfigError if there are fewer public units than a batch, or than one for each of the mechanism's bands.
    """
    count, bands = len(records.units), calibrated.mechanism.bands
    if count < schedule.expected_batch_size * bands:
        problem = f"has {count} units to train on, fewer than {_batches(bands)} of {schedule.expected_batch_size:g}"
        raise ConfigError("public", problem, fix="give more public records, or leave trials out")
    mechanism = _rebuild_mechanism(settings, base, calibrated.mechanism, schedule)
    rate = schedule.expected_batch_size / count
    own = replace(schedule, sample_rate=rate, learning_rate=learning_rate, sampler="poisson", max_batch=None)
    plan = training_plan(settings, replace(own, checkpoint_every=schedule.steps))
    entropy = OsEntropy()
    delta, said = schedule.delta, settings.trained.said
    header = header_of(mechanism, records.units, entropy, delta=delta, data="public records", train=said)
    tokens, frozen = records.tokens, shared_copy(weights)
    model = base.start(settings.seed, frozen)
    spec = RunSpec(model, tokens, records.units, mechanism, plan, header, public=tokens)
    with (
        tempfile.TemporaryDirectory(prefix="dptune-trial-") as folder,
        Meter(f"trial at learning rate {learning_rate:g}", total=plan.steps, unit="steps", keep=True) as meter,
    ):
        try:
            with train(spec, Path(folder), entropy, lambda report: meter.update(report.releases)) as ledger:
                ledger.finish()
        except DivergedError:
            return math.inf
        return perplexity(spec.model, records.evaluation, plan.physical_batch_size, autocast=plan.autocast_dtype)


def _batches(bands: int) -> str:
    return "a batch" if bands == 1 else f"the batches, one for each of {bands} bands,"


def _rebuild_mechanism(settings: TuneSettings, base: Base, calibrated: Mechanism, schedule: TuneSchedule) -> Mechanism:
    """A new mechanism with the same noise. A trial must not use another one's, whose controller has learned."""
    options = of_model(settings.mechanism, schedule.options, base.pairs, base.dimension)
    return build(settings.mechanism, options | noise_options(calibrated))
