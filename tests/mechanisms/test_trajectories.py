"""Trajectories of every mechanism equal those of its transcription, so that no edit moves one in silence."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transcribed_coordinates as coordinates
import transcribed_noises as noises
import transcribed_radii as moving
import transcriptions as fixed
from trajectories import BATCH, SIZES, Case, differences

from dptune.cli.mechanisms import summaries

#: Sums are of float64, in another order; released gradients are equal to the last bit of their float32.
TOLERANCE = 1e-11
#: Mechanisms whose trajectories are held by another file.
ELSEWHERE = {
    "rldp": "tests/mechanisms/test_rldp_trajectory.py",
    "rldp_published": "tests/mechanisms/test_rldp_trajectory.py",
    "pmixed": "tests/prediction/test_pmixed_trajectory.py",
    "pmixed_published": "tests/prediction/test_pmixed_trajectory.py",
    "dppg": "tests/policy/test_dppg_trajectory.py",
}
D, K = sum(SIZES), 4
T03 = {"weights": (0.1, 0.1, 0.1), "gamma": (0.5, 1.0), "rate": 5.0, "uniform": (1.0, 2.0)}
#: Options of GeoClip's algorithms as printed, with h_2 = 10: of the library, and of the transcription.
PRINTED = {"explore": 0.0, "floor": 1e-15, "ceiling": 10.0}
PRINTED_HERE = {"h1": 1e-15, "h2": 10.0}


def case(
    name: str, transcription: type[fixed.Transcription], options: dict[str, Any] | None = None, **here: Any
) -> Case:
    """A mechanism with ``options``, and its transcription with those of ``here``, in the paper's names."""
    return Case(name, partial(transcription, **here), options or {})


CASES = {
    "nonprivate": case("nonprivate", fixed.Nonprivate, margin=0.0),
    "static": case("static", fixed.Static, {"max_grad_norm": 0.3}, radius=0.3),
    "auto_s": case("auto_s", fixed.AutoS),
    "psac": case("psac", fixed.Psac),
    "psac, r and C": case("psac", fixed.Psac, {"r": 0.01, "max_grad_norm": 0.3}, r=0.01, radius=0.3),
    "autoclip_published": case("autoclip_published", fixed.RawQuantile),
    "autoclip_published, p": case("autoclip_published", fixed.RawQuantile, {"target": 0.9}, p=0.9),
    "per_pair": case("per_pair", fixed.PerPair),
    "per_pair, weights": case("per_pair", fixed.PerPair, {"weights": [1.0, 2.0, 3.0]}, weights=[1.0, 2.0, 3.0]),
    "per_pair, RLDP's noise": case(
        "per_pair", fixed.PerPair, {"noise_unit": "pair", "pair_radius": 0.1, "stabiliser": 1e-6},
        scheme="pair", radius=0.1, stabiliser=1e-6,
    ),
    "dp_lora": case("dp_lora", fixed.PerPair, scheme="global"),
    "dp_lora_fed": case("dp_lora_fed", fixed.Static, {"max_grad_norm": 0.3}, radius=0.3),
    "laplace": case("laplace", noises.Laplace, {"max_grad_norm": 0.7}, radius=0.7),
    "plrvo": case("plrvo", noises.Plrvo),
    "plrvo, theta": case(
        "plrvo", noises.Plrvo, {"k": 7.0, "theta": 0.2, "max_grad_norm": 0.3}, k=7.0, theta=0.2, radius=0.3
    ),
    "lmo_dp": case("lmo_dp", noises.LmoDp, {"noise_multiplier": 0.0}, **T03),
    "lmo_dp, scaled": case(
        "lmo_dp", noises.LmoDp, {"preset": "T3", "max_grad_norm": 0.3},
        weights=(0.1, 0.1, 0.9), gamma=(1.0, 2.0), rate=5.0, uniform=(2.0, 3.0), multiplier=1.0, radius=0.3,
    ),
    "lmo_dp, two parts": case(
        "lmo_dp", noises.LmoDp,
        {"preset": "none", "gamma_weight": 0.4, "gamma_shape": 3.0, "uniform_weight": 0.2, "noise_multiplier": 0.0},
        weights=(0.4, 0.0, 0.2), gamma=(1.0, 3.0),
    ),
    "banded": case("banded", noises.Banded, {"bands": 4}, coefficients=noises.sqrt_strategy(4)),
    "banded, given": case("banded", noises.Banded, {"given": (0.9, 0.3)}, coefficients=(0.9, 0.3)),
    "banded, per pair": case(
        "banded", noises.BandedPairs, {"bands": 3, "clipper": "per_pair"}, coefficients=noises.sqrt_strategy(3)
    ),
    "quantile": case("quantile", moving.Quantile, z_b=0.5 / math.sqrt(0.05)),
    "quantile, papers": case("quantile", moving.Quantile, {"count_noise": 0.8}, z_b=BATCH / 20),
    "quantile, bounded": case(
        "quantile", moving.Quantile,
        {"count_noise": 0.55, "rate": 5.0, "lowest_radius": 0.2, "highest_radius": 1.2},
        z_b=0.55, eta=5.0, lowest=0.2, highest=1.2,
    ),
    "quantile, per pair": case(
        "quantile", moving.QuantileEach, {"clipper": "per_pair", "pair_radius": 0.1, "count_noise": 1.4},
        radius=0.1, z_b=1.4,
    ),
    "dc_sgd_p": case("dc_sgd_p", moving.DcSgd, {"memory": 0.0}),
    "dc_sgd_p, memory": case("dc_sgd_p", moving.DcSgd, memory=0.9),
    "dc_sgd_p, dear": case(
        "dc_sgd_p", moving.DcSgd,
        {"memory": 0.0, "histogram_noise": 1.5, "bins": 7, "target": 0.3, "lowest_radius": 0.2, "highest_radius": 1.5},
        p=0.3, z_h=1.5, bins=7, lowest=0.2, highest=1.5,
    ),
    "dc_sgd_e": case("dc_sgd_e", moving.DcSgd, {"memory": 0.0}, rule="E"),
    "dc_sgd_e, memory": case(
        "dc_sgd_e", moving.DcSgd, {"histogram_noise": 1.2, "bins": 5, "width": 0.5},
        rule="E", memory=0.9, z_h=1.2, bins=5, width=0.5,
    ),
    "adaclip": case("adaclip", coordinates.AdaClip),
    "adaclip, fast": case(
        "adaclip", coordinates.AdaClip, {"mean_decay": 0.9, "variance_decay": 0.9, "start_norm": 0.5},
        b1=0.9, b2=0.9, start=0.5,
    ),
    "geoclip": case("geoclip", coordinates.GeoClip, rank=D - 1, explore=0.2),
    "geoclip, axes": case(
        "geoclip", coordinates.GeoClip, {"rank": K, "directions": "axes", "outer_radius": 0.3},
        rank=K, explore=0.2, outer=0.3,
    ),
    "geoclip, whole": case("geoclip", coordinates.GeoClip, {"rank": 0, "explore": 0.0, "mean_decay": 0.9}, b1=0.9),
    "geoclip, Algorithm 1": case(
        "geoclip", coordinates.GeoClip,
        PRINTED | {"rank": 0, "covariance_decay": 0.999, "start_norm": math.sqrt(D)},
        **PRINTED_HERE, b2=0.999, start=math.sqrt(D),
    ),
    "geoclip, Algorithm 3": case(
        "geoclip", coordinates.GeoClip, PRINTED | {"rank": K, "directions": "axes", "start_norm": math.sqrt(K)},
        **PRINTED_HERE, rank=K, start=math.sqrt(K),
    ),
}  # fmt: skip
# The listings are for batches of one unit.
CASES |= {f"{title}, one unit": replace(CASES[title], batch=1.0) for title in CASES if "Algorithm" in title}


def test_every_mechanism_has_a_trajectory() -> None:
    """Nothing can be added to what ``dptune mechanisms`` lists without one."""
    held = {one.name for one in CASES.values()}
    assert held.isdisjoint(ELSEWHERE)
    assert held | set(ELSEWHERE) == set(summaries())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_trajectory_that_is_held_elsewhere_is_there(name: str) -> None:
    assert "def test_" in (Path(__file__).parents[2] / ELSEWHERE[name]).read_text(encoding="utf-8")


@pytest.mark.parametrize("title", CASES)
def test_a_mechanism_does_what_its_transcription_does(title: str) -> None:
    """Empty batches, hostile gradients, a kill; of every other case the first batch is empty too."""
    found = differences(CASES[title], seed=list(CASES).index(title))
    assert max(found.values()) < TOLERANCE, found
    assert {"radii", "deviations", "gradient"} <= set(found)


#: Numbers of a transcription that an error of 1e-7 is planted in.
PLANTED = {
    "static": ("radius",),
    "auto_s": ("gamma",),
    "psac": ("r",),
    "autoclip_published, p": ("p",),
    "per_pair, RLDP's noise": ("radius",),
    "laplace": ("radius",),
    "plrvo, theta": ("k", "theta"),
    "lmo_dp, scaled": ("multiplier",),
    "quantile, papers": ("gamma", "eta", "z_b"),
    "quantile, per pair": ("z_b",),
    "dc_sgd_p, memory": ("memory", "z_h", "width"),
    "adaclip": ("b1", "b2", "start"),
    "geoclip, axes": ("b1", "b2", "explore", "outer", "start"),
    "geoclip, whole": ("b1", "b2", "h2"),
}


def default(transcription: partial[fixed.Transcription], number: str) -> float:
    """A number of a transcription: of its case, or else the default."""
    of_bases = [inspect.signature(base.__init__).parameters for base in transcription.func.__mro__]  # type: ignore[attr-defined]
    found = next(options[number].default for options in of_bases if number in options)
    return float(transcription.keywords.get(number, found))


@pytest.mark.parametrize(("title", "number"), [(title, number) for title in PLANTED for number in PLANTED[title]])
def test_an_error_of_a_ten_millionth_is_seen(title: str, number: str) -> None:
    """Within nine steps, at a hundred times the tolerance."""
    one = CASES[title]
    wrong = partial(one.transcribed, **{number: default(one.transcribed, number) * (1 + 1e-7)})
    found = differences(replace(one, transcribed=wrong), seed=1, steps=9)
    assert max(found.values()) > 100 * TOLERANCE


def test_the_papers_own_factors_are_told_from_those_with_a_margin() -> None:
    """The margin for rounding, 1e-9 of a radius, is the library's."""
    one = CASES["static"]
    found = differences(replace(one, transcribed=partial(one.transcribed, margin=0.0)), seed=1, steps=9)
    assert found["sums"] == pytest.approx(1e-9, rel=0.1)
