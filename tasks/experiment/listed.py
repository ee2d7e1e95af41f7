"""The list of the cells that the last experiment ran, which says by digests what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptune.errors import DataError
from dptune.files import read_json, sha256, write_json
from dptune.privacy.run_folder import RunFolder
from tasks.experiment.result import CellResult

Result = dict[str, Any]
#: The mechanism that is plain DP-SGD: one fixed radius, Gaussian noise.
PLAIN = "static"
_AGAIN = "run the experiment stage again"


def write_list(experiment: Path, name: str, directories: Sequence[Path]) -> None:
    """Write an experiment file: the cells' folder names, and a digest of each result, so that DVC sees a new one."""
    results = {path.name: RunFolder(path).result for path in directories}
    digests = {cell: sha256(file) for cell, file in results.items() if file.exists()}
    write_json(experiment, {"name": name, "cells": list(results), "results": digests})


def read_results(experiment: Path, runs: Path) -> list[Result]:
    """The results of the cells that an experiment file lists.

    Raises: DataError if the file or a cell's result is missing, or lacks a field of ``CellResult``.
    """
    results = []
    for name in listed_cells(experiment):
        path = RunFolder(runs / name).result
        try:
            results.append(CellResult.read(path).to_dict() | _settings_of(RunFolder(runs / name).cell))
        except (OSError, ValueError):
            raise DataError("is missing or unreadable", fix=_AGAIN, file=path) from None
    return results


def _settings_of(cell: Path) -> dict[str, Any]:
    """What a page says of a cell's settings: its learning rate, and whether it is plain DP-SGD; empty if unknown."""
    if not cell.exists():
        return {}
    settings = read_json(cell)
    options = settings["options"]
    own_parts = {"clipper", "noise", "controller"} & set(options)
    plain = options.get("like", settings["mechanism"]) == PLAIN and not own_parts
    return {"learning_rate": settings["training"]["learning_rate"], "plain": plain}


def listed_cells(experiment: Path) -> list[str]:
    """The folder names of the cells that an experiment file lists.

    Raises: DataError if the file is missing, or lists none.
    """
    try:
        names = read_json(experiment)["cells"]
    except (OSError, ValueError, KeyError):
        raise DataError("is missing or no experiment file", fix=_AGAIN, file=experiment) from None
    if not names:
        raise DataError("lists no cell", fix="give params.yaml a mechanism and an epsilon", file=experiment)
    return list(names)
