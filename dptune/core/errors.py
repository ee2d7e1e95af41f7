"""The errors that dptune raises on bad input. The message is all a user needs: what, where, and the fix."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What a single run can do about it; none of it changes a result.
LESS_MEMORY = (
    "lower --physical-batch-size (training.physical_batch_size; --rows of sample and score), or turn gradient "
    "checkpointing on, and run again: it goes on"
)

#: Types of errors for lack of memory; and what torch says, in a RuntimeError, where a CPU's does not suffice.
_FULL, _FULL_CPU = ("OutOfMemoryError", "MemoryError"), "DefaultCPUAllocator: can't allocate memory"


class DptuneError(Exception):
    """A problem that the user can fix; command lines print it without a traceback."""


class DataError(DptuneError):
    """Bad input data, located by file, 1-based row (the header is row 1) and column, or several columns."""

    def __init__(
        self,
        problem: str,
        *,
        fix: str,
        file: Path | str,
        row: int | None = None,
        column: str | Sequence[str] | None = None,
    ) -> None:
        names = [name for name in ([column] if isinstance(column, str) else column or []) if name]
        where = f"{file}" + (f", row {row}" if row is not None else "")
        where += f", column{'s' * (len(names) > 1)} {' and '.join(map(repr, names))}" if names else ""
        super().__init__(f"{where}: {problem}. Fix: {fix}.")
        self.file, self.row, self.column = str(file), row, column


class ConfigError(DptuneError):
    """A parameter that is missing, unknown or out of range, named by its path in params.yaml or its option."""

    def __init__(self, field: str, problem: str, *, fix: str) -> None:
        super().__init__(f"{field}: {problem}. Fix: {fix}.")
        self.field, self.problem, self.fix = field, problem, fix


class DivergedError(DptuneError):
    """Training whose weights or predictions are no longer numbers; resumed, only new noise could help it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop; its type where it has none.

    Where that line only announces what follows, it is joined with the second.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return said.rstrip(".") or type(error).__name__


class FullDeviceError(DptuneError):
    """Too little memory is left: the machine's problem, and no run's. A size would follow from drawn records."""

    def __init__(self, fix: str = LESS_MEMORY) -> None:
        super().__init__(f"memory is full, the GPU's or the machine's. Fix: {fix}.")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory did not suffice, a GPU's or the machine's, here or in what caused it."""
    return _caused_by(error, *_FULL)


def is_of_device(error: BaseException | None) -> bool:
    """Whether a GPU failed or memory did not suffice, and not the code that ran there."""
    return _caused_by(error, *_FULL, "AcceleratorError")


def _caused_by(error: BaseException | None, *names: str) -> bool:
    """Whether an error, or what caused it, has such a type. By name, for importing torch takes seconds."""
    while error is not None and type(error).__name__ not in names and _FULL_CPU not in str(error):
        error = error.__cause__
    return error is not None


_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "there is no such entry",
    "unexpected_keyword_argument": "there is no such entry",
    "float_type": "{value} is not a number",
    "float_parsing": "{value} is not a number",
    "finite_number": "{value} is not a finite number",
    "int_type": "{value} is not a whole number",
    "int_parsing": "{value} is not a whole number",
    "int_parsing_size": "{value} is too large a number",
    "int_from_float": "{value} is not a whole number",
    "bool_type": "{value} is neither true nor false",
    "bool_parsing": "{value} is neither true nor false",
    "string_type": "{value} is not a text",
    "path_type": "{value} is not a path",
    "dict_type": "{value} is not a table of entries",
    "model_type": "{value} is not a table of entries",
    "dataclass_type": "{value} is not a table of entries",
    "model_attributes_type": "{value} is not a table of entries",
    "list_type": "{value} is not a list",
    "tuple_type": "{value} is not a list",
    "greater_than": "{value} is not above {gt}",
    "greater_than_equal": "{value} is below {ge}",
    "less_than": "{value} is not below {lt}",
    "less_than_equal": "{value} is above {le}",
    "literal_error": "{value} is not {expected}",
    "string_too_short": "{value} has fewer characters than {min_length}",
    "string_too_long": "{value} has more characters than {max_length}",
    "string_pattern_mismatch": "{value} is not of the form {pattern}",
    "too_short": "has {actual_length} entries, and {min_length} is the least",
    "too_long": "has {actual_length} entries, and {max_length} is the most",
}


def problem_of(item: Mapping[str, Any]) -> str:
    """Words for an item of pydantic's ``errors()``, to follow the field's name and a colon."""
    kind, context = str(item["type"]), dict(item.get("ctx", {}))
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", item["msg"]))
    if isinstance(item.get("input"), float) and item["input"] != item["input"]:
        return "nan is not a number"
    if kind not in _WORDS:
        return f"{reprlib.repr(item.get('input'))}: {item['msg']}"
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    return _WORDS[kind].format(value=reprlib.repr(item.get("input")), **shown)
