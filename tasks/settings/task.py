"""The section `task`: whether models learn the texts of records or their labels, and how that is scored."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, field_validator, model_validator

from dptune.core.bounds import Count, CountOrZero, Few
from dptune.job.label_checks import HIDDEN, HIDDEN_NAMED, RENAME_HIDDEN
from dptune.records.reading.spelling import spelled
from tasks.settings.strict import StrictModel, Title, distinct


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
