"""A planted bug: one change of one line, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class StaleMutantError(Exception):
    """The text that a mutant replaces is not in its file exactly once, so that nothing would be tested."""


@dataclass(frozen=True)
class Mutant:
    """One bug that real code for differential privacy has had, or might have.

    Attributes:
        name: short, unique, with underscores.
        why: what it would cost, in one line.
        file: below the repository's root.
        old: text that is in the file exactly once.
        new: what stands there instead.
        tests: files or test ids, of which at least one must fail; a parametrised test may name one of its cases.
        harmless: why no test need fail; empty where one must.
    """

    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    harmless: str = ""

    def planted(self, root: Path) -> str:
        """The whole text of the file with the bug in it. Raises: StaleMutantError."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise StaleMutantError(f"{self.name}: its old text is {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)
