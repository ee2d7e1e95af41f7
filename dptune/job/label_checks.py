"""Messages to the owner of records about a label that was not named; they hold a value, and are private."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dptune.core.errors import DataError
from dptune.records.reading.record import Labelled, Record

#: What data sets of the ``datasets`` library hold in place of a label that is not given away.
HIDDEN = "-1"
#: What is wrong with it as the name of a label, and what to do where it is a class, as of sentiments from -1 to 1.
HIDDEN_NAMED = f"{HIDDEN} is what data sets write where a label is hidden, and would become a class"
RENAME_HIDDEN = "leave it out, or give that class another name in the records, such as negative"
#: The most characters of a label that a message shows.
_LONGEST = 40


def check_labels(records: Sequence[Record], labels: Collection[str], column: str, fix: str) -> None:
    """Raise DataError naming row, column and value of the first label that is not in ``labels``.

    Args:
        fix: what can be done besides mending the value.
    """
    known = set(labels)
    for record in records:
        if isinstance(record.content, Labelled) and record.content.label not in known:
            problem = f"{_shown(record.content.label)} is not one of the labels {', '.join(labels)}"
            fix = f"mend it, or {fix}"
            if record.content.label == HIDDEN:
                problem = f"the label is {HIDDEN}, which data sets write where it is hidden, as in GLUE's test parts"
                fix = "give a part whose labels are known, or remove the record"
            raise DataError(problem, fix=fix, file=record.file, row=record.row, column=column)


def _shown(label: str) -> str:
    return repr(label if len(label) <= _LONGEST else f"{label[:_LONGEST]}...")
