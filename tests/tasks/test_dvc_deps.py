"""Dependencies of DVC's stages: no code is missing, too much or doubled, and what people write by hand stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import dvc_deps
from tasks.dvc_deps import NO_STAGE, code_deps, with_deps
from tasks.identity import ROOT, closure, file_of

TEXT = (ROOT / "dvc.yaml").read_text(encoding="utf-8")


def test_dvc_yaml_lists_what_each_stage_reaches() -> None:
    assert with_deps(TEXT) == TEXT, "run python -m tasks.dvc_deps, or make format"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("      - dptune/core/settings.py\n", ""),
        ("      - dptune/core/settings.py\n", "      - dptune/core/settings.py\n      - dptune/core/settings.py\n"),
        ("      - dptune/core/settings.py\n", "      - dptune/cli\n      - dptune/core/settings.py\n"),
        (
            "      - dptune/core/settings.py\n",
            "      - dptune/core/settings.py\n      - tasks/gone\n      - dptune/gone.py\n",
        ),
    ],
    ids=["missing", "doubled", "too much", "gone"],
)
def test_a_wrong_list_is_mended(old: str, new: str) -> None:
    wrong = TEXT.replace(old, new, 1)
    assert wrong != TEXT
    assert with_deps(wrong) == TEXT


def test_a_stage_depends_on_all_that_its_command_reaches() -> None:
    """Not only on the modules of its own process: a flow starts others by name."""
    deps = code_deps("flows.experiment")
    reached = {file_of(name).relative_to(ROOT) for name in closure(["flows.experiment"], NO_STAGE)}
    assert Path("tasks/experiment/finetune.py") in reached
    assert not [path for path in reached if not any(path.is_relative_to(dep) for dep in deps)]


def test_only_code_is_written() -> None:
    text = (
        "stages:\n  one:  # kept\n    cmd: sh tasks/stage.sh tasks.corpus.split\n    deps:\n"
        "      - data/in   # read only\n      - tasks/report/templates\n    params: [a]\n"
        "  two:\n    cmd: other\n    deps: [dptune]\n"
    )
    code = "".join(f"      - {dep}\n" for dep in code_deps("tasks.corpus.split"))
    assert with_deps(text) == text.replace("      - data/in", f"{code}      - data/in")


def test_a_folder_that_holds_only_caches_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python leaves them where a package was moved away; its line must go, and that of a folder of data stays."""
    monkeypatch.setattr(dvc_deps, "ROOT", tmp_path)
    for name in ("moved/__pycache__/a.pyc", "code/a.py", "code/page.j2", "templates/page.j2"):
        (tmp_path / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tasks" / name).write_text("")
    found = {name: dvc_deps._is_code(f"tasks/{name}") for name in ("moved", "gone", "code", "templates")}
    assert found == {"moved": True, "gone": True, "code": True, "templates": False}
