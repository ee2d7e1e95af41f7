"""Declarations of settings: name, type, bounds, default and one sentence, all read from a field of a dataclass.

A setting is written once, as a field whose sentence stands in the docstring of its class. The command line,
params.yaml, Prefect's forms, the card and the reference pages take it from here, so a new field is behind every door.

Example:
    >>> from dptune.core.settings import UpdateRule
    >>> declared(UpdateRule)["momentum"].sentence
    'Momentum of optimizer sgd.'
    >>> problem_of(declared(UpdateRule)["momentum"].kind, 1.5)
    '1.5 is not below 1'
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen

from dptune.core.errors import ConfigError

Part = TypeVar("Part")
#: Metadata of a field that moves no released number beyond rounding: it names no result, and a resumed run may have
#: another value of it.
NAMES_NOTHING = {"names": False}
_NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Declared:
    """One setting as its field declares it.

    Attributes:
        name: name of the field, and of the setting behind every door.
        kind: type, annotated with its bounds (``Count``, ``Share`` and others below).
        default: value of a setting that is left out; ``dataclasses.MISSING`` where it must be given.
        sentence: what it sets, for help texts and pages.
        names: whether another value is another result (``NAMES_NOTHING`` says no).
    """

    name: str
    kind: Any
    default: Any
    sentence: str
    names: bool

    @property
    def choices(self) -> tuple[Any, ...]:
        """The types that a value may have, without bounds and without None."""
        return tuple(_bare(kind) for kind in alternatives(self.kind) if kind is not NoneType)

    @property
    def may_be_left_open(self) -> bool:
        """Whether None is a value, by which something else chooses."""
        return NoneType in alternatives(self.kind)


def declared(cls: Any) -> dict[str, Declared]:
    """The settings of a dataclass by name, in the order of its fields."""
    return _declared(cls)


@cache
def _declared(cls: Any) -> dict[str, Declared]:
    kinds, texts, nameless = get_type_hints(cls, include_extras=True), sentences(cls), names_nothing(cls)
    return {
        name: Declared(name, kinds[name], default, texts.get(name, ""), name not in nameless)
        for name, default in defaults_of(cls).items()
    }


def names_nothing(cls: Any) -> set[str]:
    """The settings of a dataclass that are declared with ``NAMES_NOTHING``; none of a pydantic model."""
    return {one.name for one in fields(cls) if not one.metadata.get("names", True)} if is_dataclass(cls) else set()


def defaults_of(cls: Any) -> dict[str, Any]:
    """The default of each setting of a dataclass or a pydantic model; ``MISSING`` for one that must be given."""
    if (models := getattr(cls, "model_fields", None)) is not None:
        return {
            name: MISSING if one.is_required() else one.get_default(call_default_factory=True)
            for name, one in models.items()
        }
    return {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(cls)}


@cache
def sentences(cls: Any) -> dict[str, str]:
    """Texts by field from the docstrings of a class and its bases, each with a capital at its beginning."""
    import docstring_parser

    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for one in docstring_parser.parse(base.__doc__ or "").params:
            text = " ".join((one.description or "").split())
            texts |= dict.fromkeys(one.arg_name.split(", "), text[:1].upper() + text[1:])
    return texts


def check(settings: Any, where: str = "") -> None:
    """Check every field against its type and bounds.

    Args:
        where: what stands before the names in messages, such as "lora.".

    Raises: ConfigError naming the first field with a value that it cannot have.
    """
    for one in declared(type(settings)).values():
        if problem := problem_of(one.kind, getattr(settings, one.name)):
            raise ConfigError(f"{where}{one.name}", problem, fix=_fix(one))


def problem_of(kind: Any, value: Any) -> str:
    """Why a value is not of a type with bounds; empty if it is. What a container holds is not looked at."""
    options = alternatives(kind)
    if len(options) > 1:
        problems = [problem_of(one, value) for one in options if one is not NoneType]
        return "" if "" in problems or (value is None and NoneType in options) else problems[0]
    bare, bounds = _bare(kind), get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    if get_origin(bare) is Literal:
        known = [one for one in get_args(bare) if type(one) is type(value) and one == value]
        return "" if known else f"{value!r} is not {' or '.join(map(repr, get_args(bare)))}"
    if bare is bool:
        return "" if isinstance(value, bool) else f"{value!r} is neither true nor false"
    if bare is str:
        return _length(value, bounds) if isinstance(value, str) else f"{value!r} is not a text"
    if bare not in _NUMBERS:
        return ""
    right = isinstance(value, int | bare) and not isinstance(value, bool) and math.isfinite(value)
    return next(_beyond(value, bounds), "") if right else f"{value!r} is not {_NUMBERS[bare]}"


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of any other type, the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def part_of(kind: Callable[..., Part], settings: Any, **rest: Any) -> Part:
    """The dataclass ``kind`` whose fields ``settings`` has too, with the same values.

    Args:
        rest: fields of ``kind`` with other values than those of ``settings``, or that it lacks.
    """
    names = [one.name for one in fields(kind) if one.name not in rest]  # type: ignore[arg-type]
    return kind(**{name: getattr(settings, name) for name in names}, **rest)


def differing(settings: Any) -> dict[str, Any]:
    """The settings of a dataclass or a pydantic model that differ from their defaults; all that have no default."""
    return {
        name: value
        for name, default in defaults_of(type(settings)).items()
        if (value := getattr(settings, name)) is not default and (default is MISSING or _text(value) != _text(default))
    }


def plain(value: Any) -> Any:
    """A setting as JSON types, in which 3.0 is 3 and a tuple is a list. Of a section, what differs in it and names it.

    >>> plain({"rate": 3.0, "names": ("a",), "none": None})
    {'rate': 3, 'names': ['a'], 'none': None}
    """
    if hasattr(type(value), "model_fields") or (is_dataclass(value) and not isinstance(value, type)):
        nameless = names_nothing(type(value))
        return {name: plain(one) for name, one in differing(value).items() if name not in nameless}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> str:
    return json.dumps(plain(value), sort_keys=True, default=repr)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _beyond(value: float, bounds: tuple[Any, ...]) -> Iterator[str]:
    for bound in bounds:
        if isinstance(bound, Ge) and not value >= bound.ge:  # type: ignore[operator]
            yield f"{value!r} is below {bound.ge}"
        if isinstance(bound, Gt) and not value > bound.gt:  # type: ignore[operator]
            yield f"{value!r} is not above {bound.gt}"
        if isinstance(bound, Le) and not value <= bound.le:  # type: ignore[operator]
            yield f"{value!r} is above {bound.le}"
        if isinstance(bound, Lt) and not value < bound.lt:  # type: ignore[operator]
            yield f"{value!r} is not below {bound.lt}"


def _length(value: str, bounds: tuple[Any, ...]) -> str:
    for bound in bounds:
        if isinstance(bound, Len | MinLen) and len(value) < bound.min_length:
            return f"{value!r} has fewer than {bound.min_length} characters"
        if isinstance(bound, Len) and bound.max_length is not None and len(value) > bound.max_length:
            return f"{value[:20]!r}... has more than {bound.max_length} characters"
    return ""


def _fix(one: Declared) -> str:
    """What to give instead."""
    kind = next((kind for kind in alternatives(one.kind) if kind is not NoneType), one.kind)
    bare = _bare(kind)
    if get_origin(bare) is Literal:
        use = f"use {' or '.join(map(str, get_args(bare)))}"
    elif bare is bool:
        use = "use true or false"
    else:
        use = f"give {_NUMBERS.get(bare, 'a text')}{_range(get_args(kind)[1:] if kind is not bare else ())}"
    return f"{use}, or leave it out" if one.default is not MISSING else use


def _range(bounds: tuple[Any, ...]) -> str:
    words = []
    for bound in bounds:
        for kind, word in ((Ge, "at least"), (Gt, "above"), (Le, "at most"), (Lt, "below")):
            if isinstance(bound, kind):
                value: Any = getattr(bound, kind.__name__.lower())
                words.append(f"{word} {value:g}" if isinstance(value, float) else f"{word} {value}")
    return f" {' and '.join(words)}" if words else ""


def assignments(options: Iterable[str]) -> dict[str, str]:
    """Values by key, as texts with their white space, which a separator may be made of.

    Raises: ConfigError for an option without ``=`` or key, or a key given twice.
    """
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {option}", "has no '='", fix="write --set KEY=VALUE")
        if not key:
            raise ConfigError(f"--set {option}", "names no option before the '='", fix="write --set KEY=VALUE")
        if key in values:
            raise ConfigError(f"--set {key}", "is given twice", fix="give it once")
        values[key] = value
    return values


# Bounds of numbers in settings, as annotations of their types.
#
# A settings dataclass writes a field's name, type, default and bounds once; what reads settings from a file
# (params.yaml) checks the bounds that it finds there. The upper bounds are far above anything that fits on a machine,
# and below what overflows in a library: a number beyond one is a slip of the keyboard.


_LARGEST = 1e300

#: A seed of public random numbers. torch, NumPy and transformers all take these, and the next few above.
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
Positive = Annotated[float, Gt(0), Le(_LARGEST)]
NotNegative = Annotated[float, Ge(0), Le(1e9)]
#: Number of times that something is done, or 0 where it need not be.
Count = Annotated[int, Ge(1), Le(10**9)]
CountOrZero = Annotated[int, Ge(0), Le(10**9)]
#: Rows of a table, or samples, of which all are held in memory.
Rows = Annotated[int, Ge(1), Le(10**7)]
TokenCount = Annotated[int, Ge(1), Le(10**6)]
#: Numbers of what takes time each: updates, users, tokens.
Few = Annotated[int, Ge(1), Le(10**6)]
FewOrZero = Annotated[int, Ge(0), Le(10**6)]
#: A probability or share that is neither 0 nor 1, and one that may be either.
Chance = Annotated[float, Gt(0), Lt(1)]
Share = Annotated[float, Ge(0), Le(1)]
Rank = Annotated[int, Ge(1), Le(4096)]
Epochs = Annotated[float, Ge(1e-6), Le(1e6)]
Epsilon = Annotated[float, Ge(1e-6), Le(1e6)]
Delta = Annotated[float, Ge(1e-30), Lt(1)]
#: 10 would already throw any weights away; a run at 1e30 trains, diverges and has spent its budget.
LearningRate = Annotated[float, Gt(0), Le(10)]
