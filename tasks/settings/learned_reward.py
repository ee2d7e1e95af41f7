"""The section `policy.rlhf.reward`: a reward that is learned from public texts with labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD
from dptune.records.benchmarks import BENCHMARKS
from dptune.records.catalogue import SourceSettings, chosen_rows, find_source
from dptune.records.published_files import place_of
from dptune.records.reading.source import are_same, refuse_same
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
    if own.path and reward.path:
        _refuse_own(place_of(str(reward.path)), place_of(str(own.path)))
    if reward.source == own.source and not reward.path and reward.options == own.options:
        # A function of a plug-in that is called alike gives the same records.
        problem = f"source {own.source!r} with the options of section data reads the users' own records"
        raise ConfigError("policy.rlhf.reward.options", problem, fix="name other records, which are public")


def _refuse_own(path: Path, own: Path) -> None:
    """Refuse a path to the users' own records, or into their folder; also links and copies, and folders of them."""
    field, fix = "policy.rlhf.reward.path", "give public records, in another folder"
    refuse_same(own, path, field)
    if own.resolve() in path.resolve().parents:
        raise ConfigError(field, f"lies in {own}, the folder of the users' own records", fix=fix)
    file, folder = (own, path) if path.is_dir() else (path, own)
    if file.is_file() and folder.is_dir() and any(are_same(one, file) for one in folder.rglob("*")):
        problem = f"holds {own.name}" if folder == path else f"is a file of {own}"
        raise ConfigError(field, f"{problem}, which has the users' own records", fix=fix)
