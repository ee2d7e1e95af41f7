"""Tune a model on your records; price a mechanism, calibrate it, search its noise, audit it, and verify a ledger.

One file a group of commands. What a command needs of the library it imports when it runs, so that help and
completion answer at once.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dptune import __version__
from dptune.cli.catalogue import mechanisms
from dptune.cli.console import Group, reports_errors
from dptune.cli.ensembles import generate, serve
from dptune.cli.ledgers import set_aside, verify
from dptune.cli.noise_search import search
from dptune.cli.pricing import account, calibrate
from dptune.cli.step_audit import audit
from dptune.cli.tune import tune

# Without rich's boxes: of a wrong option, the last line is the error and not a border, and help keeps what is written
# in brackets, such as [data/search], which rich takes for markup. Tracebacks show no local variables: they may be
# secret.
app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dptune {__version__}")
        raise typer.Exit


@app.callback(help=(__doc__ or "").partition("\n")[0])
@reports_errors
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
    plugin: Annotated[
        list[str] | None, typer.Option(help="Module of yours with mechanisms, beside those that DPTUNE_PLUGINS names.")
    ] = None,
) -> None:
    """Take the options that belong to no command."""
    if plugin or os.environ.get("DPTUNE_PLUGINS"):
        from dptune.plugins import load, load_variable

        load(plugin or (), "--plugin")
        load_variable()


for _command in (tune, account, calibrate, search, audit, verify, mechanisms, set_aside, generate, serve):
    # The whole first line: what is taken from a docstring otherwise is cut off.
    app.command(short_help=(_command.__doc__ or "").partition("\n")[0])(reports_errors(_command))
