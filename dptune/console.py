"""What every command does: errors without tracebacks, and results as a table or as JSON."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dptune.errors import DptuneError


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A command that ends with status 2 and one sentence where the user can fix something."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except DptuneError as error:
            Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            problem = f"{where}{error.strerror or error}. Fix: free space, or make it readable and writable."
            Console(stderr=True).print(f"[red]error:[/red] {escape(problem)}", soft_wrap=True)
            raise typer.Exit(2) from None

    return run


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print names and values."""
    if as_json:
        typer.echo(json.dumps({key: _json_number(value) for key, value in result.items()}, allow_nan=False))
        return
    table = Table(show_header=False)
    for key, value in result.items():
        table.add_row(key, _text(value))
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, list):
        texts = isinstance(value[0], str) if value else True
        return ("; " if texts else ", ").join(map(_text, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and math.isinf(value) else value
