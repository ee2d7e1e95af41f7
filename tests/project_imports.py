"""The modules of this project that an entry point can run: what it imports, and what those import, and so on.

Read from the sources, so that imports inside functions count, and modules that are named in a string because a process
of its own runs them. Imports for type checkers alone do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PACKAGES = ("dptune", "tasks", "flows")


def closure(entries: Collection[str], passed_over: Collection[str] = ()) -> set[str]:
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


def _does_something(name: str) -> bool:
    body = _source(name).body
    return bool(body[1:] if ast.get_docstring(_source(name)) else body)


@cache
def _source(name: str) -> ast.Module:
    return ast.parse(file_of(name).read_text(encoding="utf-8"))


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
