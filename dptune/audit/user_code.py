"""The user's own function or loader, named on the command line as ``MODULE:NAME``, and calls of it.

Importing a module runs its code with all rights of this process, as ``python -m MODULE`` would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

from dptune.core.errors import ConfigError, DptuneError, first_line


def imported(text: str) -> Any:
    """Import what ``MODULE:NAME`` names; modules in the current directory are found too.

    Raises: ConfigError naming the text if it is not of that form, or has a module that cannot be imported, or a name
        that is not in it.

    Example:
        >>> from dptune.audit.user_code import imported
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
