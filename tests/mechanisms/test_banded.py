"""Banded noise: its law, its recursion, what one unit moves, and what it does not go with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from mechanism_steps import EXPECTED, RATE, SIZES, batch_of, privatised, started, zeros
from scipy.linalg import solve_triangular, toeplitz

from dptune.core.errors import ConfigError
from dptune.mechanisms.interfaces import RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.banded import BandedGaussian, _Window
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.planning import Schedule, fitted
from dptune.mechanisms.registry import build
from dptune.privacy.accounting.strategy import inverse, optimised, row_deviations, square_root
from dptune.privacy.entropy import FixedSeed, OsEntropy

torch.set_num_threads(1)

REFERENCE = optimised(8, 72)
CPU = torch.device("cpu")


def banded(bands: int = 3, sizes: Sequence[int] = SIZES, **entry: Any) -> Mechanism:
    return started("banded", sizes, bands=bands, **entry)


def rows_of(mechanism: Mechanism, batches: Sequence[Any], sizes: Sequence[int] = SIZES, seed: int = 0) -> np.ndarray:
    """(rows, coordinates) releases of a run of these batches, from the same entropy for the same seed."""
    entropy, found = FixedSeed(seed), []
    for row, batch in enumerate(batches):
        released = mechanism.privatise(batch, zeros(sizes), mechanism.knobs(), EXPECTED, entropy, list, row)
        found.append(torch.cat(released.blocks).double().numpy())
    return np.stack(found)


def decoded(rows: np.ndarray, strategy: Sequence[float]) -> np.ndarray:
    """y_r = sum_i c_i x_(r-i)."""
    column = np.zeros(len(rows))
    column[: min(len(rows), len(strategy))] = strategy[: len(rows)]
    return np.asarray(toeplitz(column, np.zeros(len(rows))) @ rows)


def test_one_band_is_gaussian_noise_bit_for_bit() -> None:
    """Release and noise, under a fixed seed; so is a number of bands that nobody has chosen yet."""
    rng = np.random.default_rng(3)
    batch = [batch_of(rng.standard_normal((4, 8)))]
    static = started("static")
    for mechanism in (banded(1), started("banded")):
        assert mechanism.release(mechanism.knobs(), RATE, 5) == static.release(static.knobs(), RATE)
        for one, other in zip(privatised(mechanism, batch).blocks, privatised(static, batch).blocks, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("first", [0, 5])
def test_the_recursion_is_the_solution_of_the_whole_matrix(first: int) -> None:
    """300 rows of C w = z at once, to 1e-12 of float64; and z = (1, 0, 0, ..) gives the inverse's column.

    Also where it begins after a gap.
    """
    z = np.random.default_rng(0).standard_normal((300, 5))
    z[:, 0] = np.eye(1, 300)[0]
    column = np.zeros(300)
    column[:8] = REFERENCE
    expected = solve_triangular(toeplitz(column, np.zeros(300)), z, lower=True)
    window, found = _Window(), []
    for row, normals in enumerate(z):
        w = torch.from_numpy(normals.copy())
        assert window.follow(w, first + row, REFERENCE, (1.0,)) == row
        found.append(w.numpy())
    assert np.abs(np.stack(found) - expected).max() < 1e-12
    assert np.abs(np.stack(found)[:, 0] - inverse(REFERENCE, 300)).max() < 1e-12


def test_the_law_of_the_noise_is_the_announced_one() -> None:
    """10^5 coordinates, 24 rows: deviations within 1 %, and decoded rows independent at the multiplier itself."""
    sizes = (100_000,)
    mechanism = started("banded", sizes, given=REFERENCE, noise_multiplier=2.0, max_grad_norm=0.5)
    entropy, found, said = OsEntropy(), [], []
    for row in range(24):
        released = mechanism.privatise([], zeros(sizes), mechanism.knobs(), EXPECTED, entropy, list, row)
        found.append(released.blocks[0].double().numpy())
        said.append(released.deviations[0])
    rows = np.stack(found)
    expected = row_deviations(REFERENCE, 24)
    assert rows.std(axis=1) == pytest.approx(expected, rel=0.01)
    assert said == pytest.approx(list(expected), rel=1e-9)
    y = decoded(rows, REFERENCE)
    assert y.std(axis=1) == pytest.approx(np.ones(24), rel=0.01)
    assert np.abs(np.corrcoef(y) - np.eye(24)).max() < 6 / len(y[0]) ** 0.5
    sums = np.cumsum(rows, axis=0).std(axis=1)
    assert sums[[0, 1, 7]] == pytest.approx((1.49690, 1.61489, 1.76340), rel=0.01)


def test_coordinates_share_no_noise_within_a_row_or_across_blocks() -> None:
    """1,500 runs of two rows: 28 + 64 correlations of 8 coordinates, each below 6 sigma: a false alarm in 5 million."""
    entropy, found, runs = OsEntropy(), [], 1500
    for _ in range(runs):
        mechanism = banded(2, clipper="per_pair")
        two = [mechanism.privatise([], zeros(), mechanism.knobs(), EXPECTED, entropy, list, row) for row in range(2)]
        found.append([torch.cat(released.blocks).double().numpy() for released in two])
    first, second = np.moveaxis(np.array(found), 1, 0)
    second = second - first * (second * first).sum() / (first * first).sum()  # what the recursion takes back
    size = first.shape[1]
    together = np.corrcoef(np.hstack([first, second]).T)
    assert np.abs(together - np.eye(2 * size)).max() < 6 / runs**0.5


def test_releases_lie_on_a_grid_that_is_public() -> None:
    """Also in later rows, whose noise is a sum: else the last bits of a release would tell of the exact sum."""
    mechanism = banded(3, noise_multiplier=1.5)
    batch = [batch_of(np.random.default_rng(0).standard_normal((4, 8)))]
    rows = rows_of(mechanism, [batch] * 4)
    steps = rows * 2.0**20 / 1.5 / mechanism.scales(mechanism.knobs())[0]
    assert np.abs(steps - np.round(steps)).max() < 1e-2


def test_a_scale_that_moves_begins_the_recursion_anew() -> None:
    window = _Window()
    assert [window.follow(torch.ones(2, dtype=torch.float64), row, (0.8, 0.6), (1.0,)) for row in (0, 1)] == [0, 1]
    assert window.follow(torch.ones(2, dtype=torch.float64), 2, (0.8, 0.6), (2.0,)) == 0


@pytest.mark.parametrize("bands", [2, 3, 8])
@pytest.mark.parametrize("entry", [{}, {"clipper": "per_pair"}, {"clipper": "auto_s"}, {"clipper": "psac"}])
def test_one_unit_moves_decoded_rows_by_c_times_its_gradient_and_no_others(bands: int, entry: dict[str, Any]) -> None:
    """From the row where it was drawn, over b rows, by at most the sensitivity in all; nearly that if it saturates."""
    mechanism, rng = banded(bands, noise_multiplier=0.01, **entry), np.random.default_rng(1)
    others = [[batch_of(rng.standard_normal((2, 8)))] for _ in range(12)]
    extra = batch_of(np.full((1, 8), 1e9))
    with_unit = [[*batch, extra] if row == 2 else batch for row, batch in enumerate(others)]
    scales = np.repeat(mechanism.scales(mechanism.knobs()), SIZES)
    copied = copy.deepcopy(mechanism)
    moved = decoded((rows_of(mechanism, with_unit) - rows_of(copied, others)) / scales, mechanism.coefficients)
    norms, rounding = np.linalg.norm(moved, axis=1), 1e-4
    expected = np.zeros(12)
    expected[2 : 2 + bands] = mechanism.coefficients
    assert norms == pytest.approx(expected[:12], abs=rounding)
    assert np.linalg.norm(moved) == pytest.approx(1, abs=rounding)


@pytest.mark.parametrize("gap", [2, 5])
def test_after_rows_that_were_not_made_here_the_noise_begins_anew(gap: int) -> None:
    """A row that is no successor of the last one has deviation 1 / c_0, and no correlation with what was made."""
    sizes = (50_000,)
    mechanism = started("banded", sizes, given=REFERENCE)
    entropy, found = OsEntropy(), []
    for row in (0, 1, 1 + gap):
        released = mechanism.privatise([], zeros(sizes), mechanism.knobs(), EXPECTED, entropy, list, row)
        found.append(released.blocks[0].double().numpy())
    assert released.deviations == pytest.approx((1 / REFERENCE[0],), rel=1e-9)
    assert found[2].std() == pytest.approx(1 / REFERENCE[0], rel=0.02)
    assert abs(np.corrcoef(found)[2, :2]).max() < 6 / sizes[0] ** 0.5
    assert abs(np.corrcoef(found)[0, 1]) > 0.2  # and the test can see a correlation


def test_a_row_that_failed_half_way_is_not_built_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = banded(3)
    rows_of(mechanism, [[], []])
    with monkeypatch.context() as patch:
        patch.setattr(_Window, "__setattr__", failing_at("unit"))
        with pytest.raises(RuntimeError, match="out of memory"):
            mechanism.privatise([], zeros(), mechanism.knobs(), EXPECTED, OsEntropy(), list, 2)
    released = mechanism.privatise([], zeros(), mechanism.knobs(), EXPECTED, OsEntropy(), list, 3)
    assert released.deviations[0] == pytest.approx(1 / mechanism.coefficients[0])


def failing_at(name: str) -> Any:
    """An assignment that fails for one name once."""

    def assign(window: _Window, attribute: str, value: Any) -> None:
        if attribute == name:
            raise RuntimeError("out of memory")
        object.__setattr__(window, attribute, value)

    return assign


def test_noise_leaves_its_process_neither_by_a_copy_nor_by_a_pickle() -> None:
    mechanism = banded(3)
    rows_of(mechanism, [[], [], []])
    noise = mechanism.noise
    assert isinstance(noise, BandedGaussian)
    assert noise._window.row == 2
    assert noise._window.ring is not None
    for copied in (
        copy.deepcopy(noise),
        pickle.loads(pickle.dumps(noise)),
        replace(noise),
        copy.copy(noise),
        copy.copy(noise._window),
    ):
        window = copied._window if isinstance(copied, BandedGaussian) else copied
        assert (window.row, window.ring) == (None, None)
    assert "tensor" not in repr(noise) + repr(noise._window)
    shown = asdict(noise)["_window"]
    assert isinstance(shown, _Window)
    assert shown.ring is None
    noise.forget()
    assert noise._window.ring is None
    assert mechanism.controller.state_dict() == {}


def test_a_start_forgets_the_run_before() -> None:
    mechanism = banded(3)
    rows_of(mechanism, [[], [], []])
    mechanism.start(RunFacts(SIZES, CPU, EXPECTED, RATE, 100, 2.0, 1e-5))
    released = mechanism.privatise([], zeros(), mechanism.knobs(), EXPECTED, OsEntropy(), list, 3)
    assert released.deviations[0] == pytest.approx(1 / mechanism.coefficients[0])


def test_rows_are_charged_to_their_group_at_its_own_rate() -> None:
    mechanism = banded(4)
    for row in range(9):
        release = mechanism.release(mechanism.knobs(), RATE, row)
        assert (release.part, release.sample_rate, release.noise) == (row % 4, 4 * RATE, "gaussian")
        assert (release.coefficients, release.leaks) == (square_root(4), ())
    assert banded(100).release(mechanism.knobs(), 0.01).sample_rate == 1.0


def test_a_strategy_of_ones_own_is_charged_with_its_norm() -> None:
    mechanism = started("banded", given="2,1,0.5")
    release = mechanism.release(mechanism.knobs(), RATE)
    assert release.sensitivity == pytest.approx(5.25**0.5)
    assert mechanism.effective_noise_multiplier(mechanism.knobs()) == release.effective_noise_multiplier
    at = mechanism.at_effective_noise_multiplier(mechanism.knobs(), 0.7)
    assert mechanism.effective_noise_multiplier(at) == pytest.approx(0.7, rel=1e-12)
    with pytest.raises(ConfigError, match="fixed multiplier"):
        mechanism.release(at, RATE)  # and no filter prices noise that moves
    each = started("banded", SIZES, given="2,1,0.5", clipper="per_pair", noise_unit="pair")
    assert each.release(each.knobs(), RATE).sensitivity == pytest.approx((len(SIZES) * 5.25) ** 0.5)


@pytest.mark.parametrize(
    ("entry", "field", "fix"),
    [
        ({"controller": "quantile"}, "controller", "constant"),
        ({"controller": "rldp"}, "controller", "constant"),
        ({"controller": "adaclip", "clipper": "transformed"}, "controller", "constant"),
        ({"clipper": "l1"}, "clipper", "flat"),
        ({"clipper": "transformed"}, "clipper", "flat"),
        ({"clipper": "local_updates"}, "clipper", "flat"),
        ({"bands": 0}, "bands", "auto"),
        ({"bands": 2.5}, "bands", "whole"),
        ({"bands": "many"}, "bands", "number"),
        ({"bands": 3, "given": "0.8,0.6"}, "bands", "leave"),
        ({"given": "0.6,0.8"}, "given", "numbers that fall, such as 1,0.5"),
        ({"given": "1"}, "given", "numbers that fall"),
        ({"strategy": "bisr"}, "strategy", "optimised or sqrt"),
        ({"objective": "median"}, "objective", "mean"),
        ({"window": 0.5}, "window", "100"),
        ({"noise_memory": 0}, "noise_memory", "2"),
        ({"dimension": -1}, "dimension", "count"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(entry: dict[str, Any], field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("banded", {"noise_multiplier": 1.0, "pairs": 2} | entry)
    assert caught.value.field == field
    assert fix in str(caught.value).partition("Fix: ")[2]


@pytest.mark.parametrize(
    ("bands", "rate", "steps", "said"),
    [
        (8, 0.2, 40, "use at most 5"),
        (8, 0.01, 7, "use at most 7"),
        ("auto", 0.01, 7, "give a number"),
    ],
)
def test_a_schedule_that_has_no_room_for_the_bands(bands: Any, rate: float, steps: int, said: str) -> None:
    mechanism = build("banded", {"noise_multiplier": 1.0, "bands": bands})
    with pytest.raises(ConfigError, match=said) as caught:
        fitted(mechanism, Schedule(rate, steps, 1e-5))
    assert caught.value.field == "bands"


def test_too_many_bands_are_refused_before_anything_is_charged() -> None:
    mechanism = build("banded", {"noise_multiplier": 1.0, "bands": 64})
    with pytest.raises(ConfigError, match=r"64 bands keep 2\.52 GB of past noise, and 2 are allowed"):
        mechanism.start(RunFacts((5_000_000,), CPU, 64.0, 0.001, 1000, 2.0, 1e-5))
    with pytest.raises(ConfigError, match="use at most 50"):
        mechanism.start(RunFacts((5,), CPU, 64.0, 0.02, 1000, 2.0, 1e-5))
    with pytest.raises(ConfigError, match="use at most 10"):
        mechanism.start(RunFacts((5,), CPU, 64.0, 0.01, 10, 2.0, 1e-5))
    with pytest.raises(ConfigError, match="use at most 50 bands"):
        mechanism.release(mechanism.knobs(), 0.02)


@pytest.mark.parametrize(
    ("dimension", "memory", "most"), [(0, 2.0, 64), (4_000_000, 2.0, 32), (40_000_000, 2.0, 4), (10**9, 2.0, 1)]
)
def test_calibration_tries_no_bands_that_memory_does_not_hold(dimension: int, memory: float, most: int) -> None:
    """Written out: b bands keep b - 1 float64 adapters. A number that was asked for is refused, not lowered."""
    noise = BandedGaussian(1.0, dimension=dimension, noise_memory=memory)
    tried = noise.bands_to_try(0.001, 256)
    assert max(tried) == most
    noise.fitted(0.001, 256, most).check_memory((dimension,))
    if dimension:
        with pytest.raises(ConfigError, match="noise_memory"):
            noise.fitted(0.001, 256, 2 * most).check_memory((dimension,))
    assert BandedGaussian(1.0, bands=64, dimension=dimension).bands_to_try(0.001, 256) == (64,)


class WithoutWindow(BandedGaussian):
    """Draws its own rows and inherits a family that it did not name."""

    def add_row(self, *arguments: Any) -> Any:
        return super().add_row(*arguments)


class Silent:
    """Rows without noise, of another object than the noise that is priced."""

    coefficients = (0.8, 0.6)

    def add_row(self, sums: Any, *_arguments: Any) -> Any:
        return sums, 1.0

    def check(self, *_arguments: Any) -> None:
        pass


class SilentRows(Gaussian):
    """Gaussian noise by its name, of which another object makes the rows."""

    @property
    def correlated(self) -> Any:
        return Silent()


class OwnStrategy(BandedGaussian):
    """Announces other coefficients than its rows have."""

    @property
    def coefficients(self) -> tuple[float, ...]:
        return (1.0,)


@pytest.mark.parametrize("noise", [WithoutWindow(1.0, bands=4), SilentRows(1.0), OwnStrategy(1.0, bands=4)])
def test_who_overrides_the_recursion_names_the_family_again(noise: Any) -> None:
    sound = build("banded", {"noise_multiplier": 1.0, "bands": 4})
    with pytest.raises(ConfigError, match="draws its own noise"):
        replace(sound, noise=noise)
