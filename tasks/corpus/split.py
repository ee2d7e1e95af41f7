"""DVC stage: split the records into attack, train and eval sides."""

from __future__ import annotations

from dptune.records.splits import write_splits
from tasks.paths import NARRATIVES, NARRATIVES_EVAL, SPLITS
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def split() -> None:
    """Split data/narratives by the unit of privacy."""
    data = load_settings().data
    held_out, attack = (None, 0.0) if data.parts is None else (NARRATIVES_EVAL, data.parts.attack)
    write_splits(NARRATIVES, SPLITS, data.split_seed, data.unit, held_out, attack)


if __name__ == "__main__":
    run_stage(split)
