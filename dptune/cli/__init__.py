"""Tune a model on your records; price a mechanism, calibrate it, search its noise, audit it, and verify a ledger.

Each file holds a group of commands. A command imports the library when it runs, so that help and completion answer at
once.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dptune import __version__
from dptune.cli.answer_commands import generate, sample, score, serve
from dptune.cli.audit_commands import audit, audit_draw, audit_run
from dptune.cli.console import Group, reports_errors
from dptune.cli.ledgers import export, set_aside, spent, verify
from dptune.cli.mechanisms import mechanisms
from dptune.cli.pricing import account, calibrate, samplers, search
from dptune.cli.suggest import suggest
from dptune.cli.tune import tune

# rich is off: its box would make a border the last line of an error, and its markup would swallow brackets in help,
# such as [data/search]. Tracebacks show no local variables, which may be secret.
app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"dptune {__version__}")
        raise typer.Exit


@app.callback(help=(__doc__ or "").partition("\n")[0])
@reports_errors
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="Your own module with mechanisms, in addition to the modules in DPTUNE_PLUGINS."),
    ] = None,
) -> None:
    """Handle the options that belong to no command."""
    # Threads that wait sleep instead of spinning: beside other work on the same cores a step took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if plugin or os.environ.get("DPTUNE_PLUGINS"):
        from dptune.core.plugins import load, load_variable

        load(plugin or (), "--plugin")
        load_variable()


for _command in (
    tune,
    suggest,
    sample,
    score,
    account,
    calibrate,
    search,
    audit,
    audit_draw,
    audit_run,
    verify,
    export,
    spent,
    mechanisms,
    samplers,
    set_aside,
    generate,
    serve,
):
    # Typer cuts the first line of a docstring short, so the help's text is set here as a whole.
    app.command(short_help=(_command.__doc__ or "").partition("\n")[0])(reports_errors(_command))
