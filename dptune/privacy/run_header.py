"""The first line of a ledger: everything besides its releases that an epsilon depends on."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD, Train
from dptune.privacy.accountants import (
    PUBLISHED_ACCOUNTANTS,
    Epsilons,
    epsilons,
    leaks_of,
    published_epsilon,
)
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.release import DEALT_BY_RANK, Composition, Release

ACCOUNTINGS = ("certified", "noise_only", "published")
#: What new ledgers are written in. Format 5 differs by one word: the unit of one record is "encounter" there.
FORMAT = 6
_READ = (5, FORMAT)


class OtherFormatError(ConfigError):
    """A ledger of another version of dptune: undamaged, but this version cannot price it."""

    def __init__(self, other_format: Any) -> None:
        problem = f"{other_format!r} is not one of the formats {_READ[0]} to {FORMAT}, which this dptune reads"
        super().__init__("format", problem, fix="verify it with the dptune that wrote it, and keep the file as it is")


@dataclass(frozen=True)
class RunHeader:
    """The first line of a ledger: everything besides the releases that an epsilon depends on. Public.

    Attributes:
        mechanism: registered name of the mechanism.
        published_accountant: key of ``PUBLISHED_ACCOUNTANTS``.
        accounting: the epsilon that the budget limits, one of ``ACCOUNTINGS``.
        epsilon: the budget, or None when the run has none (the non-private mechanism).
        delta: delta of every epsilon of this run.
        unit: what is added or removed: "record", the name of a column (all records that share a value of it), or
            another kind, such as "client", "tenant" or "shard".
        units: how many units the training data holds (public by assumption).
        data: label of the data source, "synthetic" included.
        telemetry: "research" when curves computed from private records are logged beside the adapter. "private" when
            only releases and public figures are published. The times of the releases are not covered: Prefect's
            database, logs and files keep them.
        leaks: reasons from outside the releases that void the guarantee (a fixed noise seed).
        renyi_filter: the filter fixed before the run, or None.
        inherited: releases of other runs that this one was made from; its epsilon includes them.
        schedule: digest of whatever else decides which units a release is about; empty where nothing does.
        plugins: name, version and digest of the code outside dptune that bounds, noises or steers. The epsilons hold if
            it does what it says.
        search: id of the private selection that the run is a candidate of; empty for a run of its own. A candidate has
            no guarantee alone, since the choice depends on all of them: the search's certificate has it.
        canaries: number of units that an auditor's planted gradients may be; they count among ``units``.
        coins: commitment to their coins, a salted SHA-256; empty without canaries.
        train: the weights that trained: "lora", adapters; or the model's own, as ``TrainedWeights.said`` names them.
        run_id: id that ties checkpoints to this ledger.
        format: format of the ledger; one of an older format is verified, but not resumed.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.run_header import RunHeader
        >>> header = RunHeader("static", "gdp_clt", "certified", epsilon=2.0, delta=1e-5, unit="patient_id", units=800)
        >>> header.within_budget(Counter({Release(0.01, 1.0): 1000}))
        True
        >>> header.within_budget(Counter({Release(0.01, 0.8): 1000}))
        False
    """

    mechanism: str
    published_accountant: str
    accounting: str
    epsilon: float | None
    delta: float
    unit: str
    units: int
    data: str = "unspecified"
    telemetry: str = "research"
    leaks: tuple[str, ...] = ()
    renyi_filter: RenyiFilter | None = None
    inherited: tuple[tuple[Release, int], ...] = ()
    schedule: str = ""
    plugins: tuple[str, ...] = ()
    search: str = ""
    canaries: int = 0
    coins: str = ""
    train: str = "lora"
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not (isinstance(self.delta, float) and 0 < self.delta < 1):
            raise ConfigError("delta", f"{self.delta!r} is not in (0, 1)", fix="use a number")
        if self.epsilon is not None and not (isinstance(self.epsilon, int | float) and math.isfinite(self.epsilon)):
            raise ConfigError("epsilon", f"{self.epsilon!r} is not a number", fix="use a number")
        if self.accounting not in ACCOUNTINGS:
            raise ConfigError("accounting", f"unknown {self.accounting!r}", fix=f"use {' or '.join(ACCOUNTINGS)}")
        if self.published_accountant not in PUBLISHED_ACCOUNTANTS:
            raise ConfigError(
                "published_accountant", f"unknown {self.published_accountant!r}", fix="use a known accountant"
            )
        if any(release.coefficients for release, _ in self.inherited):
            problem = "holds rows of correlated noise, and no accountant can price them together with another run"
            raise ConfigError("inherited", problem, fix="start from a run of independent noise")
        if any(not release.sampler.like_poisson for release, _ in self.inherited):
            # Counts of two runs would add up, and two half epochs of bins cost more than a whole one.
            problem = "holds releases of a sampler other than poisson, which no bound prices together with another run"
            raise ConfigError("inherited", problem, fix="start from a run by poisson, or from none")
        if self.accounting == "certified" and self.leaks and self.epsilon is not None:
            raise ConfigError(
                "accounting",
                f"certified is refused: {'; '.join(self.leaks)}",
                fix="remove the leak or use published",
            )

    def differences(self, other: RunHeader) -> list[str]:
        """Names of the fields in which another header differs, ``run_id`` left out."""
        theirs = replace(other, run_id=self.run_id)
        return [item.name for item in fields(self) if getattr(self, item.name) != getattr(theirs, item.name)]

    def price(self, composition: Composition) -> Epsilons:
        """The three epsilons of a composition in this run."""
        return epsilons(
            composition,
            self.delta,
            published_accountant=self.published_accountant,
            renyi_filter=self.renyi_filter,
            run_leaks=self.leaks,
            inherited=composition_of(self.inherited),
        )

    def leaks_of(self, composition: Composition) -> tuple[str, ...]:
        """Reasons why a run of these releases has no certified epsilon; found without pricing them."""
        return leaks_of(composition + composition_of(self.inherited), self.renyi_filter, self.leaks)

    def within_budget(self, composition: Composition) -> bool:
        """Whether the epsilon that ``accounting`` names is within the budget for this composition.

        A run that an earlier version began, with groups dealt by rank, goes on within what it was started for.
        """
        if self.epsilon is None:
            return True
        if self.accounting == "published":  # pricing the others at every charge is slow if noise moves
            return published_epsilon(self.published_accountant, composition, self.delta) <= self.epsilon
        prices = self.price(composition)
        by_rank = self.accounting == "certified" and prices.leaks == (DEALT_BY_RANK,)
        return float(prices.noise_only if by_rank else getattr(prices, self.accounting)) <= self.epsilon

    def to_dict(self) -> dict[str, Any]:
        """The header in plain JSON types."""
        data = asdict(self)
        data["leaks"] = list(self.leaks)
        data["inherited"] = [[release.to_dict(), count] for release, count in self.inherited]
        data["plugins"] = list(self.plugins)
        if not self.plugins:
            del data["plugins"]  # so that ledgers without plug-ins stay as they were
        if not self.search:
            del data["search"]  # likewise
        if not self.canaries:
            del data["canaries"], data["coins"]
        if self.train == "lora":
            del data["train"]  # likewise
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunHeader:
        """Make a header of what ``to_dict`` gave. Raises ConfigError on missing or unknown keys."""
        values = {"plugins": [], "search": "", "canaries": 0, "coins": "", "train": "lora", **data}
        if (written := values.get("format")) not in _READ:
            raise OtherFormatError(written)
        if written != FORMAT and values.get("unit") == "encounter":
            values["unit"] = RECORD
        known = {item.name for item in fields(cls)}
        if set(values) != known:
            raise ConfigError("run", f"keys {sorted(set(values) ^ known)} missing or unknown", fix="use a whole ledger")
        if not isinstance(values["leaks"], list):
            raise ConfigError("leaks", "is not a list", fix="write a list of reasons")
        values["leaks"] = tuple(values["leaks"])
        plugins = values["plugins"]
        if not isinstance(plugins, list) or not all(isinstance(plugin, str) for plugin in plugins):
            raise ConfigError("plugins", f"{plugins!r} is not a list of names", fix="use a whole ledger")
        values["plugins"] = tuple(plugins)
        if not isinstance(values["search"], str):
            raise ConfigError("search", f"{values['search']!r} is not an id", fix="use a whole ledger")
        if not isinstance(values["train"], str) or values["train"].partition(":")[0] not in get_args(Train):
            problem = f"{values['train']!r} does not name weights that can train"
            raise ConfigError("train", problem, fix="use a whole ledger, with the dptune that wrote it")
        canaries, coins = values["canaries"], values["coins"]
        if type(canaries) is not int or not isinstance(coins, str) or canaries < 0 or len(coins) != 64 * (canaries > 0):
            raise ConfigError("canaries", "are not a number with a commitment to its coins", fix="use a whole ledger")
        values["inherited"] = tuple((Release.from_dict(item), _count(count)) for item, count in values["inherited"])
        if values["renyi_filter"] is not None:
            values["renyi_filter"] = RenyiFilter.from_dict(values["renyi_filter"])
        return cls(**values)


def composition_of(inherited: tuple[tuple[Release, int], ...]) -> Composition:
    """The releases of a header's ``inherited``; entries that name the same release add up."""
    total: Composition = Counter()
    for release, count in inherited:
        total[release] += count
    return total


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("inherited", f"{value!r} is not a count", fix="write a whole number")
    return value
