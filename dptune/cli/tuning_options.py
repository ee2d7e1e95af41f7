"""Options that are made of the fields of ``TuneSettings``, and those about columns that several commands share.

A field's name, type, default and sentence become the option. Only what a command line cannot know of a type is written
here: short flags that options had before, and how a text becomes a mapping or a list.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, get_origin

import typer

from dptune.cli.console import notice
from dptune.cli.mechanisms import completions
from dptune.cli.options import read_options
from dptune.cli.tune_messages import by_option, flag
from dptune.core.declarations import Declared, declared, differing
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.lora import Lora
from dptune.core.step_settings import ScheduleSettings
from dptune.job.settings import RENAMED, TuneSettings

Completion = Annotated[str | None, typer.Option(help="Column of completions.")]
Messages = Annotated[str | None, typer.Option(help="Column of chats.")]
Model = Annotated[
    str, typer.Option(help="Folder of a checkpoint, GGUF file, package:NAME, or a hub id with --revision.")
]
Prompt = Annotated[str | None, typer.Option(help="Column of prompts, which have no loss.")]
Revision = Annotated[str | None, typer.Option(help="Commit of a hub id, in 40 digits.")]
Template = Annotated[
    str | None, typer.Option(help="Text with columns in braces: '{age} years'. {text} is the column of --text.")
]
Text = Annotated[str | None, typer.Option(help="Column of texts.")]

_SHARED = {**declared(ScheduleSettings), **declared(Lora)}
_NAMES = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")
#: What is the run's own comes before what all runs have.
_OWN_FIRST = dict(sorted(declared(TuneSettings).items(), key=lambda item: item[0] in _SHARED))
Command = Callable[..., None]


def takes_settings(*names: str) -> Callable[[Command], Command]:
    """Decorator that gives a command an option for each of these settings, or for all of ``TuneSettings``.

    The command gets their values by name in its argument ``settings``. Former names of options still work, with a
    warning. Messages of errors name options in place of settings.
    """
    chosen = {name: one for name, one in _OWN_FIRST.items() if not names or name in names}
    former = {old: chosen[new] for old, new in RENAMED.items() if new in chosen}
    made = [_parameter(name, one) for name, one in chosen.items()]
    made += [_parameter(old, one, hidden=True) for old, one in former.items()]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        before = [one for name, one in own.items() if name != "settings"]
        place = list(own).index("settings")

        @functools.wraps(command)
        def run(**given: Any) -> None:
            try:
                settings = {name: _read(one, given.pop(name)) for name, one in chosen.items()}
                for old, one in former.items():
                    if (value := given.pop(old)) is not None:
                        notice("warning", f"--{old} is the former name of {flag(one.name)}: use that")
                        settings[one.name] = value
                command(**given, settings=settings)
            except DptuneError as error:
                raise DptuneError(by_option(str(error))) from None

        ordered = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in before[:place] + made + before[place:]]
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in ordered}
        return run

    return decorate


def arguments_of(settings: TuneSettings, names: Iterable[str]) -> list[str]:
    """The words of a command line that give those of these settings that differ from their defaults."""
    changed = {name: value for name, value in differing(settings).items() if name in names}
    words: list[str] = []
    for name, value in changed.items():
        if isinstance(value, Mapping):
            words += [word for key, one in value.items() for word in (flag(name), f"{key}={one}")]
        elif isinstance(value, bool):
            words += [flag(name)]
        else:
            words += [flag(name), ",".join(value) if isinstance(value, tuple) else exact(value)]
    return words


def exact(value: Any) -> str:
    """A setting as a command takes it: all digits of a number, for one that was rounded would be another."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _parameter(name: str, one: Declared, *, hidden: bool = False) -> inspect.Parameter:
    """The parameter of a command from which typer makes the option of a setting."""
    kind, default = _typed(one)
    more: dict[str, Any] = {"autocompletion": completions} if name == "mechanism" else {}
    flags = dict.fromkeys((flag(name), f"--{name.replace('_', '-')}")) if name == "init_lora_weights" else (flag(name),)
    option = typer.Option(*flags, help=_help(one), hidden=hidden, **more)
    if hidden:
        kind, default = kind | None, None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _help(one: Declared) -> str:
    """The sentence of a setting, and what is particular to a command line."""
    if get_origin(one.choices[0]) is Mapping:
        return f"{one.sentence} Repeatable: KEY=VALUE."
    chosen = one.may_be_left_open and one.name in _SHARED and not _SHARED[one.name].may_be_left_open
    return f"{one.sentence} Left out: chosen from public facts." if chosen else one.sentence


def _typed(one: Declared) -> tuple[Any, Any]:
    """Type and default of an option; a mapping is a list of texts, and what typer has no type for is a text."""
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    kind, *others = one.choices
    if get_origin(kind) is Mapping:
        return list[str] | None, None
    if others or get_origin(kind) is tuple:
        kind, default = str, "true" if default is True else default
    return (kind | None if one.may_be_left_open else kind), default


def _read(one: Declared, given: Any) -> Any:
    """The value of a setting from what its option was given."""
    if given is None or given == []:
        return one.default
    if one.name == "options":
        return read_options(given)
    if one.name == "words":
        return words_of_labels(given)
    if one.name == "labels":
        return named_labels(given)
    kinds = one.choices
    if get_origin(kinds[0]) is Mapping:
        return _pattern(one.name, given)
    if get_origin(kinds[0]) is tuple:
        return _modules(given)
    return True if len(kinds) > 1 and given == "true" else given


def named_labels(given: str) -> tuple[Any, ...]:
    """Labels from a text with commas, or from a list in JSON, where a label holds a comma."""
    if not given.lstrip().startswith("["):
        return tuple(name.strip() for name in given.split(","))
    try:
        return tuple(json.loads(given))
    except ValueError:
        raise ConfigError(
            "--labels", f"{given!r} is not a list in JSON", fix='write ["one, label", "another"]'
        ) from None


def words_of_labels(given: list[str]) -> dict[str, str]:
    """Each label's word, with the space at its beginning."""
    found: dict[str, str] = {}
    for text in given:
        label, sign, word = text.partition("=")
        if not (sign and label.strip() and word):
            problem = f"{text!r} is not of the form LABEL=WORD"
            raise ConfigError("task.words", problem, fix='write a label, = and its word, such as 0=" poor"')
        if label.strip() in found:
            raise ConfigError("task.words", f"label {label.strip()!r} is given twice", fix="give it one word")
        found[label.strip()] = word
    return found


def _modules(given: str) -> tuple[str, ...] | str:
    """Names of layers from a text with commas. What else is given is a regular expression, as PEFT takes texts."""
    if given == "all-linear" or not _NAMES.fullmatch(given):
        return given
    return tuple(name.strip() for name in given.split(","))


def _pattern(field: str, given: list[str]) -> dict[str, int]:
    """Numbers by names of layers, which are regular expressions and may hold ``=``."""
    found = {}
    for text in given:
        name, sign, number = text.rpartition("=")
        if not (sign and name and number.strip().isdigit()):
            fix = "write the layer's name, = and a whole number, such as q_proj=4"
            raise ConfigError(field, f"{text!r} is not of the form NAME=NUMBER", fix=fix)
        if name in found:
            raise ConfigError(field, f"{name!r} is given twice", fix="give it once")
        found[name] = int(number)
    return found
