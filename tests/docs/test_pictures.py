"""The pictures of the concepts show what the accountants and the audit say today."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from docs.generate.pictures import FOLDER, PICTURES, draw, four_epsilons, noise_left

_SLOW = ("four-epsilons", "cancelling", "choosing")  # three audits; two dozen calibrations; 200 prices


def coordinates(picture: Path) -> np.ndarray:
    """All numbers of a picture's paths and places, in points."""
    parts = re.findall(r'(?: d| transform| x| y|points)="([^"]*)"', picture.read_text(encoding="utf-8"))
    return np.array([float(number) for part in parts for number in re.findall(r"-?\d+\.?\d*", part)])


def words(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))


def check(name: str, folder: Path) -> None:
    (drawn,) = draw(folder, [name], ["light"])
    kept = FOLDER / drawn.name
    assert words(drawn) == words(kept) != []
    assert coordinates(drawn) == pytest.approx(coordinates(kept), abs=0.5)


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in _SLOW])
def test_a_picture_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", _SLOW)
def test_a_slow_picture_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
def test_the_text_beside_the_picture_is_true() -> None:
    """An audit with a fixed seed: no false alarms to count."""
    published, noise_only, certified, audited = four_epsilons("rldp")
    assert audited > published
    assert audited < noise_only == certified
    assert four_epsilons("rldp_published")[2] == float("inf")
    assert four_epsilons("static")[2] < four_epsilons("static")[0]


@pytest.mark.slow
def test_bands_do_least_where_batches_are_large() -> None:
    """As docs/findings/correlated.md says: noise and bands at epsilon 0.5, of which 1 is independent noise."""
    small, large = noise_left(64, 0.5), noise_left(4096, 0.5)
    assert small[0] < 0.75
    assert large == (1.0, 1)


def test_light_and_dark_show_the_same() -> None:
    for name in PICTURES:
        light, dark = (FOLDER / f"{name}-{theme}.svg" for theme in ("light", "dark"))
        assert words(light) == words(dark)
        assert coordinates(light) == pytest.approx(coordinates(dark))
