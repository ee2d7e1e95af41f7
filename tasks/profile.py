"""Write a profile (a named set of parameters) over params.yaml, keeping its comments.

python -m tasks.profile profiles/paper.yaml     # `git checkout params.yaml` takes it back
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from dptune.errors import ConfigError
from dptune.files import write_text
from tasks.settings.params import load_settings
from tasks.stage import run_command

PARAMS = Path("params.yaml")


def apply_profile(profile: Path, params: Path = PARAMS) -> None:
    """Merge ``profile`` over ``params``.

    Raises: ConfigError if a file is unreadable or the result would not be valid; ``params`` is then unchanged.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 200
    try:
        base, over = (yaml.load(path.read_text(encoding="utf-8")) or {} for path in (params, profile))
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({_reason(error)})"
        raise ConfigError(str(profile), problem, fix="give a YAML file of parameters") from None
    if not (isinstance(base, dict) and isinstance(over, dict)):
        raise ConfigError(str(profile), "is no table of parameters", fix="give a YAML file of parameters")
    load_settings(params, over)
    _overlay(base, over)
    text = StringIO()
    yaml.dump(base, text)
    write_text(params, text.getvalue())
    params.chmod(0o644)


def _reason(error: Exception) -> str:
    """The reason in one line: YAML's own spreads over four."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(getattr(error, "strerror", None) or error).splitlines()[0]


def _overlay(base: Any, over: Any, *, whole: bool = False) -> None:
    """Merge ``over`` into ``base``; a mechanism's entry replaces the one of its name, so a profile says all of it."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict) and key != "models" and not whole:
            _overlay(base[key], value, whole=key == "mechanisms")
        else:
            base[key] = value


def main(profile: Annotated[Path, typer.Argument(help="profiles/paper.yaml, say")]) -> None:
    """Write a profile over params.yaml."""
    apply_profile(profile)
    print(f"{PARAMS} holds {profile} now: `make repro` runs it, and `git checkout {PARAMS}` takes the old one back.")


if __name__ == "__main__":
    run_command(main)
