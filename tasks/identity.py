"""What decides a result: the code that an entry point can run, found by reading the imports of its sources.

Imports inside functions count, and so do modules that are named in a string, because a process of its own runs them.
Imports for type checkers alone do not count. Of a module counts its syntax: comments, docstrings and layout decide
nothing, and a mended sentence must not make users pay for their runs again.

Versions of Python and of libraries are not part of it: an upgrade would repeat, and charge, every finished run. So the
digest is made of those parts of the syntax that every supported Python parses alike.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).parents[1]
_PACKAGES = ("dptune", "tasks", "flows")
_SECTIONS = [
    f"tasks.settings.{section}"
    for section in (
        *("audit", "experiment", "mechanisms", "params", "policy"),
        *("prediction", "pretrain", "rlhf", "search", "task", "tenants", "training"),
    )
]
#: Modules that change no result, each with the reason. Modules that they import count only if others import them too.
#: If these counted, a change of one would repeat finished runs, which costs privacy and changes nothing.
NO_RESULT = {
    "dptune": "a version and the package's description",
    "dptune.bounds": "which settings are taken",
    "dptune.errors": "the words of an error",
    "dptune.files": "how a file is written, not what",
    "dptune.plugins": "it names the code of others, which has a digest of its own",
    "dptune.progress": "bars for people",
    "dptune.stopping": "when a run stops; it goes on from its checkpoint",
    "flows": "how long Prefect waits, and what it logs",
    "flows.command": "how a flow that failed or was stopped ends",
    "flows.failures": "the words of a failed flow",
    "flows.names": "what a run is called",
    "flows.progress_page": "how far a run came",
    "tasks": "which Python has dptune",
    "tasks.drawing": "pictures of a finished run",
    "tasks.experiment.cell_errors": "how a cell that failed is reported; a finished one has none of it",
    "tasks.experiment.checks": "what is refused before any work",
    "tasks.experiment.cells": "it spells a run out, and what it spells out is part of the name",
    "tasks.experiment.results": "what is told of a finished run",
    "tasks.experiment.spent": "what a register is told of a finished run",
    "tasks.experiment.standing": "how far a run came that was stopped",
    "tasks.identity": "it names what decides",
    "tasks.paths": "where files lie",
    **dict.fromkeys(_SECTIONS, "its values are part of what names a run, and the parameters of a stage"),
    "tasks.settings.library_section": "which settings are taken",
    "tasks.settings.plain_numbers": "which settings are taken",
    "tasks.settings.strict": "which settings are taken",
    "tasks.settings.strict_yaml": "which files of settings are taken",
    "tasks.settings.sweeps": "which runs a list of values makes; each is named by its own",
    "tasks.split_records": "by which records a register counts, and what a search reads, which no run is named by",
    "tasks.stage": "how a failed command ends",
    "tasks.tracking": "what MLflow is sent",
    "tasks.unsent": "what MLflow is sent later",
    "tasks.workspace": "where a copy of the checkout finds what is kept",
}


def code_digest(entry: str, passed_over: Collection[str] = ()) -> str:
    """A digest of the code that decides what ``entry`` results in: the name and syntax of each of its modules.

    Args:
        entry: the module of ``tasks`` that does the work, such as "experiment.finetune".
        passed_over: modules besides ``NO_RESULT`` that decide nothing here.
    """
    return _digest(f"tasks.{entry}", frozenset(passed_over))


@cache
def _digest(entry: str, passed_over: frozenset[str]) -> str:
    names = sorted(closure([entry], {*NO_RESULT, *passed_over} - {entry}))
    lines = [f"{name} {syntax_digest(_source(name))}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def syntax_digest(module: ast.Module) -> str:
    """A digest of what a module does: its syntax tree without docstrings and positions."""
    return hashlib.sha256(_written_out(module).encode()).hexdigest()


def _written_out(part: Any) -> str:
    """Write out a syntax tree like ``ast.dump``, but without docstrings, and without fields that are absent or empty.

    Empty fields differ between versions of Python: 3.12 added some that code for 3.11 leaves empty.
    """
    if isinstance(part, list):
        return "[" + ",".join(_written_out(item) for item in part if not _is_docstring(item)) + "]"
    if not isinstance(part, ast.AST):
        return repr(part)
    fields = {name: value for name, value in ast.iter_fields(part) if value is not None and value != []}
    if isinstance(part, ast.Constant):
        fields["value"] = part.value  # None too
    return type(part).__name__ + "(" + ",".join(f"{name}={_written_out(value)}" for name, value in fields.items()) + ")"


def _is_docstring(item: Any) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)


def closure(entries: Collection[str], passed_over: Collection[str] | Mapping[str, str] = ()) -> set[str]:
    """Dotted names of the modules that ``entries`` reach, themselves included; none that holds a docstring alone.

    Args:
        passed_over: modules that are left out, and not followed.
    """
    seen: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name not in seen and name not in passed_over:
            seen.add(name)
            waiting += imported(name)
    return {name for name in seen if _does_something(name)}


def file_of(name: str) -> Path:
    """The source of a module of this project."""
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def imported(name: str) -> frozenset[str]:
    """The project's modules that a module imports or names, and the packages that they lie in."""
    found: set[str] = set()
    for text in _names(_source(name)):
        parts = text.split(".")
        if parts[0] in _PACKAGES and all(part.isidentifier() for part in parts):
            found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    if name == "dptune.mechanisms.registry":  # which loads its whole package
        found |= {f"dptune.mechanisms.{path.stem}" for path in file_of("dptune.mechanisms").parent.glob("*.py")}
    return frozenset(module for module in found if file_of(module).is_file())


def _does_something(name: str) -> bool:
    body = _source(name).body
    return bool(body[1:] if ast.get_docstring(_source(name)) else body)


#: Python 3.11 counts the depth of all threads' syntax trees together, and fails where two are built at once.
_PARSING = Lock()


@cache
def _source(name: str) -> ast.Module:
    with _PARSING:
        return ast.parse(file_of(name).read_text(encoding="utf-8"))


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=others):
            for other in others:
                yield from _names(other)
            return
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Constant(value=str(text)):
            yield text
    for child in ast.iter_child_nodes(node):
        yield from _names(child)
