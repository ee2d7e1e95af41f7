"""Time from table to narratives: ``python -m benchmarks.verbalize [ZIP_OR_CSV]`` (synthetic without a path).

The named peer is the plain row-by-row loop over csv.DictReader, which validates nothing and writes nothing.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dptune.records.diabetes.narratives import PLAIN, WORDINGS, clause_makers, verbalise, write_narratives
from dptune.records.diabetes.sources import Acquired, acquire_synthetic, acquire_uci
from dptune.records.diabetes.table import IdsMapping, read_ids_mapping, read_table

ENCOUNTERS, SEED = 101_766, 7
T = TypeVar("T")


def row_by_row(table_csv: Path, ids: IdsMapping) -> list[str]:
    """The peer: one dictionary and one pass over all clauses per row."""
    makers = clause_makers(ids)
    opening = WORDINGS[PLAIN].opening
    with table_csv.open(newline="", encoding="utf-8") as file:
        return [
            " ".join((opening, *(maker(row[name]) for name, maker in makers.items()))) for row in csv.DictReader(file)
        ]


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value


def acquire(directory: Path, path: Path | None) -> Acquired:
    if path is None:
        return acquire_synthetic(directory, ENCOUNTERS, SEED)
    return acquire_uci(directory, path)


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else None
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        acquiring, files = timed(lambda: acquire(directory, path))
        out = directory / "narratives.parquet"
        whole, _ = timed(lambda: write_narratives(files.table, files.ids_mapping, files.manifest, out))
        reading, table = timed(lambda: read_table(files.table, files.ids_mapping))
        wording, texts = timed(lambda: verbalise(table))
        peer, expected = timed(lambda: row_by_row(files.table, read_ids_mapping(files.ids_mapping)))
        if texts != expected:
            raise SystemExit("the two verbalisers differ")
        size = out.stat().st_size / 1e6
    words = sum(len(text.split()) for text in texts) / len(texts)
    print(f"{'real' if path else 'synthetic'}: {len(texts):,} encounters of {words:.1f} words, {size:.1f} MB")
    for name, seconds in (
        ("acquire (copy or generate, check)", acquiring),
        ("write_narratives (all of it)", whole),
        ("  read_table (read, check)", reading),
        ("  verbalise", wording),
        ("peer: csv.DictReader loop", peer),
    ):
        print(f"{name:<36}{seconds:8.2f} s")
    print(f"peer / (read_table + verbalise)     {peer / (reading + wording):8.2f} x")
    print(f"peer / verbalise                    {peer / wording:8.2f} x")


if __name__ == "__main__":
    main(sys.argv[1:])
