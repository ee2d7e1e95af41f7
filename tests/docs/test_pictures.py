"""Pictures of the documentation show what the accountants and the audit say today."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from docs.generate.pictures import (
    FOLDER,
    PICTURES,
    README,
    draw,
    four_epsilons,
    kept_numbers,
    noise_left,
    noise_of_choosing,
    slow_numbers,
)

DRAWN = [name for name in PICTURES if name not in README]


def coordinates(picture: Path) -> np.ndarray:
    """All numbers of a picture's paths and places, in points."""
    parts = re.findall(r'(?: d| transform| x| y|points)="([^"]*)"', picture.read_text(encoding="utf-8"))
    return np.array([float(number) for part in parts for number in re.findall(r"-?\d+\.?\d*", part)])


def words(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))


def check_same(one: Path, other: Path) -> None:
    assert words(one) == words(other) != []
    assert coordinates(one) == pytest.approx(coordinates(other), abs=0.5)


@pytest.mark.one_case
@pytest.mark.parametrize("name", DRAWN)
def test_light_and_dark_show_the_same(name: str, tmp_path: Path) -> None:
    check_same(*draw(tmp_path, [name]))


def test_readmes_picture_shows_the_same_in_light_and_dark() -> None:
    for name in README:
        check_same(*(FOLDER / f"{name}-{theme}.svg" for theme in ("light", "dark")))


def test_only_readmes_picture_is_kept() -> None:
    """The site's build draws the others; a kept one would be shown in their place, and grow old."""
    assert [file.stem for file in sorted(FOLDER.glob("*.svg"))] == [
        f"{name}-{theme}" for name in README for theme in ("dark", "light")
    ]


def test_kept_numbers_are_those_of_today() -> None:
    """One of each picture; all of them in the slow test below."""
    assert noise_left(4096, 8.0) == pytest.approx(tuple(kept_numbers()["cancelling"]["8"][-1]), rel=1e-6)


@pytest.mark.slow
def test_all_kept_numbers_are_those_of_today() -> None:
    """Two dozen calibrations and 200 prices."""
    kept, today = kept_numbers(), slow_numbers()
    assert kept["choosing"] == {label: pytest.approx(curve, rel=1e-6) for label, curve in noise_of_choosing().items()}
    for epsilon, found in today["cancelling"].items():
        assert np.array(kept["cancelling"][epsilon]) == pytest.approx(np.array(found), rel=1e-6)


@pytest.mark.slow
def test_readmes_picture_is_what_the_script_draws(tmp_path: Path) -> None:
    """Three audits."""
    for drawn in draw(tmp_path, README, ["light"]):
        check_same(drawn, FOLDER / drawn.name)


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
