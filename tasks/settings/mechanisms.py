"""The section `mechanisms`: entries of options by label, with sweeps and what differs on one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from dptune.core.declarations import LearningRate
from dptune.core.errors import ConfigError, problem_of
from dptune.core.settings import TrainedWeights, UpdateRule
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.options import option_names
from dptune.mechanisms.registry import build, takes_noise
from dptune.privacy.run_header import ACCOUNTINGS
from tasks.settings.experiment import RULE, TRAINED, Epsilons, Experiment
from tasks.settings.strict import PlainNumbers, combinations

_UPDATE_RULE: TypeAdapter[UpdateRule] = TypeAdapter(Annotated[UpdateRule, PlainNumbers()])
_LEARNING_RATE: TypeAdapter[float] = TypeAdapter(Annotated[LearningRate, PlainNumbers()])
_EPSILONS: TypeAdapter[tuple[float, ...]] = TypeAdapter(Annotated[Epsilons, PlainNumbers()])


def options_on(entry: dict[str, Any], model: str) -> dict[str, Any]:
    """A mechanism's entry on one base model; its ``on_model: {MODEL: {OPTION: VALUE}}`` says what differs there."""
    special = entry.get("on_model", {}).get(model, {})
    return {key: value for key, value in entry.items() if key != "on_model"} | special


def learning_rate_of(options: dict[str, Any]) -> float | None:
    """Take ``learning_rate`` out of a mechanism's entry; None if the entry has none, so that training's applies.

    Raises: ConfigError if it is out of range.
    """
    if (rate := options.pop("learning_rate", None)) is None:
        return None
    try:
        return float(_LEARNING_RATE.validate_python(rate))
    except ValidationError:
        raise ConfigError(
            "learning_rate", f"{rate!r} is not within 0 and 10", fix="use a number such as 0.01"
        ) from None


def rule_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of the update rule out of a mechanism's entry; those that it lacks are training's.

    Raises: ConfigError naming the one that is unknown or out of range.
    """
    own = {name: options.pop(name) for name in RULE if name in options}
    try:
        _UPDATE_RULE.validate_python(own)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "optimizer"
        raise ConfigError(field, problem_of(first), fix="see `training` in params.yaml") from None
    return own


def trained_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take what trains out of a mechanism's entry, so that one study compares adapters with a model's own weights.

    Raises: ConfigError for what cannot train.
    """
    own = {name: options.pop(name) for name in TRAINED if name in options}
    if own:
        TrainedWeights(**own)
    return own


def epsilons_of(options: dict[str, Any]) -> tuple[float, ...] | None:
    """Take ``epsilons`` out of a mechanism's entry; None if the entry has none, so that the experiment's apply.

    An empty list takes the budget from an entry whose noise is given: its run then ends where its steps end.

    Raises: ConfigError unless they are numbers above 0, each once, or an empty list where no noise is given.
    """
    if (own := options.pop("epsilons", None)) is None:
        return None
    try:
        found = _EPSILONS.validate_python(own)
    except ValidationError as error:
        problem = problem_of(error.errors()[0])
        raise ConfigError("epsilons", f"{own!r}: {problem}", fix="write a list such as [1, 8]") from None
    if not found and "noise_multiplier" not in options:
        problem = "is empty, and no noise_multiplier is given"
        raise ConfigError("epsilons", problem, fix="leave it out for the experiment's, or write a list such as [1, 8]")
    return found


def own_epsilons(entries: Mapping[str, dict[str, Any]], experiment: Experiment) -> dict[str, tuple[float, ...]]:
    """The epsilons of those of the experiment's entries that name their own, by label, on whichever model."""
    found: dict[str, tuple[float, ...]] = {}
    for name in experiment.mechanisms:
        versions = [epsilons_of(options_on(entries[name], model)) or () for model in experiment.models]
        found[name] = tuple(dict.fromkeys(epsilon for own in versions for epsilon in own))
    return {name: epsilons for name, epsilons in found.items() if epsilons}


def check_entry(name: str, entry: dict[str, Any], experiment: Experiment) -> bool:
    """Check an entry, and return whether it needs the experiment's budgets. What no cell uses is checked less strictly.

    Raises: ConfigError if the mechanism cannot be built, or cannot meet its accounting.
    """
    special = entry.get("on_model", {})
    if not (isinstance(special, dict) and all(isinstance(options, dict) for options in special.values())):
        raise ConfigError("on_model", "is not a table of models", fix="write on_model: {MODEL: {OPTION: VALUE}}")
    in_experiment, models = name in experiment.mechanisms, experiment.models
    if in_experiment and (unknown := [model for model in special if model not in models]):
        raise ConfigError("on_model", f"{unknown[0]!r} is not a model", fix=f"use one of {', '.join(models)}")
    versions = [options_on(entry, ""), *(options_on(entry, model) for model in models if model in special)]
    needs = [_check_options(name, options, experiment.accounting, in_experiment=in_experiment) for options in versions]
    return any(needs)


def _check_options(name: str, options: dict[str, Any], default_accounting: str, *, in_experiment: bool) -> bool:
    accounting = options.pop("accounting", default_accounting)
    learning_rate_of(options)
    rule_of(options)
    trained_of(options)
    own_epsilons = epsilons_of(options)
    if accounting not in ACCOUNTINGS:
        raise ConfigError("accounting", f"unknown {accounting!r}", fix=f"use one of {', '.join(ACCOUNTINGS)}")
    if options.get("init_from") == "":
        raise ConfigError("init_from", "is an empty text", fix="give a finished run's controller/ folder")
    needs_budget = takes_noise(name, options) and "noise_multiplier" not in options
    mechanism = build(name, options | ({"noise_multiplier": 1.0} if needs_budget else {}))
    _refuse_texts(options, mechanism)
    leaks = mechanism.controller.raw_inputs
    if needs_budget and in_experiment and leaks and accounting == "certified":
        problem = f"leaks ({'; '.join(leaks)}), so no noise reaches a certified budget"
        raise ConfigError("accounting", problem, fix="give its entry accounting: published, or noise_only")
    if own_epsilons and not needs_budget:
        raise ConfigError("epsilons", "no noise of this mechanism is calibrated", fix="leave it out, or write []")
    return needs_budget and not own_epsilons


def _refuse_texts(options: Mapping[str, Any], mechanism: Mechanism) -> None:
    """Raise ConfigError for a text that an option of ``mechanism`` read as a number, or as true or false.

    The library reads ``"8"`` as 8, because a command line has nothing but texts. In a file it is a slip, and would give
    a cell another name than 8 does, under which it trains and pays once more.
    """
    parts = (mechanism.clipper, mechanism.noise, mechanism.controller)
    read = {name: getattr(part, name) for part in parts for name in option_names(type(part))} | {
        "pairs": mechanism.pairs
    }
    for name, given in options.items():
        if _holds_text(given) and name in read and not _holds_text(read[name]):
            what = "neither true nor false" if isinstance(read[name], bool) else "not a number"
            raise ConfigError(name, f"{given!r} is {what}, but a text", fix="write it without quotes")


def _holds_text(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, str | bytes | bytearray) for item in items)


def with_more_epsilons(content: dict[str, Any]) -> dict[str, Any]:
    """The file's content where ``{static: [1, 8]}`` among ``experiment.mechanisms`` is ``static``, at 1 and 8 too.

    The list has them, and not the entry, because a profile or a form that lists its own mechanisms means no others.

    Raises: ValueError for a table that is no label with a list of epsilons.
    """
    mechanisms, experiment = content.get("mechanisms"), content.get("experiment")
    if not (isinstance(mechanisms, dict) and isinstance(experiment, dict)):
        return content
    chosen = experiment.get("mechanisms")
    if not isinstance(chosen, list | tuple):
        return content
    labels, entries = [], dict(mechanisms)
    for one in chosen:
        if isinstance(one, dict):
            (name, more), *others = one.items() or [("", None)]
            if others or not isinstance(more, list | tuple):
                problem = f"{one} is neither a label nor a label with a list of more epsilons"
                raise ValueError(f"experiment.mechanisms: {problem}; write static, or {{static: [1, 8]}}")
            if isinstance(entry := entries.get(name), dict):  # otherwise it is refused later, by its name
                usual = experiment.get("epsilons")
                entries[name] = _at_more(entry, usual, more)
                if isinstance(special := entry.get("on_model"), dict):
                    own = {model: one for model, one in special.items() if isinstance(one, dict) and "epsilons" in one}
                    entries[name]["on_model"] = special | {m: _at_more(one, usual, more) for m, one in own.items()}
            one = name
        labels.append(one)
    return content | {"mechanisms": entries, "experiment": experiment | {"mechanisms": labels}}


def _at_more(options: dict[str, Any], usual: Any, more: Sequence[Any]) -> dict[str, Any]:
    """The options with more epsilons beside their own, or beside the experiment's, which an entry without any has."""
    own = usual if options.get("epsilons") is None else options["epsilons"]
    known = own if isinstance(own, list | tuple) else ()  # otherwise it is refused later
    # True equals 1: left out as known, it would not be refused.
    return options | {"epsilons": [*known, *(one for one in more if isinstance(one, bool) or one not in known)]}


def with_sweeps(content: dict[str, Any]) -> dict[str, Any]:
    """The file's content with one entry for every combination of an entry's ``sweep: {option: [values]}``.

    ``experiment.mechanisms`` then names these entries. Raises: ValueError for a sweep that is no table of lists.
    """
    mechanisms, experiment = content.get("mechanisms"), content.get("experiment")
    if not (isinstance(mechanisms, dict) and isinstance(experiment, dict)):
        return content
    entries: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for name, entry in mechanisms.items():
        versions = _versions(name, entry) if isinstance(entry, dict) and "sweep" in entry else {name: entry}
        entries |= versions
        names[name] = list(versions)
    chosen = experiment.get("mechanisms")
    if isinstance(chosen, list | tuple):
        experiment = experiment | {
            "mechanisms": [new for old in chosen for new in (names.get(old, [old]) if isinstance(old, str) else [old])]
        }
    return content | {"mechanisms": entries, "experiment": experiment}


def _versions(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    try:
        found = combinations(entry["sweep"] or None)
    except ValueError as error:
        raise ValueError(f"mechanisms.{name}.sweep: {error}") from None
    fixed = {"like": name} | {key: value for key, value in entry.items() if key != "sweep"}
    return {"_".join([name, *(f"{key}{value}" for key, value in one.items())]): fixed | one for one in found}
