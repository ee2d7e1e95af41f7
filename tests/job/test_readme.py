"""The example of the README runs as it stands, but for the path of the model."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from tiny_tuning import checkpoint

from dptune.job.delivery.verification import check_deliverable

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, start, rest = README.read_text(encoding="utf-8").partition("    import dptune\n")
    lines = (start + rest).splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("    "))
    assert end <= 15
    code = dedent("\n".join(lines[:end]))
    assert "path/to/checkpoint" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/checkpoint", checkpoint().as_posix()), {})
    assert check_deliverable(tmp_path / "to hand on").epsilons.certified <= 4
