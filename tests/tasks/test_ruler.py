"""The ruler of a mechanism: ticks in their places, an arrow for infinity, and nothing for what was not measured."""

from __future__ import annotations

import math
import re

import pytest

from tasks.report.numbers import ruler, ruler_end, whole_percent


def test_ticks_stand_in_proportion_and_what_is_ruled_out_is_filled() -> None:
    drawn = str(ruler({"claimed": 1.0, "noise": 2.0, "proved": 4.0, "shown": 0.5}, 4.0))
    places = dict(re.findall(r'<line class="(\w+)" x1="([\d.]+)%"', drawn))
    assert {name: float(place) for name, place in places.items()} == {
        "claimed": 22.5,
        "noise": 45.0,
        "proved": 90.0,
        "shown": 11.25,
    }
    assert '<rect class="shown" x="0" width="11.25%"' in drawn
    assert "<title>shown: ε ≥ 0.5</title>" in drawn
    assert "<title>proved: ε ≤ 4</title>" in drawn
    assert "→" not in drawn


def test_infinity_is_an_arrow_and_what_was_not_measured_is_not_drawn() -> None:
    drawn = str(ruler({"claimed": 1.0, "noise": math.inf, "proved": math.inf, "shown": None}, 1.0))
    assert "→<title>noise only, proved: ε = ∞</title>" in drawn
    assert "shown" not in drawn
    assert 'aria-label="claimed 1; noise only ∞; proved ∞"' in drawn


def test_rows_of_a_section_share_a_scale() -> None:
    assert ruler_end([{"claimed": 0.5, "proved": math.inf}, {"claimed": 3.0, "shown": None}]) == 3.0
    assert ruler_end([{"claimed": math.inf}]) == 1.0


@pytest.mark.parametrize(("share", "percent"), [(0.709, 70), (1.0, 100), (0.29, 29), (0.999999, 99), (-0.001, -1)])
def test_a_share_is_rounded_down_in_sentences_and_tables_alike(share: float, percent: int) -> None:
    assert whole_percent(share) == percent
