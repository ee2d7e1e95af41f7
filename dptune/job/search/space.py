"""The public space that a search draws its candidates from: a distribution over settings of ``tune``.

Settings that decide a candidate's releases (mechanism, batch, epochs, options) take finitely many values, so that the
releases of every *kind* of candidate are known, and priced, before anything is drawn. The learning rate and the radius
decide none, and may be ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dptune.core.declarations import declared
from dptune.core.errors import ConfigError
from dptune.core.settings import UpdateRule
from dptune.job.settings import RENAMED
from dptune.privacy.entropy import Entropy, uniform

Value = str | int | float | bool
Configuration = dict[str, Value]

_RULE = tuple(declared(UpdateRule))
#: Settings that may be searched, beside ``options.<name>``. A former name stays as it is written, for kinds are
#: numbered in the order of names, and certificates and plans of earlier searches hold them.
SEARCHED = ("mechanism", "learning_rate", "expected_batch_size", "epochs", *_RULE, "warmup_steps")
#: Settings that decide no release, so that they may be ranges.
RANGED = ("learning_rate", "options.max_grad_norm", *(n for n in _RULE if float in declared(UpdateRule)[n].choices))
_LAWS = ("uniform", "log_uniform")
#: What the name of a mechanism's option begins with.
OPTION = "options."
#: Options that read files or another run's releases, which candidates would share, or that the model decides.
_REFUSED = ("init_from", "noise_multiplier", "policy", "file", "path", "pairs", "dimension")
_MOST_KINDS = 256


@dataclass(frozen=True)
class Range:
    """A range of numbers, ``law`` "uniform" or "log_uniform"."""

    law: str
    low: float
    high: float

    def draw(self, entropy: Entropy) -> float:
        """Draw a number."""
        place = float(uniform(entropy, 1)[0])
        if self.law == "uniform":
            return self.low + place * (self.high - self.low)
        return math.exp(math.log(self.low) + place * (math.log(self.high) - math.log(self.low)))

    def to_json(self) -> Any:
        """The range as the file has it."""
        return {self.law: [self.low, self.high]}


Domain = tuple[Value, ...] | Range


@dataclass(frozen=True)
class SpaceTable:
    """Independent settings: each uniform over its values, or by its range; chosen with chance ``weight``."""

    weight: float
    domains: Mapping[str, Domain]

    def kinds(self) -> Iterator[tuple[float, Configuration]]:
        """The chance of each combination of values, and the combination; ranges at their lower ends."""
        names, sets = list(self.domains), []
        for domain in self.domains.values():
            sets.append((domain.low,) if isinstance(domain, Range) else domain)
        chance = self.weight / math.prod(len(values) for values in sets)
        for values in product(*sets):
            yield chance, dict(zip(names, values, strict=True))

    @property
    def upper(self) -> Configuration:
        """The upper ends of the ranges."""
        return {name: domain.high for name, domain in self.domains.items() if isinstance(domain, Range)}


@dataclass(frozen=True)
class Space:
    """A public distribution over configurations: one table, or several with weights. Public."""

    tables: tuple[SpaceTable, ...]

    @classmethod
    def of(cls, given: Any) -> Space:
        """The space that a file or a mapping describes. Raises: ConfigError naming the entry."""
        tables = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        if not tables or not all(isinstance(table, Mapping) and table for table in tables):
            raise ConfigError("search.space", "is empty", fix="name settings with the values to try")
        for former, name in RENAMED.items():
            if any(former in table and name in table for table in tables):
                problem = f"is the former name of {name}, which stands there too"
                raise ConfigError(f"search.space.{former}", problem, fix="leave it out")
        weights = [table.get("weight", 1) for table in tables]
        if not all(_is_number(weight) and weight > 0 for weight in weights):
            raise ConfigError("search.space.weight", f"{weights} are not all positive", fix="give numbers above 0")
        found = cls(
            tuple(
                SpaceTable(
                    weight / sum(weights),
                    # Sorted: kinds are numbered in this order, and a certificate's JSON keeps no other.
                    {name: _domain(name, table[name]) for name in sorted(map(str, table)) if name != "weight"},
                )
                for weight, table in zip(weights, tables, strict=True)
            )
        )
        kinds, ranges = (
            found.kinds(),
            any(isinstance(one, Range) for table in found.tables for one in table.domains.values()),
        )
        if len(kinds) == 1 and not ranges:
            problem = "holds one point, so there is nothing to choose"
            raise ConfigError("search.space", problem, fix="add values, or tune without a search")
        if len(kinds) > _MOST_KINDS:
            problem = f"holds {len(kinds)} combinations of values, and each has to be priced"
            raise ConfigError(
                "search.space", problem, fix=f"use at most {_MOST_KINDS}, or ranges for {' and '.join(RANGED)}"
            )
        return found

    def kinds(self) -> list[tuple[float, Configuration]]:
        """The chance of each kind, and its settings; ranges at their lower ends."""
        return [kind for table in self.tables for kind in table.kinds()]

    def ends(self) -> list[tuple[Configuration, ...]]:
        """The points of each kind with all ranges at their lower ends, and with all at their upper ones."""
        return [
            (kind, kind | table.upper) if table.upper else (kind,) for table in self.tables for _, kind in table.kinds()
        ]

    def draw(self, entropy: Entropy) -> tuple[int, Configuration]:
        """Draw a configuration, and the number of its kind."""
        place, first = float(uniform(entropy, 1)[0]), 0
        table = self.tables[0]
        for later in self.tables[1:]:
            if place < table.weight:
                break
            place -= table.weight
            first += sum(1 for _ in table.kinds())
            table = later
        found: Configuration = {}
        number = 0
        for name, domain in table.domains.items():
            if isinstance(domain, Range):
                found[name] = domain.draw(entropy)
            else:
                at = min(int(float(uniform(entropy, 1)[0]) * len(domain)), len(domain) - 1)
                found[name], number = domain[at], number * len(domain) + at
        return first + number, found

    def kind_of(self, configuration: Mapping[str, Any]) -> int | None:
        """The number of the kind that a configuration belongs to; None if the space does not hold it."""
        first = 0
        for table in self.tables:
            if set(configuration) == set(table.domains):
                at = _place(table, configuration)
                if at is not None:
                    return first + at
            first += sum(1 for _ in table.kinds())
        return None

    def to_json(self) -> list[dict[str, Any]]:
        """The space in plain JSON types, from which ``of`` makes an equal one."""
        return [
            {"weight": table.weight}
            | {name: one.to_json() if isinstance(one, Range) else list(one) for name, one in table.domains.items()}
            for table in self.tables
        ]


def _place(table: SpaceTable, configuration: Mapping[str, Any]) -> int | None:
    number = 0
    for name, domain in table.domains.items():
        value = configuration[name]
        if isinstance(domain, Range):
            if not (_is_number(value) and domain.low <= value <= domain.high):
                return None
        elif value not in domain:
            return None
        else:
            number = number * len(domain) + domain.index(value)
    return number


def _domain(name: str, value: Any) -> Domain:
    where = f"search.space.{name}"
    option = name.removeprefix(OPTION)
    if RENAMED.get(name, name) not in SEARCHED and (option == name or not option):
        problem = "is not a setting that a search may choose: it would decide what is read, or the adapter's shape"
        raise ConfigError(where, problem, fix=f"use {', '.join(SEARCHED)} or options.<name>")
    if option in _REFUSED:
        problem = "would read a file or another run, or follows from the budget or the model"
        raise ConfigError(where, problem, fix="leave it out of the space")
    if isinstance(value, Mapping):
        return _range(name, where, value)
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(one, str | int | float) for one in values):
        raise ConfigError(where, f"{value!r} is not a list of values", fix="give texts, numbers or booleans")
    if any(isinstance(one, float) and not math.isfinite(one) for one in values):
        raise ConfigError(where, f"{value!r} holds a number that is not finite", fix="leave it out")
    if len({_meant(one) for one in values}) != len(values):
        problem = "names a value twice, which would be tried twice as often"
        raise ConfigError(where, problem, fix="name each once, or weigh whole tables")
    return values


def _meant(value: str | float) -> str | float:
    """The number that a text reads as, for options take such a text for it; any other value as it is."""
    try:
        return float(value)
    except ValueError:
        return value


def _range(name: str, where: str, value: Mapping[str, Any]) -> Range:
    law, bounds = next(iter(value.items())) if len(value) == 1 else ("", None)
    if law not in _LAWS or not isinstance(bounds, list | tuple) or len(bounds) != 2:
        problem = f"{dict(value)!r} is not a range"
        raise ConfigError(where, problem, fix="write {log_uniform: [0.001, 0.02]}, uniform, or a list of values")
    if name not in RANGED:
        problem = "may decide a candidate's releases, which are priced in advance, so it takes no range"
        raise ConfigError(where, problem, fix="give a list of values")
    low, high = bounds
    if not (_is_number(low) and _is_number(high) and 0 < low < high):
        raise ConfigError(where, f"{list(bounds)} is not a range of numbers above 0", fix="give [lower, upper]")
    return Range(law, float(low), float(high))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
