"""The sections `data` and `canaries`: the records, whose privacy is kept, and the secrets planted among them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field, ValidationInfo, field_validator, model_validator

from dptune.core.declarations import Few, FewOrZero, Rows, Seed
from dptune.core.errors import ConfigError, DataError, DptuneError
from dptune.core.settings import RECORD
from dptune.records.benchmarks import BENCHMARKS
from dptune.records.canaries import WRITTEN
from dptune.records.catalogue import SourceSettings, find_source
from dptune.records.diabetes.narratives import LABEL
from dptune.records.own_files import form_at, source_of
from dptune.records.reading.formats import FORMATS
from dptune.records.reading.source import RecordSource, refuse_same
from tasks.paths import RAW_MANIFEST
from tasks.settings.strict import FilePath, StrictModel, Unit, as_value_error

#: Sources that are the diabetes table, generated or real, verbalised.
NARRATED = ("synthetic", "uci")


class Synthetic(StrictModel):
    """Size and seed of the generated cohort.

    Attributes:
        encounters: number of rows of the generated table.
        seed: seed of the generator; public.
    """

    encounters: Annotated[Rows, Ge(50)]
    seed: Seed


class Parts(StrictModel):
    """The parts of a benchmark by their use; ``data.options.part``, else "train", is the one that trains.

    Attributes:
        eval: the part that finished cells are scored on; nothing trains on it.
        public: the part that counts as public, for validation and controllers.
        attack: share of the training part's units that only attacks read: their inputs tell them apart from other
            parts.
    """

    eval: str
    public: str
    attack: Annotated[float, Ge(0), Lt(1)] = 0.02


class Data(StrictModel):
    """The source of the records, its options, and the unit of privacy.

    Attributes:
        source: "synthetic" (generated, no real person), "uci" (the real table), "text", "table", "jsonl" or "datasets"
            (records of a file), or the name of a plug-in's source.
        path: the file of records; for "uci" a CSV or the archive's zip, where the variable DPTUNE_UCI_PATH wins, and
            left empty, DVC's cache is used, or otherwise the UCI archive.
        public: public records of your own, in the same format; left empty, synthetic narratives are used.
        options: options of the source, such as {template: "{age}: {note}"} for a table.
        unit: unit of privacy: "record", or the column whose values name units ("patient" for synthetic and uci).
        label: the column of labels, which ``task.kind: classify`` learns.
        parts: parts of a benchmark that are held out and public; left empty, the records are dealt to sides.
        split_seed: key of the hash that gives every unit its side of the split; public.
        synthetic: size and seed of the generated cohort.
        template: wording of the narratives of "synthetic" and "uci": "plain", or "published", that of RLDP's table 6.1.
    """

    source: str
    path: FilePath | None = None
    public: FilePath | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    unit: Unit
    label: Unit | None = None
    parts: Parts | None = None
    split_seed: Seed
    synthetic: Synthetic
    template: Literal["plain", "published"] = "plain"

    @field_validator("source")
    @classmethod
    def _exists(cls, name: str) -> str:
        as_value_error(find_source, name)
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
    def _suits_its_source(self) -> Data:
        own = SourceSettings(self.path, self.unit, self.options, label=self.label)
        if self.label is not None and self.source == "text":
            raise ValueError("label: source text has no column of labels: leave it out")
        if self.label not in (None, LABEL) and self.source in NARRATED:
            raise ValueError(f"label: narratives may leave out {LABEL} alone, to be learned: use {LABEL}")
        if self.parts is not None and self.source not in BENCHMARKS:
            raise ValueError(f"parts: source {self.source} has none: use {', '.join(BENCHMARKS)}, or leave it out")
        if self.template != "plain" and self.source not in NARRATED:
            raise ValueError(
                f"template: source {self.source} makes no narratives: leave it out, or use synthetic or uci"
            )
        if self.parts is not None and self.public is not None:
            raise ValueError("parts: data.public is given too: leave out one of them")
        try:
            find_source(self.source).check(own)
            _ = self.form
            self._check_public()
        except DptuneError as error:
            raise ValueError(str(error)) from None
        return self

    def _check_public(self) -> None:
        """Raises: ConfigError and DataError for public records that cannot be read, or are of another form."""
        if self.public is None:
            return
        if self.public_source is None:
            problem = f"source {self.source} takes no public records of yours: synthetic narratives serve"
            raise ConfigError("data.public", problem, fix="leave it empty")
        refuse_same(self.path, self.public)
        form = form_at(self.public_source, public=True)
        if self.form not in (None, form):
            spelt = {"text": "texts", "pair": "prompts with completions", "messages": "chats", "label": "labels"}
            problem = f"holds {spelt[form]}, and the records are {spelt[str(self.form)]}"
            raise ConfigError("data.public", problem, fix="give public records of the same kind")

    @property
    def public_source(self) -> RecordSource | None:
        """The user's own public records, read as ``path`` is; None where synthetic narratives serve."""
        if self.public is None or self.source not in FORMATS:
            return None
        described = source_of(self.source, self.path or self.public, self.unit, self.options, self.label)
        return replace(described, public=str(self.public))

    def settings_of_source(self, cached: Path | None = None) -> SourceSettings:
        """The settings that are handed to the source.

        Args:
            cached: root of DVC's cache, if there is one.
        """
        options = self.synthetic.model_dump() if self.source == "synthetic" else self.options
        path = self.uci_path if self.source == "uci" else self.path
        return SourceSettings(path, self.unit, options, cached, self.label)

    def settings_of_part(self, part: str) -> SourceSettings:
        """The settings of another part of a benchmark."""
        own = self.settings_of_source()
        return replace(own, options={**own.options, "part": part})

    @cached_property
    def form(self) -> str | None:
        """The form of the records (text, pair, messages or label), by a look at the first one.

        None where the source's file is gone, and only the records that were copied from it earlier are here.
        """
        if self.path is not None and not self.path.exists() and RAW_MANIFEST.exists():
            return None
        try:
            return find_source(self.source).look(self.settings_of_source())
        except DataError:
            if self.path is None and RAW_MANIFEST.exists():  # a plug-in's database that is gone since, say
                return None
            raise

    @property
    def units(self) -> tuple[str, ...]:
        """The values that ``unit`` and ``prediction.partition`` may have."""
        return find_source(self.source).units or tuple(dict.fromkeys((RECORD, self.unit)))

    @property
    def uci_path(self) -> Path | None:
        """The user's copy of the table: DPTUNE_UCI_PATH, else ``path``."""
        given = os.environ.get("DPTUNE_UCI_PATH")
        return Path(given) if given else self.path


class Canaries(StrictModel):
    """Numbers of secrets to plant, each in a row of its own; nothing is planted if all are 0.

    Attributes:
        extraction: number of secrets that are always planted, to be extracted.
        repeats: number of rows that carry each of them.
        audit: number of secrets that a fair coin plants or leaves out; it limits the epsilon that can be shown.
        audit_kind: what those say: "samples", texts that the pipeline's own public model writes; "maximisers", the
            eighth of such texts whose gradients can be told apart best, which takes minutes to choose; "words", random
            words of public texts; or "code", a public text and a code.
        crafted: number of gradients that an auditor adds to every run, by coins; they cost utility.
        carrier: what the secrets of extraction stand in: "public", texts in rows of their own; or "records", as RLDP
            plants them, after which no run certifies anything.
        carrier_seed: seed of the public texts, or of the choice of records, that carry secrets; the secrets and coins
            have none.
    """

    extraction: FewOrZero
    repeats: Few = 1
    audit: FewOrZero
    audit_kind: Literal["code", "words", "samples", "maximisers"] = "samples"
    crafted: FewOrZero = 0
    carrier: Literal["public", "records"] = "public"
    carrier_seed: Seed

    @property
    def says_samples(self) -> bool:
        """Whether audit canaries say what the pipeline's own public model writes."""
        return self.audit > 0 and self.audit_kind in WRITTEN

    @field_validator("crafted")
    @classmethod
    def _several(cls, count: int) -> int:
        if count == 1:
            raise ValueError("1 is too few: use 0, or hundreds")
        return count
