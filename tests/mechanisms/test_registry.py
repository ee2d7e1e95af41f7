"""Entries of params.yaml: every mistake is named with its field and its fix."""

from __future__ import annotations

from typing import Any

import pytest

from dptune.errors import ConfigError
from dptune.mechanisms.clipping import Flat
from dptune.mechanisms.control import Constant
from dptune.mechanisms.noise import Gaussian
from dptune.mechanisms.registry import MECHANISMS, OPTION_HELP, build, describe_options, takes_noise

NOISE = {"noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("name", "entry", "field", "fix"),
    [
        ("static", {}, "noise_multiplier", "calibrated"),
        ("static", NOISE | {"max_grad_nrom": 1}, "max_grad_nrom", "max_grad_norm"),
        ("static", NOISE | {"clipper": "round"}, "mechanisms.static.clipper", "flat"),
        ("static", NOISE | {"noise": "loud"}, "mechanisms.static.noise", "gaussian"),
        ("static", NOISE | {"controller": "joystick"}, "mechanisms.static.controller", "constant"),
        ("static", {"noise_multiplier": "much"}, "noise_multiplier", "number"),
        ("static", {"noise_multiplier": None}, "noise_multiplier", "number"),
        ("static", {"noise_multiplier": 0}, "noise_multiplier", "calibrate"),
        ("static", NOISE | {"max_grad_norm": "nan"}, "max_grad_norm", "radius"),
        ("static", NOISE | {"pairs": 0}, "pairs", "count"),
        ("static", NOISE | {"pairs": 1.5}, "pairs", "count"),
        ("static", NOISE | {"pairs": "nan"}, "pairs", "count"),
        ("static", NOISE | {"pairs": "inf"}, "pairs", "count"),
        ("nonprivate", NOISE, "noise_multiplier", "use one of"),
        ("novel", NOISE, "mechanisms.novel", "clipper"),
        ("novel", NOISE | {"clipper": "flat", "noise": "gaussian"}, "mechanisms.novel", "controller"),
    ],
)
def test_a_mistake_names_its_field_and_its_fix(name: str, entry: dict[str, Any], field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, entry)
    assert caught.value.field == field
    assert fix in str(caught.value).partition("Fix: ")[2]


def test_a_new_name_that_names_its_parts_builds() -> None:
    parts = {"clipper": "flat", "noise": "gaussian", "controller": "constant"}
    mechanism = build("novel", parts | {"noise_multiplier": "2", "max_grad_norm": 0.5, "pairs": 3})
    assert (mechanism.name, mechanism.pairs) == ("novel", 3)
    assert (mechanism.clipper, mechanism.noise, mechanism.controller) == (Flat(0.5), Gaussian(2.0), Constant())


def test_building_leaves_the_entry_alone() -> None:
    entry = {"noise_multiplier": 1.0, "pairs": 2}
    build("static", entry)
    assert entry == {"noise_multiplier": 1.0, "pairs": 2}


def test_which_mechanisms_take_noise() -> None:
    assert takes_noise("static", {})
    assert not takes_noise("nonprivate", {})
    assert not takes_noise("static", {"noise": "none"})


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_option_is_explained(name: str) -> None:
    rows = describe_options(name)
    assert [row[0] for row in rows][-1] == "pairs"
    assert all(row[2] and row[2] == OPTION_HELP[row[0]] for row in rows)
