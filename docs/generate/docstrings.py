"""A griffe extension: reads "Raises: ConfigError for a folder that ..." as the sentence that it is.

griffe takes such a line for the title of a section and drops it if the sentence goes on, indented, on the next line.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SENTENCE = re.compile(r"^(Raises|Returns|Yields): (\S.*(?:\n {4,}\S.*)*)", re.M)
_OPENING = re.compile(r"^(Guarantee|Private|Public): ", re.M)


def as_markdown(docstring: str) -> str:
    """The docstring with these sentences as paragraphs, their first word bold."""
    joined = _SENTENCE.sub(lambda found: f"**{found[1]}:** {' '.join(found[2].split())}", docstring)
    return _OPENING.sub(r"**\1:** ", joined)


class Sentences(griffe.Extension):
    """Applies ``as_markdown`` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
