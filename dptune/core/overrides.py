"""``--set KEY=VALUE``, the one way in which command lines change a setting by name."""

from __future__ import annotations

from collections.abc import Iterable

from dptune.core.errors import ConfigError


def assignments(options: Iterable[str]) -> dict[str, str]:
    """Values by key, as texts. Raises: ConfigError for an option without ``=`` or key, or a key given twice."""
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals:
            raise ConfigError(f"--set {option}", "has no '='", fix="write --set KEY=VALUE")
        if not key:
            raise ConfigError(f"--set {option}", "names no option before the '='", fix="write --set KEY=VALUE")
        if key in values:
            raise ConfigError(f"--set {key}", "is given twice", fix="give it once")
        values[key] = value
    return values
