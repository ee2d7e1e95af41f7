"""What the owner of records is told of labels that do not fit; messages hold values of records, and are private."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dptune.corpus.reading.record import Labelled, Record
from dptune.errors import ConfigError, DataError
from dptune.tuning.settings import FEWEST_UNITS

#: Rare labels that a message names, and the most characters of each.
_NAMED, _LONGEST = 3, 40


def check_labels(records: Sequence[Record], labels: Collection[str], column: str, fix: str) -> None:
    """Raise DataError naming row, column and value of the first label that is not in ``labels``.

    Args:
        fix: what can be done besides mending the value.
    """
    known = set(labels)
    for record in records:
        if isinstance(record.content, Labelled) and record.content.label not in known:
            problem = f"{_shown(record.content.label)} is none of the labels {', '.join(labels)}"
            fix = f"mend it, or {fix}"
            raise DataError(problem, fix=fix, file=record.file, row=record.row, column=column)


def check_read_labels(records: Sequence[Record], column: str, *, grouped: bool) -> tuple[str, ...]:
    """The labels of all records, sorted, where it tells nothing of a few units that these are all.

    What labels there are becomes public. If a single unit could add one, the delivered folder would say whether that
    unit was there. The message names such labels, and where the first record with it is: it is for the owner alone.

    Args:
        grouped: whether a column names units; else each record is one, equal ones too.

    Raises: ConfigError for fewer than two labels, and for labels of fewer than ``FEWEST_UNITS`` units.
    """
    units, first = dict[str, set[int]](), dict[str, Record]()
    for number, record in enumerate(records):
        assert isinstance(record.content, Labelled)
        units.setdefault(record.content.label, set()).add(record.unit if grouped else number)
        first.setdefault(record.content.label, record)
    if len(units) < 2:
        problem = f"all records have one label, {_shown(next(iter(units), ''))}, in column {column!r}"
        raise ConfigError("labels", problem, fix="name another column of labels, or give records of both labels")
    if rare := {label: len(own) for label, own in units.items() if len(own) < FEWEST_UNITS}:
        problem = (
            f"{len(rare)} of {len(units)} labels in the records belong to fewer than {FEWEST_UNITS} units: "
            f"{_places(rare, first)}; what labels there are becomes public"
        )
        fix = f"mend misspelt ones in column {column!r}; if all are right, name them all: their names are then public"
        raise ConfigError("labels", problem, fix=fix)
    return tuple(sorted(units))


def _places(rare: Mapping[str, int], first: Mapping[str, Record]) -> str:
    told = [
        f"{_shown(label)} ({first[label].file}, row {first[label].row}; {count} unit{'s' if count > 1 else ''})"
        for label, count in list(rare.items())[:_NAMED]
    ]
    return ", ".join(told) + (", ..." if len(rare) > _NAMED else "")


def _shown(label: str) -> str:
    return repr(label if len(label) <= _LONGEST else f"{label[:_LONGEST]}...")
