"""params.yaml, checked: every unknown, missing or impossible entry is an error that names it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dptune.corpus.catalogue import SourceSettings, find_source
from dptune.errors import ConfigError, DataError, DptuneError
from dptune.mechanisms.registry import build, takes_noise
from dptune.plugins import load
from dptune.privacy.run_header import ACCOUNTINGS
from dptune.units import RECORD
from tasks.paths import RAW_MANIFEST
from tasks.settings.bounds import (
    Chance,
    Count,
    CountOrNone,
    Delta,
    Epochs,
    Epsilon,
    Few,
    FilePath,
    LearningRate,
    Name,
    Rank,
    Rows,
    Seed,
    StrictModel,
    Title,
    Tokens,
    Unit,
    distinct,
    printable,
)
from tasks.settings.policy import PolicySettings
from tasks.settings.refusals import refusal
from tasks.settings.strict_yaml import load_yaml
from tasks.settings.sweeps import combinations

_Layer = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=200)]
_Device = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d{1,3})?)$")]
_Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]
_Source = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(printable)]
_RUNNER = re.compile(r"threads|dask|ray|(tcp|tls|ray)://[^\s/]+:\d+")


def _as_value_error(check: Callable[..., Any], *arguments: Any) -> None:
    """Run the check; what it refuses becomes a ValueError, which names the entry of params.yaml itself."""
    try:
        check(*arguments)
    except ConfigError as error:
        raise ValueError(f"{error.problem}. Fix: {error.fix}") from None


class Synthetic(StrictModel):
    """The generated cohort."""

    encounters: Annotated[Rows, Field(ge=50)]
    seed: Seed


class Data(StrictModel):
    """Which table, and whose privacy."""

    source: str
    path: FilePath | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    unit: Unit
    split_seed: Seed
    synthetic: Synthetic

    @field_validator("source")
    @classmethod
    def _exists(cls, name: str) -> str:
        _as_value_error(find_source, name)
        return name

    @field_validator("unit")
    @classmethod
    def _has_units(cls, unit: str, info: ValidationInfo) -> str:
        if (name := info.data.get("source")) is not None:
            known = find_source(name).units
            if known is not None and unit not in known:
                raise ValueError(f"source {name} has no column {unit!r} of units: use {' or '.join(known)}")
        return unit

    @model_validator(mode="after")
    def _taken(self) -> Data:
        own = SourceSettings(self.path, self.unit, self.options)
        try:
            find_source(self.source).check(own)
            _ = self.form
        except DptuneError as error:
            raise ValueError(str(error)) from None
        return self

    def given(self, cached: Path | None = None) -> SourceSettings:
        """What the source is given."""
        options = self.synthetic.model_dump() if self.source == "synthetic" else self.options
        return SourceSettings(self.uci_path if self.source == "uci" else self.path, self.unit, options, cached)

    @cached_property
    def form(self) -> str | None:
        """What the records are, by a look at the first one; None where only an earlier copy of them is here."""
        if self.path is not None and not self.path.exists() and RAW_MANIFEST.exists():
            return None
        try:
            return find_source(self.source).look(self.given())
        except DataError:
            if self.path is None and RAW_MANIFEST.exists():  # a plug-in's database that is gone since, say
                return None
            raise

    @property
    def units(self) -> tuple[str, ...]:
        """What ``unit`` may be, and what shards may go by."""
        return find_source(self.source).units or tuple(dict.fromkeys((RECORD, self.unit)))

    @property
    def uci_path(self) -> Path | None:
        """The user's copy of the table: DPTUNE_UCI_PATH, else ``path``."""
        given = os.environ.get("DPTUNE_UCI_PATH")
        return Path(given) if given else self.path


class Canaries(StrictModel):
    """How many secrets are planted, each in a row of its own; none if all counts are 0."""

    extraction: Annotated[int, Field(ge=0, le=10**6)]
    repeats: Few = 1
    audit: Annotated[int, Field(ge=0, le=10**6)]
    crafted: Annotated[int, Field(ge=0, le=10**6)] = 0
    carrier_seed: Seed

    @field_validator("crafted")
    @classmethod
    def _several(cls, count: int) -> int:
        if count == 1:
            raise ValueError("1 is too few: use 0, or hundreds")
        return count


class Pretrain(StrictModel):
    """The public model and the public narratives it is trained on."""

    encounters: Annotated[Rows, Field(ge=50)]
    validation_encounters: Annotated[Rows, Field(ge=10)]
    data_seed: Seed
    codes: Annotated[float, Field(ge=0, le=1)]
    vocabulary: Annotated[int, Field(ge=300, le=10**6)]
    layers: Annotated[int, Field(ge=1, le=256)]
    width: Annotated[int, Field(ge=1, le=32768)]
    heads: Annotated[int, Field(ge=1, le=1024)]
    max_length: Annotated[Tokens, Field(ge=2)]
    epochs: Rows
    batch_size: Rows
    learning_rate: LearningRate
    seed: Seed

    @model_validator(mode="after")
    def _whole_heads(self) -> Pretrain:
        if self.width % self.heads:
            raise ValueError(f"heads: {self.heads} do not divide the width of {self.width}")
        return self


class LoraSettings(StrictModel):
    """Adapters on the layers that PEFT knows for the family, or on named ones."""

    rank: Rank
    alpha: Few
    dropout: Annotated[float, Field(ge=0, lt=1)]
    target_modules: Annotated[tuple[_Layer, ...], Field(min_length=1)] | Literal["all-linear"] | None = None
    rslora: bool = False
    rank_pattern: dict[str, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[str, Few] = Field(default_factory=dict)
    init_lora_weights: Literal[True] | str = True  # Lora names each start that it refuses, with the reason


class TrainingSettings(StrictModel):
    """The schedule that all cells share."""

    expected_batch_size: Annotated[float, Field(ge=1e-3, le=1e9)]
    epochs: Epochs
    max_length: Annotated[Tokens, Field(ge=3)]
    records_per_unit: Rows
    learning_rate: LearningRate
    warmup_steps: CountOrNone
    physical_batch_size: Rows
    checkpoint_every: Count
    evaluate_every: Count
    evaluate_records: Count
    autocast: Literal["bfloat16"] | None = None


class Model(StrictModel):
    """A base model: hub id with its commit, or a local directory."""

    source: _Source
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


class Experiment(StrictModel):
    """The grid, and how it is run."""

    name: Title
    models: Annotated[dict[Name, Model], Field(min_length=1)]
    mechanisms: Annotated[tuple[Name, ...], Field(min_length=1)]
    epsilons: tuple[Epsilon, ...]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    delta: Delta
    accounting: Literal["certified", "noise_only", "published"]
    telemetry: Literal["research", "private"]
    devices: Literal["auto"] | Annotated[tuple[_Device, ...], Field(min_length=1)] = "auto"
    cells_per_device: Annotated[int, Field(ge=1, le=1024)] = 1
    cells_together: Annotated[int, Field(ge=1, le=1024)] = 1
    runner: str = "threads"
    retries: Annotated[int, Field(ge=0, le=100)] = 2

    @field_validator("runner")
    @classmethod
    def _known_runner(cls, runner: str) -> str:
        if not _RUNNER.fullmatch(runner):
            addresses = "tcp://host:8786 (Dask; tls:// too) or ray://host:10001"
            raise ValueError(f"{runner!r} is none: use threads, dask, ray, or a running cluster's {addresses}")
        return runner

    @field_validator("mechanisms", "epsilons", "seeds")
    @classmethod
    def _once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return distinct(values)


_LEAST = {"shadows": 4, "step_trials": 500}


class Audit(StrictModel):
    """The attacks on every finished cell."""

    confidence: Annotated[float, Field(gt=0.5, le=1 - 1e-9)]
    false_alarms: Annotated[float, Field(ge=1e-9, lt=1)]
    generations: Rows
    candidates: Few
    records: Annotated[int, Field(ge=0, le=10**7)]
    shadows: Annotated[int, Field(ge=0, le=10**4)]
    step_trials: CountOrNone
    seed: Seed

    @field_validator("shadows", "step_trials")
    @classmethod
    def _enough(cls, count: int, info: ValidationInfo) -> int:
        least = _LEAST[str(info.field_name)]
        if 0 < count < least:
            raise ValueError(f"{count} is too few: use 0, or {least} or more")
        return count


class TuningSettings(StrictModel):
    """How every shard's adapter is trained."""

    epochs: Rows
    batch_size: Rows
    learning_rate: LearningRate
    seed: Seed


class Serve(StrictModel):
    """The protocol that `dptune generate` and `dptune serve` answer by."""

    epsilon: Epsilon
    tokens: Count
    models: Count
    public_weight: Chance
    unit: Unit | Literal["shard"]


class Prediction(StrictModel):
    """Private prediction: ensembles, and the protocols that are compared."""

    models: Annotated[tuple[Annotated[int, Field(ge=1, le=10**5)], ...], Field(min_length=1)]
    partition: Unit
    tuning: TuningSettings
    alpha: Annotated[float, Field(ge=1 + 1e-6, le=1e6)] | Literal["auto"]
    epsilons: Annotated[tuple[Epsilon, ...], Field(min_length=1)]
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    public_weights: tuple[Chance, ...]
    units: tuple[Unit | Literal["shard"], ...]
    subsamples: tuple[Annotated[float, Field(gt=0, le=1)], ...]
    with_replacement: bool
    records: Rows
    serve: Serve

    @model_validator(mode="after")
    def _consistent(self) -> Prediction:
        if self.serve.models not in self.models:
            raise ValueError(f"serve.models: {self.serve.models} is none of the numbers under models")
        for unit in (*self.units, self.serve.unit):
            if unit not in ("shard", RECORD, self.partition):
                problem = f"by {self.partition}, a {unit} is in many shards"
                raise ValueError(f"units: {unit} needs partition: {unit}; {problem}")
        return self

    def alpha_at(self, epsilon: float, delta: float) -> float:
        """The Renyi order: as given, or ceil(4 log(1/delta) / (3 epsilon) + 1), the rule of PMixED's ablation."""
        if self.alpha == "auto":
            return float(math.ceil(4 * math.log(1 / delta) / (3 * epsilon) + 1))
        return self.alpha


class Settings(StrictModel):
    """All of params.yaml. Plug-ins are imported first, for what follows may name their parts."""

    plugins: tuple[_Module, ...] = ()
    data: Data
    canaries: Canaries
    pretrain: Pretrain
    lora: LoraSettings
    training: TrainingSettings
    mechanisms: dict[str, dict[str, Any]]
    experiment: Experiment
    audit: Audit
    prediction: Prediction
    policy: PolicySettings

    @field_validator("plugins")
    @classmethod
    def _imported(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        _as_value_error(load, modules)
        return modules

    @model_validator(mode="before")
    @classmethod
    def _sweeps(cls, content: Any) -> Any:
        """An entry with ``sweep: {option: [values]}`` becomes one entry for every combination."""
        return _expanded(content) if isinstance(content, dict) else content

    @model_validator(mode="after")
    def _attacks_read_text(self) -> Settings:
        counts = {
            "canaries.extraction": self.canaries.extraction,
            "canaries.audit": self.canaries.audit,
            "audit.records": self.audit.records,
            "audit.shadows": self.audit.shadows,
        }
        asked = [f"{name}: 0" for name, count in counts.items() if count]
        if self.data.form in ("pair", "messages") and asked:
            what = "prompts with targets" if self.data.form == "pair" else "chats"
            raise ValueError(f"data: {what} are no texts, which these attacks need. Fix: set {', '.join(asked)}")
        return self

    @model_validator(mode="after")
    def _partition_exists(self) -> Settings:
        if self.prediction.partition not in self.data.units:
            problem = f"the data has no column {self.prediction.partition!r} of units"
            raise ValueError(f"prediction.partition: {problem}; use {' or '.join(self.data.units)}")
        return self

    @model_validator(mode="after")
    def _mechanisms_exist(self) -> Settings:
        for name in self.experiment.mechanisms:
            if name not in self.mechanisms:
                raise ValueError(f"experiment.mechanisms: {name!r} has no entry under mechanisms")
        for name, entry in self.mechanisms.items():
            try:
                needs_budget = self._check_mechanism(name, entry, chosen=name in self.experiment.mechanisms)
            except ConfigError as error:
                raise ValueError(f"mechanisms.{name}: {error}") from None
            if needs_budget and name in self.experiment.mechanisms and not self.experiment.epsilons:
                raise ValueError(f"experiment.epsilons: is empty, but {name!r} needs a budget")
        return self

    def _check_mechanism(self, name: str, entry: dict[str, Any], *, chosen: bool) -> bool:
        """Whether it needs a budget. Raises ConfigError for what cannot be built, or cannot meet its accounting."""
        special = entry.get("on_model", {})
        if not (isinstance(special, dict) and all(isinstance(options, dict) for options in special.values())):
            raise ConfigError("on_model", "is no table of models", fix="write on_model: {MODEL: {OPTION: VALUE}}")
        models = self.experiment.models
        if chosen and (unknown := [model for model in special if model not in models]):
            raise ConfigError("on_model", f"{unknown[0]!r} is no model", fix=f"use one of {', '.join(models)}")
        distinct = [options_on(entry, model) for model in models if model in special]
        needs = [self._check_options(name, options, chosen=chosen) for options in (options_on(entry, ""), *distinct)]
        return any(needs)

    def _check_options(self, name: str, options: dict[str, Any], *, chosen: bool) -> bool:
        accounting = options.pop("accounting", self.experiment.accounting)
        learning_rate_of(options)
        if accounting not in ACCOUNTINGS:
            raise ConfigError("accounting", f"unknown {accounting!r}", fix=f"use one of {', '.join(ACCOUNTINGS)}")
        if options.get("init_from") == "":
            problem = "is an empty text"
            raise ConfigError("init_from", problem, fix="give a finished run's controller/ folder")
        needs_budget = takes_noise(name, options) and "noise_multiplier" not in options
        mechanism = build(name, options | ({"noise_multiplier": 1.0} if needs_budget else {}))
        leaks = mechanism.controller.raw_inputs
        if needs_budget and chosen and leaks and accounting == "certified":
            problem = f"leaks ({'; '.join(leaks)}), so no noise reaches a certified budget"
            raise ConfigError("accounting", problem, fix="give its entry accounting: published, or noise_only")
        return needs_budget


def options_on(entry: dict[str, Any], model: str) -> dict[str, Any]:
    """A mechanism's entry on one base model; its ``on_model: {MODEL: {OPTION: VALUE}}`` says what differs there."""
    special = entry.get("on_model", {}).get(model, {})
    return {key: value for key, value in entry.items() if key != "on_model"} | special


def learning_rate_of(options: dict[str, Any]) -> float | None:
    """Take ``learning_rate`` out of a mechanism's entry: its own, or None where it has training's.

    Raises: ConfigError if it is none.
    """
    if (rate := options.pop("learning_rate", None)) is None:
        return None
    try:
        return TypeAdapter(LearningRate).validate_python(rate)
    except ValidationError:
        raise ConfigError(
            "learning_rate", f"{rate!r} is not within 0 and 10", fix="use a number such as 0.01"
        ) from None


def _expanded(content: dict[str, Any]) -> dict[str, Any]:
    mechanisms, experiment = content.get("mechanisms"), content.get("experiment")
    if not (isinstance(mechanisms, dict) and isinstance(experiment, dict)):
        return content
    entries: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for name, entry in mechanisms.items():
        versions = _versions(name, entry) if isinstance(entry, dict) and "sweep" in entry else {name: entry}
        entries |= versions
        names[name] = list(versions)
    chosen = experiment.get("mechanisms")
    if isinstance(chosen, list | tuple):
        experiment = experiment | {
            "mechanisms": [new for old in chosen for new in (names.get(old, [old]) if isinstance(old, str) else [old])]
        }
    return content | {"mechanisms": entries, "experiment": experiment}


def _versions(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    try:
        found = combinations(entry["sweep"] or None)
    except ValueError as error:
        raise ValueError(f"mechanisms.{name}.sweep: {error}") from None
    fixed = {"like": name} | {key: value for key, value in entry.items() if key != "sweep"}
    return {"_".join([name, *(f"{key}{value}" for key, value in one.items())]): fixed | one for one in found}


def load_settings(path: Path = Path("params.yaml"), overrides: dict[str, Any] | None = None) -> Settings:
    """Read and check params.yaml.

    Args:
        overrides: sections to merge over the file, as a deployment's parameters give them.

    Raises: ConfigError naming each entry that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = load_yaml(text)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})", fix="run from the repository") from None
    except ValueError as error:
        raise ConfigError(str(path), f"is not YAML as it should be ({error})", fix="correct that line") from None
    if not isinstance(content, dict):
        raise ConfigError(str(path), "holds no table of sections", fix="restore params.yaml")
    merged = merge(content, overrides or {})
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise refusal(error, str(path), merged, "" if overrides else text) from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``base`` with ``over`` written over it, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged
