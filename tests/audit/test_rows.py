"""The audit of correlated noise: it finds most of a sound mechanism's mu and no more, and accuses planted bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dptune.audit.epsilon_bounds import best_cuts
from dptune.audit.games import correlated_noise
from dptune.audit.games.correlated_noise import ROW_SCENES, audit_rows, fault_of_deal
from dptune.audit.games.scene import StepAudit
from dptune.audit.verdict import certificate, judged
from dptune.core.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.banded import BandedGaussian, _Window
from dptune.mechanisms.registry import build
from dptune.privacy.accounting.strategy import column_norm
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.release import Release
from dptune.training.privacy_units import PrivacyUnits, Turn

pytestmark = pytest.mark.long

torch.set_num_threads(1)

BANDS, TRIALS = 2, 500


def flat(bands: int) -> tuple[float, ...]:
    """A strategy that falls slowly, so that few bands make large mistakes of wrong recursions."""
    slow = [0.99**place for place in range(bands)]
    return tuple(one / column_norm(slow) for one in slow)


def banded(**entry: Any) -> Mechanism:
    return build("banded", {"noise_multiplier": 1.0} | ({} if "given" in entry else {"bands": BANDS}) | entry)


def audited(mechanism: Mechanism, trials: int = TRIALS, **changes: Any) -> StepAudit:
    options = {"confidence": 0.95, "delta": 1e-5, "entropy": FixedSeed(0), "scenes": ROW_SCENES[:1]} | changes
    return audit_rows(mechanism, trials=trials, **options)


def test_most_of_a_sound_blocks_mu_is_found_and_no_more() -> None:
    """At 95 %, with a fixed seed: the block of a visit is worth 1 / sigma, whatever the bands."""
    found = audited(banded())
    assert 0.6 < found.mu_audited <= 1.0
    certified = certificate(Counter({found.release: 1}), 1e-5)
    assert certified.mu == 1.0
    assert found.epsilon_audited <= certified.epsilon


def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    """Announces one multiplier and adds half of it."""
    add = BandedGaussian.add_row

    def less(
        noise: BandedGaussian, sums: list[Any], scales: Sequence[float], multiplier: float, *rest: Any
    ) -> tuple[list[Any], float]:
        return add(noise, sums, scales, multiplier / 2, *rest)

    patch.setattr(BandedGaussian, "add_row", less)


def not_normalised(patch: pytest.MonkeyPatch) -> None:
    """Solves with c_0 = 1, and charges a norm of 1."""
    follow = _Window.follow
    patch.setattr(
        _Window, "follow", lambda self, z, row, c, unit: follow(self, z, row, tuple(one / c[0] for one in c), unit)
    )


def multiplied(patch: pytest.MonkeyPatch) -> None:
    """w = C z in place of C^-1 z."""

    def follow(self: _Window, z: torch.Tensor, row: int, c: tuple[float, ...], unit: tuple[float, ...]) -> int:
        past = vars(self).setdefault("past", [])
        past.insert(0, z.clone())
        z.copy_(sum((one * old for one, old in zip(c, past, strict=False)), torch.zeros_like(z)))
        return len(past) - 1

    patch.setattr(_Window, "follow", follow)


def window_of_fresh_noise(patch: pytest.MonkeyPatch) -> None:
    """Takes back the z of past rows, not their w."""

    def follow(self: _Window, z: torch.Tensor, row: int, c: tuple[float, ...], unit: tuple[float, ...]) -> int:
        past = vars(self).setdefault("past", [])
        fresh = z.clone()
        for one, old in zip(c[1:], past, strict=False):
            z -= one * old
        z /= c[0]
        past.insert(0, fresh)
        return len(past) - 1

    patch.setattr(_Window, "follow", follow)


@pytest.mark.parametrize(
    ("bug", "bands", "trials"),
    [
        (half_the_noise, 2, TRIALS),
        (not_normalised, 2, TRIALS),
        (multiplied, 2, TRIALS),
        (window_of_fresh_noise, 4, 800),  # fewer bands leave nothing that it drags on
    ],
)
def test_a_planted_bug_is_accused(bug: Any, bands: int, trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shows a mu above the 1 / sigma that the ledger would certify, at 95 %."""
    bug(monkeypatch)
    assert audited(banded(noise_multiplier=0.5, given=flat(bands)), trials).mu_audited > 2.0


@pytest.mark.parametrize("bands", [2, 3, 8, 37])
def test_every_unit_has_one_turn_in_as_many_rows_as_bands(bands: int) -> None:
    assert fault_of_deal(bands) is None


@pytest.mark.parametrize("salt", ["{run_id}, row {row}", "{run_id} {row} of {bands}"])
def test_groups_dealt_anew_are_accused_by_every_audit(salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For certain, whatever the trials show: they play one unit, which may have had luck."""
    of = Turn.of
    anew = lambda run_id, bands, row: of(salt.format(run_id=run_id, row=row, bands=bands), bands, row)  # noqa: E731
    monkeypatch.setattr(Turn, "of", anew)
    found = audited(banded(bands=3), 600)
    accusation = judged(found, certificate(Counter({found.release: 1}), 1e-5), 0.001).accusation
    assert accusation is not None
    assert "groups are not dealt once for a run" in accusation


@pytest.mark.slow
def test_a_price_of_single_steps_at_the_rate_of_the_whole_data_is_accused() -> None:
    """Eight rows of (sigma, q) miss a unit with chance (7 / 8)^8; one whose group is drawn whole is never missed."""
    found = audited(banded(noise_multiplier=0.5, bands=8), 1600)
    wrong = certificate(Counter({Release(1 / 8, 0.5): 8}), 1e-5)
    assert judged(found, wrong, 0.001).accusation is not None
    assert judged(found, certificate(Counter({found.release: 1}), 1e-5), 0.001).accusation is None


def test_visits_compose_and_coins_are_the_groups() -> None:
    """Two visits at rate 1 are worth sqrt(2); at rate 1 / 2 the audit stays below the certified epsilon."""
    two = audited(banded(), visits=2)
    assert 1.0 < two.mu_audited <= 2**0.5
    half = audited(banded(), sample_rate=0.5)
    assert half.release.sample_rate == 0.5
    assert half.epsilon_audited <= certificate(Counter({half.release: 1}), 1e-5).epsilon


def test_the_attacked_unit_is_drawn_by_the_groups_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, draw = set(), PrivacyUnits.draw

    def noted(units: Any, sample_rate: float, entropy: Any, turn: Turn | None = None) -> Any:
        groups.add(None if turn is None else turn.group)
        return draw(units, sample_rate, entropy, turn)

    monkeypatch.setattr(PrivacyUnits, "draw", noted)
    audited(banded(bands=3), 600)
    assert groups == {0, 1, 2}


def test_thresholds_are_chosen_on_trials_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()

    def noted(inside: Any, outside: Any, *rest: Any) -> Any:
        sizes.update((len(inside), len(outside)))
        return best_cuts(inside, outside, *rest)

    monkeypatch.setattr(correlated_noise, "best_cuts", noted)
    found = audited(banded())
    assert sizes == {TRIALS // 10}  # half of the fifth of the trials that choose
    assert found.mu_errors[1::2] == (TRIALS - TRIALS // 5,) * 2


def test_one_band_and_too_few_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="use audit_step"):
        audited(banded(bands=1))
    with pytest.raises(ConfigError, match=r"too few for 8 bands.* use 1600 or more"):
        audited(banded(bands=8))
