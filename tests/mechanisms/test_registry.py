"""Entries of params.yaml: every mistake is named with its field and its fix."""

from __future__ import annotations

from typing import Any

import pytest

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.clippers.groupwise_clipping import PerPair
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.controllers.dc_sgd import DcSgd
from dptune.mechanisms.descriptions import describe_options
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.registry import CLIPPERS, CONTROLLERS, MECHANISMS, NOISES, build, takes_noise

NOISE = {"noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("name", "entry", "field", "fix"),
    [
        ("static", {}, "noise_multiplier", "calibrated"),
        ("static", NOISE | {"max_grad_nrom": 1}, "max_grad_nrom", "max_grad_norm"),
        ("static", NOISE | {"clipper": "round"}, "mechanisms.static.clipper", "flat"),
        ("static", NOISE | {"noise": "loud"}, "mechanisms.static.noise", "gaussian"),
        ("static", NOISE | {"controller": "joystick"}, "mechanisms.static.controller", "constant"),
        ("static", NOISE | {"clipper": ["flat"]}, "mechanisms.static.clipper", "flat"),
        ("static", NOISE | {"r": 0.1}, "r", "max_grad_norm"),
        ("quantile", NOISE | {"controller": "constant", "rate": 0.1}, "rate", "max_grad_norm"),
        ("static", {"noise_multiplier": "much"}, "noise_multiplier", "number"),
        ("static", {"noise_multiplier": None}, "noise_multiplier", "number"),
        ("static", {"noise_multiplier": 0}, "noise_multiplier", "calibrate"),
        ("static", NOISE | {"max_grad_norm": "nan"}, "max_grad_norm", "number"),
        ("static", NOISE | {"max_grad_norm": 10**400}, "max_grad_norm", "number"),
        ("static", NOISE | {"max_grad_norm": [1.0]}, "max_grad_norm", "number"),
        ("static", NOISE | {"pairs": 0}, "pairs", "count"),
        ("static", NOISE | {"pairs": -3}, "pairs", "count"),
        ("static", NOISE | {"pairs": 1.5}, "pairs", "whole number"),
        ("static", NOISE | {"pairs": "nan"}, "pairs", "whole number"),
        ("static", NOISE | {"pairs": "inf"}, "pairs", "whole number"),
        ("static", NOISE | {"pairs": "two"}, "pairs", "number"),
        ("dp_lora", NOISE | {"freeze_down": "maybe"}, "freeze_down", "true or false"),
        ("dp_lora", NOISE | {"freeze_down": 1}, "freeze_down", "true or false"),
        ("dp_lora", NOISE | {"freeze_down": None}, "freeze_down", "true or false"),
        ("dc_sgd_p", NOISE | {"bins": 20.5}, "bins", "whole number"),
        ("dc_sgd_p", NOISE | {"bins": "many"}, "bins", "number"),
        ("dc_sgd_p", NOISE | {"rule": "quartile"}, "rule", "percentile or expected_error"),
        ("dc_sgd_p", NOISE | {"rule": None}, "rule", "percentile or expected_error"),
        ("per_pair", NOISE | {"weights": "1,two"}, "weights", "number"),
        ("per_pair", NOISE | {"weights": ""}, "weights", "number"),
        ("per_pair", NOISE | {"weights": None}, "weights", "number"),
        ("per_pair", NOISE | {"weights": {"a": 1}}, "weights", "number"),
        ("per_pair", NOISE | {"weights": [[1.0, 2.0]]}, "weights", "number"),
        ("nonprivate", NOISE, "noise_multiplier", "use one of"),
        ("novel", NOISE | {"like": "nothing"}, "mechanisms.novel.like", "rldp_published"),
        ("novel", NOISE | {"like": ["static"]}, "mechanisms.novel.like", "rldp_published"),
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
    assert (mechanism.clipper, mechanism.noise) == (Flat(0.5), Gaussian(2.0))
    assert type(mechanism.controller) is Constant


@pytest.mark.parametrize(
    ("name", "option", "given", "expected"),
    [
        ("dp_lora", "freeze_down", "True", True),
        ("dp_lora", "freeze_down", "false", False),
        ("dp_lora", "freeze_down", True, True),
        ("dp_lora", "allocation", "equal", "equal"),
        ("dp_lora", "weights", "1, 2.5 ,3e-1", (1.0, 2.5, 0.3)),
        ("dp_lora", "weights", [1, 2], (1.0, 2.0)),
        ("dp_lora", "weights", 2, (2.0,)),
        ("dp_lora", "pair_radius", "0.25", 0.25),
    ],
)
def test_an_option_takes_its_own_type_from_yaml_and_from_the_command_line(
    name: str, option: str, given: Any, expected: Any
) -> None:
    value = getattr(build(name, NOISE | {option: given}).clipper, option)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("given", [7, 7.0, "7", "7.0"])
def test_a_whole_number_stays_whole(given: Any) -> None:
    controller = build("dc_sgd_p", NOISE | {"bins": given}).controller
    assert isinstance(controller, DcSgd)
    assert (controller.bins, type(controller.bins)) == (7, int)


def test_a_registered_mechanism_brings_defaults_that_an_entry_overrides() -> None:
    assert build("dp_lora", NOISE).clipper == PerPair(allocation="global")
    assert build("dp_lora", NOISE | {"allocation": "equal"}).clipper == PerPair(allocation="equal")
    assert build("rldp", NOISE).clipper == PerPair(pair_radius=0.1, noise_unit="pair", stabiliser=1e-6)


def test_an_entry_may_be_like_another_mechanism_and_differ_where_it_says_so() -> None:
    ours = build("ours", NOISE | {"like": "dp_lora", "freeze_down": True})
    assert (ours.name, ours.clipper) == ("ours", PerPair(allocation="global", freeze_down=True))
    assert build("static", NOISE | {"like": "dp_lora"}).clipper == PerPair(allocation="global")
    assert not takes_noise("ours", {"like": "nonprivate"})


def test_a_part_that_was_replaced_takes_its_registered_defaults_along() -> None:
    assert build("dp_lora", NOISE | {"clipper": "flat"}).clipper == Flat()
    with pytest.raises(ConfigError, match="allocation"):
        build("dp_lora", NOISE | {"clipper": "flat", "allocation": "global"})


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
    assert len({row[0] for row in rows}) == len(rows)
    for option, default, text in rows:
        assert len(text) > 5, f"{option} has no help"
        assert default or option == "init_from", f"{option} shows no default"


def test_the_help_of_an_option_is_what_its_own_class_says_of_it() -> None:
    """Options come from three classes and their bases; a base's text holds where a class has none."""
    texts = {row[0]: row[2] for row in describe_options("auto_s")}
    assert texts["stabiliser"].startswith("Gamma; tiny gradients are amplified")
    assert {row[0]: row[2] for row in describe_options("dc_sgd_p")}["target"].startswith("P of DC-SGD-P")
    assert {row[0]: row[2] for row in describe_options("quantile")}["target"] == "Gamma, the quantile."


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_default_that_is_shown_is_the_one_that_is_used(name: str) -> None:
    noise = NOISE if takes_noise(name, {}) else {}
    shown = {row[0]: row[1] for row in describe_options(name) if row[1] not in ("required", "()", "")}
    fed_back, plain = build(name, shown | noise), build(name, noise)
    for part in ("clipper", "noise", "controller"):
        assert _settings(getattr(fed_back, part)) == _settings(getattr(plain, part))


def _settings(part: Any) -> dict[str, Any]:
    """What was set, without what a run keeps there, such as the window of correlated noise."""
    return {name: value for name, value in vars(part).items() if not name.startswith("_")}


def test_every_part_has_a_mechanism_that_shows_it() -> None:
    for part, table in (("clipper", CLIPPERS), ("noise", NOISES), ("controller", CONTROLLERS)):
        assert {registered.parts[part] for registered in MECHANISMS.values()} == set(table)
