"""The settings of a tuning run, apart from its model and records."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from dptune.core.declarations import (
    NAMES_NOTHING,
    Count,
    CountOrZero,
    Delta,
    Epochs,
    Epsilon,
    LearningRate,
    Rows,
    Seed,
    declared,
    differing,
    names_nothing,
    part_of,
)
from dptune.core.errors import ConfigError, DataError
from dptune.core.settings import (
    Average,
    BatchSize,
    Dropout,
    Lora,
    LossOn,
    RateRatio,
    ScheduleSettings,
    UpdateRule,
    Width,
)
from dptune.records.reading.record import Labelled, Record
from dptune.records.reading.spelling import spelled

_log = logging.getLogger(__name__)

Telemetry = Literal["research", "private"]
Task = Literal["generate", "classify"]


#: Settings that had another name, with the one that they have now.
RENAMED = {"batch": "expected_batch_size", "rows": "physical_batch_size"}


@dataclass(frozen=True, kw_only=True)
class JobSettings(ScheduleSettings, Lora):
    """The settings of a run, apart from its model and records, as every door makes them. Public.

    Attributes:
        epsilon: privacy budget, which the certified epsilon never exceeds.
        delta: delta of the guarantee, below 1 / units; left out, at most 1 / (10 x units).
        task: "generate" learns to write the records' texts; "classify" learns their labels.
        labels: all labels of task classify, in the order of the outputs; they become public, and are never read from
            the records.
        words: word for each label of task classify, such as 0=" poor", in place of a trained head: the likeliest word
            after the text wins.
        mechanism: name of a registered mechanism; `dptune mechanisms` lists them.
        options: option of the mechanism; `dptune mechanisms NAME` lists them.
        loss_on: tokens that are learned; left out, it follows the kind of record.
        add_bos_token: put a beginning-of-text token before each record where the tokenizer puts none, so that the
            first token is learned too; for `dptune sample`.
        telemetry: "private" publishes nothing computed from private records; "research" also shows their owner the
            scores of held-out ones.
        seed: public seed of the initial weights of adapters and head.
        device: device such as cpu or cuda:0; left out, a GPU if there is one.
        dtype: number format of the frozen weights; left out, bfloat16 on a GPU and float32 elsewhere.
        load_in_4bit: store the frozen weights in 4 bits (NF4 of bitsandbytes), and compute with them in dtype.
        called: name of the records in the ledger and on the card; public.
    """

    epsilon: Epsilon | None = None
    delta: Delta | None = None
    task: Task = "generate"
    labels: tuple[str, ...] | None = None
    words: Mapping[str, str] | None = None
    mechanism: str = "static"
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_on: LossOn | None = None
    add_bos_token: bool = False
    telemetry: Telemetry = "research"
    seed: Seed = 0
    device: str | None = field(default=None, metadata=NAMES_NOTHING)  # its kernels round otherwise
    dtype: Literal["float32", "bfloat16"] | None = None
    load_in_4bit: bool = False
    called: str = "own records"

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value that a setting cannot have, or that does not go with the others."""
        Lora.__post_init__(self)
        self.check_layers()
        self._check_task()
        if self.train != "lora":
            self._check_own_weights()

    def check_rows(self, unit: str | None) -> None:
        """Check that a micro-batch holds all that one unit brings: a record, or ``records_per_unit`` of a column's.

        Raises: ConfigError if it does not.
        """
        rows = self.physical_batch_size or self.records_per_unit  # left open, it holds them
        if unit is not None and rows < self.records_per_unit:
            problem = f"{rows} is less than the {self.records_per_unit} records that one unit may bring"
            raise ConfigError("physical_batch_size", problem, fix="raise it, or lower records_per_unit")

    @property
    def lora(self) -> Lora:
        """The hyper-parameters of the adapters."""
        return part_of(Lora, self)

    @property
    def has_head(self) -> bool:
        """Whether a new head is trained, beside whatever else trains."""
        return self.task == "classify" and not self.words

    @property
    def named_labels(self) -> tuple[str, ...] | None:
        """All labels, where ``labels`` or ``words`` names them; None else."""
        return tuple(self.words) if self.labels is None and self.words else self.labels

    def _check_own_weights(self) -> None:
        """Raise ConfigError for settings that have no effect, or are refused, where the model's own weights train."""
        if useless := [name for name in differing(self) if name in declared(Lora)]:
            problem = f"is about LoRA adapters, and train {self.train} has none, so it would have no effect"
            raise ConfigError(f"lora.{useless[0]}", problem, fix="leave it out, or set train to lora")
        if self.load_in_4bit:
            problem = f"holds the weights in 4 bits, and train {self.train} moves the weights themselves"
            raise ConfigError("model.load_in_4bit", problem, fix="leave it out, or set train to lora")
        if self.dtype not in (None, "float32"):
            problem = f"{self.dtype} has too few digits for the steps of a weight that train {self.train} moves"
            fix = "use float32, with autocast bfloat16 for speed; or set train to lora"
            raise ConfigError("model.dtype", problem, fix=fix)
        if self.train == "head" and not self.has_head and self.task == "classify":
            problem = "head has nothing to train: label words take the place of a head"
            raise ConfigError("train", problem, fix="leave words out, or train lora, all, bias or layers")

    def _check_task(self) -> None:
        """Raise ConfigError for labels that are no names, and for settings that do not go with the task."""
        if not self.has_head and self.head_rate_ratio not in (None, 1):
            problem = "is about a classifier's head, and this run trains none"
            raise ConfigError("head_rate_ratio", problem, fix="leave it out")
        if self.task == "generate":
            for name, given in (("labels", self.labels), (_WORDS, self.words)):
                if given is not None:
                    raise ConfigError(name, "are for task classify", fix="set it, or leave them out")
            return
        if self.loss_on is not None:
            raise ConfigError(
                "training.loss_on", "is for task generate: a classifier learns labels", fix="leave it out"
            )
        if self.add_bos_token:
            raise ConfigError("add_bos_token", "is for task generate: a classifier writes nothing", fix="leave it out")
        if self.load_in_4bit:
            fix = "use dtype bfloat16" if self.train == "lora" else "leave it out"
            raise ConfigError("model.load_in_4bit", "does not go with task classify", fix=fix)
        if self.words is not None and not (isinstance(self.words, Mapping) and self.words):
            problem = f"{self.words!r} is not a mapping from labels to words"
            raise ConfigError(_WORDS, problem, fix='give one, such as {"0": " poor", "1": " great"}')
        if (labels := self.named_labels) is None:
            problem = "are missing: they become public, and no epsilon would cover reading them from the records"
            raise ConfigError("labels", problem, fix="name all of them, such as good,bad (in Python: ('good', 'bad'))")
        _check_labels(labels)
        _check_words(self.words, labels)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(JobSettings):
    """The settings of ``dptune.tune``, apart from its model and records. Public.

    Those of its bases are declared there, and have other defaults here. What is None, ``run_spec`` chooses from public
    facts: the number of units, the size of the model and its context. The budget decides the noise.

    Example:
        >>> TuneSettings.of(epsilon=8, optimizer="sgd", momentum=0.5).rule.momentum
        0.5

    Attributes:
        eval_share: share of the units that is held out to measure perplexity; none with telemetry private.
        audit_canaries: gradients that an auditor plants in the run, each by a fair coin, for `dptune audit-run`; they
            count as units, and cost utility.
    """

    epsilon: Epsilon
    eval_share: Annotated[float, Ge(0), Lt(1)] = 0.1
    audit_canaries: CountOrZero = 0
    # Declared in the bases, with their bounds and sentences: other defaults, and None where ``run_spec`` chooses.
    expected_batch_size: BatchSize | None = None  # type: ignore[assignment]
    epochs: Epochs | None = None  # type: ignore[assignment]
    max_length: Width | None = None  # type: ignore[assignment]
    learning_rate: LearningRate | None = None  # type: ignore[assignment]
    warmup_steps: CountOrZero | None = None  # type: ignore[assignment]
    head_rate_ratio: RateRatio | None = None  # type: ignore[assignment]
    checkpoint_every: Count | None = field(default=None, metadata=NAMES_NOTHING)  # type: ignore[assignment]
    physical_batch_size: Rows | None = field(default=None, metadata=NAMES_NOTHING)  # type: ignore[assignment]
    records_per_unit: Rows = 4
    # Cells keep "none", as papers train, and 0.05, which names of finished ones left out: another default renames them.
    average: Average = "tail"
    dropout: Dropout = 0.0  # on a CPU a private run refuses any other

    def __post_init__(self) -> None:
        """Raises: ConfigError as its base, and for noise that is given."""
        super().__post_init__()
        if "noise_multiplier" in self.options:
            problem = "follows from the budget"
            raise ConfigError("options.noise_multiplier", problem, fix="leave it out, and change epsilon")

    def check_search(self) -> None:
        """Raise ConfigError for canaries, which a search would plant in every candidate, and releases only one; and for
        a sampler other than poisson.
        """
        if self.sampler != "poisson":
            problem = f"{self.sampler} does not go with a search, whose price is proven for Poisson sampling"
            raise ConfigError("sampler", problem, fix="use poisson, or tune without a search")
        if self.audit_canaries:
            problem = "are planted in single runs, not in the candidates of a search"
            raise ConfigError("audit_canaries", problem, fix="leave them out, or tune without a search")

    @property
    def rule(self) -> UpdateRule:
        """The update rule. An open head_rate_ratio counts as 1 here; ``TuneSchedule.rule`` has the chosen one."""
        return part_of(UpdateRule, self, head_rate_ratio=self.head_rate_ratio or 1.0)

    @classmethod
    def of(cls, **given: Any) -> TuneSettings:
        """Make settings from names and values; warns of each former name.

        Raises: ConfigError for a name that no setting has, suggesting a similar one, and for a setting that is given
            under both of its names.
        """
        found: dict[str, Any] = {}
        for name, value in given.items():
            new = RENAMED.get(name, name)
            cls.check_name(new)
            if new in found or (new != name and new in given):
                raise ConfigError(name, f"is the former name of {new}, which is given too", fix="leave it out")
            if new != name:
                _log.warning("%s is the former name of %s: use that", name, new)
            found[new] = value
        return cls(**found)

    @classmethod
    def check_name(cls, name: str) -> None:
        """Raise ConfigError for a name that no setting has."""
        known = list(declared(cls))
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"use {close[0]}" if close else f"use one of {', '.join(known)}"
            raise ConfigError(name, "is not a setting", fix=fix)


#: Settings that move no released number beyond rounding: a resumed run may have others.
FREE = tuple(sorted(names_nothing(TuneSettings)))


def rows_of(settings: ScheduleSettings | Lora, besides: Iterable[str] = ()) -> dict[str, Any]:
    """Rows of a card: the settings of schedule and adapters that differ from their defaults and can change a result.

    Args:
        besides: settings that the card says elsewhere.
    """
    lora, left_out = declared(Lora), {*besides, *FREE}
    shared = {**declared(ScheduleSettings), **lora}
    return {
        f"LoRA {name.replace('_', ' ')}" if name in lora else name.replace("_", " "): value
        for name, value in differing(settings).items()
        if name in shared and name not in left_out
    }


def as_written_now(known: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder of an earlier version says that it was made with, as this version would say it.

    Settings have their present names, and those that it did not know their defaults. What changes no result is left
    out.
    """
    new = {name: one.default for name, one in declared(TuneSettings).items() if one.default is not MISSING}
    found = new | {RENAMED.get(name, name): value for name, value in known.items()}
    return {name: value for name, value in found.items() if name not in FREE}


def _check_labels(labels: tuple[str, ...]) -> None:
    """Raise ConfigError unless these are two or more distinct names."""
    if isinstance(labels, str):
        raise ConfigError("labels", f"{labels!r} is one text", fix="give a list of names")
    if others := [label for label in labels if not isinstance(label, str)]:
        names = ", ".join(repr(str(label)) for label in labels)
        raise ConfigError("labels", f"{others[0]!r} is not a text", fix=f"write them as texts: {names}")
    if not all(labels):
        raise ConfigError("labels", f"{labels!r} include an empty one", fix="give each label a name")
    if others := [label for label in labels if spelled(label) != label]:
        problem = f"{others[0]!r} is spelled {spelled(others[0])!r} where records are read"
        raise ConfigError("labels", problem, fix="write it so")
    if HIDDEN in labels:
        raise ConfigError("labels", HIDDEN_NAMED, fix=RENAME_HIDDEN)
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ConfigError("labels", f"{labels!r} are not two or more distinct names", fix="name each label once")


def _check_words(words: Mapping[str, str] | None, labels: tuple[str, ...]) -> None:
    """Raise ConfigError unless each label has a word of its own, where there are words."""
    if words is None:
        return
    if set(words) != set(labels):
        problem = f"there are {len(words)}, for {', '.join(words)}, and {len(labels)} labels ({', '.join(labels)})"
        raise ConfigError(_WORDS, problem, fix="give each label its word")
    owners: dict[str, str] = {}
    for label, word in words.items():
        if not isinstance(word, str) or not word:
            raise ConfigError(_WORDS, f"{word!r} of label {label!r} is not a word", fix='give one, such as " good"')
        if word in owners:
            problem = f"labels {owners[word]!r} and {label!r} have one word, {word!r}"
            raise ConfigError(_WORDS, problem, fix="give each label a word of its own")
        owners[word] = label


_WORDS = "task.words"

#: What data sets of the ``datasets`` library hold in place of a label that is not given away.
HIDDEN = "-1"
#: What is wrong with it as the name of a label, and what to do where it is a class, as of sentiments from -1 to 1.
HIDDEN_NAMED = f"{HIDDEN} is what data sets write where a label is hidden, and would become a class"
RENAME_HIDDEN = "leave it out, or give that class another name in the records, such as negative"
#: The most characters of a label that a message shows.
_LONGEST = 40


def check_labels(records: Sequence[Record], labels: Collection[str], column: str, fix: str) -> None:
    """Raise DataError naming row, column and value of the first label that is not in ``labels``.

    Args:
        fix: what can be done besides mending the value.
    """
    known = set(labels)
    for record in records:
        if isinstance(record.content, Labelled) and record.content.label not in known:
            problem = f"{_shown(record.content.label)} is not one of the labels {', '.join(labels)}"
            fix = f"mend it, or {fix}"
            if record.content.label == HIDDEN:
                problem = f"the label is {HIDDEN}, which data sets write where it is hidden, as in GLUE's test parts"
                fix = "give a part whose labels are known, or remove the record"
            raise DataError(problem, fix=fix, file=record.file, row=record.row, column=column)


def _shown(label: str) -> str:
    return repr(label if len(label) <= _LONGEST else f"{label[:_LONGEST]}...")
