"""Prepares a run before any weight is read: tokens, units, a schedule and a calibrated mechanism."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from dptune.core.errors import ConfigError
from dptune.core.settings import MADE_OF_OTHERS, RECORD
from dptune.job.audit_canaries import check_count, price_of
from dptune.job.base_model import Base
from dptune.job.delivery.verification import LABELS, RECORDS, WORDS
from dptune.job.estimate import memory_warning, rows_of
from dptune.job.run_spec import (
    TuneSchedule,
    at_whole_bins,
    job_header,
    max_length_of,
    mechanism_of,
    options_of,
    schedule_of,
    signal_of,
    training_plan,
)
from dptune.job.settings import TuneSettings, check_labels
from dptune.mechanisms.agents.rl import idle_agent
from dptune.mechanisms.controllers.rldp import Rldp
from dptune.mechanisms.descriptions import describe_options
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated
from dptune.mechanisms.registry import MECHANISMS, PARTS, build, of_model, takes_noise
from dptune.mechanisms.versions import versions_of
from dptune.privacy.calibration import delta_warning
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.run_header import RunHeader
from dptune.records.reading.fields import note_of_unread
from dptune.records.reading.read import Records, Sides, read_sides
from dptune.records.reading.record import as_text, form_of
from dptune.records.reading.source import Fractions, RecordSource
from dptune.training.data import Tokens
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run_start import check_masks
from dptune.training.spec import TrainingPlan
from dptune.training.tokens.chat_template import check_template
from dptune.training.tokens.encoding import BESIDE_TEXT, labelled_tokens, tokens_of

#: Signals (``signal_of``), and the percentage of SST-2's dev set that heads on frozen states of all-MiniLM-L6-v2 had
#: right with default settings, where a constant answer has 51 %: means of four runs (``benchmarks.heads``) with 50, 400
#: and 2,000 sentences.
_LEARNED = ((45, 54), (122, 69), (489, 77))
#: Names of units that a column must not have, because ledgers use them for units of other kinds.
_TAKEN = (RECORD, *MADE_OF_OTHERS, "user")
#: The column of labels where none is named.
DEFAULT_LABEL = "label"


@dataclass(frozen=True)
class PreparedRun:
    """All that a run needs but the weights. ``tokens``, ``evaluation``, ``counts`` and ``notes`` are private.

    Attributes:
        tokens: the train side's records.
        evaluation: the held-out records; None without any.
        public: the public records; None without any.
        counts: number of records of each side.
        notes: warnings for the owner of the records alone.
        held_out: the units of ``evaluation``; None without any.
        form: what the records are, one of ``corpus.records.FORMS``. Public.
        template: the template of the records' texts; None without one, or where their sides were dealt before. Public.
        made_by: what benchmark made the rows, and how; see ``RecordSource``. Public.
        first: the first two records as they were read: public ones if there are any, else, except under private
            telemetry, the owner's.
        way: how their texts were made of rows, one of ``corpus.reading.fields.WAYS``; empty where nobody said. Public.
        canaries: what an auditor plants, and what that costs; empty for nothing. Public.
        fingerprint: digest of the contents of all private records, by which a register recognises them. Private.
    """

    settings: TuneSettings
    base: Base
    schedule: TuneSchedule
    tokens: Tokens = field(repr=False)
    evaluation: Tokens | None = field(repr=False)
    public: Tokens | None = field(repr=False)
    units: PrivacyUnits = field(repr=False)
    mechanism: Calibrated
    counts: dict[str, int] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)
    held_out: PrivacyUnits | None = field(default=None, repr=False)
    fingerprint: str = field(default="", repr=False)
    canaries: str = ""
    form: str = "text"
    template: str | None = None
    made_by: Mapping[str, str] = field(default_factory=dict)
    way: str = ""
    first: tuple[str, ...] = field(default=(), repr=False)

    @property
    def kept(self) -> dict[str, Any]:
        """What is delivered with the weights, by name of file, for sampling and scoring.

        Form of the records, most tokens, way, and what else made their texts; of a classifier its labels, and words
        with their template.
        """
        classifies = self.settings.task == "classify"
        records = {"form": self.form, "tokens": self.tokens.width - (BESIDE_TEXT if classifies else 1)}
        template = None if self.base.words else self.template
        made = {"way": self.way, "template": template, "made_by": dict(self.made_by)}
        kept: dict[str, Any] = {RECORDS: records | {name: value for name, value in made.items() if value}}
        if classifies:
            kept[LABELS] = list(self.settings.labels or ())
        if self.base.words:
            kept[WORDS] = {"words": self.base.words, "template": self.template}
        return kept

    @property
    def plan(self) -> TrainingPlan:
        """The schedule as the training loop takes it."""
        rows = rows_of(self.settings, self.base, self.schedule, self.units.most)
        return training_plan(self.settings, self.schedule, physical_batch_size=rows)

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the parts that the run uses, by name."""
        return versions_of(self.settings.mechanism, self.schedule.options, self.settings.rule)

    @property
    def header(self) -> RunHeader:
        """The first line of the run's ledger. Raises: ConfigError as ``job_header``."""
        return job_header(self.settings, self.mechanism, self.units, OsEntropy(), self.schedule.priced)

    def digest_of_keys(self, salt: str) -> str:
        """A keyed digest of the units' keys, by which correlated noise deals them into groups. Private, as ``digest``.

        Records may be the same to the last token that is read, and their keys others.
        """
        assert self.units.keys is not None  # ``units_of_side`` gives them
        keys = np.asarray(self.units.keys, dtype=np.int64)
        return blake2b(keys.tobytes(), digest_size=16, key=bytes.fromhex(salt)).hexdigest()

    def digest(self, salt: str) -> str:
        """A keyed digest of all records and their units. Private: with the salt it tests a guess of all of them."""
        found = blake2b(digest_size=16, key=bytes.fromhex(salt))
        for side in (self.tokens, self.evaluation, self.public):
            for row in side.rows if side else ():
                found.update(row.tobytes() + b"|")
            found.update(b"||")
        for units in (self.units, self.held_out):
            for members in units.members if units else ():
                found.update(members.tobytes() + b"|")
            found.update(b"||")
        return found.hexdigest()


def with_labels(settings: TuneSettings, source: RecordSource) -> tuple[TuneSettings, RecordSource]:
    """Complete settings and source of a classification; of another task, return them unchanged. Nothing is read.

    Raises: ConfigError for a column of labels without the task.
    """
    if settings.task != "classify":
        if source.label is not None:
            problem = "names a column of labels, which only task classify learns"
            raise ConfigError("data.label", problem, fix="set task to classify, or leave it out")
        return settings, source
    return replace(settings, labels=settings.named_labels), replace(source, label=source.label or DEFAULT_LABEL)


def check_mechanism(settings: TuneSettings, base: Base) -> None:
    """Build the mechanism with some noise, before any record is read.

    Raises: ConfigError for an unknown mechanism or option, and for one that no noise certifies or that trains clients.
    """
    name = settings.mechanism
    if name not in MECHANISMS:
        sound = [known for known, listed in MECHANISMS.items() if listed.verdict.startswith("Sound")]
        raise ConfigError("mechanism", f"{name!r} is unknown", fix=f"use one of {', '.join(sound)}")
    options = of_model(name, options_of(settings, base.parameters), base.pairs, base.dimension)
    if not takes_noise(name, options):
        raise ConfigError(
            "mechanism", f"{name} has no noise to calibrate", fix="use static, or another that adds noise"
        )
    # An entry that names parts takes the parts' options, which are checked where it is built.
    if settings.options and not any(part in options for part in ("like", *PARTS)):
        known = [row[0] for row in describe_options(name) if row[0] not in ("noise_multiplier", "pairs", "dimension")]
        for option in settings.options:
            if option not in known:
                problem = f"mechanism {name!r} has no option of this name that you can set"
                raise ConfigError(f"options.{option}", problem, fix=f"use one of {', '.join(known)}")
    probe = build(name, options | {"noise_multiplier": 1.0})
    leaks = probe.release(probe.knobs(), 0.1 / probe.bands).leaks  # at a rate that any number of bands bears
    if leaks:
        problem = f"{name} has no certified epsilon ({'; '.join(leaks)})"
        raise ConfigError("mechanism", problem, fix="use a sound one: `dptune mechanisms` says which are")
    probe.check_trained(head=bool(base.head), own=settings.train != "lora")
    if settings.dropout:  # a run would refuse it too, and a search has booked its budget by then
        check_masks(base.device)
    if probe.clipper.federation is not None:
        raise ConfigError("mechanism", f"{name} trains simulated clients", fix="use static, or another without clients")


def check_public(mechanism: Mechanism, *, public: bool) -> None:
    """Raise ConfigError for a mechanism that follows public records, where there are none."""
    if isinstance(mechanism.controller, Rldp) and not public:
        problem = f"{mechanism.name} follows the loss on public records"
        raise ConfigError("public", f"{problem}, and none were given", fix="give public records")


def prepare(source: RecordSource, base: Base, settings: TuneSettings, *, scored: bool = False) -> PreparedRun:
    """Read the records and complete the schedule.

    ``source.split`` is set here, by ``settings.eval_share``.

    Args:
        scored: whether held-out units score the candidates of a search, within its guarantee; they are then held out
            under private telemetry too.

    Raises: DataError naming file, row, column and fix; ConfigError for settings that do not go with these records.
    """
    check_mechanism(settings, base)
    held_out = settings.eval_share if settings.telemetry == "research" or scored else 0.0
    settings.check_rows(source.unit)  # like the next line, before any record is read
    max_length_of(settings, base.positions)
    sides = read_sides(replace(source, split=Fractions(1 - held_out, held_out, 0.0)))
    for records in (sides.train, sides.eval, sides.public) if settings.labels else ():
        check_labels(records, settings.labels or (), source.label or DEFAULT_LABEL, "name all labels, this one too")
    prepared = prepare_sides(sides, base, settings, source.unit)
    shown = sides.public or (sides.train if settings.telemetry == "research" else ())
    first = tuple(map(as_text, shown[:2]))
    return replace(prepared, template=source.template, made_by=source.made_by, first=first)


def prepare_sides(sides: Sides, base: Base, settings: TuneSettings, unit: str | None) -> PreparedRun:
    """Complete the schedule of a run on records whose sides are dealt already.

    Args:
        unit: the kind of unit that the records' keys name; None: each record is a unit of its own.

    Raises: ConfigError for settings that do not go with these records.
    """
    check_mechanism(settings, base)
    settings.check_rows(unit)
    length = max_length_of(settings, base.positions)
    form = form_of(sides.train)
    if settings.add_bos_token and form == "messages":
        raise ConfigError("add_bos_token", "is not for chats, which their template begins", fix="leave it out")
    if form == "messages":
        check_template(base.tokenizer)
    units, price = units_of_side(sides.train, unit, settings.records_per_unit), ""
    planted = settings.audit_canaries
    own = at_whole_bins(settings, len(units)) if planted else settings  # the run without canaries is a comparison
    schedule, mechanism = calibrated_schedule(own, base, len(units))
    if planted:
        layers = base.trained.train != "lora"
        check_count(planted, len(units), base.pair_sizes, has_head=bool(base.head) and not layers, own=layers)
        alone, batch, units = (
            mechanism.mechanism,
            schedule.expected_batch_size,
            units.with_slots(np.zeros(planted, bool)),
        )
        schedule, mechanism = calibrated_schedule(settings, base, len(units))
        price = price_of(planted, schedule, mechanism.mechanism, alone, batch, base.dimension)
    tokens, evaluation, public = (
        tokens_of_side(records, base.tokenizer, length, settings) for records in (sides.train, sides.eval, sides.public)
    )
    assert tokens is not None  # there is a train side, or read_sides raised
    if public is not None and not settings.labels and public.without_loss == len(public.rows):
        # The first public loss would end the run, after its budget is booked. The same fault of private records is not
        # refused: a refusal would tell of them.
        problem = f"none of the public records has a token that counts in the loss within {length - 1} tokens"
        raise ConfigError("public", problem, fix="raise max_length, or give public records with shorter prompts")
    check_public(mechanism.mechanism, public=public is not None)
    return PreparedRun(
        settings=settings,
        base=base,
        schedule=schedule,
        tokens=tokens,
        evaluation=evaluation,
        public=public,
        units=units,
        mechanism=mechanism,
        counts={name: len(getattr(sides, name)) for name in ("train", "eval", "public")},
        notes=(
            *base.notes,
            *note_of_unread(sides.unread),
            *filter(None, [delta_warning(schedule.delta, len(units)), weak_signal(settings, schedule, mechanism)]),
            *filter(None, [idle_agent(mechanism.mechanism, schedule.steps)]),
            *filter(None, [memory_warning(settings, base, schedule, units.most, mechanism.mechanism.bands)]),
            *_notes(sides, unit, tokens, settings),
        ),
        held_out=units_of_side(sides.eval, unit, settings.records_per_unit) if sides.eval else None,
        fingerprint=sides.fingerprint,
        form=form,
        way=sides.way,
        canaries=price,
    )


def units_of_side(records: Records, column: str | None, most: int) -> PrivacyUnits:
    """The units of one side's records; ``most`` bounds the records that one unit brings to a batch."""
    keys = np.array([record.unit for record in records], dtype=np.int64)
    if column is None:
        return PrivacyUnits.of(RECORD, keys, 1)
    return PrivacyUnits.of(f"column {column}" if column in _TAKEN else column, keys, most)


def tokens_of_side(records: Records, tokenizer: Any, length: int, settings: TuneSettings) -> Tokens | None:
    """Token ids; None without records. How many are cut refuses no run: no epsilon would cover what that tells."""
    if not records:
        return None
    if settings.task == "classify":
        assert settings.labels is not None  # ``with_labels``
        return labelled_tokens(records, tokenizer, length, settings.labels)
    return tokens_of(records, tokenizer, length, settings.loss_on)


def calibrated_schedule(settings: TuneSettings, base: Base, units: int) -> tuple[TuneSchedule, Calibrated]:
    """The schedule of a run on ``units`` units, and its mechanism with the noise that the budget asks for."""
    schedule = schedule_of(settings, units, base.parameters, base.positions)
    mechanism = calibrate_mechanism(settings, base, schedule)
    if (noise := mechanism.mechanism.noise.correlated) is not None:
        noise.check_memory(base.pair_sizes)  # before the run is booked, not when it starts
    # The default learning rate depends on the number of bands of the mechanism's noise.
    return schedule_of(settings, units, base.parameters, base.positions, mechanism.mechanism.bands), mechanism


def calibrate_mechanism(settings: TuneSettings, base: Base, schedule: TuneSchedule) -> Calibrated:
    """The mechanism with the least noise that keeps the schedule within ``settings.epsilon``. Raises: ConfigError."""
    options = of_model(settings.mechanism, schedule.options, base.pairs, base.dimension)
    return mechanism_of(settings, options, schedule.priced)


def weak_signal(settings: TuneSettings, schedule: TuneSchedule, calibrated: Calibrated) -> str | None:
    """A warning, from public facts, that a run can learn little at this budget, and what would help."""
    mechanism = calibrated.mechanism
    signal = signal_of(schedule, mechanism.effective_noise_multiplier(mechanism.knobs()))
    if signal >= _LEARNED[1][0]:
        return None
    units = round(schedule.expected_batch_size / schedule.sample_rate) - settings.audit_canaries
    helps = [f"some {math.ceil(units * _LEARNED[-1][0] / signal):,} units in place of {units:,}", "a larger epsilon"]
    learned = ", ".join(f"{right} % of the labels right at {at}" for at, right in _LEARNED)
    measured = f"On SST-2, a head on MiniLM had {learned}, and a constant answer 51 %"
    if settings.has_head:
        helps.append("with a causal model, words (a word for each label in place of a new head)")
    else:
        measured += "; what writes texts was not measured so"
    return (
        f"at this epsilon {units:,} units leave little signal: all steps together move a weight by at most "
        f"{signal:.0f} times the noise that hides one unit. {measured}. What would help: {', or '.join(helps)}"
    )


def _notes(sides: Sides, unit: str | None, tokens: Tokens, settings: TuneSettings) -> list[str]:
    """Warnings about the train records, which decide nothing; under private telemetry no statistic of them is told."""
    most = tokens.width - (BESIDE_TEXT if settings.task == "classify" else 1)
    lost = "their beginning, so that the words follow their end" if settings.words else "what is beyond"
    if settings.telemetry == "private":
        return [
            f"records of more than {most} tokens lose {lost}; private telemetry does not say how many there are, nor "
            "whether names and texts look damaged: a dry run with telemetry research tells you, and releases nothing"
        ]
    found, count = [*note_of_unread(sides.unread_later), *(one.text for one in sides.findings)], len(sides.train)
    if tokens.truncated:
        found.append(
            f"{tokens.truncated} of {count} records have more than {most} tokens and lose {lost}; "
            "max_length raises the limit"
        )
    if tokens.without_loss:
        found.append(f"{tokens.without_loss} of {count} records have no token that counts in the loss")
    if unit is not None:
        sizes = Counter(record.unit for record in sides.train)
        if large := sum(size > 10 * settings.records_per_unit for size in sizes.values()):
            found.append(
                f"{large} of {len(sizes)} units have more than 10 times the {settings.records_per_unit} records that "
                "a unit brings to a batch; records_per_unit raises that limit"
            )
    return found
