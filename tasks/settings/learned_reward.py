"""The section `policy.rlhf.reward`: a reward that is learned from public texts with labels."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from dptune.core.settings import RECORD
from dptune.records.catalogue import SourceSettings, find_source
from tasks.settings.experiment import Model
from tasks.settings.strict import FilePath, StrictModel, Title, Unit, as_value_error


class LearnedRewardSettings(StrictModel):
    """A reward that is learned from public texts with labels: a frozen encoder and a logistic head on its states.

    Attributes:
        encoder: the encoder.
        source, path, options: the labelled texts, as in section `data`. They count as public: no record that a
            guarantee is about may be among them.
        label: column of labels.
        positive: label that is rewarded; all others are not.
    """

    encoder: Model
    source: str
    path: FilePath | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    label: Unit = "label"
    positive: Title

    @model_validator(mode="after")
    def _known_source(self) -> LearnedRewardSettings:
        as_value_error(find_source, self.source)
        return self

    @property
    def texts(self) -> SourceSettings:
        """Settings of the source of the labelled texts."""
        return SourceSettings(self.path, RECORD, self.options, label=self.label)
