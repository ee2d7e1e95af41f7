"""Options that several commands share, and functions that read them."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer

from dptune.cli.console import by_option, flag, notice
from dptune.cli.mechanisms import completions
from dptune.core.declarations import Declared, assignments, declared, differing
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.settings import Lora, ScheduleSettings
from dptune.job.settings import RENAMED, TuneSettings

if TYPE_CHECKING:
    from dptune.privacy.selection_law import SelectionLaw


Mechanism = Annotated[
    str, typer.Argument(help="Name of the mechanism; `dptune mechanisms` lists them.", autocompletion=completions)
]
SampleRate = Annotated[
    float | None, typer.Option(help="Probability that each unit independently enters a batch (Poisson sampling).")
]
Steps = Annotated[int | None, typer.Option(help="Number of steps.", min=1, max=10**12)]
Records = Annotated[int | None, typer.Option(help="Number of units in the training data.", max=10**15)]
Batch = Annotated[float | None, typer.Option(help="Expected number of units in a batch.")]
Epochs = Annotated[float | None, typer.Option(help="Number of passes over the data.")]
SamplerName = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        help="How units get into batches; `dptune samplers` lists them (default: the mechanism's own).",
    ),
]
MaxBatch = Annotated[
    int | None, typer.Option(help="Number of units that a batch is cut to, for the sampler truncated_poisson.", min=1)
]
DropLast = Annotated[
    bool, typer.Option("--drop-last", help="The sampler shuffle leaves the last, smaller batch of an epoch out.")
]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Options = Annotated[
    list[str] | None, typer.Option("--set", help="Sets an option of the mechanism, as KEY=VALUE; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Candidates = Annotated[
    float | None, typer.Option(help="Average number of candidates to try; only the best is released.")
]
Shape = Annotated[
    float | None,
    typer.Option(
        help="Shape of the distribution of their number: 0 logarithmic, 1 geometric, inf Poisson (default: 2)."
    ),
]
SelectionBound = Annotated[
    Literal["hull", "one_shift"] | None,
    typer.Option(
        "--bound", help="Bound on the cost of a search: hull (default), or one_shift, which is older and looser."
    ),
]
Accounting = Literal["certified", "noise_only", "published"]


def read_options(texts: list[str] | None) -> dict[str, Any]:
    """The mechanism's options by name, values as texts. Raises: ConfigError for one without ``=``, or given twice."""
    return {name: value.strip() for name, value in assignments(texts or []).items()}


def law_of(
    candidates: float | None, shape: float | None, bound: Literal["hull", "one_shift"] | None
) -> SelectionLaw | None:
    """The law of the number of candidates; None where none are asked for. Raises: ConfigError naming the option."""
    from dptune.privacy.selection_law import DEFAULT_SHAPE, SelectionLaw

    if candidates is None:
        for option, value in (("--shape", shape), ("--bound", bound)):
            if value is not None:
                raise ConfigError(
                    option, "is about a search among candidates", fix="give --candidates, or leave it out"
                )
        return None
    try:
        return SelectionLaw.of(candidates, DEFAULT_SHAPE if shape is None else shape)
    except ConfigError as error:
        raise ConfigError(f"--{error.field}", error.problem, fix=error.fix) from None


def refuse_selection(name: str, law: SelectionLaw | None) -> None:
    """Raise ConfigError if a search is asked of ``name``, whose loss distribution is not known."""
    if law is not None:
        problem = f"{name} has no loss distribution, by which a search is priced"
        raise ConfigError("--candidates", problem, fix="leave it out, or take a mechanism of fine-tuning")


def warn_of_delta(delta: float, units: int | None = None) -> None:
    """Warn of a delta that is too large to mean anything."""
    from dptune.privacy.calibration import delta_warning

    if warning := delta_warning(delta, units):
        notice("warning", warning)


def without_noise(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options``. Raises: ConfigError if they set the noise multiplier, which ``calibrate`` finds."""
    if "noise_multiplier" in options:
        raise ConfigError("--set noise_multiplier", "is what calibrate finds", fix="leave it out, or use account")
    return options


def rate_and_steps(sample_rate: float | None, steps: int | None) -> tuple[float, int]:
    """Return both values. Raises: ConfigError naming the option that is missing."""
    if sample_rate is None:
        raise ConfigError("--sample-rate", "is missing", fix="give --sample-rate")
    if steps is None:
        raise ConfigError("--steps", "is missing", fix="give --steps")
    return sample_rate, steps


def sampling_of(
    sample_rate: float | None,
    steps: int | None,
    records: int | None,
    batch: float | None,
    epochs: float | None,
) -> tuple[float, int]:
    """Sample rate and steps: given, or computed from records, batch and epochs. Raises: ConfigError for a mixture."""
    from dptune.privacy.calibration import sampling

    if sample_rate is not None and steps is not None and records is batch is epochs is None:
        return sample_rate, steps
    if records is not None and batch is not None and epochs is not None and sample_rate is steps is None:
        return sampling(records, batch, epochs)
    raise ConfigError(
        "--sample-rate --steps",
        "give these two, or all of --records --batch --epochs",
        fix="choose one of the sets",
    )


def refuse_sampling(name: str, *given: float | str | None) -> None:
    """Refuse options about batches of records for ``name``, which takes none. Raises: ConfigError if any is given."""
    if any(value is not None for value in given):
        problem = f"{name} takes no batches of records"
        raise ConfigError("--sample-rate --steps --records --batch --epochs", problem, fix="use only --set options")


# Options that are made of the fields of ``TuneSettings``, and those about columns that several commands share.


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
    """The options of a command line for the settings that differ from their defaults."""
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
