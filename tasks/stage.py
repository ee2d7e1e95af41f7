"""What every stage does around its work: privacy of files, logging, and errors without tracebacks."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from dptune.cli.console import Command
from dptune.errors import DptuneError
from dptune.files import private_directory
from tasks.paths import DATA

#: Exit status of an error that trying again cannot mend.
USER_ERROR = 2


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
    """Run a stage's work; a problem that the user can fix ends it with a message and status 2."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("dptune").setLevel(logging.INFO)  # Prefect, if it was first, lets only warnings through
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    try:
        private_directory(DATA)
        if Path(".dvc").is_dir():
            # DVC makes its copies readable to all; the folder around them keeps others out.
            private_directory(Path(".dvc") / "cache")
        work()
    except DptuneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        missing = isinstance(error, FileNotFoundError)
        fix = "run `dvc repro`, which makes it" if missing else "free space or make it writable"
        print(f"error: {where}{error.strerror or error}. Fix: {fix}.", file=sys.stderr)
        sys.exit(USER_ERROR)
