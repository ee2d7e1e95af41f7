"""params.yaml, checked: every unknown, missing or impossible entry is an error that names it.

python -m tasks.settings.params        # writes the comments of its section `training` again, and changes no value
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from dptune.core.declarations import sentences
from dptune.core.errors import ConfigError
from dptune.core.plugins import load
from dptune.core.settings import Lora
from dptune.core.streams import read_input
from dptune.records.canaries import SECRETS_IN_RECORDS
from tasks.settings.data import NARRATED, Canaries, Data
from tasks.settings.experiment import REQUIRED, Audit, Experiment, Pretrain, Task, TrainingSettings
from tasks.settings.learned_reward import check_reward
from tasks.settings.mechanisms import check_entry, with_more_epsilons, with_sweeps
from tasks.settings.policy import PolicySettings
from tasks.settings.prediction import Prediction
from tasks.settings.search import Search
from tasks.settings.strict import LibrarySection, StrictModel, as_value_error, load_yaml, refusal

_FILE = Path("params.yaml")
_COLUMN, _WIDTH = 31, 120  # of the comments of the section `training`
_ENTRY = re.compile(r"  (\w+):([^#]*)")
_Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]


LoraSection = Annotated[Lora, LibrarySection(("rank", "alpha", "dropout"))]
TrainingSection = Annotated[TrainingSettings, LibrarySection(REQUIRED)]


class Settings(StrictModel):
    """All of params.yaml. Plug-ins are imported first, because the sections may name their parts.

    Attributes:
        plugins: modules of yours with clippers, noises, controllers, scores or sources.
        task: what is learned from the records, and how finished cells are scored.
        mechanisms: mechanisms by a label of yours: clipper, noise, controller and their options, ``like``,
            ``accounting``, ``epsilons``, ``learning_rate``, ``on_model`` and ``sweep``. What is left out comes from the
            registered mechanism of that name.
    """

    plugins: tuple[_Module, ...] = ()
    data: Data
    task: Task
    canaries: Canaries
    pretrain: Annotated[Pretrain, LibrarySection("all")]
    lora: LoraSection
    training: TrainingSection
    mechanisms: dict[str, dict[str, Any]]
    experiment: Experiment
    audit: Audit
    prediction: Prediction
    search: Search
    policy: PolicySettings

    @field_validator("plugins")
    @classmethod
    def _import_plugins(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        as_value_error(load, modules)
        return modules

    @model_validator(mode="before")
    @classmethod
    def _expand_lists(cls, content: Any) -> Any:
        return with_sweeps(with_more_epsilons(content)) if isinstance(content, dict) else content

    @model_validator(mode="after")
    def _partition_exists(self) -> Settings:
        if self.prediction.partition not in self.data.units:
            problem = f"the data has no column {self.prediction.partition!r} of units"
            raise ValueError(f"prediction.partition: {problem}; use {' or '.join(self.data.units)}")
        return self

    @model_validator(mode="after")
    def _task_fits(self) -> Settings:
        if not self.task.classifies:
            if self.data.label is not None:
                raise ValueError("data.label: only task.kind: classify learns labels: set it, or leave the column out")
            return self
        if self.data.label is None:
            raise ValueError("data.label: is empty: name the column of the labels that task.kind: classify learns")
        if self.canaries.extraction or self.canaries.audit:
            raise ValueError("canaries: a classifier's loss sees no secret in a text: set extraction and audit to 0")
        if self.audit.shadows:
            raise ValueError("audit.shadows: are for canaries, which a classifier has none of: use 0")
        if self.data.parts is None and self.data.public is None and self.data.source not in NARRATED:
            raise ValueError("data.public: is empty, and narratives have no labels: give records, or data.parts")
        return self

    @model_validator(mode="after")
    def _reward_reads_no_user(self) -> Settings:
        if self.policy.rlhf and self.policy.rlhf.reward:
            try:
                check_reward(self.policy.rlhf.reward, self.data)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _secrets_in_records(self) -> Settings:
        """Records that carry secrets are for studies that certify nothing: see ``dptune.records.canaries``."""
        if self.canaries.carrier == "public" or not self.canaries.extraction:
            return self
        for name in self.experiment.mechanisms:
            entry = self.mechanisms.get(name, {})
            accounting = entry.get("accounting", self.experiment.accounting)
            if accounting != "published":
                problem = f"{SECRETS_IN_RECORDS}, and {name!r} has accounting: {accounting}"
                raise ValueError(f"canaries.carrier: {problem}; use public, or accounting: published")
        if self.experiment.telemetry == "private":
            raise ValueError("canaries.carrier: records lets attacks read records, which telemetry: private keeps")
        if self.prediction.models:
            raise ValueError(f"prediction.models: {SECRETS_IN_RECORDS}; use [], or canaries.carrier: public")
        return self

    @model_validator(mode="after")
    def _mechanisms_exist(self) -> Settings:
        for name in self.experiment.mechanisms:
            if name not in self.mechanisms:
                raise ValueError(f"experiment.mechanisms: {name!r} has no entry under mechanisms")
        for name, entry in self.mechanisms.items():
            try:
                needs_budget = check_entry(name, entry, self.experiment)
            except ConfigError as error:
                raise ValueError(f"mechanisms.{name}: {error}") from None
            if needs_budget and name in self.experiment.mechanisms and not self.experiment.epsilons:
                raise ValueError(f"experiment.epsilons: is empty, but {name!r} needs a budget")
        return self


def load_settings(path: Path = Path("params.yaml"), overrides: dict[str, Any] | None = None) -> Settings:
    """Read and check params.yaml.

    Args:
        overrides: sections to merge over the file, as a deployment's parameters give them. A list of names as
            ``experiment.models`` chooses among the file's models.

    Raises: ConfigError naming each entry that is wrong.
    """
    try:
        text = read_input(path).decode()
        content = load_yaml(text)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})", fix="run from the repository") from None
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid YAML ({error})", fix="correct that line") from None
    if not isinstance(content, dict):
        raise ConfigError(str(path), "holds no table of sections", fix="restore params.yaml")
    merged = merge(content, overrides or {})
    _choose_models(merged, content)
    given = (overrides or {}).get("search")
    if isinstance(given, dict) and "space" in given:
        merged["search"]["space"] = given["space"]  # a distribution: what it leaves out must not come from the file
    return settings_of(merged, str(path), "" if overrides else text)


def _choose_models(merged: dict[str, Any], content: dict[str, Any]) -> None:
    """Replace a list of names in ``experiment.models`` by the file's models of these names, in the file's order.

    Raises: ConfigError for a name that the file does not have.
    """
    experiment, there = merged.get("experiment"), content.get("experiment")
    if not (isinstance(experiment, dict) and isinstance(chosen := experiment.get("models"), list)):
        return
    known = there.get("models") if isinstance(there, dict) else None
    if isinstance(known, dict):
        if unknown := [name for name in chosen if name not in known]:
            fix = f"use {' or '.join(known)}, or add it to the file"
            raise ConfigError("experiment.models", f"params.yaml has no model {unknown[0]!r}", fix=fix)
        merged["experiment"] = experiment | {"models": {name: one for name, one in known.items() if name in chosen}}


def settings_of(content: dict[str, Any], file: str, text: str = "") -> Settings:
    """The settings with this content. Raises: ConfigError naming each entry of ``file`` that is wrong.

    Args:
        text: the file as it is written, for lines in messages; empty if it does not hold the content as it is.
    """
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        raise refusal(error, file, content, text) from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``base`` with ``over`` written over it, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


# Comments of the section `training`, which a test compares with the sentences of the settings.


def commented(text: str) -> str:
    """The file's text with the comments of the section `training` made anew; values stay as they are."""
    lines, inside = [], False
    texts = sentences(TrainingSettings)
    for line in text.splitlines():
        if line and not line.startswith((" ", "#")):
            inside = line.startswith("training:")
        entry = _ENTRY.match(line) if inside else None
        if entry:
            lines += _entry(line[: entry.end()].rstrip(), texts.get(entry[1], ""))
        elif not (inside and re.match(r" +#", line)):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _entry(written: str, sentence: str) -> list[str]:
    """The lines of one entry: its value, and its sentence beside and below it."""
    first, *more = textwrap.wrap(sentence, _WIDTH - _COLUMN - 2) or [""]
    if not first:
        return [written]
    beside = f"{written:<{_COLUMN - 1}} # {first}"
    return [beside, *(f"{'':<{_COLUMN}}# {part}" for part in more)]


if __name__ == "__main__":
    _FILE.write_text(commented(_FILE.read_text(encoding="utf-8")), encoding="utf-8")
