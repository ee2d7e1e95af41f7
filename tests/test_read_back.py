"""Files that dptune wrote are read back whole, or refused in one sentence that names them."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dptune.core.files import DamagedFileError, read_json, write_json
from dptune.training.models.weight_files import read_tensors

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def refused(path: Path, *arguments: Any, **more: Any) -> str:
    with pytest.raises(DamagedFileError) as caught:
        read_json(path, *arguments, **more)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert ". Fix: " in said
    assert "\n" not in said
    return said


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.data())
def test_an_object_comes_back_and_none_that_was_cut_does(content: dict[str, Any], data: st.DataObject) -> None:
    path = Path(os.environ["PYTEST_TMP"]) / "file.json"
    write_json(path, content)
    assert read_json(path) == content
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])  # all but the last newline
    refused(path)


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ["PYTEST_TMP"] = str(tmp_path_factory.mktemp("read_back"))
    yield
    del os.environ["PYTEST_TMP"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"\xff\xfe{", "not complete JSON"),
        (b"[" * 100_000, "not complete JSON"),
        (b"[]", "holds a list where an object belongs"),
        (b"null", "holds null"),
        (b"3", "holds a number"),
        (b'"x"', "holds a text"),
        (b"true", "holds true or false"),
    ],
)
def test_what_is_no_object_is_refused_with_its_reason(content: bytes, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "file.json").write_bytes(content)
    assert said in refused(path)


def test_a_missing_file_key_or_value_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert "is missing" in refused(path)
    write_json(path, {"a": {"b": "text"}})
    with pytest.raises(DamagedFileError, match=r"file\.json: lacks 'c'. Fix: ask"):
        read_json(path, fix="ask")["c"]
    assert read_json(path).get("c") is None
    assert "lacks 'c'" in refused(path, lambda found: found["c"])
    assert "could not convert" in refused(path, lambda found: float(found["a"]["b"]))
    assert "does not hold" in refused(path, lambda found: found["a"].keys().nothing)
    path.unlink()
    os.mkfifo(path)
    assert "is a FIFO" in refused(path)
    path.unlink()
    path.mkdir()
    assert "is a folder" in refused(path)


def test_tensors_that_were_cut_at_any_byte_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"weight": torch.arange(6.0)}, path)
    assert read_tensors(path)["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFileError, match=r"file\.safetensors: was cut off .*\. Fix: "):
            read_tensors(path)
    path.unlink()
    with pytest.raises(DamagedFileError, match="is missing"):
        read_tensors(path)


def test_no_module_reads_json_of_a_file_in_another_way() -> None:
    """It would end in a traceback where the file was cut off."""
    root = Path(__file__).parents[1]
    found = []
    for path in (path for name in ("dptune", "tasks", "flows") for path in (root / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.load", "json.loads"):
                reads = ("read_text", "read_bytes", "json.load(", ".open(")
                if any(name in ast.unparse(node) for name in reads):
                    found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not found
    assert json  # what is looked for
