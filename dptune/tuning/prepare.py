"""Prepares a run before any weight is read: tokens, units, a schedule and a calibrated mechanism."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dptune.corpus.reading.read import Records, Sides, read, read_sides
from dptune.corpus.reading.record import Labelled
from dptune.corpus.reading.source import Fractions, RecordSource
from dptune.corpus.records import form_of
from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated, calibrated, planned
from dptune.mechanisms.registry import MECHANISMS, PARTS, build, describe_options, of_model, takes_noise
from dptune.mechanisms.rldp import Rldp
from dptune.privacy.calibration import delta_warning
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.run_header import RunHeader
from dptune.training.data import PrivacyUnits, Tokens
from dptune.training.encoding import tokens_of
from dptune.training.labelled import BESIDE_TEXT, labelled_tokens
from dptune.training.spec import TrainingPlan, header_of
from dptune.tuning.base import Base
from dptune.tuning.defaults import TuneSchedule, max_length_of, schedule_of
from dptune.tuning.labels import check_labels, check_read_labels
from dptune.tuning.settings import MOST_LABELS, TuneSettings
from dptune.tuning.verifying import LABELS, RECORDS, WORDS
from dptune.units import MADE_OF_OTHERS, RECORD

_log = logging.getLogger(__name__)

#: Runs with fewer units are warned that noise hides nearly everything in their records.
_FEW_UNITS = 100
#: The column of labels where none is named.
DEFAULT_LABEL = "label"
#: Names of units that a column must not have, because ledgers use them for units of other kinds.
_TAKEN = (RECORD, *MADE_OF_OTHERS, "user")


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
        way: how their texts were made of rows, one of ``corpus.reading.fields.WAYS``; empty where nobody said. Public.
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
    form: str = "text"
    template: str | None = None
    made_by: Mapping[str, str] = field(default_factory=dict)
    way: str = ""

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
        chosen = self.schedule
        return TrainingPlan(
            sample_rate=chosen.sample_rate,
            expected_batch_size=chosen.batch,
            steps=chosen.steps,
            learning_rate=chosen.learning_rate,
            warmup_steps=chosen.warmup_steps,
            physical_batch_size=self.settings.rows,
            checkpoint_every=chosen.checkpoint_every,
            gradient_checkpointing=self.settings.gradient_checkpointing,
            rule=self.settings.rule,
        )

    @property
    def header(self) -> RunHeader:
        """The first line of the run's ledger."""
        return header_of(
            self.mechanism.mechanism,
            self.units,
            OsEntropy(),
            delta=self.schedule.delta,
            epsilon=self.settings.epsilon,
            data=self.settings.called,
            telemetry=self.settings.telemetry,
            renyi_filter=self.mechanism.renyi_filter,
        )

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
    """Complete settings and source of a classification; of another task, return them unchanged.

    Without ``settings.named_labels`` the labels are those of the records, sorted. What labels there are is then public,
    as the number of units is: it decides the head's shape. So each needs some units, and under private telemetry all
    must be named.

    Raises: ConfigError for a column of labels without the task, and for labels that must be named; DataError as
        ``read``.
    """
    if settings.task != "classify":
        if source.label is not None:
            problem = "names a column of labels, which only task classify learns"
            raise ConfigError("data.label", problem, fix="set task to classify, or leave it out")
        return settings, source
    # Read twice; a data set of the datasets library can be, and knows the names of its labels.
    if not isinstance(source.data, str | Path) and not hasattr(source.data, "column_names"):
        source = replace(source, data=list(source.data))
    source = replace(source, label=source.label or DEFAULT_LABEL)
    if settings.named_labels is not None:
        return replace(settings, labels=settings.named_labels), source
    if settings.telemetry == "private":
        problem = "are missing, and would be read from the records, which private telemetry tells nothing about"
        raise ConfigError("labels", problem, fix="name them all")
    records = read(source)
    if len({record.content.label for record in records if isinstance(record.content, Labelled)}) > MOST_LABELS:
        problem = f"column {source.label!r} has more than {MOST_LABELS}"
        raise ConfigError("labels", problem, fix="name another column of labels, or all labels")
    labels = check_read_labels(records, str(source.label), grouped=source.unit is not None)
    _log.warning(
        "the names of the %d labels were read from the records and are delivered with the weights; the guarantee does "
        "not cover what labels there are. Name them all to say nothing that you did not know before",
        len(labels),
    )
    return replace(settings, labels=labels), source


def check_mechanism(settings: TuneSettings, base: Base) -> None:
    """Build the mechanism with some noise, before any record is read.

    Raises: ConfigError for an unknown mechanism or option, and for one that no noise certifies or that trains clients.
    """
    name = settings.mechanism
    if name not in MECHANISMS:
        sound = [known for known, listed in MECHANISMS.items() if listed.verdict.startswith("Sound")]
        raise ConfigError("mechanism", f"{name!r} is unknown", fix=f"use one of {', '.join(sound)}")
    options = of_model(name, settings.options, base.pairs, base.dimension)
    if not takes_noise(name, options):
        raise ConfigError(
            "mechanism", f"{name} has no noise to calibrate", fix="use static, or another that adds noise"
        )
    if not any(part in options for part in ("like", *PARTS)):  # else the options are those of other parts
        known = [row[0] for row in describe_options(name) if row[0] not in ("noise_multiplier", "pairs", "dimension")]
        for option in settings.options:
            if option not in known:
                problem = f"mechanism {name!r} has no such option that is yours to set"
                raise ConfigError(f"options.{option}", problem, fix=f"use one of {', '.join(known)}")
    probe = build(name, options | {"noise_multiplier": 1.0})
    leaks = probe.release(probe.knobs(), 0.1 / probe.bands).leaks  # at a rate that any number of bands bears
    if leaks:
        problem = f"{name} has no certified epsilon ({'; '.join(leaks)})"
        raise ConfigError("mechanism", problem, fix="use a sound one: `dptune mechanisms` says which are")
    if base.head:
        probe.check_head()
    if probe.clipper.federation is not None:
        raise ConfigError("mechanism", f"{name} trains simulated clients", fix="use static, or another without clients")


def check_public(mechanism: Mechanism, *, public: bool) -> None:
    """Raise ConfigError for a mechanism that follows public records, where there are none."""
    if isinstance(mechanism.controller, Rldp) and not public:
        problem = f"{mechanism.name} follows the loss on public records"
        raise ConfigError("public", f"{problem}, and none were given", fix="give records of nobody")


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
    max_length_of(settings, base.positions)  # raises before any record is read
    sides = read_sides(replace(source, split=Fractions(1 - held_out, held_out, 0.0)))
    for records in (sides.train, sides.eval, sides.public) if settings.labels else ():
        check_labels(records, settings.labels or (), source.label or DEFAULT_LABEL, "name all labels, this one too")
    prepared = prepare_sides(sides, base, settings, source.unit)
    return replace(prepared, template=source.template, made_by=source.made_by)


def prepare_sides(sides: Sides, base: Base, settings: TuneSettings, unit: str | None) -> PreparedRun:
    """Complete the schedule of a run on records whose sides are dealt already.

    Args:
        unit: the kind of unit that the records' keys name; None: each record is a unit of its own.

    Raises: ConfigError for settings that do not go with these records.
    """
    check_mechanism(settings, base)
    length = max_length_of(settings, base.positions)
    form = form_of(sides.train)
    if settings.add_bos_token and form == "messages":
        raise ConfigError("add_bos_token", "is not for chats, which their template begins", fix="leave it out")
    units = units_of_side(sides.train, unit, settings.records_per_unit)
    schedule, mechanism = calibrated_schedule(settings, base, len(units))
    tokens, evaluation, public = (
        tokens_of_side(records, base.tokenizer, length, settings) for records in (sides.train, sides.eval, sides.public)
    )
    assert tokens is not None  # there is a train side, or read_sides raised
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
        notes=(*base.notes, *_few_units_warning(len(units), schedule.delta), *_notes(sides, unit, tokens, settings)),
        held_out=units_of_side(sides.eval, unit, settings.records_per_unit) if sides.eval else None,
        fingerprint=sides.fingerprint,
        form=form,
        way=sides.way,
    )


def units_of_side(records: Records, column: str | None, most: int) -> PrivacyUnits:
    """The units of one side's records; ``most`` bounds the records that one unit brings to a batch."""
    if column is None:
        return PrivacyUnits.records(len(records))
    kind = f"column {column}" if column in _TAKEN else column
    return PrivacyUnits.of(kind, np.array([record.unit for record in records], dtype=np.int64), most)


def tokens_of_side(records: Records, tokenizer: Any, length: int, settings: TuneSettings) -> Tokens | None:
    """Token ids; None without records. Raises: ConfigError if more than half are cut, or none counts in the loss."""
    if not records:
        return None
    most = length - 1
    if settings.task == "classify":
        assert settings.labels is not None  # ``with_labels``
        tokens, most = labelled_tokens(records, tokenizer, length, settings.labels), length - BESIDE_TEXT
    else:
        tokens = tokens_of(records, tokenizer, length, settings.loss_on)
    if 2 * tokens.truncated > len(records) and not settings.cut_records:
        private = settings.telemetry == "private"
        share = "more than half of the" if private else f"{tokens.truncated} of {len(records)}"
        problem = f"{share} records have more than {most} tokens"
        raise ConfigError("max_length", problem, fix="raise it, give shorter records, or allow it with cut_records")
    if tokens.without_loss == len(records):
        problem = "leaves no token of any record that counts in the loss"
        raise ConfigError("max_length", problem, fix="raise it, or give records with shorter prompts")
    return tokens


def calibrated_schedule(settings: TuneSettings, base: Base, units: int) -> tuple[TuneSchedule, Calibrated]:
    """The schedule of a run on ``units`` units, and its mechanism with the noise that the budget asks for."""
    schedule = schedule_of(settings, units, base.parameters, base.positions)
    mechanism = calibrate_mechanism(settings, base, schedule)
    if (noise := mechanism.mechanism.noise.correlated) is not None:
        noise.check_memory(base.pair_sizes)  # before the run is booked, not when it starts
    return trained_schedule(settings, base, units, mechanism.mechanism), mechanism


def trained_schedule(settings: TuneSettings, base: Base, units: int, mechanism: Mechanism) -> TuneSchedule:
    """The schedule that a run with this mechanism trains by: a rate that was left open follows its noise's bands."""
    return schedule_of(settings, units, base.parameters, base.positions, mechanism.bands)


def calibrate_mechanism(settings: TuneSettings, base: Base, schedule: TuneSchedule) -> Calibrated:
    """The mechanism with the least noise that keeps the schedule within ``settings.epsilon``. Raises: ConfigError."""
    options = of_model(settings.mechanism, schedule.options, base.pairs, base.dimension)
    priced = schedule.priced
    found = calibrated(
        lambda noise: build(settings.mechanism, options | {"noise_multiplier": noise}),
        settings.epsilon,
        priced,
        "certified",
    )
    assert planned(found.mechanism, priced)
    return found


def _few_units_warning(units: int, delta: float) -> list[str]:
    """Warnings about a small number of units, which is public."""
    found = [warning] if (warning := delta_warning(delta, units)) else []
    if units < _FEW_UNITS:
        found.append(
            f"{units} units are few: noise that hides one of them hides nearly all that they say together; "
            "expect little, or give more records"
        )
    return found


def _notes(sides: Sides, unit: str | None, tokens: Tokens, settings: TuneSettings) -> list[str]:
    """Warnings about the train records; none under private telemetry, for they are statistics of private records."""
    if settings.telemetry == "private":
        return []
    found, count = [], len(sides.train)
    if tokens.truncated:
        most = tokens.width - (BESIDE_TEXT if settings.task == "classify" else 1)
        lost = "their beginning, so that the words follow their end" if settings.words else "what is beyond"
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
                "one brings to a batch; records_per_unit raises that"
            )
    return found
