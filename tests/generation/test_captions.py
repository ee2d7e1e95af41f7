"""METEOR and coco-caption's own ROUGE-L and CIDEr equal the E2E challenge's script, and texts do not reach the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_metrics import OUTPUTS, REFERENCES

from dptune.core.errors import ConfigError
from dptune.generation import captions
from dptune.generation.text_metrics import check_names, score

NAMES = ("meteor", "rouge_l_ptb", "cider_ptb")


@pytest.fixture
def java() -> None:
    pytest.importorskip("pycocoevalcap")
    if shutil.which("java") is None:
        pytest.skip("METEOR and the PTB tokenizer need Java")


@pytest.mark.usefixtures("java")
def test_equal_to_the_challenge_script_whatever_numbers_the_machine_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of e2e-metrics for the same strings. METEOR reads its own numbers, and would want commas in them."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de -Duser.country=DE")
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
def test_words_are_those_of_the_package_where_a_token_holds_a_space() -> None:
    """The tokenizer joins the parts of fractions and telephone numbers by no-break spaces."""
    outputs = ["Call (555) 555 1234 now.", "Add 2 1/2 cups of milk."]
    references = [["Call (555) 555 9999 now."], ["Add 1 1/2 cups of milk."]]
    _, found = captions._spoken(outputs, references)
    assert "-lrb-555-rrb-\u00a0555\u00a01234" in found[0][0].split(" ")
    assert captions.rouge_l(outputs, references) == pytest.approx(0.7333, abs=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("java")
def test_a_separator_within_markup_parts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer leaves markup as one token, with the separator of METEOR's texts. Java starts once for all."""
    real, counts = captions._ask, []
    monkeypatch.setattr(captions, "_ask", lambda *given: counts.append(real(*given)) or counts[-1])
    answer = "the eagle is a cheap coffee shop"
    outputs, references = [f"{answer} <a href='x ||| y'>", answer], [[answer], [f"{answer} <!-- ||| -->"]]
    apart = [f"{answer} <a href='x | | | y'>", answer], [[answer], [f"{answer} <!-- | | | -->"]]
    assert captions.meteor([*outputs, *apart[0]], [*references, *apart[1]]) > 0.3
    assert counts[:2] == counts[2:4]
    assert all(counts)


_LISTENING = """
import subprocess, sys
from dptune.generation import captions
seen = []
popen = subprocess.Popen.__init__
def start(self, command, *given, **options):
    seen.extend(command)
    popen(self, command, *given, **options)
subprocess.Popen.__init__ = start
opened = []
sys.addaudithook(lambda event, given: opened.append(given) if event == "open" else None)
outputs, references = ["Zizzi is a pub.", "Cotto is one."], [["Zizzi is a pub."], ["It is Cotto."]]
print(captions.meteor(outputs, references), captions.rouge_l(outputs, references))
writing = [path for path, mode, flags in opened if flags & 3 and not isinstance(path, int)]
print(writing, [part for part in seen if "Zizzi" in part or "Cotto" in part])
"""


@pytest.mark.long
@pytest.mark.usefixtures("java")
def test_texts_are_not_written_to_disk_and_stand_on_no_command_line(tmp_path: Path) -> None:
    """The package's own wrapper writes them beside its jar; what Java writes would be in one of these folders."""
    import pycocoevalcap

    folders = [Path(pycocoevalcap.__path__[0]), tmp_path]
    before = [sorted(folder.rglob("*.*")) for folder in folders]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", _LISTENING], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] []"
    assert [sorted(folder.rglob("*.*")) for folder in folders] == before


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


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", r"the java on the path does not run"),
        ('[ "$1" = -version ]', r"Stanford's tokenizer ended with status 1, 1 lines of 9 texts"),
    ],
)
def test_a_java_that_fails_is_said(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocoevalcap")
    _java(tmp_path, script, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        score(OUTPUTS, REFERENCES, ["rouge_l_ptb"])


def test_what_meteor_ends_with_is_said_without_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocoevalcap")
    _java(tmp_path, 'echo "java.util.InputMismatchException: For input string: Zizzi" >&2', monkeypatch)
    monkeypatch.setattr(captions, "_spoken", lambda *_: ({0: ["a"]}, {0: ["a"]}))
    with pytest.raises(ConfigError, match=r"returned no score \(java\.util\.InputMismatchException\)\. Fix"):
        score(OUTPUTS[:1], REFERENCES[:1], ["meteor"])


def _java(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a java of this script on the path, and nothing else."""
    (folder / "java").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "java").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
