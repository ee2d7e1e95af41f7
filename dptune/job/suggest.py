"""Suggestions and estimates before a run starts: hyper-parameters from public records; memory and time from shapes.

Hyper-parameters that were chosen by looking at the private records would cost privacy that no epsilon counts. Public
records of the same kind may be looked at as often as one likes. A trial trains on them with the noise, batch and number
of steps of the private run, so that it meets the same noise, and costs no privacy. An estimate follows from
shapes, from the lengths of records, and from the device's speed of multiplication.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError, DivergedError
from dptune.core.progress import Meter
from dptune.job.base_model import Base
from dptune.job.preparation import calibrated_schedule, rows_of, tokens_of_side, units_of_side
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
from dptune.training.data import Tokens, by_width
from dptune.training.evaluation import perplexity
from dptune.training.gradients.gradient_check import first_evaluation, rehearse
from dptune.training.gradients.layer_gradients import layer_gradients
from dptune.training.gradients.per_sample import per_sample_gradients
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.gradients.step_memory import micro_batches, public_widths
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


_LOGIT_COPIES = 4  # float32 copies: logits, their logarithms, the gradient of each
_ACTIVATIONS = 20  # vectors of the layer's width that each token keeps in each layer for the backward pass
#: Elementwise operations on such vectors, in each layer and both passes: norms, rotations, activations, sums.
_VECTOR_OPERATIONS = 200
_ROWS, _MEASURED_SECONDS = 256, 0.2
_COUNTED = 10_000  # units
_STEP_SECONDS = 0.02  # fixed cost of a micro-batch, however small the model


@dataclass(frozen=True)
class Estimate:
    """The resources that a run needs.

    Attributes:
        memory: bytes on the device.
        seconds: time of all steps, without the evaluations.
    """

    memory: float
    seconds: float


def estimate(
    base: Base,
    schedule: TuneSchedule,
    rows: int,
    brought: Mapping[int, float] | None = None,
    *,
    checkpointing: bool = False,
    bands: int = 1,
) -> Estimate:
    """The estimate of a run with micro-batches of ``rows`` records; measures the device for a third of a second.

    Args:
        brought: records that a drawn unit brings, by the width of their micro-batches (``records_by_width``); None:
            one of the greatest width.
        checkpointing: whether layers keep their inputs alone, and run again.
        bands: steps over which noise is correlated; the noise of all but one is kept in float64.
    """
    tokens, own = rows * schedule.max_length, base.trained.train != "lora"
    frozen = base.frozen_bytes - (4 * base.dimension if own else 0)  # what trains is counted in the next line
    # float32: weights, gradient, two moments; float64: the sum, and past noise.
    adapters = base.dimension * (4 * 4 + 8 + 8 * (bands - 1))
    # Training a model's own weights keeps no unit's gradient, but another sum in float64 and the noise of all weights.
    per_sample = base.dimension * 16 if own else rows * base.dimension * 4
    logits = _LOGIT_COPIES * 4 * tokens * base.vocabulary
    kept = _ACTIVATIONS + base.layers if checkpointing else _ACTIVATIONS * base.layers
    activations = kept * tokens * base.width * base.bytes_each
    brought = brought or {schedule.max_length: 1.0}
    parts = {width: math.ceil(schedule.expected_batch_size * each / rows) for width, each in brought.items()}
    # Two operations a parameter and token in the forward pass, and two in the backward pass: frozen weights need no
    # gradient. Those that train need two more, and two passes: one for the norms, one for the sum. A checkpointed layer
    # runs forward twice.
    each = (12 if own else 4) + (4 if own and checkpointing else 2 if checkpointing else 0)
    products = each * base.parameters / _product_speed(base)
    vectors = _VECTOR_OPERATIONS * base.width * base.layers / _vector_speed(base)
    step = sum(count * (rows * width * (products + vectors) + _STEP_SECONDS) for width, count in parts.items())
    return Estimate(
        memory=float(frozen + adapters + per_sample + logits + activations),
        seconds=schedule.steps * step,
    )


def records_by_width(tokens: Tokens, units: PrivacyUnits, schedule: TuneSchedule, rows: int) -> dict[int, float]:
    """Records that a unit brings to a batch on average, by the width that they need. Private.

    Each unit's records are drawn once. Of more than 10,000 units, 10,000 are drawn too.
    """
    chance = np.random.default_rng(0)
    chosen = chance.permutation(len(units.members))[:_COUNTED]
    drawn = [chance.permutation(unit)[: units.most] for unit in map(units.members.__getitem__, chosen) if len(unit)]
    widths = public_widths(tokens.width, schedule.expected_batch_size, rows)
    return {width: sum(map(len, held)) / len(chosen) for width, held in by_width(drawn, tokens, widths)}


def _product_speed(base: Base) -> float:
    """Operations a second of a matrix product of the model's width and dtype on its device."""
    weights, rows, seconds = _ones(base, base.width, base.width), 0, 0.0
    # A CPU may take a minute for all rows in bfloat16: fewer are as slow, row by row.
    while seconds < _MEASURED_SECONDS / 4 and rows < _ROWS:
        rows = min(8 * rows or 8, _ROWS)
        states = _ones(base, rows, base.width)
        seconds = _seconds(partial(torch.matmul, states, weights))
    return 2 * rows * base.width * base.width / seconds


def _vector_speed(base: Base) -> float:
    """Numbers a second that an elementwise operation passes in the model's dtype on its device."""
    states = _ones(base, _ROWS, base.width)
    return states.numel() / _seconds(lambda: torch.nn.functional.silu(states))


def _ones(base: Base, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16 if base.bytes_each == 2 else torch.float32, device=base.device)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Time of one call; a device answers when it is asked for a number."""
    start = time.monotonic()
    work().sum().item()  # the first one also starts the device
    together = 4 if time.monotonic() - start < _MEASURED_SECONDS / 4 else 1
    start, done = time.monotonic(), 0
    while (passed := time.monotonic() - start) < _MEASURED_SECONDS or not done:
        for _ in range(together):
            result = work()
        result[0, 0].item()
        done += together
    return passed / done
