"""DVC stage: one narrative per encounter."""

from __future__ import annotations

from dptune.corpus.narratives import write_narratives
from tasks.paths import NARRATIVES, RAW
from tasks.stage import run_stage


def verbalize() -> None:
    """Read data/raw, write data/narratives."""
    write_narratives(RAW / "diabetic_data.csv", RAW / "IDs_mapping.csv", RAW / "source.json", NARRATIVES)


if __name__ == "__main__":
    run_stage(verbalize)
