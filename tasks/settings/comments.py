"""Comments of params.yaml's section `training`, written from the sentences of the settings.

    python -m tasks.settings.comments        # writes them again, and changes no value

A test fails where the file's comments are not those of the fields.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from dptune.core.declarations import sentences
from tasks.settings.experiment import TrainingSettings

_FILE = Path("params.yaml")
_COLUMN, _WIDTH = 31, 120
_ENTRY = re.compile(r"  (\w+):([^#]*)")


def commented(text: str) -> str:
    """The file's text with the comments of the section `training` made anew; values stay as they are."""
    lines, inside = [], False
    texts = sentences(TrainingSettings)
    for line in text.splitlines():
        if line and not line.startswith((" ", "#")):
            inside = line.startswith("training:")
        entry = _ENTRY.match(line) if inside else None
        if entry:
            lines += _entry(line[: entry.end()].rstrip(), texts.get(entry[1], ""))
        elif not (inside and re.match(r" +#", line)):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _entry(written: str, sentence: str) -> list[str]:
    """The lines of one entry: its value, and its sentence beside and below it."""
    first, *more = textwrap.wrap(sentence, _WIDTH - _COLUMN - 2) or [""]
    if not first:
        return [written]
    beside = f"{written:<{_COLUMN - 1}} # {first}"
    return [beside, *(f"{'':<{_COLUMN}}# {part}" for part in more)]


if __name__ == "__main__":
    _FILE.write_text(commented(_FILE.read_text(encoding="utf-8")), encoding="utf-8")
