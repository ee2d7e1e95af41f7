"""A corpus on disk is the corpus in memory; the file is whole or absent, private, and made once."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_data import tokenizer
from tiny_models import CPU

from dptune.core.errors import ConfigError, DataError
from dptune.records.parquet_file import Records, read_about, read_batches, read_records, write_records
from dptune.training.data import Tokens, tokenize
from dptune.training.tokens import token_file
from dptune.training.tokens.token_file import Corpus, MappedRows, open_corpus, open_or_tokenize, token_batch

WIDTH = 6
row_lists = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=30)
texts = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=8).map(" ".join), max_size=20)


def batches(all_texts: list[str], rows: int = 3) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(all_texts), rows):
        some = all_texts[start : start + rows]
        columns = [pa.array(range(100 + start, 100 + start + len(some))), pa.array(some, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, names=["unit", "text"])


def corpus_of(path: Path, all_texts: list[str], rows: int = 3) -> Corpus:
    return open_or_tokenize(path, lambda: batches(all_texts, rows), tokenizer(), WIDTH)


def lists(rows: Any) -> list[list[int]]:
    return [row.tolist() for row in rows]


# --- the same as in memory --------------------------------------------------------------------------------


@given(held=texts, rows=st.integers(1, 7))
def test_a_mapped_corpus_is_the_corpus_in_memory(
    tmp_path_factory: pytest.TempPathFactory, held: list[str], rows: int
) -> None:
    corpus = corpus_of(tmp_path_factory.mktemp("tokens") / "train.arrow", held, rows)
    expected = tokenize(held, tokenizer(), WIDTH) if held else Tokens([], 0, WIDTH)
    assert lists(corpus.tokens.rows) == lists(expected.rows)
    assert (corpus.tokens.padding, corpus.tokens.width) == (expected.padding, expected.width)
    assert corpus.tokens.truncated == expected.truncated
    assert corpus.units.tolist() == [100 + index for index in range(len(held))]
    absent = [text == "" for text in held]
    assert (corpus.absent is None and not any(absent)) or corpus.absent.tolist() == absent


@given(rows=row_lists, per_batch=st.integers(1, 7), data=st.data())
def test_mapped_rows_are_a_sequence_like_a_list(rows: list[list[int]], per_batch: int, data: st.DataObject) -> None:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    parts = [arrays[start : start + per_batch] for start in range(0, len(arrays), per_batch)]
    mapped = MappedRows([token_batch(part, np.zeros(len(part), dtype=np.int64)) for part in parts])
    assert len(mapped) == len(rows)
    assert lists(mapped) == rows
    edge = st.none() | st.integers(-40, 40)
    chosen = slice(data.draw(edge), data.draw(edge), data.draw(edge.filter(lambda step: step != 0)))
    assert lists(mapped[chosen]) == rows[chosen]
    assert lists(mapped[chosen][:3]) == rows[chosen][:3]
    for index in range(-len(rows), len(rows)):
        row = mapped[np.int64(index)]
        assert (row.tolist(), row.dtype) == (rows[index], np.int32)
    with pytest.raises(IndexError):
        mapped[len(rows)]


@pytest.mark.parametrize("number", [0, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**62])
def test_any_number_of_a_patient_is_kept(tmp_path: Path, number: int) -> None:
    rows = [np.array([1], dtype=np.int32)] * 2
    token_file.write(tmp_path / "t.arrow", [token_batch(rows, np.array([7, number]))], padding=0, width=6)
    assert open_corpus(tmp_path / "t.arrow").units.tolist() == [7, number]


def test_batches_of_mapped_and_listed_rows_are_equal(tmp_path: Path) -> None:
    held = ["a b c", "", "d", "a b c d e f g"]
    ours, theirs = corpus_of(tmp_path / "t.arrow", held).tokens, tokenize(held, tokenizer(), WIDTH)
    indices = np.array([3, 0, 1])
    for mine, other in zip(ours.batch(indices, CPU, height=5), theirs.batch(indices, CPU, height=5), strict=True):
        assert mine.equal(other)


def test_rows_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """They lie in the mapped file: nobody owns a copy, and nobody can write to the records."""
    row = corpus_of(tmp_path / "t.arrow", ["a b c"]).tokens.rows[0]
    assert not row.flags.owndata
    assert not row.flags.writeable


def test_nothing_private_shows_in_a_representation(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "t.arrow", ["a b c", ""])
    shown = repr(corpus) + repr(corpus.tokens) + repr(corpus.tokens.rows)
    assert "array" not in shown
    assert "[1, 2" not in shown


# --- whole or absent --------------------------------------------------------------------------------------


def test_the_file_and_its_folder_are_their_owners(tmp_path: Path) -> None:
    path = tmp_path / "tokens" / "t.arrow"
    corpus_of(path, ["a b"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_records_are_tokenised_once(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    first = corpus_of(path, ["a b", "c"])
    again = open_or_tokenize(path, lambda: pytest.fail("read again"), tokenizer(), WIDTH)
    assert lists(again.tokens.rows) == lists(first.tokens.rows)


def failing() -> Iterator[pa.RecordBatch]:
    yield from batches(["a b", "c"])
    raise DataError("is gone", fix="bring it back", file="train.parquet")


def test_what_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    with pytest.raises(DataError, match=r"train\.parquet"):
        open_or_tokenize(path, failing, tokenizer(), WIDTH)
    assert not [left for left in tmp_path.iterdir() if left.suffix != ".lock"]
    assert lists(corpus_of(path, ["a"]).tokens.rows) == [[1, 0]]


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match=r"t\.arrow: the token ids cannot be written \(No space left.*Fix: free space"):
        corpus_of(tmp_path / "t.arrow", ["a b"])
    assert not [left for left in tmp_path.iterdir() if left.suffix != ".lock"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    abandoned, foreign = (tmp_path / name for name in (".t.arrow.123.partial", ".other.arrow.123.partial"))
    abandoned.write_bytes(b"half")
    foreign.write_bytes(b"being written")
    corpus_of(path, ["a b"])
    assert not abandoned.exists()
    assert foreign.exists()


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_torn_file_is_refused_with_its_name_and_the_fix(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "t.arrow"
    corpus_of(path, ["a b c"] * 50)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(DataError, match=r"t\.arrow: is cut off.*Fix: remove it"):
        corpus_of(path, ["a b c"] * 50)


def foreign_files() -> dict[str, pa.Table]:
    about = {b"dptune": b'{"padding": 0, "width": 6}'}
    good = pa.Table.from_batches([token_batch([np.array([1], dtype=np.int32)], np.array([0]))])
    gaps = pa.table([[0], [False], [False], pa.array([[None]], pa.list_(pa.int32()))], schema=good.schema)
    return {
        "no metadata": good,
        "other columns": pa.table({"a": [1]}).replace_schema_metadata(about),
        "no width": good.replace_schema_metadata({b"dptune": b'{"padding": 0}'}),
        "width is text": good.replace_schema_metadata({b"dptune": b'{"padding": 0, "width": "wide"}'}),
        "no object": good.replace_schema_metadata({b"dptune": b"[]"}),
        "a token is missing": gaps.replace_schema_metadata(about),
    }


@pytest.mark.parametrize("name", foreign_files())
def test_another_file_is_refused(tmp_path: Path, name: str) -> None:
    table = foreign_files()[name]
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"t\.arrow: is cut off, or not a file of token ids"):
        open_corpus(tmp_path / "t.arrow")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.arrow"):
        open_corpus(tmp_path / "none.arrow")


def test_a_length_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_length"):
        open_or_tokenize(tmp_path / "t.arrow", lambda: batches(["a"]), tokenizer(), 2)
    assert not (tmp_path / "t.arrow").exists()


def build(path: Path, calls: Path, start: Any) -> None:
    """In a process of its own: note that records were read, and start when the other does."""

    def noted() -> Iterator[pa.RecordBatch]:
        with calls.open("a") as file:
            file.write("read\n")
        yield from batches(["a b", "c"] * 200)

    start.wait()
    open_or_tokenize(path, noted, tokenizer(), WIDTH)


def test_two_processes_at_once_make_one_file(tmp_path: Path) -> None:
    path, calls = tmp_path / "tokens" / "t.arrow", tmp_path / "calls"
    # From a server that has imported torch: a fork of a worker full of threads may fail, and a fresh process is slow.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dptune.training.loop", "dptune.mechanisms.registry"])  # as tiny_ranks does
    start = context.Barrier(2)
    both = [context.Process(target=build, args=(path, calls, start), daemon=True) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()  # pytest's own limit ends a hang; a shorter one would measure the neighbours
    assert [process.exitcode for process in both] == [0, 0]
    assert calls.read_text() == "read\n", "the second waits, and finds the file"
    assert lists(open_corpus(path).tokens.rows) == [[1, 2, 0], [3, 0]] * 200
    assert not list(path.parent.glob("*.partial"))


# --- reading records by batches ---------------------------------------------------------------------------


def stored(path: Path, count: int = 10) -> Path:
    numbers: NDArray[np.int64] = np.arange(count)
    held = pa.array(["" if n == 3 else f"a {'b ' * n}" for n in numbers], pa.string())
    write_records(path, Records(numbers, numbers // 2, held, {"label": "SYNTHETIC", "salt": "s"}))
    return path


@given(rows=st.integers(1, 12))
def test_batches_are_the_file_in_order(tmp_path_factory: pytest.TempPathFactory, rows: int) -> None:
    path = stored(tmp_path_factory.mktemp("records") / "train.parquet")
    parts = list(read_batches(path, ("unit", "text"), rows))
    whole = read_records(path)
    assert max(map(len, parts)) <= rows
    assert [text for part in parts for text in part.column("text").to_pylist()] == whole.text.to_pylist()
    assert [one for part in parts for one in part.column("unit").to_pylist()] == whole.unit.tolist()
    assert all(part.schema.names == ["unit", "text"] for part in parts)


def test_what_a_file_is_about_is_read_without_its_records(tmp_path: Path) -> None:
    path = stored(tmp_path / "train.parquet")
    assert read_about(path) == read_records(path).about


@pytest.mark.parametrize("content", [None, b"", b"no parquet"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.parquet: not a file of records"):
        next(read_batches(path, ("text",)))
    with pytest.raises(DataError, match=r"bad\.parquet: not a file of records"):
        read_about(path)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    """The footer is whole, the pages are not."""
    path = stored(tmp_path / "bad.parquet", 1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(DataError, match=r"bad\.parquet: not a file of records"):
        list(read_batches(path, ("text",)))


def test_a_missing_value_is_named_by_its_column(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    write_records(path, Records(np.arange(2), np.arange(2), pa.array(["a", None]), {}))
    with pytest.raises(DataError, match=r"bad\.parquet, column 'text': a value is missing"):
        list(read_batches(path, ("unit", "text")))


def test_memory_follows_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the records: what Arrow holds at its peak (a page, a batch) is hardly more."""
    peaks = []
    monkeypatch.setattr(
        token_file, "encode", lambda texts, *_: ([np.ones(5, np.int32)] * len(texts), np.zeros(len(texts), bool))
    )
    for count in (50_000, 400_000):
        numbers = np.arange(count)
        held = pa.array([f"record {n} " * 8 for n in numbers])
        source = tmp_path / f"{count}.parquet"
        write_records(source, Records(numbers, numbers, held, {}))
        del held
        pa.default_memory_pool().release_unused()
        before, seen = pa.total_allocated_bytes(), [0]

        def watched(source: Path = source, seen: list[int] = seen) -> Iterator[pa.RecordBatch]:
            for batch in read_batches(source, ("unit", "text"), 1000):
                seen[0] = max(seen[0], pa.total_allocated_bytes())
                yield batch

        open_or_tokenize(tmp_path / f"{count}.arrow", watched, tokenizer(), WIDTH)
        peaks.append(seen[0] - before)
    assert peaks[1] < 2 * peaks[0]
