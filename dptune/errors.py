"""The errors that dptune raises on bad input. The message is all a user needs: what, where, and the fix."""

from __future__ import annotations

from pathlib import Path


class DptuneError(Exception):
    """A problem that the user can fix; command lines print it without a traceback."""


class DataError(DptuneError):
    """Bad input data, located by file, 1-based row (the header is row 1) and column."""

    def __init__(
        self, problem: str, *, fix: str, file: Path | str, row: int | None = None, column: str | None = None
    ) -> None:
        where = f"{file}" + (f", row {row}" if row is not None else "") + (f", column {column!r}" if column else "")
        super().__init__(f"{where}: {problem}. Fix: {fix}.")
        self.file, self.row, self.column = str(file), row, column


class ConfigError(DptuneError):
    """A parameter that is missing, unknown or out of range, named by its path in params.yaml or its option."""

    def __init__(self, field: str, problem: str, *, fix: str) -> None:
        super().__init__(f"{field}: {problem}. Fix: {fix}.")
        self.field, self.problem, self.fix = field, problem, fix


class DivergedError(DptuneError):
    """Training whose weights or predictions are no longer numbers; running it again would end alike."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop; its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def out_of_memory(error: BaseException) -> str | None:
    """What a GPU could not give; None for any other error. Known by its name, for importing torch takes seconds."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    return ". ".join(first_line(error).split(". ")[:2])  # what it says after these is every process on the GPU
