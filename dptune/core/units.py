"""Names of units of privacy: "record" for a record of its own, else the column whose values say whose a record is."""

from __future__ import annotations

from dptune.core.errors import ConfigError

RECORD = "record"
#: Units that are made of others; a column of such a name would be taken for them.
MADE_OF_OTHERS = ("client", "tenant", "shard")


def check_unit(name: str, field: str) -> None:
    """Raise ConfigError about ``field`` unless ``name`` is "record" or may be a column's name."""
    if not name.strip():
        raise ConfigError(field, "names no unit", fix=f"use {RECORD}, or the name of a column")
    if name in MADE_OF_OTHERS:
        raise ConfigError(field, f"{name!r} is another kind of unit", fix=f"use {RECORD}, or rename the column")
