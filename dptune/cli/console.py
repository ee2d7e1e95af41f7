"""What every command does: errors without tracebacks, and results as a table or as JSON."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import typer

from dptune.errors import DptuneError


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
