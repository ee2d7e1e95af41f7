"""`RunSpec` of a job: schedule with its defaults, plan, mechanism and ledger header, made alike for every door.

``tune``, ``suggest``, the candidates of a search, rehearsals and the cells of a grid call these functions. What differs
is where records come from, and whether the schedule is given or chosen. Defaults are chosen from public facts alone:
number of units, parameters, the model's context and the device. Nothing here may look at the records: a schedule that
depends on them would leak something that no epsilon covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dptune.core.declarations import part_of
from dptune.core.errors import ConfigError
from dptune.core.settings import ScheduleSettings, TrainingSampler, UpdateRule
from dptune.job.settings import JobSettings, TuneSettings
from dptune.mechanisms.planning import Calibrated, Schedule, calibrated, fitted, planned
from dptune.mechanisms.registry import build, leaves_radius_open, takes_noise
from dptune.privacy.calibration import check_delta, sampling
from dptune.privacy.entropy import Entropy
from dptune.privacy.run_header import RunHeader
from dptune.privacy.samplers.sampler import sampler_of_run
from dptune.privacy.samplers.sampler_bounds import advised_batch
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import TrainingPlan, header_of

_BATCHES = (64, 1024)
_LEAST_STEPS, _EPOCHS = 100, (3, 20)
#: The most tokens of a record by default.
CONTEXT = 512
_SMALL, _SMALL_RATE = 10_000_000, 0.02
#: Learning rates of larger models that write texts. The first, below a thousand million parameters, was measured with
#: SmolLM2-135M, where 5e-4 hardly moved anything. Nobody measured the second.
_LARGE, _MIDDLE_RATE, _LARGE_RATE = 1_000_000_000, 0.005, 5e-4
#: Adam divides by the noise of a step, which is larger if later steps take a part of it back: with 1, 2 and 4 bands the
#: best of 0.02, 0.04 and 0.08 was the first, second and third, and with more bands 0.08 was among the best tried.
_MOST_RATES = 4
#: The radius with which the rates of small models were measured.
_RADIUS = 0.1
#: Those of a classifier. States are about sqrt(width) long, and a head's gradient is a state times how far off it is:
#: at a small radius every record has one vote, and the more frequent label wins however sure the head is already.
_SMALL_HEAD_RADIUS, _SMALL_HEAD_RATE = 10.0, 0.005
#: Those of a classifier on a pretrained model, measured with all-MiniLM-L6-v2 on SST-2 (docs/findings/pretrained.md). A
#: new head has far to go and few weights; adapters that go as far in each of theirs mostly follow the noise. A head's
#: first gradients are 0.7 of its states long, here 3. A radius below clips a record that the head has right as much as
#: one that it has wrong, so probabilities go to 0 and 1; one above adds noise.
_HEAD_RADIUS, _HEAD_RATE, _HEAD_RATIO = 3.0, 0.001, 10.0
#: Those of a classifier by label words, which has no head.
_WORDS_RADIUS, _SMALL_WORDS_RATE = 1.0, 0.01
#: Learning rates of a model's own weights, by what trains, and the radius of all of them. For classifiers those of all,
#: bias and head were tried with all-MiniLM-L6-v2 on SST-2 (docs/findings/pretrained.md); the others are guesses. A new
#: head beside them takes the rate at which it was measured beside adapters, as in all of these trials.
_OWN_RATES = {"all": 1e-3, "layers": 2e-4, "bias": 3e-3, "head": 1e-2}
_OWN_RADIUS = 0.1
_TRIED = {
    "all": "on 1,000 sentences of SST-2, all-MiniLM-L6-v2 had 77.2 % right at 0.001, 73.3 % at 0.003, and 57.0 to "
    "58.5 % at 0.0003 and less, one run each",
    "bias": "on 1,000 sentences of SST-2, all-MiniLM-L6-v2 had 75.6 to 78.3 % right at 0.001 to 0.01, one run each",
    "head": "on 1,000 sentences of SST-2, all-MiniLM-L6-v2 had 74.7 to 78.0 % right at 0.003 to 0.03, one run each",
}
_GUESSED = "a guess: nobody has measured it for train {}, so give your own where it matters"
_WHOLE_BINS = "a whole part of the units"


@dataclass(frozen=True)
class TuneSchedule:
    """A complete schedule. Public.

    Attributes:
        expected_batch_size: expected number of units of a batch.
        epochs: passes over the units.
        options: the mechanism's own options.
        rule: how released gradients move the weights.
        reasons: for each setting that the user left open, why its value was chosen.
        sampler: how units get into batches.
        max_batch: most units of a batch of truncated_poisson; None for other samplers.
    """

    delta: float
    expected_batch_size: float
    epochs: float
    sample_rate: float
    steps: int
    learning_rate: float
    warmup_steps: int
    checkpoint_every: int
    max_length: int
    options: dict[str, object]
    rule: UpdateRule
    reasons: dict[str, str] = field(repr=False)
    sampler: TrainingSampler = "poisson"
    max_batch: int | None = None

    @property
    def head_rate(self) -> float:
        """Learning rate of a classifier's head after warm-up."""
        return float(f"{self.learning_rate * self.rule.head_rate_ratio:.6g}")

    @property
    def priced(self) -> Schedule:
        """What the price of a run depends on."""
        law = sampler_of_run(self.sampler, self.sample_rate, self.steps, self.expected_batch_size, self.max_batch)
        return Schedule(self.sample_rate, self.steps, self.delta, law)


def schedule_of(
    settings: TuneSettings, units: int, parameters: int, positions: int | None, bands: int = _MOST_RATES
) -> TuneSchedule:
    """The schedule of a run on ``units`` units (of the train side).

    Args:
        parameters: number of parameters of the frozen model.
        positions: length of the model's context in tokens; None if it has no bound.
        bands: of correlated noise, which calibration may choose for the rest of the schedule.

    Raises: ConfigError for a delta of 1 over the units or more, a batch of more than all units, or a length beyond the
        context.
    """
    reasons: dict[str, str] = {}

    def pick(name: str, asked: float | None, value: float, reason: str) -> float:
        if asked is None:
            reasons[name] = reason
            return value
        return asked

    delta = pick("delta", settings.delta, default_delta(units), "the power of ten at or below 1 / (10 x units)")
    check_delta(delta, units, fix=f"use {default_delta(units):g}, or leave it out")
    usual, bins = default_batch(units), settings.sampler == "balls_in_bins"
    batch = pick(
        "expected_batch_size",
        settings.expected_batch_size,
        units / round(units / usual) if bins else usual,
        f"near 4 x sqrt(units), {_WHOLE_BINS if bins else 'a power of two'}, but a quarter of the units at most: noise "
        "shrinks with it",
    )
    if batch > units:
        problem = f"{batch:g} is more than the {units} units"
        raise ConfigError("expected_batch_size", problem, fix="lower it, or leave it out")
    fewest = float(min(max(math.ceil(_LEAST_STEPS * batch / units), _EPOCHS[0]), _EPOCHS[1]))
    epochs = pick("epochs", settings.epochs, fewest, "3 to 20, so that there are some 100 steps")
    sample_rate, _ = sampling(units, batch, epochs)
    steps = math.ceil(epochs / sample_rate - 1e-9)  # rounding up once: an epoch need not be whole steps
    max_batch = largest_batch(settings, sample_rate, steps, delta, units)
    if max_batch != settings.max_batch:
        reasons["max_batch"] = "the least whose cuts, over all steps, take at most a thousandth of delta"
    sampler_of_run(settings.sampler, sample_rate, steps, batch, max_batch)  # refuses what does not go together
    rate, rate_reason = _rate(settings, parameters, bands)
    learning_rate = pick("learning_rate", settings.learning_rate, rate, rate_reason)
    ratio = settings.head_rate_ratio
    if ratio is None and settings.has_head:
        own = float(f"{_HEAD_RATE * _HEAD_RATIO / _OWN_RATES.get(settings.train, _HEAD_RATE):.5g}")
        ratio = 1.0 if parameters < _SMALL or settings.train == "head" else own
        measured = "measured with the learning rate"
        reasons["head_rate_ratio"] = measured if settings.train == "lora" else _of_own(settings, parameters)
    if settings.max_length is None:
        reasons["max_length"] = "the model's context, 512 at most; less saves memory, and time where texts are longer"
    options = options_of(settings, parameters)
    if options != settings.options:
        reasons["max_grad_norm"] = _radius(settings, parameters < _SMALL)[1]
    return TuneSchedule(
        delta=delta,
        expected_batch_size=batch,
        epochs=epochs,
        sample_rate=sample_rate,
        steps=steps,
        learning_rate=learning_rate,
        warmup_steps=max(1, steps // 10) if settings.warmup_steps is None else settings.warmup_steps,
        checkpoint_every=settings.checkpoint_every or min(10, max(1, steps // 50)),
        max_length=max_length_of(settings, positions),
        options=options,
        rule=replace(settings.rule, head_rate_ratio=ratio or 1.0),
        reasons=reasons,
        sampler=settings.sampler,
        max_batch=max_batch,
    )


def at_whole_bins(settings: TuneSettings, units: int) -> TuneSettings:
    """The settings with the expected batch of balls_in_bins that is nearest what they ask for, of so many units."""
    batch = settings.expected_batch_size
    if settings.sampler != "balls_in_bins" or batch is None:
        return settings
    return replace(settings, expected_batch_size=units / max(1, round(units / batch)))


def largest_batch(settings: ScheduleSettings, sample_rate: float, steps: int, delta: float, units: int) -> int | None:
    """The batch that truncated_poisson cuts to, given or chosen; for another sampler what is given, to be refused."""
    if settings.sampler != "truncated_poisson" or settings.max_batch is not None:
        return settings.max_batch
    return advised_batch(units, sample_rate, steps, delta)


def options_of(settings: TuneSettings, parameters: int) -> dict[str, Any]:
    """The mechanism's options, with the clip radius where it is left open."""
    options = dict(settings.options)
    if leaves_radius_open(settings.mechanism, options):
        options["max_grad_norm"] = _radius(settings, parameters < _SMALL)[0]
    return options


def _radius(settings: TuneSettings, small: bool) -> tuple[float, str]:
    """The clip radius of a task, and why."""
    if settings.train != "lora":
        return (_HEAD_RADIUS if settings.has_head else _OWN_RADIUS), _GUESSED.format(settings.train)
    if settings.words:
        return _WORDS_RADIUS, "the radius with which the learning rate of label words was measured"
    if settings.has_head and small:
        why = "at 0.1 each record of a classifier has one vote, and the more frequent label wins; not tuned for yours"
        return _SMALL_HEAD_RADIUS, why
    if settings.has_head:
        return _HEAD_RADIUS, "measured with the learning rate"
    return _RADIUS, "the radius with which the learning rate of the small default model was measured"


def _rate(settings: TuneSettings, parameters: int, bands: int) -> tuple[float, str]:
    """The learning rate for a task, a model of this size and so many bands, and why."""
    mechanism, small = settings.mechanism, parameters < _SMALL
    if settings.train != "lora":
        return _OWN_RATES[settings.train], _of_own(settings, parameters)
    if settings.words and small:
        return (
            _SMALL_WORDS_RATE,
            "the best of 0.003, 0.01 and 0.03 for SST-2 by words with 1.3 million parameters",
        )
    if settings.has_head and small:
        return _SMALL_HEAD_RATE, "the one of those tried that learned anything on SST-2 with 1.3 million parameters"
    if settings.has_head:
        return _HEAD_RATE, "the best of those tried for all-MiniLM-L6-v2 on SST-2, with a head ten times as fast"
    if small and mechanism == "banded":
        rate = _SMALL_RATE * min(bands, _MOST_RATES)
        return rate, f"{_SMALL_RATE:g} for each band up to four, measured on the small default model"
    if small:
        return _SMALL_RATE, "measured on the small default model: perplexity 2.263, at 0.005 it was 2.315"
    if parameters < _LARGE:
        return _MIDDLE_RATE, "measured on SmolLM2-135M, where a tenth of it hardly moved anything"
    return _LARGE_RATE, "RLDP's published setting for GPT-2 to Mistral-7B; not tuned for yours"


def _of_own(settings: TuneSettings, parameters: int) -> str:
    """Where a rate of own weights comes from."""
    tried = _TRIED.get(settings.train) if settings.has_head and parameters >= _SMALL else None
    return tried or _GUESSED.format(settings.train)


def signal_of(schedule: TuneSchedule, noise_multiplier: float) -> float:
    """How far all units together could push one weight in all steps, in standard deviations of the noise there. Public.

    Each of ``steps`` batches is a sum of ``expected_batch_size`` units of at most the clip radius each, with noise of
    ``noise_multiplier`` times that radius in each weight. With the default batch it is proportional to the number of
    units, and nearly to epsilon.

    Example:
        >>> schedule = TuneSchedule(1e-5, 64.0, 16, 0.16, 100, 0.03, 10, 2, 64, {}, UpdateRule(), {})
        >>> signal_of(schedule, noise_multiplier=6.25)
        102.4
    """
    return math.sqrt(schedule.steps) * schedule.expected_batch_size / noise_multiplier


def max_length_of(settings: TuneSettings, positions: int | None) -> int:
    """Tokens of a batch's rows. Raises: ConfigError for more than the model's ``positions``, or fewer than three."""
    length = settings.max_length
    if length is None:
        return min(positions or CONTEXT, CONTEXT)
    if positions is not None and length > positions:
        raise ConfigError("max_length", f"{length} exceeds the model's {positions}", fix=f"use {positions} or less")
    if length < 3:
        raise ConfigError("max_length", f"{length} is below 3", fix="allow at least three tokens")
    return length


def default_delta(units: int) -> float:
    """The power of ten at or below 1 / (10 x units)."""
    return float(f"1e-{len(str(10 * units - 1))}")


def default_batch(units: int) -> float:
    """The power of two nearest 4 sqrt(units), within 64 and 1024, and at most a quarter of the units."""
    near = 2 ** round(math.log2(4 * math.sqrt(units)))
    return float(max(1, min(max(near, _BATCHES[0]), _BATCHES[1], units // 4)))


def training_plan(settings: ScheduleSettings, chosen: Any = None, **rest: Any) -> TrainingPlan:
    """The public schedule of a run.

    Args:
        chosen: an object with some of the plan's fields, which go before those of ``settings``.
        rest: further fields of the plan, such as ``sample_rate`` and ``steps``.
    """
    names = [item.name for item in fields(TrainingPlan) if hasattr(chosen, item.name)]
    return part_of(TrainingPlan, settings, **{name: getattr(chosen, name) for name in names}, **rest)


def mechanism_of(
    settings: JobSettings, options: dict[str, Any], priced: Schedule, accounting: str = "certified"
) -> Calibrated:
    """The mechanism with the least noise that keeps the schedule within ``settings.epsilon``.

    Without a budget, with a noise that is given, or for a mechanism without noise, the options' own.

    Args:
        options: the mechanism's own, completed for the model by ``registry.of_model``.

    Raises: ConfigError for a budget that no noise meets.
    """
    name = settings.mechanism
    if settings.epsilon is None or "noise_multiplier" in options or not takes_noise(name, options):
        return Calibrated(fitted(build(name, options), priced))
    return calibrated(
        lambda noise: build(name, options | {"noise_multiplier": noise}), settings.epsilon, priced, accounting
    )


def job_header(
    settings: JobSettings,
    ready: Calibrated,
    units: PrivacyUnits,
    entropy: Entropy,
    priced: Schedule,
    accounting: str = "certified",
) -> RunHeader:
    """The first line of the run's ledger.

    Raises: ConfigError if the run would leak what private telemetry promises to keep.
    """
    mechanism = ready.mechanism
    header = header_of(
        mechanism,
        units,
        entropy,
        delta=priced.delta,
        epsilon=settings.epsilon,
        accounting=accounting,
        data=settings.called,
        telemetry=settings.telemetry,
        renyi_filter=ready.renyi_filter,
        train=settings.trained.said,
    )
    if settings.telemetry == "private" and (leaks := header.leaks_of(planned(mechanism, priced))):
        problem = f"private cannot hold for {settings.mechanism}: {'; '.join(leaks)}"
        raise ConfigError("telemetry", problem, fix="leave that mechanism out, or use research")
    return header
