"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

import typer

from docs.generate.tables import code, plain, table
from dptune.cli import app

_ABOUT = """# Command line

You get every command and option of `dptune`, as `dptune COMMAND --help` prints them. This page is generated
from them.

    dptune --help
    dptune --install-completion         # the shell then completes commands and mechanisms

Every command ends with status 0, or with status 2 and a last line that names the option, the cause and the fix;
`dptune audit` and `dptune audit-run` end with status 1 if they accuse what they attack, `dptune verify` where no
epsilon is certified. `--json`, where a command has it, prints one JSON object for scripts. `--plugin MODULE` before the
command (`dptune --plugin my_parts account ...`) or the variable `DPTUNE_PLUGINS` adds [parts of your
own](../howto/plugins.md).
"""
#: What the help of an option ends with: "[default: 8000; 1<=x<=65535]", "[x>=1; required]".
_FACTS = re.compile(r"\s*\[([^\[\]]*(?:required|default: |x)[^\[\]]*)\]$")
_HEAD = ("argument or option", "default", "meaning")


def page() -> str:
    """The page in Markdown."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("dptune", [], resilient_parsing=True)
    common = "\n## Before the command\n\n" + table(_HEAD, [_row(parameter, context) for parameter in group.params])
    sections = [_section(name, group.get_command(context, name), context) for name in group.list_commands(context)]
    return _ABOUT + "".join(sections) + common


def _section(name: str, command: Any, parent: Any) -> str:
    context = type(parent)(command, info_name=name, parent=parent)
    usage = " ".join(["dptune", name, *command.collect_usage_pieces(context)])
    rows = [_row(one, context) for one in command.params if not getattr(one, "hidden", False)]
    about = plain(command.help or command.short_help)
    return f"\n## {name}\n\n{about}\n\n    {usage}\n\n" + table(_HEAD, rows)


def _row(parameter: Any, context: Any) -> tuple[str, str, str]:
    names, text = parameter.get_help_record(context)
    text = " ".join(text.split())
    found = _FACTS.search(text)
    if found is None:
        return code(names), "", plain(text)
    default, bounds = "", ""
    for fact in found.group(1).split("; "):
        if fact == "required":
            default = fact
        elif fact.startswith("default: "):
            default = code(fact.removeprefix("default: "))
        else:
            bounds = f" ({code(fact)})"
    return code(names), default, plain(text[: found.start()]) + bounds
