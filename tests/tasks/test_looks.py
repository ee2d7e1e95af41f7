"""Colours and markers of mechanisms: one for each, the same everywhere, told apart by readers who see fewer colours."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from dptune.mechanisms.registry import MECHANISMS
from tasks.charts import looks as module
from tasks.charts.canvas import DARK, PAPER
from tasks.charts.looks import GREY, HUES, INK, line_colours, looks, run_colours

#: What is left of a colour, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "all colours": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]


def linear(colour: str) -> Any:
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: Any) -> Any:
    """CIELAB, in which a distance of about 2 is just seen."""
    share = (TO_XYZ @ rgb) / np.array([0.95047, 1.0, 1.08883])
    root = np.where(share > 0.008856, np.cbrt(share.clip(0)), 7.787 * share + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize(("sight", "ground"), list(product(SIGHT, (0, 1))))
def test_hues_differ_for_every_reader_on_both_grounds(sight: str, ground: int) -> None:
    seen = [lab((np.array(SIGHT[sight]) @ linear(hue[ground])).clip(0, 1)) for hue in (*HUES, INK)]
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)) > 12


@pytest.mark.parametrize("ground", [0, 1])
def test_hues_stand_out_from_the_ground(ground: int) -> None:
    def luminance(colour: str) -> float:
        return float(linear(colour) @ TO_XYZ[1])

    paper = luminance(PAPER[ground])
    for hue in (*HUES, INK, GREY):
        low, high = sorted((paper, luminance(hue[ground])))
        assert (high + 0.05) / (low + 0.05) > 2.8, hue


def test_every_registered_mechanism_has_a_look_of_its_own() -> None:
    """A mechanism that is added must be given one: in a legend of all it would take another's place."""
    assert set(MECHANISMS) <= {*module._KNOWN, *module._NONPRIVATE}
    found = [(look.light, look.shape) for look in looks(MECHANISMS).values()]
    assert len(found) == len(set(found)) == len(MECHANISMS)


def test_a_mechanism_looks_the_same_whoever_is_beside_it() -> None:
    everything = looks(MECHANISMS)
    for name in MECHANISMS:
        assert looks([name, "mine", "another"])[name] == everything[name]


def test_a_hollow_marker_is_a_mechanism_that_leaks() -> None:
    """And nothing but it, of those that add noise."""
    hollow = {name for name, look in looks(MECHANISMS).items() if look.hollow}
    assert hollow == {name for name in MECHANISMS if MECHANISMS[name].verdict.startswith("NOT sound")}


def test_the_order_is_one_and_plain_dp_sgd_comes_first_and_no_privacy_last() -> None:
    names = ["nonprivate", "zeta", "rldp", "static", "alpha", "quantile"]
    expected = ["static", "quantile", "rldp", "alpha", "zeta", "nonprivate"]
    assert list(looks(names)) == list(looks(reversed(names))) == expected


def test_labels_of_ones_own_are_all_different() -> None:
    found = looks([*MECHANISMS, *(f"mine{n}" for n in range(20))])
    seen = [(look.light, look.shape) for look in found.values()]
    assert len(set(seen)) == len(found) == len(MECHANISMS) + 20
    many = looks(f"mine{n}" for n in range(100))
    assert len(many) == 100
    assert len({(look.light, look.shape) for look in many.values()}) == 48


def test_lines_of_a_mechanism_are_tints_of_its_colour_and_all_differ() -> None:
    """DVC's charts give each colour one name: two lines of one colour would shift the colours of all that follow."""
    lines = [(name, budget) for name in MECHANISMS for budget in ("1", "2", "4", "8")]
    found = line_colours(lines)
    assert len(set(found.values())) == len(lines)
    assert found["static", "1"] == run_colours(MECHANISMS)["static"] == run_colours(["static"])["static"]


def test_the_dark_colours_are_no_light_ones() -> None:
    """A page replaces one colour after the other: none may be replaced twice."""
    assert not set(DARK) & set(DARK.values())
    assert {look.light: look.dark for look in looks(MECHANISMS).values()}.items() <= DARK.items()
