"""Writes a file of parameters over params.yaml, keeping its comments and layout: merge.py FILE."""

import sys
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

sys.path.insert(0, "")


def merge(profile: Path, params: Path = Path("params.yaml")) -> None:
    """Refuses what would not be valid, and then changes nothing."""
    from tasks.profile import overrides

    overrides(profile, params)
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 200
    base, over = (yaml.load(path.read_text(encoding="utf-8")) or {} for path in (params, profile))
    _overlay(base, over)
    text = StringIO()
    yaml.dump(base, text)
    params.write_text(text.getvalue(), encoding="utf-8")


def _overlay(base: Any, over: Any, *, whole: bool = False) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict) and key != "models" and not whole:
            _overlay(base[key], value, whole=key == "mechanisms")
        else:
            base[key] = value


if __name__ == "__main__":
    from tasks.stage import run_stage

    run_stage(lambda: merge(Path(sys.argv[1])))
