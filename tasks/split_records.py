"""The records as the split deals them to its sides, before any canary was planted."""

from __future__ import annotations

from pathlib import Path

from dptune.corpus.reading.record import Record, fingerprint
from dptune.corpus.records import decode_content, form_at, read_records
from tasks.paths import EVAL, SPLITS

#: The training side without canaries: secrets that an auditor planted are nobody's records, and cost utility.
TRAIN_SIDE = SPLITS / "train.parquet"
#: What attackers know of. No candidate reads it; it is read so that a register knows the same records by another split.
ATTACK_SIDE = SPLITS / "attack.parquet"


def split_records(file: Path) -> tuple[Record, ...]:
    """The records of one file. Private, unless the file is public."""
    stored = read_records(file)
    form = form_at(stored.about)
    return tuple(
        Record(decode_content(text, form), int(unit), file.name, row)
        for row, (unit, text) in enumerate(zip(stored.unit, stored.text.to_pylist(), strict=True), start=1)
    )


def records_digest() -> str:
    """The digest by which a register recognises the pipeline's records, however they are split. Private."""
    return fingerprint(record for file in (TRAIN_SIDE, EVAL, ATTACK_SIDE) for record in split_records(file))
