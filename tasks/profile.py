"""Print a profile (a named set of parameters) as the options with which DVC runs it. Changes no file.

dvc exp run --temp $(python -m tasks.profile profiles/tiny.yaml)     # make repro PROFILE=profiles/tiny.yaml does this
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.core.errors import ConfigError
from dptune.core.streams import read_input
from tasks.settings.params import load_settings
from tasks.settings.strict import load_yaml
from tasks.stage import run_command

PARAMS = Path("params.yaml")
#: Names that DVC's parser does not split.
_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
#: Tables that a profile says all of: what it leaves out must not come from params.yaml.
_WHOLE = re.compile(r"mechanisms\.[^.]+|experiment\.models|search\.space")


def overrides(profile: Path, params: Path = PARAMS) -> list[str]:
    """The profile as values of DVC's ``--set-param``, which follow Hydra's grammar: ``training.epochs=0.15``.

    A mechanism's entry, the table of models and a search's space replace those of ``params``; all else is merged.

    Raises: ConfigError if a file is unreadable, or the parameters would not be valid.
    """
    base, over = read_profile(params), read_profile(profile)
    try:
        load_settings(params, over)
    except ConfigError as error:
        raise ConfigError(f"{profile} over {error.field}", error.problem, fix=error.fix) from None
    return list(_set(base, over))


def merged_profile(profile: Path, params: Path = PARAMS) -> dict[str, Any]:
    """The parameters that an experiment of ``profile`` has: ``params`` with the values of ``overrides``.

    Raises: ConfigError as ``overrides``, and for a file that names several profiles.
    """
    if members(profile) != (profile,):
        raise ConfigError(str(profile), "names several profiles", fix="give one of those that it names")
    return _merged(read_profile(params), read_profile(profile), "")


def members(profile: Path) -> tuple[Path, ...]:
    """The profiles that a file names under ``profiles``, which lie beside it; the file itself if it names none.

    Raises: ConfigError if the file is unreadable, says more than ``profiles``, or names a file twice.
    """
    content = read_profile(profile)
    if "profiles" not in content:
        return (profile,)
    named = content["profiles"]
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        problem, fix = "is not a list of files", "name profiles beside this file, such as [bench-sst2-small.yaml]"
    elif len({(profile.parent / name).resolve() for name in named}) != len(named):
        problem, fix = "names a file twice", "name each once"
    elif len(content) > 1:
        other = next(key for key in content if key != "profiles")
        problem, fix = f"stands beside {other!r}", "put all values into the profiles that it names"
    elif lists := [name for name in named if "profiles" in read_profile(profile.parent / name)]:
        problem, fix = f"names {lists[0]}, which is itself a list", "name the studies"
    else:
        return tuple(profile.parent / name for name in named)
    raise ConfigError(f"{profile}: profiles", problem, fix=fix)


def read_profile(path: Path) -> dict[str, Any]:
    """A file of parameters. Raises: ConfigError if it is unreadable, or no table."""
    try:
        content = load_yaml(read_input(path).decode()) or {}
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({str(getattr(error, 'strerror', None) or error).splitlines()[0]})"
        fix = "change its permissions" if isinstance(error, PermissionError) else "give a YAML file of parameters"
        raise ConfigError(str(path), problem, fix=fix) from None
    if not isinstance(content, dict):
        raise ConfigError(str(path), "is not a table of parameters", fix="give a YAML file of parameters")
    return content


def _set(base: Mapping[str, Any], over: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key, value in over.items():
        name, old = f"{section}{key}", base.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not _WHOLE.fullmatch(name):
            if all(map(_PLAIN.fullmatch, map(str, value))):
                yield from _set(old, value, f"{name}.")
                continue
            # DVC would split such a name at its dots: the table goes whole.
            value = _merged(old, value, f"{name}.")
        if isinstance(old, dict):
            yield f"~{name}"
        yield f"{'' if key in base and not isinstance(old, dict) else '+'}{name}={_value(value)}"


def _merged(base: Mapping[str, Any], over: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The table that ``_set`` would leave."""
    found = dict(base)
    for key, value in over.items():
        old, name = base.get(key), f"{section}{key}"
        if isinstance(value, dict) and isinstance(old, dict) and not _WHOLE.fullmatch(name):
            value = _merged(old, value, f"{name}.")
        found[key] = value
    return found


def _value(value: Any) -> str:
    """A value in Hydra's grammar, without spaces where it holds none, so that a shell keeps it in one word."""
    match value:
        case dict():
            return "{" + ",".join(f"{_key(key)}:{_value(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_value, value)) + "]"
        case str() if not re.fullmatch(r"[A-Za-z][\w/.-]*", value) or value.lower() in (
            "null",
            "true",
            "false",
            "nan",
            "inf",
        ):
            # Within quotes a backslash escapes nothing but a quote, or backslashes before one.
            return (
                "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + "\\" * bool(found[2]) + found[2], value) + "'"
            )
        case str():
            return value
    return json.dumps(value)


def _key(key: object) -> str:
    """A name within a table: Hydra takes no quotes there, and escapes what it would read as its own signs.

    Raises: ConfigError for a name that it would read as a number or a truth.
    """
    if not isinstance(load_yaml(str(key)), str):
        fix = "begin it with a letter"
        raise ConfigError("profile", f"the name {str(key)!r} would be read as a number or a truth", fix=fix)
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key))


def main(profile: Annotated[Path, typer.Argument(help="profiles/paper.yaml, say")]) -> None:
    """Print a profile as options of `dvc exp run`, one a line and a word each."""
    if members(profile) != (profile,):
        problem = "names several profiles, and an experiment of DVC has the parameters of one"
        raise ConfigError(str(profile), problem, fix=f"run them with `make repro PROFILE={profile}`")
    found = overrides(profile)
    if split := [one for one in found if len(one.split()) != 1]:
        problem = f"{split[0].partition('=')[0].lstrip('+')} holds spaces, at which a shell would split the option"
        raise ConfigError(str(profile), problem, fix=f"run it with `make repro PROFILE={profile}`")
    for override in found:
        print(f"--set-param={override}")


if __name__ == "__main__":
    run_command(main)
