"""What every stage does around its work: privacy of files, logging, and errors without tracebacks."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from dptune.cli.console import Command
from dptune.core.errors import DptuneError
from dptune.core.files import PRIVATE_FILE, private_directory, write_text
from tasks.paths import DATA, FAILURES
from tasks.workspace import share_checkout

#: Exit status of an error that trying again cannot mend.
USER_ERROR = 2
#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Variable with the file that takes the last line of a command that fails: one for whoever started the command.
ERROR_FILE = "DPTUNE_ERROR_FILE"


def run_command(work: Callable[..., None]) -> None:
    """``run_stage`` with what the command line gives for the parameters of ``work``."""
    # Tracebacks must not print local variables: they hold records. Of a wrong option, the last line is the error.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @functools.wraps(work)
    def run(**given: Any) -> None:
        run_stage(functools.partial(work, **given))

    app.command(cls=Command)(run)
    app()


def run_stage(work: Callable[[], None]) -> None:
    """Run a stage's work; whatever ends it, the last line says the cause and the fix.

    A problem that the user can fix has status 2; any other has status 1, and its traceback is kept in a file.
    """
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("dptune").setLevel(logging.INFO)  # Prefect, if it was first, lets only warnings through
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error") == "error":
        logging.getLogger("transformers").setLevel(logging.ERROR)  # imported already, it has read the variable
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    try:
        private_directory(DATA)
        share_checkout()
        if Path(".dvc").is_dir():
            # DVC makes its copies readable to all; the folder around them keeps others out.
            private_directory(Path(".dvc") / "cache")
        work()
    except (DptuneError, OSError) as error:
        say_error(last_error(error))
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("stopped; run again to go on", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        keep_failure(error)
        say_error(unknown_failure(error))
        raise SystemExit(1) from error


def say_error(sentence: str) -> None:
    """Print the last line of a command that failed, and write it to the file that ``ERROR_FILE`` names, if any."""
    if file := os.environ.get(ERROR_FILE):
        with suppress(OSError):  # a full disk, say, which the sentence may be about
            write_text(Path(file), f"error: {sentence}\n")
    print(f"error: {sentence}", file=sys.stderr)


def last_error(error: DptuneError | OSError) -> str:
    """The sentence of an error that the user can fix."""
    if isinstance(error, DptuneError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    fix = "free space or make it writable"
    if isinstance(error, FileNotFoundError):
        fix = "run `dvc repro`, which makes it"
    elif isinstance(error, PermissionError):
        fix = "change its permissions or those of its folder"
    return f"{where}{error.strerror or error}. Fix: {fix}."


def unknown_failure(error: BaseException) -> str:
    """The sentence of an error that nobody foresaw."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    return f"{what}. Fix: the traceback is in {FAILURES}; run again to go on, and report it if it comes back."


def keep_failure(error: BaseException) -> None:
    """Add an error's traceback to the file of failures, for the owner's eyes only."""
    keep_text("".join([f"{' '.join(sys.orig_argv)}\n", *traceback.format_exception(error), "\n"]))


def keep_text(text: str) -> None:
    """Add a text to the file of failures, for the owner's eyes only."""
    with suppress(OSError):
        descriptor = os.open(FAILURES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
