"""What a plug-in's part returns in an audited step is a vector of numbers, or the audit names it and shows nothing."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core import plugins
from dptune.mechanisms import registry
from dptune.mechanisms.registry import CLIPPERS, MECHANISMS

MODULE = "faulty_parts"
CODE = '''
from dataclasses import dataclass, replace
import math, os, sys
import torch
from dptune.mechanisms.clippers.clipping import ByNorm
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Statistics
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.registry import clipper, controller, mechanism, noise

FAULTS = {
    "nothing": lambda found: found,
    "nan": lambda found: [one * math.nan for one in found],
    "inf": lambda found: [one * math.inf for one in found],
    "none": lambda found: None,
    "none inside": lambda found: [None for one in found],
    "number": lambda found: 0.0,
    "empty": lambda found: [],
    "fewer": lambda found: found[:-1],
    "more": lambda found: [*found, found[0]],
    "longer": lambda found: [torch.cat([one, one]) for one in found],
    "broadcast": lambda found: [one[:1] for one in found],
    "matrix": lambda found: [one[None] for one in found],
    "meta": lambda found: [one.to("meta") for one in found],
    "half": lambda found: [one.half() for one in found],
    "int": lambda found: [one.long() for one in found],
    "complex": lambda found: [one.to(torch.complex64) for one in found],
    "numpy": lambda found: [one.numpy() for one in found],
    "raises": lambda found: 1 / 0,
    "exits": lambda found: sys.exit(0),
}
fault = lambda method, found: FAULTS[KIND](found) if method == METHOD else found

@clipper("faulty clipper")
@dataclass(frozen=True)
class FaultyClipper(ByNorm):
    """A clipper."""
    def factors(self, norms, radius):
        return (radius / (norms + 1e-12)).clamp(max=1.0)
    def empty(self, zeros, knobs):
        return fault("empty", super().empty(zeros, knobs))
    def clipped_sum(self, gradients, knobs):
        return fault("clipped_sum", super().clipped_sum(gradients, knobs))
    def restore(self, *given):
        return fault("restore", super().restore(*given))

@noise("faulty noise")
@dataclass(frozen=True)
class FaultyNoise(Gaussian):
    """A noise."""
    family = "gaussian"
    def add(self, *given):
        return fault("add", super().add(*given))

@controller("faulty controller")
@dataclass
class FaultyController(Constant):
    """A controller."""
    releases_statistics = property(lambda self: METHOD == "sum_of")
    def knobs(self, initial):
        if METHOD == "radii":
            return replace(initial, radii=tuple(map(float, fault("radii", [torch.ones(1)]))))
        return fault("knobs", [initial])[0]
    def statistics(self, knobs, effective):
        if METHOD != "sum_of":
            return None
        size = torch.zeros(2, dtype=torch.float64)
        return Statistics(("one",), 1.0, 9.0, lambda gradients: fault("sum_of", [size + 0.1])[0], size)

mechanism("faulty", clipper="faulty clipper", noise="faulty noise", controller="faulty controller", clips="all")
'''
KINDS = ("nan", "inf", "none", "none inside", "number", "empty", "fewer", "more", "longer", "broadcast", "matrix")
KINDS += ("meta", "half", "int", "complex", "numpy", "raises", "exits")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    len(CLIPPERS)  # dptune's own are to stay
    tables: list[Any] = [*registry.PARTS.values(), MECHANISMS]
    before = [(dict(table._values), dict(table._modules)) for table in tables]
    yield tmp_path
    for table, (values, modules) in zip(tables, before, strict=True):
        table._values, table._modules = values, modules
    sys.modules.pop(MODULE, None)
    plugins._IMPORTED.pop(MODULE, None)


def audited(folder: Path, kind: str, method: str, *more: str) -> Result:
    (folder / f"{MODULE}.py").write_text(f"KIND, METHOD = {kind!r}, {method!r}\n{CODE}", encoding="utf-8")
    given = [
        "--plugin",
        MODULE,
        "audit",
        "faulty",
        "--trials",
        "500",
        "--set",
        "noise_multiplier=1",
        "--set",
        "pairs=2",
        *more,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return CliRunner().invoke(app, given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["empty", "clipped_sum", "add", "restore", "sum_of"])
def test_a_part_that_returns_no_vectors_of_numbers_is_named_with_what_it_returned(
    method: str, kind: str, folder: Path
) -> None:
    if method == "sum_of" and kind in ("fewer", "empty", "number", "more", "half"):
        pytest.skip("of a list; a sum of other precision is a sum")
    done = audited(folder, kind, method)
    line = done.stderr.strip().splitlines()[-1]
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "epsilon_audited" not in done.stdout
    assert line.startswith("error: mechanisms.faulty: ")
    assert f"plug-in {MODULE} sha256:" in line
    if kind in ("raises", "exits"):
        assert f"raised {'ZeroDivisionError' if kind == 'raises' else 'SystemExit'}" in line
    elif method == "empty":
        assert f" of {MODULE}.Faulty" in line
        assert " returned " in line
    elif method != "sum_of":
        said = {"none": "None", "none inside": "None", "number": "a float", "numpy": "a ndarray", "inf": "infinity"}
        said |= {"empty": "0 vectors", "fewer": "1 vectors", "more": "3 vectors", "meta": "meta", "int": "int64"}
        said |= {"half": "float16", "longer": "(4,)", "broadcast": "(1,)", "matrix": "(1, 2)", "complex": "complex64"}
        assert f"{method} of {MODULE}.Faulty" in line
        assert f" returned {said.get(kind, kind)}" in line or said.get(kind, kind) in line


@pytest.mark.parametrize("kind", ["none inside", "meta", "raises", "exits"])
@pytest.mark.parametrize("method", ["knobs", "radii"])
def test_knobs_that_are_none_are_named(method: str, kind: str, folder: Path) -> None:
    done = audited(folder, kind, method)
    assert done.exit_code == 2, done.output
    assert f"plug-in {MODULE} sha256:" in done.stderr.strip().splitlines()[-1]


def test_radii_that_are_no_numbers_are_named(folder: Path) -> None:
    done = audited(folder, "nan", "radii")
    assert done.exit_code == 2, done.output
    assert f"plug-in {MODULE} sha256:" in done.stderr.strip().splitlines()[-1]


@pytest.mark.one_case
@pytest.mark.parametrize("method", ["add", "sum_of"])
def test_the_same_parts_without_a_fault_are_audited(method: str, folder: Path) -> None:
    done = audited(folder, "nothing", method)
    assert done.exit_code == 0, done.output
    assert "epsilon_audited" in done.stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_whole_runs_of_a_plug_in_say_why_fewer_games_are_played(as_json: bool, folder: Path) -> None:
    done = audited(folder, "nothing", "add", "--whole-run", "--trials", "1100", *(["--json"] if as_json else []))
    assert done.exit_code == 0, done.output
    said = done.stderr if as_json else done.stdout
    assert "because faulty has code of a plug-in, which may mix coordinates. That is slow, so a tenth of" in said
    assert "--trials 11000 plays 1100 pairs." in said
    assert re.search(r"\bgames\W+110\b", done.stdout), done.stdout
