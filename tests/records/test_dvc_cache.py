"""Benchmarks that DVC tracks are read from its cache, by the checksum of their ``.dvc`` file, with DVC's own files."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from hashlib import md5
from pathlib import Path

import pytest
from dvc.repo import Repo

from dptune.core.errors import DataError
from dptune.records import published_files
from dptune.records.benchmarks import e2e, glue
from dptune.records.published_files import CachedFile, cached_files

E2E = 'mr,ref\r\n"name[Bo]",Bo is red.\r\n'
SST2 = "sentence\tlabel\nold cat \t0\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of DVC whose working folder lacks what its cache has: an archive, and a folder of folders."""
    monkeypatch.setattr(published_files, "KNOWN", {})
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("e2e.zip", "w") as archive:
        archive.writestr("e2e-dataset/trainset.csv", E2E)
    for task in ("sst2", "other"):
        (tmp_path / "glue" / task).mkdir(parents=True)
        (tmp_path / "glue" / task / "train.tsv").write_text(SST2 if task == "sst2" else "sentence\tlabel\nno\t1\n")
    repo = Repo.init(str(tmp_path), no_scm=True)
    repo.add(["e2e.zip", "glue"])
    (tmp_path / "e2e.zip").unlink()
    shutil.rmtree(tmp_path / "glue")
    return tmp_path


def test_what_is_not_checked_out_is_read_from_the_cache(repository: Path) -> None:
    assert [row["completion"] for row in e2e(str(repository / "e2e.zip"))] == [" Bo is red."]
    assert [row["text"] for row in glue(str(repository / "glue" / "sst2"))] == ["old cat"]
    assert [row["text"] for row in glue("glue/other")] == ["no"]
    with pytest.raises(DataError, match="holds 2 files"):
        list(glue(str(repository / "glue")))
    with pytest.raises(DataError, match="holds no dev"):
        list(glue(str(repository / "glue" / "sst2"), part="dev"))
    assert not (repository / "e2e.zip").exists()


def test_what_is_checked_out_is_read_itself(repository: Path) -> None:
    with zipfile.ZipFile(repository / "e2e.zip", "w") as archive:
        archive.writestr("trainset.csv", E2E.replace("red", "blue"))
    assert [row["completion"] for row in e2e(str(repository / "e2e.zip"))] == [" Bo is blue."]


def test_an_archive_within_a_tracked_folder_is_read_whatever_lies_beside_it(repository: Path) -> None:
    (repository / "all").mkdir()
    with zipfile.ZipFile("all/e2e.zip", "w") as archive:
        archive.writestr("trainset.csv", E2E)
    (repository / "all" / "train.tsv").write_text("broken")
    Repo(str(repository)).add(["all"])
    shutil.rmtree(repository / "all")
    broken = cached_files(repository / "all" / "train.tsv")[0].place
    broken.chmod(0o644)
    broken.write_text("something else")
    assert [row["completion"] for row in e2e("all/e2e.zip")] == [" Bo is red."]
    with pytest.raises(DataError, match="does not have the MD5 in its name"):
        list(glue("all"))


def test_it_is_found_beside_the_folder_of_benchmarks_and_through_a_link(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(published_files.FOLDER, str(tmp_path_factory.mktemp("empty")))
    assert [row["mr"] for row in e2e("e2e.zip")] == ["name[Bo]"]
    link = tmp_path_factory.mktemp("links") / "repository"
    link.symlink_to(repository)
    assert [row["text"] for row in glue(str(link / "glue" / "sst2"))] == ["old cat"]


def test_what_was_never_fetched_is_named(repository: Path) -> None:
    shutil.rmtree(repository / ".dvc" / "cache")
    for path in ("e2e.zip", "glue/sst2"):
        said = f"{path}: is tracked by DVC, and its content is not in the cache .*dvc pull"
        with pytest.raises(DataError, match=said):
            cached_files(repository / path)


@pytest.mark.parametrize("file", ["config", "config.local"])
@pytest.mark.parametrize("said", ["../elsewhere", "'../elsewhere'", "../elsewhere  # big disk"])
def test_the_cache_is_where_the_repository_says(repository: Path, file: str, said: str) -> None:
    (repository / ".dvc" / "cache").rename(repository / "elsewhere")
    with (repository / ".dvc" / file).open("a") as config:
        config.write(f"[cache]\n    dir = {said}\n")
    assert [row["mr"] for row in e2e(str(repository / "e2e.zip"))] == ["name[Bo]"]


def test_texts_of_dvc_2_have_the_checksum_of_unix_lines(repository: Path) -> None:
    content = b"sentence\tlabel\r\nnew cat\t1\r\n"
    checksum = md5(content.replace(b"\r\n", b"\n")).hexdigest()
    place = repository / ".dvc" / "cache" / checksum[:2] / checksum[2:]
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    (repository / "train.tsv.dvc").write_text(f"outs:\n- md5: {checksum}\n  path: train.tsv\n")
    assert cached_files(repository / "train.tsv") == [CachedFile(".", place)]


def _change_content(repository: Path) -> None:
    found = cached_files(repository / "e2e.zip")[0].place
    found.chmod(0o644)
    found.write_bytes(found.read_bytes() + b" ")


def _no_outs(repository: Path) -> None:
    (repository / "e2e.zip.dvc").write_text("outs: []\n")


def _no_yaml(repository: Path) -> None:
    (repository / "e2e.zip.dvc").write_text("outs: [")


def _no_config(repository: Path) -> None:
    (repository / ".dvc" / "config.local").write_text("dir = x\n")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_change_content, "does not have the MD5 in its name.*dvc pull"),
        (_no_outs, "e2e.zip.dvc: is not a valid .dvc file.*IndexError.*dvc checkout"),
        (_no_yaml, "e2e.zip.dvc: is not a valid .dvc file"),
        (_no_config, "config.local: is not a valid DVC configuration"),
    ],
)
def test_a_broken_cache_is_refused(repository: Path, break_it: Callable[[Path], None], said: str) -> None:
    break_it(repository)
    with pytest.raises(DataError, match=said):
        list(e2e(str(repository / "e2e.zip")))


def test_a_file_that_nobody_tracks_is_absent(tmp_path: Path) -> None:
    (tmp_path / "x.zip.dvc").write_text("outs: []\n")  # outside of any repository
    assert cached_files(tmp_path / "x.zip") == []
    assert cached_files(tmp_path / "y.zip") == []
