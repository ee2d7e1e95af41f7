"""A synthetic twin of the private records, to rehearse on: another cohort of the public generator, of as many units.

The ranking of settings on it carries over as far as the generator is like the records. For records that the generator
itself made that is very far; of the real table it has the columns, and invented correlations.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dptune.core.errors import ConfigError
from dptune.core.units import RECORD
from dptune.records.diabetes.narratives import write_narratives
from dptune.records.diabetes.sources import acquire_synthetic
from dptune.records.parquet_file import Records, read_records
from dptune.records.reading.source import RecordSource
from dptune.records.splits import keys_of
from tasks.settings.params import Settings

#: Sources whose records are verbalised from the columns that the generator has.
SOURCES = ("synthetic", "uci")
#: The column of a twin's rows that names their units.
UNIT = "unit"


def check_twin(settings: Settings) -> None:
    """Raise ConfigError where no generator fits the records, or where it would make the private ones again."""
    data = settings.data
    if data.source not in SOURCES:
        problem = f"is twin, and no generator makes records like the records of source {data.source}"
        fix = "use public, with public records in data.public"
        raise ConfigError("search.rehearse_on", problem, fix=fix)
    if data.source == "synthetic" and settings.search.twin_seed == data.synthetic.seed:
        problem = f"{data.synthetic.seed} is data.synthetic.seed: the twin would be made of the private records"
        raise ConfigError("search.twin_seed", problem, fix="use another seed")


def twin_source(units: int, unit: str, seed: int) -> RecordSource:
    """The twin as the library reads public rows: columns ``text`` and ``unit``. Equal for equal arguments.

    Guarantee: it costs no privacy. Public: all arguments; the number of private units stands in every ledger's header
    and certificate. Private records decide nothing else here, for nothing else of them is given.

    The generator draws this kind of cohort and that of the public narratives from streams of their own, and each seed
    has its own, so that the twin shares no patient with either.

    Args:
        units: number of units of the private run.
        unit: kind of unit: record, or patient.
    """
    found = _cohort(units if unit == RECORD else 2 * units + 50, seed)  # patients have 1.4 encounters on average
    keys = keys_of(found, unit)
    chosen = np.isin(keys, np.unique(keys)[:units])
    rows = zip(keys[chosen].tolist(), found.text.to_pandas()[chosen], strict=True)
    return RecordSource((), public=[{UNIT: key, "text": text} for key, text in rows])


def twin_name(units: int, unit: str, seed: int) -> str:
    """What the page calls the twin."""
    return f"a generated cohort (SYNTHETIC, {units} {unit}s, seed {seed})"


def _cohort(encounters: int, seed: int) -> Records:
    with TemporaryDirectory(prefix="dptune-twin-") as work:
        acquired = acquire_synthetic(Path(work), encounters, seed, kind="private")
        narratives = Path(work) / "twin.parquet"
        write_narratives(acquired.table, acquired.ids_mapping, acquired.manifest, narratives)
        return read_records(narratives)
