"""A release refuses what no accountant could price, and survives its trip through JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.privacy.release import Release

names = st.lists(st.text(max_size=8), max_size=3).map(tuple)
releases = st.builds(
    Release,
    sample_rate=st.floats(0, 1, exclude_min=True),
    noise_multiplier=st.floats(1e-3, 1e4),
    sensitivity=st.floats(1e-3, 1e4),
    statistics=names,
    raw_inputs=names,
    adaptive=st.booleans(),
)


@given(releases)
def test_round_trip_through_json_is_equal(release: Release) -> None:
    assert Release.from_dict(json.loads(json.dumps(release.to_dict()))) == release


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.1}, "sample_rate"),
        ({"sample_rate": math.nan}, "sample_rate"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise": "none"}, "noise_multiplier"),
        ({"noise": "laplace"}, "noise"),
        ({"sensitivity": 0.0}, "sensitivity"),
        ({"sensitivity": math.inf}, "sensitivity"),
        ({"sensitivity": math.nan}, "sensitivity"),
    ],
)
def test_out_of_range_is_refused_by_name(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Release(**({"sample_rate": 0.1, "noise_multiplier": 1.0} | values))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": "1"},
        {"sample_rate": True},
        {"adaptive": 1},
        {"extra": 0},
        {"raw_inputs": None},
        {"raw_inputs": "loss"},
        {"raw_inputs": [1]},
    ],
)
def test_wrong_types_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Release.from_dict(Release(0.1, 1.0).to_dict() | change)


def test_missing_key_is_refused() -> None:
    data = Release(0.1, 1.0).to_dict()
    del data["sensitivity"]
    with pytest.raises(ConfigError, match="sensitivity"):
        Release.from_dict(data)


def test_effective_multiplier_is_noise_over_sensitivity() -> None:
    assert Release(0.1, 3.0, sensitivity=2.0).effective_noise_multiplier == 1.5
