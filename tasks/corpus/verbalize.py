"""DVC stage: one narrative per encounter, or one record per paragraph of a text file."""

from __future__ import annotations

from dptune.corpus.narratives import read_source, write_narratives
from dptune.corpus.text import MANIFEST_NAME, write_paragraphs
from tasks.paths import NARRATIVES, RAW
from tasks.stage import run_stage


def verbalize() -> None:
    """Read data/raw, write data/narratives."""
    if read_source(RAW / MANIFEST_NAME)["source"] == "text":
        write_paragraphs(RAW, NARRATIVES)
        return
    write_narratives(RAW / "diabetic_data.csv", RAW / "IDs_mapping.csv", RAW / "source.json", NARRATIVES)


if __name__ == "__main__":
    run_stage(verbalize)
