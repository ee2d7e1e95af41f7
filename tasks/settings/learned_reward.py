"""The section `policy.rlhf.reward`: a reward that is learned from public texts with labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD
from dptune.records.benchmarks import BENCHMARKS
from dptune.records.catalogue import SourceSettings, chosen_rows, find_source
from dptune.records.reading.source import refuse_same
from tasks.settings.experiment import Model
from tasks.settings.strict import FilePath, StrictModel, Title, Unit, as_value_error

if TYPE_CHECKING:
    from tasks.settings.data import Data


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


def check_reward(reward: LearnedRewardSettings, own: Data) -> None:
    """Refuse a reward that is learned from the users' own records.

    What it learned of them would reach the policy, and no epsilon would cover it. A benchmark is the same data in
    whatever folder, so its parts decide and its path does not.

    Raises: ConfigError naming the entry of ``policy.rlhf.reward`` that reads them.
    """
    if reward.source == own.source and own.source in BENCHMARKS:
        mine, read = (chosen_rows(own.source, options) for options in (own.options, reward.options))
        private = {mine["part"]} | ({own.parts.eval} - {own.parts.public} if own.parts else set())
        # The phrases of sst2 are those of the sentences of sst2-sentences.
        tasks = {str(rows.get("task", "")).removesuffix("-sentences") for rows in (mine, read)}
        if len(tasks) == 1 and read["part"] in private:
            problem = f"part {read['part']!r} holds the users' own records, and a reward costs no budget"
            raise ConfigError("policy.rlhf.reward.options", problem, fix="name another part, which is public")
        return
    refuse_same(own.path, reward.path, "policy.rlhf.reward.path")
    if own.path and reward.path and own.path.resolve() in reward.path.resolve().parents:
        problem = f"lies in {own.path}, the folder of the users' own records"
        raise ConfigError("policy.rlhf.reward.path", problem, fix="give public records, in another folder")
    if reward.source == own.source and not reward.path and reward.options == own.options:
        # A function of a plug-in that is called alike gives the same records.
        problem = f"source {own.source!r} with the options of section data reads the users' own records"
        raise ConfigError("policy.rlhf.reward.options", problem, fix="name other records, which are public")
