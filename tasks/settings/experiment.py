"""Sections of an experiment: `experiment` (the grid and how it is run), `task`, `training`, `pretrain` and `audit`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from dptune.core.declarations import NAMES_NOTHING, Count, CountOrZero, Delta, Epsilon, Few, Rows, Seed, Share
from dptune.core.errors import ConfigError
from dptune.core.settings import Pretraining, ScheduleSettings, TrainedWeights, UpdateRule
from dptune.job.settings import HIDDEN, HIDDEN_NAMED, RENAME_HIDDEN
from dptune.records.reading.spelling import spelled
from tasks.settings.strict import Name, StrictModel, Title, distinct, printable

if TYPE_CHECKING:
    from dptune.training.models.model import ModelSource

_Device = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d{1,3})?)$")]
_Source = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(printable)]
_Workers = Annotated[int, Ge(1), Le(1024)]
_RUNNER = re.compile(r"threads|dask|ray|(tcp|tls|ray)://[^\s/]+:\d+")


def _named_apart(epsilons: tuple[float, ...]) -> tuple[float, ...]:
    """Return the epsilons. Raises ValueError for two whose cells would have one label, which no report could tell."""
    labels = [f"{one:g}" for one in distinct(epsilons)]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise ValueError(f"{epsilons[place]!r} is {label} in the names of cells, as another epsilon is")
    return epsilons


Epsilons = Annotated[tuple[Epsilon, ...], AfterValidator(_named_apart)]


class Model(StrictModel):
    """A base model: hub id with its commit, an installed package, or a local path, which a stage may make later.

    Attributes:
        source: hub id, folder, GGUF file, or package:NAME, an installed package that holds either.
        revision: 40-digit commit of a hub id, which needs one; of a package its version, which may be left out.
        dtype: dtype of the frozen weights, in 4 bits of the products with them; adapters are float32.
        load_in_4bit: hold the weights of linear layers in 4 bits (bitsandbytes' NF4).
    """

    source: _Source
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    load_in_4bit: bool = False

    @property
    def weights(self) -> ModelSource:
        """The source of the weights, for the library. Raises: ConfigError unless it is there, or pinned."""
        from dptune.training.models.model import ModelSource

        return ModelSource(self.source, self.revision, self.dtype, self.load_in_4bit)


class Experiment(StrictModel):
    """The grid, and how it is run.

    Attributes:
        name: name of the experiment in MLflow and on its page.
        models: base models by a name of yours.
        mechanisms: labels of the entries of ``mechanisms`` that are run. In the file, a table such as {static: [1, 8]}
            runs static at these epsilons too.
        epsilons: budgets; each makes one cell for every model, mechanism and seed. A mechanism's own epsilons take
            precedence.
        seeds: seeds of the adapters' initialisation; public. Noise and coins have none.
        delta: delta of every epsilon.
        accounting: the epsilon that the noise is calibrated to: certified, noise_only or published. A mechanism's own
            choice takes precedence.
        telemetry: "research" also logs curves computed from private records, and says so; "private" publishes only what
            the ledger released, public data and an auditor's own secrets.
        devices: "auto" takes every CUDA device, or the CPU if there is none; or a list such as [cuda:0, cuda:1].
        cells_per_device: number of processes on each device at a time.
        cells_together: the most cells of one model that such a process trains, in the same forward passes.
        runner: where cells run: "threads" is this machine, "dask" and "ray" a temporary cluster of it; tcp://host:8786
            (Dask, tls:// too) and ray://host:10001 are running clusters.
        retries: how often a process of cells, audits or shards is started again after it died.
    """

    name: Title
    models: Annotated[dict[Name, Model], Field(min_length=1)]
    mechanisms: Annotated[tuple[Name, ...], Field(min_length=1)]
    epsilons: Epsilons
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    delta: Delta
    accounting: Literal["certified", "noise_only", "published"]
    telemetry: Literal["research", "private"]
    devices: Literal["auto"] | Annotated[tuple[_Device, ...], Field(min_length=1)] = "auto"
    cells_per_device: _Workers = 1
    cells_together: _Workers = 1
    runner: str = "threads"
    retries: Annotated[int, Ge(0), Le(100)] = 2

    @field_validator("runner")
    @classmethod
    def _known_runner(cls, runner: str) -> str:
        if not _RUNNER.fullmatch(runner):
            addresses = "tcp://host:8786 (Dask; tls:// too) or ray://host:10001"
            raise ValueError(f"{runner!r} is not a runner: use threads, dask, ray, or a running cluster's {addresses}")
        return runner

    @field_validator("mechanisms", "seeds")
    @classmethod
    def _once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return distinct(values)


class Task(StrictModel):
    """What is learned from the records, and what finished cells are scored by.

    Attributes:
        kind: "generate" learns the records' texts or targets, "classify" their labels (``data.label``).
        labels: names of all labels, in the order of a classifier's outputs; public.
        words: word for each label, by whose logits a causal model classifies; empty trains a head.
        inputs: most held-out prompts for which a finished cell writes texts, to be scored; 0 writes nothing.
        beams, max_new_tokens, length_penalty, no_repeat_ngram: how it writes.
        metrics: metrics of what it writes (docs/howto/score.md).
    """

    kind: Literal["generate", "classify"] = "generate"
    labels: tuple[Title, ...] = ()
    words: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = ()
    inputs: CountOrZero = 0
    beams: Few = 1
    max_new_tokens: Count = 60
    length_penalty: Annotated[float, Ge(-100), Le(100)] = 1.0
    no_repeat_ngram: CountOrZero = 0
    metrics: tuple[str, ...] = ("bleu_e2e", "nist_e2e", "rouge_l_13a", "cider_13a", "chrf")

    @property
    def classifies(self) -> bool:
        """Whether labels are learned."""
        return self.kind == "classify"

    @field_validator("labels", "words")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return distinct(names)

    @model_validator(mode="after")
    def _consistent(self) -> Task:
        if self.classifies and len(self.labels) < 2:
            raise ValueError("labels: name all labels of the records, two at least")
        if HIDDEN in map(spelled, self.labels):
            raise ValueError(f"labels: {HIDDEN_NAMED}: {RENAME_HIDDEN}")
        if self.classifies and self.inputs:
            raise ValueError("inputs: a classifier writes nothing: use 0")
        if self.beams == 1 and self.length_penalty != 1:
            raise ValueError("length_penalty: is for beams: use 1, or beams above 1")
        if not self.classifies and (self.labels or self.words):
            raise ValueError("labels and words are for kind: classify: leave them out, or set it")
        if self.words and len(self.words) != len(self.labels):
            raise ValueError(f"words: there are {len(self.words)}, and {len(self.labels)} labels: give a word for each")
        return self


# The sections `training`, the schedule that all cells share, and `pretrain`, the public model and its texts.


#: Settings of the update rule.
RULE = tuple(item.name for item in fields(UpdateRule))
#: Settings of what trains.
TRAINED = tuple(item.name for item in fields(TrainedWeights))
#: Entries that params.yaml must have.
REQUIRED = (
    *("expected_batch_size", "epochs", "max_length", "records_per_unit", "learning_rate", "warmup_steps"),
    *("physical_batch_size", "checkpoint_every", "evaluate_every", "evaluate_records"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ScheduleSettings):
    """The schedule that all cells share; ``tasks.experiment.preparation.plan_of`` makes a run's plan of it.

    A mechanism's entry may name its own learning rate and update rule.

    Attributes:
        evaluate_every: steps between points of the learning curves.
        evaluate_records: records behind each point; the first and last figures use all, or final_records.
        final_records: most records behind the first and last figures, evenly spread; left out, all of them.
    """

    evaluate_every: Count = field(metadata=NAMES_NOTHING)  # it decides only where curves have points
    # These two are part of a cell's name, for they move figures by which pages compare cells.
    evaluate_records: Count
    final_records: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Pretrain(Pretraining):
    """Shape and schedule of the public model, with its texts.

    Attributes:
        source: "narratives" (synthetic), "wikitext": articles of WikiText-2, cleaned of its marks, or "both", which is
            validated on narratives.
        path: archive of WikiText-2, or the folder of its files.
        half: articles of WikiText-2: "public", which no profile protects, or "all".
        encounters, validation_encounters: number of narratives to train on, and to keep for validation.
        data_seed: seed of the narratives; public.
        codes: share of the narratives that end in a random code.
    """

    source: Literal["narratives", "wikitext", "both"] = "narratives"
    path: str | None = field(default=None, metadata=NAMES_NOTHING)  # the texts themselves count, wherever they lie
    half: Literal["public", "all"] = "public"
    encounters: Annotated[Rows, Ge(50)]
    validation_encounters: Annotated[Rows, Ge(10)]
    data_seed: Seed
    codes: Share

    def __post_init__(self) -> None:
        """Raises: ConfigError for a source without its path, and for free text with merges over sentences."""
        super().__post_init__()
        if self.source != "narratives" and not self.path:
            raise ConfigError("path", "is missing", fix="give wikitext-2-v1.zip, or the folder of its files")
        if self.source != "narratives" and self.merges != "words":
            raise ConfigError("merges", "over sentences are for narratives", fix="use words")
        if self.shape == "roberta" and self.merges != "words":
            raise ConfigError("merges", "over sentences are for shape gpt2", fix="use words")


# The section `audit`: the attacks on every finished cell.


_LEAST = {"shadows": 4, "step_trials": 500}


class Audit(StrictModel):
    """The attacks on every finished cell.

    Attributes:
        confidence: confidence of each lower bound in the report.
        false_alarms: chance that sound ledgers fail the stage, over all cells.
        generations: number of samples of the extraction attack.
        prompt: what they follow: "record", a public text where a secret would stand; or "instruction", which asks for
            the secret as RLDP's table 6.1 does.
        candidates: number of secrets never planted, to rank each planted one against.
        records: number of training records, and of held-out ones, for the membership attacks.
        shadows: number of models that the scores LiRA and RMIA train for themselves: 4 or more, or 0. The bound on
            epsilon uses them only where canaries' gradients are too many for the score by alignment, which finds more.
        step_trials: number of trials of the white-box audit of the private step, in each world: 500 or more, or 0.
        seed: seed of samples and of the choice of records; public.
    """

    confidence: Annotated[float, Gt(0.5), Le(1 - 1e-9)]
    false_alarms: Annotated[float, Ge(1e-9), Lt(1)]
    generations: Rows
    prompt: Literal["record", "instruction"] = "record"
    candidates: Few
    records: Annotated[int, Ge(0), Le(10**7)]
    shadows: Annotated[int, Ge(0), Le(10**4)]
    step_trials: CountOrZero
    seed: Seed

    @field_validator("shadows", "step_trials")
    @classmethod
    def _enough(cls, count: int, info: ValidationInfo) -> int:
        least = _LEAST[str(info.field_name)]
        if 0 < count < least:
            raise ValueError(f"{count} is too few: use 0, or {least} or more")
        return count
