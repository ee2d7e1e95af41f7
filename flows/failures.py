"""Errors of flows: which parts failed, the cause of the first failure, and whether a retry can help."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dptune.errors import DptuneError
from tasks.paths import FAILURES
from tasks.stage import USER_ERROR, keep_failure, last_error, unknown_failure

_MARK = "error: "
_MEMORY = "lower experiment.cells_together or experiment.cells_per_device, and run again: it goes on where it was"


class CellError(Exception):
    """A part's process ended with an error. ``hopeless`` says that a retry cannot help."""

    def __init__(self, label: str, status: int, output: str) -> None:
        super().__init__(label, status, output)  # unpickling in another process calls __init__ with these
        self.hopeless = status == USER_ERROR

    def __str__(self) -> str:
        label, status, output = self.args
        return f"cell {label} ended with status {status}:\n{output}"

    @property
    def cause(self) -> str:
        """The process' own last sentence, with its fix."""
        label, status, output = self.args
        said = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
        if said:
            return str(said[-1])
        if status == -signal.SIGKILL:
            return f"{label} was killed, as the system does where memory runs out. Fix: {_MEMORY}."
        return f"{label} ended with status {status} and said no reason. Fix: look at {FAILURES}, and run again."


class FlowError(RuntimeError):
    """Raised when parts of a flow failed, after all others have ended.

    Attributes:
        summary: the parts that failed, in one sentence.
        cause: cause of the first failure, with its fix.
        status: exit status of the command.
    """

    def __init__(self, summary: str, cause: str, status: int) -> None:
        super().__init__(summary, cause, status)  # unpickling in another process calls __init__ with these
        self.summary, self.cause, self.status = summary, cause, status

    def __str__(self) -> str:
        return self.summary


def flow_error(summary: str, errors: Sequence[BaseException]) -> FlowError:
    """The error of a flow whose parts failed with ``errors``. Tracebacks of unexpected ones are kept in a file."""
    unknown = [error for error in errors if not _hopeless(error)]
    for error in unknown:
        keep_failure(error)
    return FlowError(summary, _cause(errors[0]), 1 if unknown else USER_ERROR)


def _hopeless(error: BaseException) -> bool:
    return error.hopeless if isinstance(error, CellError) else isinstance(error, DptuneError | OSError)


def _cause(error: BaseException) -> str:
    if isinstance(error, CellError):
        return error.cause
    return last_error(error) if isinstance(error, DptuneError | OSError) else unknown_failure(error)
