"""Settings that every door takes: update rule, steps, what trains, schedule, LoRA adapters. Public; imports no torch.

Example:
    >>> UpdateRule(schedule="linear").rate_share(row=6, steps=10, warmup_steps=2)
    0.5
    >>> Lora(rank=4).alpha
    16
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen

from dptune.core.declarations import (
    NAMES_NOTHING,
    Chance,
    Count,
    CountOrZero,
    Epochs,
    Few,
    LearningRate,
    Rank,
    Rows,
    Seed,
    Share,
    TokenCount,
    check,
    part_of,
)
from dptune.core.errors import ConfigError, first_line

Optimizer = Literal["adamw", "adam_bc", "sgd"]
RateSchedule = Literal["constant", "linear", "cosine"]
Average = Literal["none", "ema", "tail"]
#: Version of each optimiser and each average of the weights. Raise one when a change moves the weights that it gives:
#: tests/golden says when.
VERSIONS = {
    "optimizer adamw": 1,
    "optimizer adam_bc": 1,
    "optimizer sgd": 1,
    "average ema": 1,
    "average tail": 1,
}
PartOfAll = Annotated[float, Gt(0), Le(1)]
RateRatio = Annotated[float, Gt(0), Le(1000)]


@dataclass(frozen=True)
class UpdateRule:
    """How released gradients move the weights.

    Attributes:
        optimizer: "adamw"; "adam_bc", Adam that subtracts the known noise variance from its second moment (DP-AdamBC,
            Tang et al. 2024); or "sgd" with momentum.
        momentum: momentum of optimizer sgd.
        noise_floor: smallest share of the noise variance that adam_bc leaves in the second moment; a small share makes
            steps explode.
        schedule: learning rate after warm-up: "constant", or falling to final_share of it in a line or a cosine.
        final_share: share of the learning rate that a falling schedule ends at.
        average: weights that a run ends with: the last ones ("none"), their moving average ("ema"), or the mean of
            those after the last steps ("tail").
        average_share: share of the steps that average tail uses; at least one step for each band of correlated noise.
        average_decay: decay of average ema in one step.
        head_rate_ratio: learning rate of a classifier's head, as a multiple of that of the adapters: a new head has far
            to go, and adapters that go as far mostly follow the noise.
    """

    optimizer: Optimizer = "adamw"
    momentum: Chance = 0.9
    noise_floor: PartOfAll = 0.5
    schedule: RateSchedule = "constant"
    final_share: Share = 0.0
    average: Average = "none"
    average_share: PartOfAll = 0.1
    average_decay: Chance = 0.9
    head_rate_ratio: RateRatio = 1.0

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value of the wrong type or out of bounds."""
        check(self)

    def rate_share(self, row: int, steps: int, warmup_steps: int) -> float:
        """The share of the learning rate after warm-up at release ``row`` of ``steps``, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, max(0.0, (row - warmup_steps) / max(1, steps - warmup_steps)))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final_share + (1 - self.final_share) * left

    def first_averaged(self, steps: int, bands: int) -> int:
        """The first release whose weights enter a tail's mean, counted from 0."""
        return max(0, steps - max(math.ceil(self.average_share * steps), bands)) if self.average == "tail" else 0


#: Samplers that training draws batches by. A mechanism with bands brings its own, cyclic_poisson, under the first name.
TrainingSampler = Literal["poisson", "truncated_poisson", "balls_in_bins"]
#: Tokens that count in the loss.
LossOn = Literal["completion", "assistant", "all"]
BatchSize = Annotated[float, Ge(1e-3), Le(1e9)]
Width = Annotated[TokenCount, Ge(3)]

#: Version of the training loop (``dptune.training``, tokens and adapters included). Raise it when a change moves a
#: released number of every run: tests/golden says when.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Rate, micro-batches, precision and checkpoints of a run. Public.

    Attributes:
        learning_rate: learning rate after warm-up.
        warmup_steps: steps of linear warm-up.
        physical_batch_size: records of a micro-batch, padded if there are fewer; changes only memory and speed.
        checkpoint_every: steps between checkpoints; a killed run loses at most this many.
        autocast: "bfloat16" runs the forward pass in bfloat16; left out, it runs in the dtype of the weights.
        gradient_checkpointing: keep only the inputs of transformer layers and run each layer again on the way back:
            less memory, more time, the same gradients.
    """

    learning_rate: LearningRate = 5e-4
    warmup_steps: CountOrZero = 100
    # It moves the last digits of float32 sums; which masks dropout draws follows the system's entropy anyway. The
    # default is for models of any size; params.yaml has 32, for its small one.
    physical_batch_size: Rows = field(default=16, metadata=NAMES_NOTHING)
    checkpoint_every: Count = field(default=50, metadata=NAMES_NOTHING)  # it decides only what a kill loses
    autocast: Literal["bfloat16"] | None = None
    gradient_checkpointing: bool = field(default=False, metadata=NAMES_NOTHING)  # the same products, made twice


#: Weights that a run can train.
Train = Literal["lora", "all", "bias", "head", "layers"]
_LAST = re.compile(r"last ([1-9]\d{0,3})")


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """The weights that a run trains. Public.

    Attributes:
        train: weights that train: "lora", adapters beside the frozen model; "all", every weight of the model; "bias",
            its biases; "head", its output layer; or "layers", those that train_layers names. A classifier's new head
            trains with each of them.
        train_layers: weights of train layers: "last K", the last K transformer layers; or a regular expression that
            matches the end of a name, such as layer.5 or LayerNorm.weight, of a module or a weight.

    Example:
        >>> TrainedWeights(train="layers", train_layers="last 2").last_layers
        2
        >>> TrainedWeights(train="layers", train_layers="last 2").said
        'layers: last 2'
    """

    train: Train = "lora"
    train_layers: Annotated[str, Len(1, 1000)] | None = None

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value of the wrong type, and for train_layers without train layers."""
        check(self)
        self.check_layers()

    def check_layers(self) -> None:
        """Raise ConfigError unless train_layers goes with train, and is a regular expression."""
        if self.train_layers is None:
            if self.train == "layers":
                fix = "give it: 'last 2', or a regular expression of the names of modules or weights"
                raise ConfigError(
                    "train_layers", "is missing: train layers needs the names of those that train", fix=fix
                )
            return
        if self.train != "layers":
            problem = f"names layers, and train is {self.train}"
            raise ConfigError("train_layers", problem, fix="set train to layers, or leave it out")
        try:
            re.compile(self.train_layers)
        except re.error as error:
            problem = f"{self.train_layers!r} is not a regular expression ({first_line(error)})"
            raise ConfigError("train_layers", problem, fix="mend it, or write 'last 2'") from None

    @property
    def last_layers(self) -> int | None:
        """K of "last K"; None for a regular expression, or without one."""
        found = _LAST.fullmatch(self.train_layers or "")
        return int(found[1]) if found else None

    @property
    def said(self) -> str:
        """What trains, as ledgers and cards name it: "lora", "all", "layers: last 2"."""
        return self.train if self.train_layers is None else f"{self.train}: {self.train_layers}"


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(StepSettings, UpdateRule, TrainedWeights):
    """Schedule of a private run, as every door that trains takes it. Public.

    Attributes:
        expected_batch_size: expected number of units of a batch.
        epochs: expected number of batches that contain each unit.
        sampler: how units get into batches: "poisson", each by its own coin; "truncated_poisson", the same, and a batch
            of more than max_batch units is cut at random; "balls_in_bins", each into exactly one batch of every epoch.
        max_batch: most units of a batch of truncated_poisson; left out, so many that cuts take a thousandth of delta.
        max_length: width of the widest batch in tokens, including one of padding; longer records are cut, never split.
        records_per_unit: most records of one unit in a batch, if the unit is a column.
    """

    expected_batch_size: BatchSize
    epochs: Epochs
    max_length: Width
    records_per_unit: Rows
    sampler: TrainingSampler = "poisson"
    max_batch: Count | None = None

    def __post_init__(self) -> None:
        """Raises: ConfigError as its bases."""
        UpdateRule.__post_init__(self)
        self.check_layers()

    @property
    def trained(self) -> TrainedWeights:
        """The weights that the run trains."""
        return part_of(TrainedWeights, self)

    @property
    def rule(self) -> UpdateRule:
        """Optimiser, schedule of the learning rate and average of the weights."""
        return part_of(UpdateRule, self)


_Layer = Annotated[str, Len(1, 200)]
Dropout = Annotated[float, Ge(0), Lt(1)]
#: Starts that read no record and leave the frozen weights alone; True is PEFT's default, B = 0.
STARTS = (True, "gaussian", "orthogonal")
#: Why PEFT's other starts are refused, by the first word of their name.
_REFUSED_STARTS = {
    **dict.fromkeys(("eva", "corda", "lora_ga"), "reads records, which no epsilon would cover"),
    **dict.fromkeys(("pissa", "olora", "loftq"), "changes the frozen weights, which runs share and adapters rely on"),
    "mica": "freezes the other factor, whose gradients are not supported",
}


@dataclass(frozen=True)
class Lora:
    """Hyper-parameters of the LoRA adapters, each with PEFT's meaning.

    Attributes:
        rank: LoRA rank: inner size of the two factors whose product updates a layer.
        alpha: LoRA scaling: updates are multiplied by alpha / rank.
        dropout: share of the adapters' inputs that is dropped in training.
        target_modules: linear layers to adapt: the ends of their names; a regular expression that matches whole names;
            or "all-linear" for all but the output layer. Left out: PEFT's choice for the model's family.
        rslora: scale updates by alpha / sqrt(rank) in place of alpha / rank.
        rank_pattern: rank of the layers whose name ends in, or matches, the key.
        alpha_pattern: alpha of the layers whose name ends in, or matches, the key.
        init_lora_weights: initial weights of the adapters: true for PEFT's default, "gaussian" or "orthogonal".
    """

    rank: Rank = 8
    alpha: Few = 16
    dropout: Dropout = 0.05
    target_modules: Annotated[tuple[_Layer, ...], MinLen(1)] | Annotated[str, Len(1, 1000)] | None = None
    rslora: bool = False
    rank_pattern: Mapping[str, Rank] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Few] = field(default_factory=dict)
    init_lora_weights: Literal[True] | str = True  # checked below, where each refusal has its reason

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of bounds, a start that is refused, and a pattern without numbers."""
        start, targets = self.init_lora_weights, self.target_modules
        if not (start is True or (isinstance(start, str) and start in STARTS)):
            reason = next((why for name, why in _REFUSED_STARTS.items() if str(start).startswith(name)), "is unknown")
            if start is False:
                reason = "starts from random adapters, which move the model before it learned anything"
            raise ConfigError("lora.init_lora_weights", f"{start!r} {reason}", fix="use true, gaussian or orthogonal")
        check(self, "lora." if type(self) is Lora else "")
        # An empty value would count as left out.
        names = targets if isinstance(targets, list | tuple) else (targets,)
        if targets is not None and not (names and all(isinstance(name, str) and name for name in names)):
            fix = 'name layers, such as ("q_proj", "v_proj"); or leave it out'
            raise ConfigError("lora.target_modules", f"{targets!r} names no layers", fix=fix)
        for name in ("rank_pattern", "alpha_pattern"):
            if getattr(self, name) != {}:
                _check_pattern(f"lora.{name}", getattr(self, name))
        for rank in (self.rank, *self.rank_pattern.values()):
            if self.init_lora_weights == "orthogonal" and rank % 2:
                raise ConfigError("lora.init_lora_weights", f"orthogonal needs even ranks, not {rank}", fix="change it")


def _check_pattern(field: str, pattern: object) -> None:
    """Raise ConfigError unless a pattern maps names, which are regular expressions, to positive whole numbers."""
    if not isinstance(pattern, Mapping):
        raise ConfigError(field, f"{pattern!r} is not a mapping", fix="map names of layers to numbers: {q_proj: 4}")
    for key, value in pattern.items():
        if not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            raise ConfigError(field, f"{key}: {value!r} is not a positive whole number", fix="give one, such as 4")
        try:
            re.compile(key)
        except (re.error, TypeError) as error:
            raise ConfigError(
                field, f"{key!r} is not the name of a layer ({first_line(error)})", fix="mend it"
            ) from None


# Names of units of privacy: "record" for a record of its own, else the column whose values say whose a record is.


RECORD = "record"
#: Units that are made of others; a column of such a name would be taken for them.
MADE_OF_OTHERS = ("client", "tenant", "shard")


def check_unit(name: str, field: str) -> None:
    """Raise ConfigError about ``field`` unless ``name`` is "record" or may be a column's name."""
    if not name.strip():
        raise ConfigError(field, "names no unit", fix=f"use {RECORD}, or the name of a column")
    if name in MADE_OF_OTHERS:
        raise ConfigError(field, f"{name!r} is another kind of unit", fix=f"use {RECORD}, or rename the column")


@dataclass(frozen=True)
class Pretraining:
    """Shape and schedule of the public model.

    Attributes:
        shape: "gpt2", a causal model, or "roberta", an encoder that is trained to fill in masked tokens.
        merges: what a token of the byte-level BPE may span: "sentences", for narratives that are lists of stock
            sentences, or "words", for free text. Free text is also cut into rows of ``max_length`` tokens.
        vocabulary: number of tokens of the byte-level BPE.
        layers, width, heads: size of the transformer.
        max_length: longest sequence, in tokens.
        epochs, batch_size, learning_rate: AdamW with warm-up and cosine decay.
        seed: seed of initialisation and data order; public.
        dtype: dtype of the saved weights; with "bfloat16" the forward passes on a GPU run in it too.
    """

    shape: Literal["gpt2", "roberta"] = "gpt2"
    merges: Literal["sentences", "words"] = "sentences"
    vocabulary: Annotated[int, Ge(300), Le(10**6)] = 1024
    layers: Annotated[int, Ge(1), Le(256)] = 2
    width: Annotated[int, Ge(1), Le(32768)] = 64
    heads: Annotated[int, Ge(1), Le(1024)] = 2
    max_length: Annotated[TokenCount, Ge(2)] = 192
    epochs: Rows = 3
    batch_size: Rows = 32
    learning_rate: LearningRate = 3e-3
    seed: Seed = 0
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("heads", f"{self.heads} do not divide the width of {self.width}", fix="use a divisor")


@dataclass(frozen=True)
class ShardTuning:
    """Settings for the training of each shard's adapter. Public.

    Attributes:
        epochs: number of passes over the shard.
        batch_size: number of records in each step.
        learning_rate: the highest learning rate of the schedule.
        seed: seed of initialisation and of the order of records, to which shard i adds i.
        schedule: learning rates over the steps: "one_cycle" (warm-up, then a cosine), or "linear" down to 0, as in
            PMixED's paper.
    """

    epochs: Rows = 15
    batch_size: Rows = 8
    learning_rate: LearningRate = 2e-4
    seed: Seed = 0
    schedule: Literal["one_cycle", "linear"] = "one_cycle"
