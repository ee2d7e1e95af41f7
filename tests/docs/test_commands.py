"""What pages and the README name exists: commands with their options, files, targets of make, modules to run."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dvc.cli import DvcParserError, parse_args
from dvc.exceptions import DvcException
from dvc.utils.hydra import apply_overrides
from pages import PAGES, ROOT

from dptune.cli import app
from dptune.core.errors import ConfigError, DptuneError
from tasks.profile import members, overrides
from tasks.settings.params import load_settings

TEXTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *PAGES]
_MISSING = "MissingParameter"
_NAMES = ("`dptune static`",)  # a line of the benchmarks' tables
_EXPERIMENT = re.compile(r"dvc (?:exp run|repro)\b|(?:[A-Z_]+=\S+ )?make (?:repro|search|policy) PROFILE=profiles/")
STAGES = set(yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"])
_FILE = re.compile(
    r"(?<![\w/.-])(?:docs|profiles|tests|benchmarks|tasks|flows|dptune)/[\w./-]+\.(?:md|yaml|py|png|svg|json)\b"
)


def lines_of_code(text: str) -> list[str]:
    """Lines of fenced and indented blocks; one that ends in a backslash goes on."""
    found, fenced = [], False
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            found.append(line.strip())
    return found


def shown_commands(text: str) -> list[tuple[str, bool]]:
    """Each ``dptune ...`` of a page, and whether it is whole: one within a sentence may be a part of a command."""
    lines = (line.removeprefix(".venv/bin/") for line in lines_of_code(text))
    whole = [(part.strip(), True) for line in lines for part in line.split("&&") if part.strip().startswith("dptune ")]
    return whole + [(found.strip("`"), False) for found in re.findall(r"`dptune [^`\n]+`", text) if found not in _NAMES]


def check_command(line: str, *, whole: bool) -> None:
    """Parse a command line as the command line does, without running it. "..." stands for what the reader adds."""
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    group: Any = typer.main.get_command(app)
    try:
        context = group.make_context("dptune", words, resilient_parsing=True)
        if rest := [*context._protected_args, *context.args]:
            name, command, rest = group.resolve_command(context, rest)
            command.make_context(name, rest, parent=context)
    except Exception as error:
        if type(error).__name__ != _MISSING or (whole and "..." not in line):
            raise AssertionError(f"{line}: {error}") from error


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_parse(page: Path) -> None:
    for line, whole in shown_commands(page.read_text(encoding="utf-8")):
        check_command(line, whole=whole)


@pytest.mark.parametrize("line", ["dptune tune --modle x", "dptune tuen", "dptune account static", "dptune verify a b"])
def test_a_wrong_command_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError, match=line):
        check_command(line, whole=True)


def check_experiment(line: str, params: Path) -> None:
    """Read a command that runs stages or a profile as DVC would: its stages exist, and its settings hold."""
    profile = re.search(r"(?:PROFILE=|tasks\.profile )(profiles/[\w.-]+)", line)
    words = shlex.split(re.sub(r"\$\(.*?\)", "", line), comments=True)
    asked = parse_args(words[1:]) if words[0] == "dvc" else None
    assert not asked or set(asked.targets) <= STAGES, line
    own = (asked and "set_param" in asked and asked.set_param) or []
    for member in members(ROOT / profile[1]) if profile else [None] if own else []:
        try:
            values = overrides(member) if member else []
        except ConfigError as error:
            if "$DPTUNE_BENCHMARKS" in str(error):  # published texts, which are read when settings are checked
                continue
            raise
        shutil.copy(ROOT / "params.yaml", params)
        apply_overrides(params, [*values, *own])
        load_settings(params)


def experiments(text: str) -> set[str]:
    """Each command of a page that runs stages of DVC, also in a sentence or comment, or a profile, in a block of code.

    A profile that a sentence names only has to exist: settings of some are checked by asking a hub.
    """
    lines = [part.lstrip("$ ") for line in lines_of_code(text) for part in line.split("&& ")]
    within = re.findall(r"(?<!`)`(dvc\s[^`]+)`(?!`)|^# +(dvc .*)", text, re.M)
    return {line for line in (*lines, *(" ".join("".join(one).split()) for one in within)) if _EXPERIMENT.match(line)}


def test_experiments_of_pages_parse_and_their_settings_hold(tmp_path: Path) -> None:
    profiles = sorted((ROOT / "profiles").glob("*.yaml"))
    found = set[str]().union(*(experiments(page.read_text(encoding="utf-8")) for page in [*TEXTS, *profiles]))
    assert sum(line.startswith("dvc exp run") for line in found) >= 5
    for line in sorted(found):
        check_experiment(line, tmp_path / "params.yaml")


@pytest.mark.parametrize(
    "line",
    [
        "dvc exp run --temp -S experiment.epsilons=[-1]",
        "dvc exp run --temp -S canaries.audit_kind=maximizers",
        "dvc exp run --temp -S experiment.mechanisms=[stattic]",
        "dvc exp run --tmp -S experiment.epsilons=[1]",
        "dvc exp run --temp $(python -m tasks.profile profiles/memorisation.yaml) -S canaries.extractions=2",
        "dvc repro -f aquire",
    ],
)
def test_a_wrong_experiment_is_noticed(line: str, tmp_path: Path) -> None:
    assert experiments(f"As in `{line.replace(' ', chr(10), 1)}`, it runs.") == experiments(f"    $ {line}") == {line}
    with pytest.raises((DptuneError, DvcException, DvcParserError, AssertionError)):
        check_experiment(line, tmp_path / "params.yaml")


def test_pages_show_commands() -> None:
    assert sum(len(shown_commands(page.read_text(encoding="utf-8"))) for page in TEXTS) > 60


@pytest.mark.parametrize(
    "page", [*TEXTS, ROOT / "params.yaml", ROOT / "Makefile", *sorted((ROOT / "profiles").glob("*.yaml"))]
)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    made = set(re.findall(r'```python title="([^"]+)"', text))  # by the page's own recipes
    named = {found for found in _FILE.findall(text) if "mine" not in found} - made
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_files_that_the_code_names_exist() -> None:
    """Docstrings, comments, help and errors name pages too."""
    code = [
        path for folder in ("dptune", "tasks", "flows", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        (found, path.name)
        for path in code
        for found in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert sorted(pair for pair in named if not (ROOT / pair[0]).exists()) == []


def test_targets_and_modules_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in TEXTS:
        for line in lines_of_code(page.read_text(encoding="utf-8")):
            for target in re.findall(r"(?:^|&& )make ([\w-]+)", line):
                assert target in targets, f"{page.name}: {line}"
            for module in re.findall(r"\bpython -m ([\w.]+)", line):
                assert find_spec(module), f"{page.name}: {line}"


def test_the_readme_fits_a_screen_and_a_half() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert "    make repro " in text
    assert "    make test " in text
