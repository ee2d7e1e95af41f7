"""Sources leave the whole of the right table, or nothing."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

import pytest
from corpus_helpers import needs_uci, uci_path, write_source

from dptune.core.errors import DataError
from dptune.records.diabetes import sources
from dptune.records.diabetes.sources import UCI_CSV_MD5, UCI_IDS_MD5, acquire_synthetic, acquire_uci
from dptune.records.diabetes.table import read_table

NAMES = ["IDs_mapping.csv", "diabetic_data.csv", "source.json"]


def digest(path: Path, kind: str = "sha256") -> str:
    return hashlib.new(kind, path.read_bytes()).hexdigest()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A stand-in for the real pair: its hashes are made the expected ones."""
    (tmp_path / "in").mkdir()
    table, ids = write_source(tmp_path / "in")
    table, ids = table.rename(table.with_name(NAMES[1])), ids.rename(ids.with_name("IDS_mapping.csv"))
    monkeypatch.setattr(sources, "UCI_CSV_SHA256", digest(table))
    monkeypatch.setattr(sources, "UCI_IDS_SHA256", digest(ids))
    return table, ids


def zipped(pair: tuple[Path, Path], folder: str = "") -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in pair:
            archive.write(path, folder + path.name)
    return content.getvalue()


@contextmanager
def serving(content: bytes, promised: int, status: int = 200) -> Iterator[str]:
    """Serve ``content`` on 127.0.0.1, promising ``promised`` bytes, then cut the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(promised))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/uci.zip"
    finally:
        server.shutdown()
        server.server_close()


def test_synthetic_files_are_valid_described_and_repeatable(tmp_path: Path) -> None:
    first, second = (acquire_synthetic(tmp_path / name, 50, 9) for name in "ab")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == NAMES
    assert len(read_table(first.table, first.ids_mapping).frame) == 50
    about = json.loads(first.manifest.read_text())
    assert (about["source"], about["synthetic"], about["rows"], about["seed"]) == ("synthetic", True, 50, 9)
    assert "SYNTHETIC" in about["label"]
    assert about["sha256"] == {NAMES[0]: digest(first.ids_mapping), NAMES[1]: digest(first.table)}
    assert first.table.read_bytes() == second.table.read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()} == {0o600}


def test_an_invalid_table_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "synthetic_ids_mapping", lambda: "admission_type_id,description\n")
    with pytest.raises(DataError):
        acquire_synthetic(tmp_path, 5, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("packaging", ["csv", "flat", "folder", "nested"])
def test_any_packaging_gives_the_pair(packaging: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "uci.zip"
    if packaging == "csv":
        path = pair[0]
    elif packaging == "nested":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inner/dataset.ZIP", zipped(pair, "deep/er/"))
    else:
        path.write_bytes(zipped(pair, "dataset/" if packaging == "folder" else ""))
    out = acquire_uci(tmp_path / "out", path)
    assert sorted(made.name for made in (tmp_path / "out").iterdir()) == NAMES
    assert (out.table.read_bytes(), out.ids_mapping.read_bytes()) == tuple(one.read_bytes() for one in pair)
    about = json.loads(out.manifest.read_text())
    assert about["source"] == "uci"
    assert about["synthetic"] is False
    assert about["licence"] == "CC BY 4.0"
    assert "10.24432/C5230J" in about["citation"]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_changed_file_is_refused_with_both_hashes(changed: int, pair: tuple[Path, Path], tmp_path: Path) -> None:
    expected = digest(pair[changed])
    pair[changed].write_bytes(pair[changed].read_bytes() + b"\n")
    with pytest.raises(DataError, match=f"{digest(pair[changed])}, expected {expected}. Fix: take the unmodified"):
        acquire_uci(tmp_path / "out", pair[0])
    assert not list((tmp_path / "out").iterdir())


def bad_paths(pair: tuple[Path, Path], folder: Path) -> dict[str, tuple[Path, str]]:
    lone, broken, partial, torn = (folder / f"{name}.zip" for name in ("lone", "broken", "partial", "torn"))
    alone = folder / "alone" / "data.csv"
    alone.parent.mkdir()
    alone.write_bytes(pair[0].read_bytes())
    partial.write_bytes(zipped(pair[:1]))  # type: ignore[arg-type]
    whole = bytearray(zipped(pair))
    whole[300:320] = b"x" * 20
    torn.write_bytes(whole)
    broken.write_bytes(zipped(pair)[:900])
    return {
        "absent": (lone, "no such file. Fix: give the path"),
        "no mapping beside": (alone, "IDs_mapping.csv is missing. Fix: put it beside the CSV"),
        "no mapping inside": (partial, "IDs_mapping.csv is missing. Fix: give the unmodified UCI zip"),
        "damaged": (torn, "not a readable zip"),
        "truncated": (
            broken,
            "not a readable zip (File is not a zip file): it may have been cut off. Fix: fetch the zip again",
        ),
    }


@pytest.mark.parametrize("case", ["absent", "no mapping beside", "no mapping inside", "damaged", "truncated"])
def test_a_bad_path_is_refused_and_leaves_nothing(case: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    path, problem = bad_paths(pair, tmp_path)[case]
    with pytest.raises(DataError) as caught:
        acquire_uci(tmp_path / "out", path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert not list((tmp_path / "out").iterdir())


def test_a_nested_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Three zips in a zip, each a table of 100 MB of zeros: their sizes are added up before any is unpacked."""
    inner = BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("diabetic_data.csv", bytes(100 << 20))
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.zip", inner.getvalue())
    with pytest.raises(DataError, match="beyond what is allowed"):
        acquire_uci(tmp_path / "out", bomb)


@pytest.mark.parametrize("layout", ["files/md5/", ""])
def test_dvcs_cache_is_used_if_it_holds_both(layout: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for path, md5 in zip(pair, (UCI_CSV_MD5, UCI_IDS_MD5), strict=True):
        place = cache / f"{layout}{md5[:2]}" / md5[2:]
        place.parent.mkdir(parents=True)
        place.write_bytes(path.read_bytes())
    out = acquire_uci(tmp_path / "out", None, cache, url="http://127.0.0.1:1/never")
    assert out.table.read_bytes() == pair[0].read_bytes()
    place.unlink()  # the mapping: now the archive is asked
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/never: download failed .* Fix: check the network"):
        acquire_uci(tmp_path / "out2", None, cache, url="http://127.0.0.1:1/never")
    assert not list((tmp_path / "out2").iterdir())


def test_a_download_gives_the_pair(pair: tuple[Path, Path], tmp_path: Path) -> None:
    content = zipped(pair)
    with serving(content, len(content)) as url:
        out = acquire_uci(tmp_path / "out", None, url=url)
    assert sorted(made.name for made in (tmp_path / "out").iterdir()) == NAMES
    assert out.table.read_bytes() == pair[0].read_bytes()


@pytest.mark.parametrize(
    ("sent", "promised", "status", "problem"),
    [
        (0.5, 1.0, 200, "download failed"),
        (0.0, 1.0, 200, "download failed"),
        (0.5, 0.5, 200, "bad download"),
        (1.0, 1.0, 503, "download failed"),
    ],
    ids=["cut", "cut at once", "short", "refused"],
)
def test_a_bad_download_is_refused_and_leaves_nothing(
    sent: float, promised: float, status: int, problem: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    content = zipped(pair)
    size = len(content)
    with (
        serving(content[: int(size * sent)], int(size * promised), status) as url,
        pytest.raises(DataError) as caught,
    ):
        acquire_uci(tmp_path / "out", None, url=url)
    assert str(caught.value).startswith(f"{url}: {problem}")
    assert not list((tmp_path / "out").iterdir())


def test_an_earlier_acquisition_survives_a_failure(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = acquire_uci(tmp_path / "out", pair[0])
    before = out.table.read_bytes()
    with pytest.raises(DataError):
        acquire_uci(tmp_path / "out", tmp_path / "absent.zip")
    assert out.table.read_bytes() == before


class TestUci:
    pytestmark = needs_uci

    def test_the_real_files_have_the_md5_that_dvc_would_use(self, tmp_path: Path) -> None:
        out = acquire_uci(tmp_path, uci_path())
        assert (digest(out.table, "md5"), digest(out.ids_mapping, "md5")) == (UCI_CSV_MD5, UCI_IDS_MD5)
        assert json.loads(out.manifest.read_text())["rows"] == 101_766
