"""Types of the entries of params.yaml, with the bounds within which the code that reads them works.

The upper bounds are far above anything that fits on a machine, and below what overflows in a library: a number beyond
one is a slip of the keyboard, and is refused by name before any work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dptune.errors import ConfigError
from dptune.units import check_unit

_LONGEST_NAME = 64  # a run's folder holds the names of a model and a mechanism, and file systems stop at 255 bytes
_LONGEST_PATH = 4096


class StrictModel(BaseModel):
    """The base of whatever is read from a file of settings: an unknown entry is an error, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def printable(text: str) -> str:
    """The text as it is; raises ValueError for one with control characters."""
    if not text.isprintable():
        raise ValueError("holds a character that is not printable")
    return text


def _usable_path(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, str | Path) else "."
    if not text:
        raise ValueError("is an empty text: give a file, or leave the entry empty")
    if "\0" in text or len(os.fsencode(text)) > _LONGEST_PATH:
        raise ValueError(f"is no path: it holds a NUL character, or is longer than {_LONGEST_PATH} bytes")
    return value


def _unit(name: str) -> str:
    try:
        check_unit(name, "unit")
    except ConfigError as error:
        raise ValueError(f"{error.problem}. Fix: {error.fix}") from None
    return printable(name)


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as they are; raises ValueError naming one that is given twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{value!r} is given twice")
    return values


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=_LONGEST_NAME)]
Title = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(printable)]
FilePath = Annotated[Path, BeforeValidator(_usable_path)]
#: "record", or the name of a column.
Unit = Annotated[str, Field(max_length=200), AfterValidator(_unit)]
#: A seed of public random numbers. torch, NumPy and transformers all take these, and the next few above.
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrNone = Annotated[int, Field(ge=0, le=10**9)]
#: Rows of a table, or samples, of which all are held in memory.
Rows = Annotated[int, Field(ge=1, le=10**7)]
Tokens = Annotated[int, Field(ge=1, le=10**6)]
#: Numbers of what takes time each: updates, users, tokens.
Few = Annotated[int, Field(ge=1, le=10**6)]
Chance = Annotated[float, Field(gt=0, lt=1)]
Rank = Annotated[int, Field(ge=1, le=4096)]
Epochs = Annotated[float, Field(ge=1e-6, le=1e6)]
Epsilon = Annotated[float, Field(ge=1e-6, le=1e6)]
Delta = Annotated[float, Field(ge=1e-30, lt=1)]
#: 10 would already throw any weights away; a run at 1e30 trains, diverges and has spent its budget.
LearningRate = Annotated[float, Field(gt=0, le=10)]
