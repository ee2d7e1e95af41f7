"""DVC stage: make a record of each encounter of the table, paragraph of a text file, or row of a user's file."""

from __future__ import annotations

from dptune.records.diabetes.narratives import read_source, write_narratives
from dptune.records.own_files import MANIFEST_NAME, WITH_COLUMNS, write_acquired, write_paragraphs
from tasks.paths import NARRATIVES, NARRATIVES_EVAL, RAW, RAW_EVAL
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def verbalize() -> None:
    """Read data/raw, write data/narratives."""
    source = read_source(RAW / MANIFEST_NAME)["source"]
    if source in WITH_COLUMNS:
        write_acquired(RAW, NARRATIVES)
        if RAW_EVAL.exists():
            write_acquired(RAW_EVAL, NARRATIVES_EVAL)
    elif source == "text":
        write_paragraphs(RAW, NARRATIVES)
    else:
        files = (RAW / "diabetic_data.csv", RAW / "IDs_mapping.csv", RAW / "source.json")
        data = load_settings().data
        write_narratives(*files, NARRATIVES, data.template, data.label)


if __name__ == "__main__":
    run_stage(verbalize)
