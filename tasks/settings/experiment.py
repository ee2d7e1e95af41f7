"""The sections `experiment`, the grid and how it is run, and `task`, what models learn and how that is scored."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, field_validator, model_validator

from dptune.core.bounds import Count, CountOrZero, Delta, Epsilon, Few, Seed
from dptune.job.settings import HIDDEN, HIDDEN_NAMED, RENAME_HIDDEN
from dptune.records.reading.spelling import spelled
from tasks.settings.strict import Name, StrictModel, Title, distinct, printable

if TYPE_CHECKING:
    from dptune.training.models.model import ModelSource


_Device = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d{1,3})?)$")]
_Source = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(printable)]
_Workers = Annotated[int, Ge(1), Le(1024)]
Epsilons = Annotated[tuple[Epsilon, ...], AfterValidator(distinct)]
_RUNNER = re.compile(r"threads|dask|ray|(tcp|tls|ray)://[^\s/]+:\d+")


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
        mechanisms: labels of the entries of ``mechanisms`` that are run.
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
        retries: how often the process of a cell is started again after it died.
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
