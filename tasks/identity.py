"""The identity of a result: the settings, inputs and versions that its folder is named by; and the code that made it.

A name is made of settings that differ from their defaults (``dptune.core.declarations.plain``), of digests of data and
model, and of the versions of the parts that a result uses, which are raised by hand. tests/golden fails where a number
moves, or a default changes, and no version was raised. So a new setting at its default, a new mechanism or an unused
function renames nothing, and no finished run is paid for again.

``code_digest`` is kept beside results as information. It is found by reading the imports of sources: imports inside
functions count, and so do modules that are named in a string, because a process of its own runs them. Imports for type
checkers alone do not count.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from dptune.mechanisms.versions import raised_versions

ROOT = Path(__file__).parents[1]
_PACKAGES = ("dptune", "tasks", "flows")


def name_digest(content: Any) -> str:
    """Eight hex digits for a folder's name. Two contents that are equal as JSON have the same, in any order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def changes(earlier: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What changed between the versions of two cells, as ``raised_versions``; a cell of before versions has none."""
    if not earlier and now:
        return "it was named by a digest of the code, before parts had versions"
    return raised_versions(earlier, now)


@cache
def code_digest(entry: str) -> str:
    """A digest of the sources that an entry point reaches. Results keep it, to tell which code made them; it names
    nothing, and refuses nothing.

    Args:
        entry: the module of ``tasks`` that does the work, such as "experiment.finetune".
    """
    names = sorted(closure([f"tasks.{entry}"]))
    digests = (hashlib.sha256(file_of(name).read_bytes()).hexdigest() for name in names)
    lines = (f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


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
    for text in _read(name)[0]:
        parts = text.split(".")
        if parts[0] in _PACKAGES and all(part.isidentifier() for part in parts):
            found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    if name == "dptune.mechanisms.registry":  # which loads all files of its rooms
        rooms = file_of("dptune.mechanisms").parent
        found |= {f"dptune.mechanisms.{path.parent.name}.{path.stem}" for path in rooms.glob("*/*.py")}
    return frozenset(module for module in found if file_of(module).is_file())


def _does_something(name: str) -> bool:
    return _read(name)[1]


#: Python 3.11 counts the depth of all threads' syntax trees together, and fails where two are built at once.
_PARSING = Lock()


@cache
def _read(name: str) -> tuple[frozenset[str], bool]:
    """What a module imports and its strings; and whether it holds more than a docstring.

    No syntax tree is kept: 300 of them slow every later one down, for Python looks through all objects again and again.
    """
    with _PARSING:
        tree = ast.parse(file_of(name).read_text(encoding="utf-8"))
    return frozenset(_names(tree)), bool(tree.body[1:] if ast.get_docstring(tree) else tree.body)


def _names(tree: ast.Module) -> Iterator[str]:
    """What a source imports, and its strings, which may name modules."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=others):
                waiting += others
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)):
                yield text
        waiting += ast.iter_child_nodes(node)
