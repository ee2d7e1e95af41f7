"""About the runs of a report: what made them, on which data, with which settings, and how to cite them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from dptune import __version__
from dptune.core.files import read_json
from dptune.privacy.run_folder import RunFolder
from tasks.charts.seed_groups import Result
from tasks.mlflow.tracking import git_commit, timed

_DIGITS = 16  # of a digest, as MLflow shows it
#: Settings that name one cell among the others, or are shown elsewhere.
_LEFT_OUT = ("experiment", "inputs", "folder", "versions")


@dataclass(frozen=True)
class About:
    """What the end of a report says of its runs.

    Attributes:
        rows: pairs of a name and a text.
        settings: those that all cells share, as YAML, and then under ``cells`` what each has for itself.
        bibtex: an entry that cites the report.
    """

    rows: tuple[tuple[str, str], ...]
    settings: str
    bibtex: str

    @property
    def download(self) -> str:
        """The settings as an address that holds them, for a page that loads nothing."""
        return f"data:text/yaml;charset=utf-8,{quote(self.settings)}"


def about_runs(name: str, runs: Path, cells: Sequence[str], results: Sequence[Result]) -> About:
    """What is said of the cells of an experiment. Times and digests of records are left out of private telemetry.

    Args:
        cells: names of the cells' folders in ``runs``, in the order of ``results``.
    """
    folders = [RunFolder(runs / cell) for cell in cells]
    by_label = {
        str(result["label"]): read_json(folder.cell)
        for result, folder in zip(results, folders, strict=True)
        if folder.cell.exists()
    }
    settings = list(by_label.values())
    open_ones = all(timed(str(result["telemetry"])) for result in results)
    day = datetime.fromtimestamp(max(one.result.stat().st_mtime for one in folders), UTC) if open_ones else None
    digests = _distinct(str(one["inputs"].get("data", ""))[:_DIGITS] for one in settings)
    rows = {
        "Experiment": name,
        "Base model": "; ".join(_distinct(str(one.get("model_about") or one["model"]) for one in results)),
        "Weights from": "; ".join(_distinct(_source(one["model"]) for one in settings)),
        "Data": "; ".join(_distinct(str(one["data"]) for one in results)),
        "Digest of the training records": (", ".join(digests) + ", keyed by their secret salt") if digests else "",
        "Last run finished": f"{day:%Y-%m-%d} (UTC)" if day else "",
        "dptune": f"{__version__}, commit {git_commit()}",
    }
    if not open_ones:
        del rows["Digest of the training records"]
    return About(
        tuple((key, text) for key, text in rows.items() if text),
        _settings(by_label),
        _bibtex(name, rows["dptune"], day),
    )


def _distinct(texts: Any) -> list[str]:
    return list(dict.fromkeys(filter(None, texts)))


def _source(model: Mapping[str, Any]) -> str:
    revision = model.get("revision")
    return f"{model['source']}{f' at {revision}' if revision else ''}"


def _settings(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings of cells by label, as YAML."""
    if not cells:
        return ""
    shared = _shared(list(cells.values()))
    own = {label: found for label, settings in cells.items() if (found := _beside(settings, shared))}
    return yaml.safe_dump(shared | ({"cells": own} if own else {}), sort_keys=False, allow_unicode=True)


def _beside(settings: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell that not all cells share."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            if inner := _beside(value, shared.get(key, {})):
                found[key] = inner
        elif key not in shared and value is not None:
            found[key] = value
    return found


def _shared(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that are equal in all cells, in tables as they are nested."""
    found: dict[str, Any] = {}
    for key, value in settings[0].items():
        others = [one.get(key) for one in settings]
        if key in _LEFT_OUT:
            continue
        if all(isinstance(one, dict) for one in others):
            if inner := _shared(others):  # type: ignore[arg-type]
                found[key] = inner
        elif all(one == value for one in others):
            found[key] = value
    return found


def _bibtex(name: str, made_by: str, day: datetime | None) -> str:
    plain = "".join(letter for letter in name if letter not in "{}\\%")
    key = "".join(letter if letter.isalnum() else "_" for letter in name)
    rows = {
        "title": f"{plain}: differentially private fine-tuning",
        "howpublished": f"Report of dptune {made_by}",
        **({"year": f"{day:%Y}"} if day else {}),
    }
    return "\n".join([f"@misc{{dptune_{key},", *(f"  {field} = {{{text}}}," for field, text in rows.items()), "}"])
