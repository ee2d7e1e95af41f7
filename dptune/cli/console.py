"""Console of all commands: errors without tracebacks, results as a table or as JSON, messages that name the option."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from logging import LogRecord
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from dptune.core.declarations import declared
from dptune.core.digits import at_least, at_most
from dptune.core.errors import DptuneError, problem_of
from dptune.job.settings import RENAMED, TuneSettings

#: The usage error of click, or of typer's own copy of click.
_UsageError: Any = typer.BadParameter.__mro__[1]
_DIGITS = 6
#: Names of prices and of noise, and of those among them that an attack showed or could have shown.
_PRICE = re.compile(r"(^|_)(epsilon|delta|mu|certified|noise_multiplier)($|_)")
_SHOWN = re.compile(r"_(audited|alarm|refutable|at_least)$")


class Group(TyperGroup):
    """A group of commands that reports a wrong command line in the same style as all other errors."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command, and end the process."""
        return _run_and_exit(super().main, *args, **extra)


class Command(TyperCommand):
    """A single command that reports a wrong command line as ``Group`` does."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command, and end the process."""
        return _run_and_exit(super().main, *args, **extra)


def _run_and_exit(run: Callable[..., Any], *args: Any, **extra: Any) -> Any:
    if not extra.setdefault("standalone_mode", True):
        return run(*args, **extra)
    try:
        status = run(*args, **(extra | {"standalone_mode": False}))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # raised to show the help; it has no message of its own
            error.show()
        else:
            notice("error", _sentence(error))
        sys.exit(error.exit_code)
    except typer.Abort:  # Ctrl-C, as older versions of click have it
        sys.exit(130)
    sys.exit(status)


def _sentence(error: Any) -> str:
    """The message for a wrong command line, with its fix."""
    problem = error.format_message().partition(" (Possible options")[0]
    if hasattr(error.__cause__, "errors"):  # newer versions of typer pass on pydantic's own words
        problem = problem.replace(error.message, problem_of(error.__cause__.errors()[0]))
    if problem.endswith(("is not readable", "is not readable.", "is not writable", "is not writable.")):
        return f"{problem.rstrip('.')}. Fix: change its permissions, or give another path."
    near = "".join(f"use {name}, or " for name in sorted(getattr(error, "possibilities", None) or ())[:1])
    return f"{problem.rstrip('.')}. Fix: {near}see `{error.ctx.command_path if error.ctx else 'dptune'} --help`."


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that an error that the user can fix ends it with status 2 and one sentence."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except DptuneError as error:
            notice("error", str(error))
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise  # the reader, such as `head`, closed the pipe: typer ends without a message
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
    """Log the progress of long work if there is no terminal to draw a bar on."""
    if not sys.stderr.isatty():
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dptune.core.progress").setLevel(logging.INFO)


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as lines of name and value, or as one JSON object."""
    if as_json:
        typer.echo(json.dumps({key: _json_number(value) for key, value in result.items()}, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for key, value in result.items():
        table.add_row(key, Text(_text(key, value)))
    Console().print(table)


def _text(key: str, value: Any) -> str:
    """A value in words. A price is rounded up, and what an attack showed down: neither promises too much. So is noise:
    whoever types the multiplier that is printed gets no more than the epsilon that is printed with it."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(name, one)}" for name, one in value.items())
    if isinstance(value, list):
        texts = isinstance(value[0], str) if value else True
        return ("; " if texts else ", ").join(_text(key, one) for one in value) or "none"
    if not isinstance(value, float):
        return "none" if value is None else str(value)
    if not math.isfinite(value) or not _PRICE.search(key):
        return f"{value:.{_DIGITS}g}"
    return (at_least if _SHOWN.search(key) else at_most)(value, _DIGITS)


def _json_number(value: Any) -> Any:
    """A value for JSON, which has no infinity, inside lists and tables neither."""
    if isinstance(value, dict):
        return {name: _json_number(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_number(one) for one in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


# Messages of the library in the words of ``dptune tune``, and its logs.


#: Options whose name is not the setting's.
_FLAGS = {"options": "--set", "words": "--word", "init_lora_weights": "--init"}


def flag(name: str) -> str:
    """The option of a setting."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


_SETTINGS = {name: flag(name) for name in (*declared(TuneSettings), *RENAMED)}
#: The option of this command for each name that messages of the library use.
_OPTIONS = {
    # A name without an underscore is an English word too, and replaced only at the beginning of a message.
    **{name: option for name, option in _SETTINGS.items() if "_" in name},
    **{f"{section}.{name}": option for name, option in _SETTINGS.items() for section in ("training", "lora", "task")},
    "data.text": "--text",
    "data.prompt": "--prompt",
    "data.completion": "--completion",
    "data.messages": "--messages",
    "data.template": "--template",
    "data.label": "--label",
    "data.format": "--format",
    "data.records_are": "--records-are",
    "data.unit": "--unit",
    "data.public": "--public",
    "data.split": "--eval-share",
    "data.revision": "datasets saved to a folder",
    "model.source": "--model",
    "model.revision": "--revision",
    "model.load_in_4bit": "--load-in-4bit",
    "model.dtype": "--dtype",
    "options.": "--set ",
    "canaries.crafted": "--audit-canaries",
    "search.again": "--again",
    "search.candidates": "--candidates",
    "search.shape": "--shape",
    "source.": "--source-set ",
    "data.options": "--source-set",
    "decoding.max_new_tokens": "--max-new-tokens",
    "decoding.no_repeat_ngram": "--no-repeat-ngram",
    "decoding.length_penalty": "--length-penalty",
    "decoding.top_p": "--top-p",
    "decoding.": "--",
    "max_new_tokens": "--max-new-tokens",
    "no_guarantee": "--no-guarantee",
    "mauve_model": "--mauve-model",
}
#: Names that are English words too: they are replaced only at the beginning of a message.
_WORDS = {name: option for name, option in _SETTINGS.items() if "_" not in name} | {
    name: f"--{name}"
    for name in ("data", "model", "source", "public", "out", "records", "prompts", "metrics", "outputs", "block")
}
#: What follows a name that is part of a path: a user's file may be called data.prompt.jsonl. A key may follow too
#: (lora.rank_pattern.q_proj), which makes no path.
_OF_A_PATH = r"(?:\.(?:jsonl?|csv|tsv|txt|parquet|arrow|yaml|gguf)\b|/)"
_NAMES = re.compile(
    "|".join(rf"(?<![\w./-]){re.escape(name)}\b(?!{_OF_A_PATH})" for name in sorted(_OPTIONS, key=len, reverse=True))
)


def check_command(adapter: Path) -> str:
    """The sentence that says how to check an adapter, with a command for the shell."""
    return f"Check it: dptune verify {shlex.quote(str(adapter))}"


def by_option(message: str) -> str:
    """A message of the library, with names of fields replaced by this command's options."""
    field, colon, rest = message.partition(": ")
    if field.startswith("search.space"):  # names within the file of the space
        return message
    named = f"{_WORDS[field]}: {rest}" if colon and rest and field in _WORDS else message
    return _NAMES.sub(lambda found: _OPTIONS[found[0]], named)


#: Warnings that would mislead a user of this command, by the logger that gives them.
_MISLEADING = {
    "transformers.modeling_utils": (
        "passing in an `attention_mask`",  # its own `generate` passes none where nothing is to be hidden
        "ForTokenClassification LOAD REPORT",
        "ForSequenceClassification LOAD REPORT",  # a missing head is the adapter's; any other gap is refused
    ),
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),  # of a layout that dptune does not use
}


def set_up_logs() -> None:
    """Show progress, and hide warnings that are meant for developers of other libraries."""
    import logging
    import warnings

    for name, parts in _MISLEADING.items():
        logging.getLogger(name).addFilter(partial(_is_for_users, parts))
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # PEFT's, of transformers
    show_progress()


def _is_for_users(misleading: tuple[str, ...], record: LogRecord) -> bool:
    return not any(part in record.getMessage() for part in misleading)
