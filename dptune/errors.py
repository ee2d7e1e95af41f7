"""The errors that dptune raises on bad input. The message is all a user needs: what, where, and the fix."""

from __future__ import annotations

from pathlib import Path

#: What a single run can do about it; none of it changes a result.
LESS_MEMORY = (
    "lower --rows (training.physical_batch_size), or turn gradient checkpointing on, and run again: it goes on"
)


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


class FullDeviceError(DptuneError):
    """A GPU has too little memory left: the machine's problem, and no run's. A size would follow from drawn records."""

    def __init__(self, fix: str = LESS_MEMORY) -> None:
        super().__init__(f"the GPU's memory is full. Fix: {fix}.")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU's memory did not suffice, here or in what caused it. By name, for importing torch takes seconds."""
    while error is not None and type(error).__name__ != "OutOfMemoryError":
        error = error.__cause__
    return error is not None
