"""Dependencies of DVC's stages: the code that a stage's command can run, found by reading imports.

    python -m tasks.dvc_deps            # writes the deps of each stage into dvc.yaml; `make format` does it too

Only lines of code are written. Data, templates, comments, commands, parameters and outputs stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

from tasks.identity import ROOT, closure, file_of

#: Modules that change no file of a stage, so that a change of one must not run a stage again.
NO_STAGE = {
    *(
        "dptune",
        "dptune.core.declarations",
        "dptune.core.errors",
        "dptune.core.files",
        "dptune.core.plugins",
        "dptune.core.progress",
    ),
    *("dptune.core.interrupts", "flows", "flows.common.command", "flows.common.pages"),
    *("tasks", "tasks.dvc_deps", "tasks.experiment.checks", "tasks.identity"),
    *("tasks.paths", "tasks.stage"),
    # Their values are parameters of the stages.
    *("tasks.settings", *(f"tasks.settings.{file.stem}" for file in (ROOT / "tasks" / "settings").glob("*.py"))),
}
#: A folder stands for its files where a stage reaches at least this share of them: dvc.yaml would be twice as long.
SHARE = 2 / 3
_STAGE = re.compile(r"(?=^  \w+:\n)", re.MULTILINE)
_COMMAND = re.compile(r"^    cmd: sh tasks/stage\.sh (\S+)", re.MULTILINE)
_DEPS = re.compile(r"^    deps: *(?:\[(?P<row>[^\]]*)\]\n|\n(?P<lines>(?:      .*\n)+))", re.MULTILINE)
_WIDTH = 120


def code_deps(entry: str) -> list[str]:
    """Files and folders that decide what the module ``entry`` does, itself first.

    >>> code_deps("tasks.corpus.acquire")[0]
    'tasks/corpus/acquire.py'
    """
    reached = {_relative(name) for name in closure([entry], NO_STAGE - {entry})}
    own, found = _relative(entry), set()
    for path in reached - {own}:
        folders = [folder for folder in reversed(path.parents) if len(folder.parts) > 1]
        found.add(next((folder for folder in folders if _stands_for_its_files(folder, reached)), path).as_posix())
    return [own.as_posix(), *sorted(found)]


def with_deps(text: str) -> str:
    """The text of a dvc.yaml, with the code that each stage depends on."""
    return "".join(_stage_with_deps(stage) for stage in _STAGE.split(text))


def _stage_with_deps(stage: str) -> str:
    command, deps = _COMMAND.search(stage), _DEPS.search(stage)
    if command is None or deps is None:
        return stage
    lines = (deps["row"] or "").split(", ") if deps["lines"] is None else re.findall("- (.*)\n", deps["lines"])
    words = [*code_deps(command[1]), *(line for line in lines if line and not _is_code(line.partition(" ")[0]))]
    row = f"    deps: [{', '.join(words)}]\n"
    if len(row) > _WIDTH or "#" in row:
        row = "    deps:\n" + "".join(f"      - {word}\n" for word in words)
    return stage[: deps.start()] + row + stage[deps.end() :]


def _is_code(dep: str) -> bool:
    """Whether a dependency is code, or was: the line of a file or folder that is gone must go too."""
    kept = [file for file in (ROOT / dep).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    is_data = bool(kept) and all(file.suffix != ".py" for file in kept)
    return dep.startswith(("dptune/", "tasks/", "flows/")) and not is_data


def _stands_for_its_files(folder: Path, reached: Collection[Path]) -> bool:
    files = _files_that_do_something(folder)
    return sum(file in reached for file in files) >= SHARE * len(files)


@cache
def _files_that_do_something(folder: Path) -> list[Path]:
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / folder).rglob("*.py"))
    modules = (name.removesuffix(".__init__") for name in names)
    return [_relative(name) for name in modules if closure([name]) & {name}]


def _relative(name: str) -> Path:
    return file_of(name).relative_to(ROOT)


def main() -> None:
    """Write dvc.yaml."""
    file = ROOT / "dvc.yaml"
    text = file.read_text(encoding="utf-8")
    if (new := with_deps(text)) != text:
        file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
