"""The settings of a tuning run, apart from its model and records."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from annotated_types import Ge, Le

from dptune.bounds import LearningRate, Rank, Seed
from dptune.corpus.reading.spelling import spelled
from dptune.errors import ConfigError
from dptune.tuning.labels import HIDDEN, HIDDEN_NAMED, RENAME_HIDDEN
from dptune.update_rule import Average, Optimizer, RateSchedule, UpdateRule

if TYPE_CHECKING:
    from dptune.training.encoding import LossOn

Telemetry = Literal["research", "private"]
Task = Literal["generate", "classify"]


@dataclass(frozen=True)
class TuneSettings:
    """The settings of a run; where a field is None, ``defaults`` chooses from public facts. Public.

    Attributes:
        epsilon: the budget that ``epsilon_certified`` keeps.
        task: "generate" learns to write the records' text; "classify" learns their labels, by a head that trains in
            full beside the adapters, or by ``words``.
        labels: names of all labels, in the order of the outputs; None takes those that have words. Public: they decide
            the head's shape, and are delivered, so they are given and never read from the records.
        words: of a causal model that classifies: for each label a word that is one token, such as " good". The label is
            that of the word which the model finds likeliest after the text. None trains a head. Public.
        delta: delta of the guarantee, below 1 over the units.
        mechanism: name of a registered mechanism; ``options`` are the mechanism's own.
        batch: expected number of units of a batch.
        epochs: passes over the units.
        learning_rate: learning rate after warm-up.
        optimizer, schedule, average: update rule, see ``dptune.update_rule.UpdateRule``.
        max_length: width of a batch in tokens, one of which stays padding; longer records are cut.
        records_per_unit: the most records that one unit brings to a batch.
        rows: number of rows of a micro-batch; changes memory and speed only.
        gradient_checkpointing: run each transformer layer again on the way back; changes memory and speed only.
        rank, alpha, target_modules: settings of LoRA; None targets the modules that PEFT knows for the family.
        rslora, rank_pattern, alpha_pattern, init_lora_weights: settings of LoRA, see ``dptune.training.lora.Lora``.
        loss_on: the tokens that count in the loss; None follows the kind of record.
        add_bos_token: put a beginning-of-text token before each record where the tokenizer puts none, so that the first
            token of a text is learned too; the delivered tokenizer puts it as well. For ``dptune.sample``.
        eval_share: share of the units that is held out to measure perplexity. Under private telemetry nobody is.
        telemetry: "private" tells no statistic of private records; "research" also shows their owner their perplexity.
        seed: seed of the initialisation of adapters and head. Public.
        device: a device such as "cuda:0"; None takes a GPU if there is one.
        dtype: dtype of the frozen weights; None is bfloat16 on a GPU, else float32.
        load_in_4bit: hold the frozen weights of linear layers in 4 bits; ``dtype`` is that of products with them.
        called: name of the records in the ledger and on the card. Public.
    """

    epsilon: float
    task: Task = "generate"
    labels: tuple[str, ...] | None = None
    words: Mapping[str, str] | None = None
    delta: float | None = None
    mechanism: str = "static"
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: float | None = None
    epochs: float | None = None
    learning_rate: float | None = None
    optimizer: Optimizer = "adamw"
    schedule: RateSchedule = "constant"
    average: Average = "tail"
    max_length: int | None = None
    records_per_unit: int = 4
    rows: int = 16
    gradient_checkpointing: bool = False
    rank: int = 8
    alpha: int = 16
    target_modules: tuple[str, ...] | str | None = None
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    init_lora_weights: Literal[True, "gaussian", "orthogonal"] = True
    loss_on: LossOn | None = None
    add_bos_token: bool = False
    eval_share: float = 0.1
    telemetry: Telemetry = "research"
    seed: int = 0
    device: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    load_in_4bit: bool = False
    called: str = "own records"

    def __post_init__(self) -> None:
        self._check_numbers()
        _ = self.rule
        if self.delta is not None and self.delta >= 1:
            raise ConfigError(
                "delta", f"{self.delta:g} is no probability below 1", fix="use less than 1 over the units"
            )
        if not (_is_number(self.eval_share) and 0 <= self.eval_share < 1):
            raise ConfigError("eval_share", f"{self.eval_share!r} is not in [0, 1)", fix="give a share, such as 0.1")
        for name, known in (
            ("task", get_args(Task)),
            ("telemetry", get_args(Telemetry)),
            ("dtype", (None, "float32", "bfloat16")),
        ):
            if getattr(self, name) not in known:
                listed = " or ".join(one for one in known if one)
                raise ConfigError(name, f"{getattr(self, name)!r} is unknown", fix=f"use {listed}")
        self._check_task()
        if "noise_multiplier" in self.options:
            problem = "is what the budget decides"
            raise ConfigError("options.noise_multiplier", problem, fix="leave it out, and change epsilon")

    def check_rows(self, unit: str | None) -> None:
        """Check that a micro-batch holds all that one unit brings: a record, or ``records_per_unit`` of a column's.

        Raises: ConfigError if it does not.
        """
        if unit is not None and self.rows < self.records_per_unit:
            problem = f"{self.rows} is less than the {self.records_per_unit} records that one unit may bring"
            raise ConfigError("rows", problem, fix="raise it, or lower records_per_unit")

    @property
    def rule(self) -> UpdateRule:
        """The update rule. Raises: ConfigError for one that is unknown."""
        return UpdateRule(optimizer=self.optimizer, schedule=self.schedule, average=self.average)

    @property
    def named_labels(self) -> tuple[str, ...] | None:
        """All labels, where ``labels`` or ``words`` names them; None else."""
        return tuple(self.words) if self.labels is None and self.words else self.labels

    def _check_task(self) -> None:
        """Raise ConfigError for labels that are no names, and for settings that do not go with the task."""
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
            raise ConfigError("model.load_in_4bit", "does not go with task classify", fix="use dtype bfloat16")
        if self.words is not None and not (isinstance(self.words, Mapping) and self.words):
            problem = f"{self.words!r} is no mapping from labels to words"
            raise ConfigError(_WORDS, problem, fix='give one, such as {"0": " poor", "1": " great"}')
        if (labels := self.named_labels) is None:
            problem = "are missing: they become public, and no epsilon would cover reading them from the records"
            raise ConfigError("labels", problem, fix="name all of them, such as good,bad (in Python: ('good', 'bad'))")
        _check_labels(labels)
        _check_words(self.words, labels)

    def _check_numbers(self) -> None:
        """Raise ConfigError for what is no number, no whole one, no boolean, or beyond its bounds."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ConfigError(
                    name, f"{value!r} is not a positive number", fix=f"give one, such as {_SUCH_AS[name]}"
                )
        for name in _WHOLE:
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool):
                raise ConfigError(name, f"{value!r} is no whole number", fix=f"give one, such as {_SUCH_AS[name]}")
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(name, f"{value!r} is no boolean", fix="use True or False")
        for name, bounds in (("learning_rate", LearningRate), ("rank", Rank), ("seed", Seed)):
            _check_bounds(name, getattr(self, name), bounds)

    @classmethod
    def of(cls, **given: Any) -> TuneSettings:
        """Make settings from names and values. Raises: ConfigError for an unknown name, suggesting a similar one."""
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                fix = f"use {close[0]}" if close else f"use one of {', '.join(known)}"
                raise ConfigError(name, "is no setting", fix=fix)
        return cls(**given)


def _check_labels(labels: tuple[str, ...]) -> None:
    """Raise ConfigError unless these are two or more distinct names."""
    if isinstance(labels, str):
        raise ConfigError("labels", f"{labels!r} is one text", fix="give a list of names")
    if others := [label for label in labels if not isinstance(label, str)]:
        names = ", ".join(repr(str(label)) for label in labels)
        raise ConfigError("labels", f"{others[0]!r} is no text", fix=f"write them as texts: {names}")
    if not all(labels):
        raise ConfigError("labels", f"{labels!r} are not all names", fix="give each label a name")
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
            raise ConfigError(_WORDS, f"{word!r} of label {label!r} is no word", fix='give one, such as " good"')
        if word in owners:
            problem = f"labels {owners[word]!r} and {label!r} have one word, {word!r}"
            raise ConfigError(_WORDS, problem, fix="give each label a word of its own")
        owners[word] = label


_WORDS = "task.words"

_SUCH_AS = {
    "epsilon": 4,
    "delta": 1e-6,
    "batch": 256,
    "epochs": 3,
    "learning_rate": 0.005,
    "rank": 8,
    "alpha": 16,
    "rows": 16,
    "records_per_unit": 4,
    "seed": 0,
}


_POSITIVE = tuple(name for name in _SUCH_AS if name != "seed")
_WHOLE = ("rank", "alpha", "rows", "records_per_unit", "seed")
_SWITCHES = ("add_bos_token", "gradient_checkpointing", "rslora", "load_in_4bit")


def _check_bounds(name: str, value: Any, bounds: Any) -> None:
    """Raise ConfigError for a number beyond the bounds that ``dptune.bounds`` annotates its type with."""
    for bound in get_args(bounds)[1:] if value is not None else ():
        if isinstance(bound, Ge) and not value >= bound.ge:
            raise ConfigError(name, f"{value!r} is below {bound.ge}", fix=f"use {bound.ge} or more")
        if isinstance(bound, Le) and not value <= bound.le:
            raise ConfigError(name, f"{value!r} is above {bound.le}", fix=f"use {bound.le} or less")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
