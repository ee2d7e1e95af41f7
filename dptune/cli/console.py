"""What every command does: errors without tracebacks, and results as a table or as JSON."""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from dptune.errors import DptuneError
from dptune.invalid import problem_of

#: Click's error for a wrong command line; where typer brings its own copy of click, that copy's.
_UsageError: Any = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    """A group of commands whose command line, if it is wrong, is refused as anything else is."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command, and end the process."""
        return _ended(super().main, *args, **extra)


class Command(TyperCommand):
    """A single command with the same refusals as ``Group``."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command, and end the process."""
        return _ended(super().main, *args, **extra)


def _ended(run: Callable[..., Any], *args: Any, **extra: Any) -> Any:
    if not extra.setdefault("standalone_mode", True):
        return run(*args, **extra)
    try:
        status = run(*args, **(extra | {"standalone_mode": False}))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it says no more than the help
            error.show()
        else:
            notice("error", _sentence(error))
        sys.exit(error.exit_code)
    except typer.Abort:  # Ctrl-C, as older versions of click have it
        sys.exit(130)
    sys.exit(status)


def _sentence(error: Any) -> str:
    """A wrong command line, with the fix."""
    problem = error.format_message().partition(" (Possible options")[0]
    if hasattr(error.__cause__, "errors"):  # pydantic's, whose words newer versions of typer pass on as they are
        problem = problem.replace(error.message, problem_of(error.__cause__.errors()[0]))
    near = "".join(f"use {name}, or " for name in sorted(getattr(error, "possibilities", None) or ())[:1])
    return f"{problem.rstrip('.')}. Fix: {near}see `{error.ctx.command_path if error.ctx else 'dptune'} --help`."


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A command that ends with status 2 and one sentence where the user can fix something."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except DptuneError as error:
            notice("error", str(error))
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise  # the reader, `head` say, has what it wants: typer ends quietly
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            fix = "check that the path exists, that you may use it, and that the disk has room"
            notice("error", f"{where}{error.strerror or error}. Fix: {fix}.")
            raise typer.Exit(2) from None

    return run


def notice(kind: str, text: str) -> None:
    """Print ``kind: text`` to standard error, as one line that no terminal's width breaks."""
    colour = typer.colors.YELLOW if kind in ("warning", "stopped") else typer.colors.RED
    typer.echo(f"{typer.style(f'{kind}:', fg=colour)} {text}", err=True)


def show_progress() -> None:
    """Let long work say how far it is where no terminal draws a bar."""
    if not sys.stderr.isatty():
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dptune.progress").setLevel(logging.INFO)


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print names and values."""
    if as_json:
        typer.echo(json.dumps({key: _json_number(value) for key, value in result.items()}, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for key, value in result.items():
        table.add_row(key, Text(_text(value)))
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, list):
        texts = isinstance(value[0], str) if value else True
        return ("; " if texts else ", ").join(map(_text, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and math.isinf(value) else value
