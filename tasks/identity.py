"""The sources that decide a result, and the digest by which a finished run is known to come from them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from dptune.files import sha256

ROOT = Path(__file__).parents[1]


def sources(patterns: tuple[str, ...]) -> list[Path]:
    """The files that match, each once; patterns are relative to the repository.

    Raises: FileNotFoundError if a pattern matches nothing: a file was renamed, and would no longer count.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(ROOT.glob(pattern))
        if not matches:
            raise FileNotFoundError(f"{pattern}: no such source")
        found |= dict.fromkeys(matches)
    return list(found)


@lru_cache
def source_digest(patterns: tuple[str, ...]) -> str:
    """Changes with the path or the content of any of these files."""
    lines = [f"{path.relative_to(ROOT).as_posix()} {sha256(path)}\n" for path in sources(patterns)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
