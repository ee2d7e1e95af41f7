"""Every planted bug, as the rows of bugs.yaml say."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.mutants.mutant import Mutant

_ROWS = yaml.load(Path(__file__).with_name("bugs.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
MUTANTS = tuple(Mutant(**{**row, "tests": tuple(row["tests"])}) for row in _ROWS)
