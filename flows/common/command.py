"""Runs a flow as a command: no traceback, one sentence as the last line, and an end within seconds on Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from types import FrameType
from typing import Any
from uuid import UUID

import psutil
from prefect import runtime
from prefect.client.orchestration import get_client

from dptune.core.errors import DptuneError
from flows.common.child import end_with
from flows.server import cancel_run, end_server_with_me, is_suspended, own_server, watched_processes
from tasks.paths import FAILURES
from tasks.stage import INTERRUPTED, USER_ERROR, keep_failure, last_error, say_error, unknown_failure

#: Time for the end of a cell's step, and its checkpoint.
_SECONDS = 7.0
_LOOK_SECONDS = 0.1
_WATCH_SECONDS = 3.0
#: Variable that holds the process id of what serves the deployments, and starts a process for each run.
SERVING = "DPTUNE_SERVING"
#: Prefect's variable with the id of the run that it started this process for.
_STARTED_FOR = "PREFECT__FLOW_RUN_ID"
_STOPS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], None]
_on_sigterm: _Handler | None = None  # this process' own handler, if it has one
_stopped = threading.Event()


def run_flow(work: Callable[[], object], standing: Callable[[], str] = lambda: "") -> None:
    """Run a flow. If parts failed, the last line says how many, and the cause of the first failure.

    Args:
        standing: function that says how far the flow came, for the last line after Ctrl-C.
    """
    plain = _Plain()
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(plain)
    try:
        with _interruptible(standing), own_server():
            work()
    except FlowError as error:
        print(error.summary, file=sys.stderr)
        say_error(error.cause)
        sys.exit(error.status)


class _Plain(logging.Filter):
    """Removes tracebacks from Prefect's lines (``flow_error`` keeps them in a file), and its server's start and end."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("prefect"):
            record.exc_info = record.exc_text = None
        return not record.getMessage().startswith(("Starting temporary server", "Stopping temporary server"))


def begin_flow() -> None:
    """Let SIGTERM end this process, and Prefect's temporary server end with it: the first line of every flow.

    Whenever a flow begins, within another one too, Prefect's own handler takes the place of this process'. It would
    wait for the cells under way, try them again, and leave runs as running. A run that a work pool started is ended by
    its page as a form's is.
    """
    end_server_with_me()
    if _on_sigterm is None and runtime.flow_run.id == os.environ.get(_STARTED_FOR, ""):
        end_when_cancelled()
    if _on_sigterm is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def end_when_cancelled() -> None:
    """Let this process end on SIGTERM as on Ctrl-C; Prefect sends it when a run is cancelled or its server ends.

    If the process that serves the deployments is killed, it can send nothing; then the same is done, and also when the
    run is suspended.
    """
    if threading.current_thread() is threading.main_thread():
        _end_by(end_quietly)
        if serving := os.environ.pop(SERVING, None):
            end_with(int(serving))
        if run := runtime.flow_run.id:
            end_when_stopped_on_page(UUID(run))


def end_when_stopped_on_page(run: UUID) -> None:
    """Let a thread send this process SIGTERM once its run is cancelled or suspended on Prefect's page.

    Prefect itself ends nothing when a run is suspended, nor when a suspended one is then cancelled: it takes a
    suspended run for one without a process, and its cells would go on to spend. It ends no run of a command's either.
    """
    threading.Thread(target=copy_context().run, args=(_watch, run), daemon=True).start()


def _watch(run: UUID) -> None:
    with get_client(sync_client=True) as client:
        while True:
            time.sleep(_WATCH_SECONDS)
            with suppress(Exception):  # a server that is away for a moment
                state = client.read_flow_run(run).state
                if state is not None and (state.is_cancelling() or state.is_cancelled() or is_suspended(state)):
                    os.kill(os.getpid(), signal.SIGTERM)
                    return


def hold_when_stopped() -> None:
    """Wait for the end of this process, if it is being stopped: a cell that ended early is not tried again."""
    if _stopped.is_set():
        threading.Event().wait()


def end_quietly(_signal: int = signal.SIGTERM, _frame: FrameType | None = None) -> None:
    """End this process and all that it started, without a word."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _stop_all()
    os._exit(0)  # Prefect takes any other status for a crash


def _end_by(handler: _Handler | None) -> None:
    """Let ``handler`` end this process on SIGTERM, in the flows that begin later too."""
    global _on_sigterm
    _on_sigterm = handler
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _stop_all() -> None:
    """End every process that this one started, and tell Prefect. Cells end after their step, with a checkpoint."""
    _stopped.set()
    logging.disable(logging.CRITICAL)
    cancel_run(_end_children)


def _end_children() -> None:
    """End every process that this one started, and theirs: first by SIGTERM, then by SIGKILL.

    Not Prefect's temporary server, which is being told at the same time; it ends with this process. Whoever waits for a
    child, in another thread, must get its status: psutil's wait would take it, and Prefect keep the cell as finished.
    """
    until, asked = time.monotonic() + _SECONDS, set[psutil.Process]()
    while (left := {one for one in {*asked, *_children()} if _is_under_way(one)}) and time.monotonic() < until:
        for child in left - asked:  # Prefect may have tried one again meanwhile
            with suppress(psutil.Error):
                child.terminate()
        asked |= left
        time.sleep(_LOOK_SECONDS)
    for child in left:
        with suppress(psutil.Error):
            child.kill()


def _children() -> list[psutil.Process]:
    kept, found = watched_processes(), []
    for child in psutil.Process().children():
        if child.pid not in kept:
            with suppress(psutil.Error):
                found += [child, *child.children(recursive=True)]
    return found


def _is_under_way(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextmanager
def _interruptible(standing: Callable[[], str]) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM end this process and all that it started. Files on disk are safe.

    What Prefect itself makes of a KeyboardInterrupt took minutes.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)
        _stop_all()
        where = ""
        with suppress(Exception):  # nothing may keep the process from ending
            where = standing()
        with suppress(OSError):  # whoever read it may have been stopped too
            # Inside a flow, Prefect makes log lines of what is printed.
            sys.stderr.write(f"\nstopped{where and ' '}{where}; run again to go on\n")
            sys.stderr.flush()
        os._exit(INTERRUPTED)

    before: dict[signal.Signals, Any] = {number: signal.signal(number, stop) for number in _STOPS}
    _end_by(stop)
    try:
        yield
    finally:
        _end_by(None)
        for number, handler in before.items():
            signal.signal(number, handler)


# Errors of flows: which parts failed, the cause of the first failure, and whether a retry can help.


_MARK = "error: "
_MEMORY = (
    "lower training.physical_batch_size, experiment.cells_together or experiment.cells_per_device, and run again: it "
    "goes on where it was"
)


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
            return f"{label} was killed, which the system does when memory runs out. Fix: {_MEMORY}."
        return f"{label} ended with status {status} and gave no reason. Fix: look at {FAILURES}, and run again."


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
