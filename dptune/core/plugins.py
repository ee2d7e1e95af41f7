"""Code from outside dptune: clippers, noises, controllers, mechanisms and sources of records that users add.

Two ways in. A module that is named (``plugins: [my.module]`` in params.yaml, ``--plugin`` or ``DPTUNE_PLUGINS`` on the
command line) is imported; an installed package names its modules as entry points of the group ``dptune.mechanisms`` or
``dptune.sources``. Importing a module runs its decorators, which register what it has.

A plug-in runs with all rights of the process, and its word is taken for what no code can check: that a clipper bounds
what it says, and that a noise is of the family that it names. So a run that uses one names it and its version in the
ledger's header, and its code is part of what identifies a cell. ``dptune audit`` tests what it claims.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from importlib import import_module, machinery, metadata
from pathlib import Path
from traceback import extract_tb
from typing import Any

from dptune.core.errors import ConfigError, DptuneError, first_line
from dptune.core.files import sha256

#: Names of modules, separated by commas.
VARIABLE = "DPTUNE_PLUGINS"
_FOUND = "give the name of a module in this folder or installed, and mend what it raises"
_SUFFIXES = (*machinery.SOURCE_SUFFIXES, *machinery.EXTENSION_SUFFIXES)


#: Modules that have registered something.
_REGISTERING: set[str] = set()
#: For each top-level package its module, and the digests of its files: when it was imported, and each time that it was
#: loaded again with other files.
_IMPORTED: dict[str, tuple[Any, tuple[str, ...]]] = {}


def note_registered(module: str) -> None:
    """Remember that a module registers something, and what its files hold. Every registry calls it.

    A module registers while it is imported: files that are edited later are not the code that runs. One that is loaded
    again registers again; with other files, what runs may be of both, so the digest is of both.
    """
    _REGISTERING.add(module)
    if is_outside(module):
        root = module.partition(".")[0]
        states, now = _states(root), _digest_of_files(root)
        if states[-1] != now:
            _IMPORTED[root] = sys.modules[root], (*states, now)


@dataclass(frozen=True)
class Plugin:
    """A package or module outside dptune.

    Attributes:
        name: name of the top-level package.
        version: version of the installed distribution that it comes from; empty if it comes from none.
        digest: SHA-256 over the names and contents of its source files.
    """

    name: str
    version: str
    digest: str

    def __str__(self) -> str:
        """Name, version and the start of the digest, for a ledger."""
        return " ".join(part for part in (self.name, self.version, f"sha256:{self.digest[:16]}") if part)


def load(modules: Iterable[str], field: str = "plugins") -> None:
    """Import the named modules; those in the current directory are found too.

    Args:
        field: what names them, for errors.

    Raises: ConfigError naming the module that cannot be imported, and why, or that registers nothing.
    """
    for module in modules:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # the command `dptune` starts without it, python -m with it
        try:
            import_module(module)
        except DptuneError:
            raise
        except (Exception, SystemExit) as error:  # whatever a module may raise, or end the process by
            problem = f"{module!r} cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError(field, problem, fix=_FOUND) from error
        package = module.partition(".")[0]
        if not any(other.partition(".")[0] == package for other in _REGISTERING):
            problem = f"{module!r} registers nothing, so it adds nothing to dptune"
            raise ConfigError(field, problem, fix="name the module whose decorators register a part, source or score")


def load_variable() -> None:
    """Import what the environment variable names. Raises: ConfigError, as ``load``."""
    load((name for part in os.environ.get(VARIABLE, "").split(",") if (name := part.strip())), VARIABLE)


def load_installed(group: str) -> None:
    """Import what installed packages offer under an entry-point group. Raises: ConfigError naming the package."""
    for entry in metadata.entry_points(group=group):
        try:
            entry.load()
        except DptuneError:
            raise
        except (Exception, SystemExit) as error:
            package = entry.dist.name if entry.dist else entry.value
            problem = f"{entry.value} of {package} cannot be loaded ({type(error).__name__}: {error})"
            raise ConfigError(f"plugins ({group})", problem, fix=f"mend or uninstall {package}") from error


def plugins_of(modules: Iterable[str]) -> tuple[Plugin, ...]:
    """The plug-ins that modules belong to, each once; modules of dptune and of Python itself belong to none.

    A module must have been imported.
    """
    roots = dict.fromkeys(module.partition(".")[0] for module in modules)
    return tuple(_plugin(root) for root in sorted(roots) if is_outside(root))


@contextmanager
def naming_plugins(field: str, modules: Iterable[str]) -> Iterator[None]:
    """Context in which code of these modules runs, and in which whatever it raises becomes one sentence.

    Raises: ConfigError naming the plug-ins among the modules in place of any other error, also of one that follows from
        what their code returned. Without a plug-in it is dptune's own, and stays as it is.
    """
    try:
        yield
    except DptuneError:
        raise
    except (Exception, SystemExit) as error:  # whatever a plug-in may raise, or end the process by
        if not (found := plugins_of(modules)):
            raise
        problem = f"plug-in {', '.join(map(str, found))} raised {type(error).__name__}, or made dptune raise it"
        raise ConfigError(field, f"{problem} ({first_line(error)})", fix="mend it, and audit it again") from error


def is_outside(module: str) -> bool:
    """Whether a module is a plug-in's: not dptune's, nor Python's own."""
    root = module.partition(".")[0]
    return root == "__main__" or (root != "dptune" and root not in sys.stdlib_module_names)


def _plugin(root: str) -> Plugin:
    distributions = _distributions().get(root, ())
    version = metadata.version(distributions[0]) if distributions else ""
    return Plugin(root, version, _digest(root))


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _digest(root: str) -> str:
    """SHA-256 of a package's files when it was first asked for since the package was imported; if some were loaded
    again with other files, of all these states."""
    first, *more = _states(root)
    return hashlib.sha256(" ".join((first, *more)).encode()).hexdigest() if more else first


def _states(root: str) -> tuple[str, ...]:
    module = sys.modules[root]
    if root not in _IMPORTED or _IMPORTED[root][0] is not module:
        _IMPORTED[root] = module, (_digest_of_files(root),)
    return _IMPORTED[root][1]


def _digest_of_files(root: str) -> str:
    lines = [f"{name} {sha256(path)}\n" for name, path in _sources(root)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sources(root: str) -> list[tuple[str, Path]]:
    """(relative name, path) of every source file of a package, or the one of a module, in a fixed order."""
    module = sys.modules[root]
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if not folders:
        file = getattr(module, "__file__", None)
        return [(Path(file).name, Path(file))] if file else []  # typed at a prompt, it has none
    found = [
        (path.relative_to(folder).as_posix(), path)
        for folder in folders
        for path in folder.rglob("*")
        if path.name.endswith(_SUFFIXES) and path.is_file()
    ]
    return sorted(found)


def check_part(kind: str, name: str, cls: Any, interface: type) -> None:
    """See that a class has every public member of its interface.

    Raises: ConfigError naming what is missing, and the class.
    """
    wanted = {member for member in (*vars(interface), *interface.__annotations__) if not member.startswith("_")}
    own = {item.name for item in fields(cls)} if is_dataclass(cls) else set()
    abstract = set(getattr(cls, "__abstractmethods__", ()))
    missing = sorted(member for member in wanted - own if not hasattr(cls, member) or member in abstract)
    if missing:
        problem = f"{kind} {name!r} ({cls.__module__}.{cls.__qualname__}) lacks {', '.join(missing)}"
        fix = f"write what dptune.mechanisms.interfaces.{interface.__name__} describes"
        raise ConfigError("plugins", problem, fix=fix)


# The user's own function or loader, named on the command line as ``MODULE:NAME``, and calls of it.
#
# Importing a module runs its code with all rights of this process, as ``python -m MODULE`` would.


def imported(text: str) -> Any:
    """Import what ``MODULE:NAME`` names; modules in the current directory are found too.

    Raises: ConfigError naming the text if it is not of that form, or has a module that cannot be imported, or a name
        that is not in it.

    Example:
        >>> from dptune.core.plugins import imported
        >>> imported("math:sqrt")(4)
        2.0
    """
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        dotted = all(part.isidentifier() for part in text.split(".")) and "." in text
        meant = ":".join(text.rsplit(".", 1)) if dotted else "my_loop:step"
        fix = f"write the module as in `import`, a colon, and the name in it: {meant}"
        raise ConfigError(text, "is not of the form MODULE:NAME", fix=fix)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # the command `dptune` starts without it, python -m with it
    try:
        with redirect_stdout(sys.stderr):
            found: Any = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module may raise, or end the process by
        problem = f"module {module} cannot be imported ({type(error).__name__}{_place(error)}: {first_line(error)})"
        fix = "run the command in the module's folder, or install it, and mend what it raises"
        raise ConfigError(text, problem, fix=fix) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(text, f"module {module} has no {name}", fix="write a name that the module defines")
        found = getattr(found, part)
    return found


def _place(error: BaseException) -> str:
    """File and line of the user's own code that an error passed through last; empty if it passed through none."""
    others = (str(Path(__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages")), "<")
    own = [one for one in extract_tb(error.__traceback__) if not one.filename.startswith((*others, sys.base_prefix))]
    return f" at {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


def imported_function(text: str) -> Callable[..., Any]:
    """``imported``, if it can be called. Raises: ConfigError also if it cannot."""
    found = imported(text)
    if not callable(found):
        problem = f"is a {type(found).__name__}, which cannot be called"
        raise ConfigError(text, problem, fix="name a function from a batch to the noisy gradient")
    return found


@contextmanager
def running(name: str, on: str, fix: str = "mend it, and audit it again") -> Iterator[None]:
    """Context in which the user's code runs: what it prints goes to standard error, and what it raises is one sentence.

    Args:
        name: what the user named, for errors.
        on: what the code was given, in words.

    Raises: ConfigError in place of any error of that code.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except DptuneError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"raised {type(error).__name__} {on} ({first_line(error)}{_place(error)})"
        raise ConfigError(name, problem, fix=fix) from error
