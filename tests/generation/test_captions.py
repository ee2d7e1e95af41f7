"""METEOR and coco-caption's own ROUGE-L and CIDEr equal the E2E challenge's script, and texts do not reach the disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_metrics import OUTPUTS, REFERENCES

from dptune.errors import ConfigError
from dptune.generation import captions
from dptune.generation.metrics import check_names, score

NAMES = ("meteor", "rouge_l_ptb", "cider_ptb")


@pytest.fixture
def java() -> None:
    pytest.importorskip("pycocoevalcap")
    if shutil.which("java") is None:
        pytest.skip("METEOR and the PTB tokenizer need Java")


@pytest.mark.usefixtures("java")
def test_equal_to_the_challenge_script() -> None:
    """Values of e2e-metrics for the same strings."""
    found = score(OUTPUTS, REFERENCES, NAMES)
    assert found["meteor"].value == pytest.approx(0.416465, abs=1e-6)
    assert found["rouge_l_ptb"].value == pytest.approx(0.696833, abs=1e-6)
    assert found["cider_ptb"].value == pytest.approx(3.817775, abs=1e-6)
    assert "METEOR 1.5" in found["meteor"].signature
    assert all("pycocoevalcap 1.2|tok:ptb" in one.signature for one in found.values())


@pytest.mark.usefixtures("java")
def test_odd_texts_keep_their_places() -> None:
    """Empty texts, several lines, other lines' ends, METEOR's own separator, other scripts."""
    outputs = ["", "one\ntwo\r\nthree", "a ||| b", "x\u2028y\x85z", "caf\u00e9 \u65e5\u672c", "-"]
    answers, found = captions._spoken(outputs, [[one, "last"] for one in outputs])
    words = ["", "one two three", "a | | | b", "x y z", "caf\u00e9 \u65e5\u672c", ""]
    assert [found[item][0] for item in range(6)] == words
    assert [answers[item] for item in range(6)] == [[one, "last"] for one in words]
    assert captions.rouge_l(outputs[1:5], [[one] for one in outputs[1:5]]) == pytest.approx(1)
    assert captions.rouge_l(["", ""], [["a"], ["b"]]) == 0


@pytest.mark.usefixtures("java")
def test_the_machine_s_encoding_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    _, found = captions._spoken(["Caf\u00e9 \u00c9t\u00e9"], [["x"]])
    assert found == {0: ["caf\u00e9 \u00e9t\u00e9"]}


@pytest.mark.usefixtures("java")
def test_texts_are_not_written_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own wrapper writes them beside its jar."""
    opened: list[str] = []
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if _writes(event, given) else None)
    run = subprocess.run

    def seen(command: list[str], **options: Any) -> Any:
        assert not any("Zizzi" in part for part in command), "other users see command lines"
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", seen)
    captions.rouge_l(OUTPUTS, REFERENCES)
    assert opened == []


def _writes(event: str, given: tuple[Any, ...]) -> bool:
    return event == "open" and isinstance(given[0], str | Path) and isinstance(given[1], str) and given[1][:1] in "wax"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pycocoevalcap.cider", None)
            with pytest.raises(ConfigError, match=r"need pycocoevalcap.*pip install 'dptune\[meteor\]'"):
                check_names([name])
        pytest.importorskip("pycocoevalcap")
        with monkeypatch.context() as patch:
            patch.setenv("PATH", "")
            with pytest.raises(ConfigError, match=r"need Java, which is not on the path.*install a Java runtime"):
                check_names([name])


def test_a_program_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocoevalcap")
    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "java").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Stanford's tokenizer gave"):
        score(OUTPUTS, REFERENCES, ["rouge_l_ptb"])
    monkeypatch.setattr(captions, "_spoken", lambda *_: ({0: ["a"]}, {0: ["a"]}))
    with pytest.raises(ConfigError, match="METEOR's Java program gave no score"):
        score(OUTPUTS[:1], REFERENCES[:1], ["meteor"])
