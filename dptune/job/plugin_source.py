"""Records of a plug-in's source, or of a benchmark, for a run without the pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD
from dptune.mechanisms.options import convert
from dptune.records.catalogue import SourceSettings, find_source, label_of, plugin_sources
from dptune.records.reading.source import RecordSource

_CONVERTED = (bool, int, float, str)


def records_of(name: str, unit: str | None, options: Mapping[str, str]) -> tuple[RecordSource, str]:
    """The records that a plug-in's function yields, and the label under which the ledger names them.

    Args:
        unit: the column whose values name units; None: every record is one.
        options: the function's arguments, as texts; each becomes what its annotation says.

    Raises: ConfigError for an unknown source, one of dptune's own, an unknown unit, or arguments that the function does
        not take.
    """
    found = find_source(name)
    if found.rows is None:
        fix = f"use one of {', '.join(plugin_sources())}, or name your own module: dptune --plugin MODULE tune ..."
        problem = f"{name!r} is neither a benchmark nor a plug-in's source"
        raise ConfigError("source", problem, fix=f"{fix}; files are read by data")
    if unit is not None and found.units is not None and unit not in found.units:
        problem = f"source {name} yields texts, which have no column {unit!r}"
        raise ConfigError("data.unit", problem, fix="leave it out, or register the source with rows=True")
    kinds = {key: kind for key in options if (kind := found.kinds.get(key)) in _CONVERTED}
    values = {key: convert(f"source.{key}", value, kinds.get(key, str)) for key, value in options.items()}
    settings = SourceSettings(unit=unit or RECORD, options=values)
    found.check(settings)
    return found.rows(settings), label_of(name, values)
