"""``dptune mechanisms``, and the names that commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from dptune.core.errors import ConfigError


def summaries() -> dict[str, str]:
    """One line by name for each mechanism, and for each protocol that has a price but trains no adapter."""
    from dptune.mechanisms.registry import MECHANISMS
    from dptune.policy import method
    from dptune.prediction.protocols import SUMMARIES

    registered = {name: listed.summary for name, listed in MECHANISMS.items()}
    return {**registered, **SUMMARIES, method.NAME: method.SUMMARY}


def completions(incomplete: str) -> list[str]:
    """The names that begin with ``incomplete``, for a shell's completion."""
    return [name for name in summaries() if name.startswith(incomplete)]


def check_mechanism(name: str) -> None:
    """Check that ``name`` is a registered mechanism. Raises: ConfigError if not."""
    from dptune.mechanisms.registry import MECHANISMS
    from dptune.prediction.protocols import PROTOCOLS

    if name in PROTOCOLS:
        raise ConfigError("mechanism", f"{name} answers and trains nothing", fix="use account or calibrate with it")
    if name not in MECHANISMS:
        fix = f"use one of {', '.join(summaries())}; a plug-in's takes `dptune --plugin MODULE`"
        raise ConfigError("mechanism", f"unknown mechanism {name!r}", fix=fix)


def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="Mechanism whose options are shown.", autocompletion=completions)
    ] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="List clippers, noises and controllers instead of mechanisms.")
    ] = False,
) -> None:
    """List the mechanisms, the `--set` options of one mechanism, or all parts that can be combined."""
    if parts:
        if name is not None:
            raise ConfigError("--parts", f"lists all parts, not only those of {name}", fix="leave one of them out")
        _show_parts()
        return
    known = summaries()
    if name is not None and name not in known:
        check_mechanism(name)
    for key in [name] if name else known:
        typer.echo(f"{typer.style(key, bold=True)}: {known[key]}")
    if name:
        _show_options(name)


def _show_parts() -> None:
    from dptune.mechanisms.descriptions import describe_parts

    for part in describe_parts():
        origin = "" if part.module.startswith("dptune.") else f" (plug-in {part.module})"
        typer.echo(f"{part.kind} {typer.style(part.name, bold=True)}{origin}: {part.summary}")
        for option, default, text in part.options:
            typer.echo(f"    {option} ({default or 'empty'}): {text}")


def _show_options(name: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dptune.mechanisms.descriptions import describe_options
    from dptune.mechanisms.options import option_rows
    from dptune.policy import method
    from dptune.prediction.protocols import PROTOCOLS

    others = {**PROTOCOLS, method.NAME: method.Dppg}
    table = Table("--set option", "default", "meaning")
    for row in option_rows(others[name]) if name in others else describe_options(name):
        table.add_row(*map(Text, row))
    Console().print(table)
