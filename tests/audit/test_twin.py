"""Games on a run's twin: close to a known curve, rarely a false alarm, certain where the run's own code errs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from typer.testing import CliRunner

from dptune.audit.games.bets import CUTS, Bets, Curve
from dptune.audit.games.run_twin import TwinAudit, audit_twin
from dptune.audit.games.twin_games import rounds_of
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.controllers.quantile import Quantile
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.planning import Schedule
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed
from dptune.training.privacy_units import PrivacyUnits

torch.set_num_threads(1)

SAMPLED = Schedule(sample_rate=0.3, steps=4, delta=1e-5)
WAYS = ("in", "out")
WHOLE = Schedule(sample_rate=1.0, steps=4, delta=1e-5)


def audited(name: str, schedule: Schedule = SAMPLED, seed: int = 1, games: int = 4000, **options: Any) -> TwinAudit:
    given = {"noise_multiplier": 1.0} | options
    return audit_twin(build(name, given), schedule, games=games, entropy=FixedSeed(seed))


@cache
def sound(name: str) -> TwinAudit:
    return audited(name)


def test_the_composition_of_whole_batches_has_its_exact_mu() -> None:
    """Four Gaussian releases of multiplier 2 are 1-GDP: the attack comes within a tenth, and stays below."""
    found = audited("static", WHOLE, games=10_000, noise_multiplier=2.0)
    assert found.mu_certified == pytest.approx(1.0, abs=1e-6)
    assert 0.9 < found.mu_audited < 1.0
    assert 1.5 < found.epsilon_audited < found.epsilon_certified == pytest.approx(4.377, abs=0.01)
    assert (found.games, found.accusation) == (10_000, None)


def test_one_sampled_release_has_its_exact_curve_in_both_directions() -> None:
    """delta of q N(1) + (1 - q) N(0) against N(0) in closed form: the Poisson-sampled Gaussian."""
    rate, found = 0.3, audited("static", Schedule(0.3, 1, 1e-5), games=10_000)
    for at, epsilon in enumerate(CUTS[:3]):
        slope = np.exp(epsilon)
        cut = 0.5 + np.log((slope - 1 + rate) / rate)  # the likelihood ratio is e^epsilon there
        inside = rate * ndtr(1 - cut) + (1 - rate) * ndtr(-cut)
        exact = inside - slope * ndtr(-cut)
        row = found.curve[at]
        assert row["epsilon"] == epsilon
        assert row["delta_in_certified"] == pytest.approx(exact, rel=1e-3)
        assert 0.3 * exact < float(row["delta_in_shown"] or 0) < exact
        if slope * (1 - rate) < 1:
            # Out exceeds e^epsilon times in: below the place where the ratio is e^-epsilon.
            cut = 0.5 + np.log((1 / slope - 1 + rate) / rate)
            exact = ndtr(cut) - slope * (rate * ndtr(cut - 1) + (1 - rate) * ndtr(cut))
            assert row["delta_out_certified"] == pytest.approx(exact, rel=1e-3)
            assert float(row["delta_out_shown"] or 0) < exact


@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("static", {"pairs": 3}, 0.75),
        ("per_pair", {"pairs": 3}, 0.75),
        ("auto_s", {}, 0.75),
        ("psac", {}, 0.75),
        ("quantile", {}, 0.7),  # a share of the budget is the count's
        ("rldp", {"pairs": 3}, 0.75),
        ("banded", {"bands": 2}, 0.75),
        ("plrvo", {}, 0.5),  # its certificate is a bound
        ("laplace", {"clipper": "l1"}, 0.5),
    ],
)
def test_the_attack_comes_close_to_what_sound_mechanisms_certify(
    name: str, options: dict[str, Any], share: float
) -> None:
    found = audited(name, games=6000, **options)
    assert share < found.mu_audited / found.mu_certified <= 1.01, found
    assert found.accusation is None
    assert found.epsilon_audited < found.epsilon_certified
    assert f"these show a mu of {found.mu_audited:.2f}"[:-1] in found.power


@pytest.mark.long
def test_at_most_ten_of_200_sound_runs_are_accused_at_one_in_twenty() -> None:
    static = build("static", {"noise_multiplier": 1.0})
    certified = audited("static", games=100)
    curve = Curve(*(tuple(float(row[f"delta_{way}_certified"] or 0) for row in certified.curve) for way in WAYS))
    accused, above = 0, 0
    for seed in range(200):
        bets = Bets()
        for scores in rounds_of(static, SAMPLED, 500, FixedSeed(seed), 1.0):
            bets.add(*scores)
        accused += bets.accuses(curve, 0.05)
        above += any(bets.delta_at(0, way, 0.05) > (curve.remove, curve.add)[way][0] for way in (0, 1))
    assert accused <= 10
    assert above <= 10


def halved(self: Any, sums: Any, scales: Any, noise: float, entropy: Any, real: Any = Gaussian.add) -> Any:
    return real(self, sums, scales, noise / 2, entropy)


def test_halved_noise_is_accused_in_5_of_5_before_all_games_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gaussian, "add", halved)
    for seed in range(5):
        found = audited("static", seed=seed)
        assert found.accused_after is not None
        assert found.games == found.accused_after < 4000
        assert "pairs of games on its twin refute the curve whose epsilon at 1e-05 is certified as" in str(
            found.accusation
        )


def broken_clip(self: Any, gradients: Any, knobs: Any, real: Any = Flat.clipped_sum) -> Any:
    return [2 * one for one in real(self, gradients, knobs)]


def broken_draw(self: Any, rate: float, entropy: Any, turn: Any = None, real: Any = PrivacyUnits.draw) -> Any:
    return real(self, min(1.0, 2 * rate), entropy, turn)


def quiet_counts(self: Any, knobs: Any, noise: float, real: Any = Quantile.statistics) -> Any:
    found = real(self, knobs, noise)
    return found and replace(found, sensitivity=found.sensitivity / 50, deviation=found.deviation / 50)


@pytest.mark.parametrize(
    ("owner", "method", "broken", "name"),
    [
        (Flat, "clipped_sum", broken_clip, "static"),  # the sensitivity is twice what is charged
        (PrivacyUnits, "draw", broken_draw, "static"),
        (Quantile, "statistics", quiet_counts, "quantile"),  # a controller that sees the batch nearly without noise
    ],
)
def test_errors_of_the_runs_own_code_are_accused(
    owner: type, method: str, broken: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sound(name).accusation is None
    monkeypatch.setattr(owner, method, broken)
    assert audited(name).accusation is not None


# What one score that trusts the charged noise does not see.


def silent_pair(self: Any, sums: Any, *rest: Any, real: Any = Gaussian.add) -> Any:
    return [sums[0].float() + 0.0, *real(self, sums, *rest)[1:]]


def half_as_loud_pair(self: Any, sums: Any, scales: Any, noise: float, entropy: Any, real: Any = Gaussian.add) -> Any:
    loud = real(self, sums, scales, noise, entropy)
    return [real(self, sums, scales, noise / 2, entropy)[0], *loud[1:]]


@pytest.mark.parametrize("broken", [silent_pair, half_as_loud_pair])
def test_too_little_noise_in_one_pair_of_eight_is_learned_and_accused(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audited("static", pairs=8, games=8000).accusation is None
    monkeypatch.setattr(Gaussian, "add", broken)
    assert "pairs of games on its twin refute" in str(audited("static", pairs=8, games=8000).accusation)


def test_noise_that_two_steps_share_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only nearly the same, so that no digit repeats; the noise of the last step but one."""
    kept: list[Any] = []

    def again(self: Any, sums: Any, scales: Any, noise: float, entropy: Any, real: Any = Gaussian.add) -> Any:
        fresh = real(self, [0 * one for one in sums], scales, noise, entropy)
        kept.append(
            fresh if len(kept) % 4 < 2 else [one + 0.01 * new for one, new in zip(kept[-2], fresh, strict=True)]
        )
        same = kept[-1] if len(kept[-1][0]) == len(sums[0]) else fresh
        return [(one + new).float() for one, new in zip(sums, same, strict=True)]

    monkeypatch.setattr(Gaussian, "add", again)
    # A mechanism makes its first releases on other sizes, whose noise is dropped here.
    monkeypatch.setattr("dptune.audit.games.twin_games.check_parts", lambda *_: kept.clear())
    monkeypatch.setattr("dptune.audit.games.twin_games.check_released", lambda *_: kept.clear())
    found = audited("static")
    assert found.accusation == "steps 1 and 3 of a run have the same noise: it must be fresh"
    assert found.games == 500


def test_a_release_that_is_no_number_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bets learn nothing from a score that is not a number, so without this fault such a release would pass."""

    def leaks(self: Any, sums: Any, *rest: Any, real: Any = Gaussian.add) -> Any:
        noisy = real(self, sums, *rest)
        many = [len(one) > 2 and int((one != 0).sum()) > 1 for one in sums]  # not the auditor's own check
        found = zip(noisy, sums, many, strict=True)
        return [one.masked_fill(total != 0, float("nan")) if leak else one for one, total, leak in found]

    monkeypatch.setattr(Gaussian, "add", leaks)
    assert "of a run released nan or infinity" in str(audited("static").accusation)


def test_the_published_rldp_refutes_its_own_claim_and_the_sound_one_keeps_its_certificate() -> None:
    """Sixteen pairs with noise as if each were alone: four times the claimed shift."""
    found = audited("rldp_published", Schedule(0.3, 8, 1e-5), pairs=16, noise_multiplier=2.0, games=2000)
    assert found.claim_refuted_after is not None
    assert found.games < 200  # it stops there
    assert "is claimed as" in str(found.claim_refuted)
    assert found.accusation is None  # nothing is certified
    assert found.epsilon_certified == float("inf")
    certain = audited("static", Schedule(0.3, 8, 1e-5), noise_multiplier=2.0, games=1000)
    assert (certain.claim_refuted, certain.accusation) == (None, None)


def test_a_run_without_noise_shows_its_leak() -> None:
    found = audit_twin(build("nonprivate", {}), SAMPLED, games=2000, entropy=FixedSeed(1))
    assert found.mu_audited > 1.5
    assert found.epsilon_audited > 4
    assert found.power.startswith(
        "nothing finite is certified, so there is nothing to refute; these show an epsilon of"
    )


@pytest.mark.parametrize(
    ("name", "options", "given", "said"),
    [
        ("static", {}, {"games": 50}, "games: 50 is below 100"),
        ("static", {}, {"confidence": 1.0}, "confidence: 1.0 is not in"),
        ("static", {}, {"false_alarms": 0.0}, "false_alarms: 0.0 is not in"),
        ("rldp", {"move_noise": True}, {}, "rldp moves its noise, and only the ledger of a run limits how far"),
        ("plrvo", {"shared": True}, {}, r"no likelihood ratio of plrvo's noise \(shared_laplace_mixture\) is known"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(
    name: str, options: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    built = build(name, {"noise_multiplier": 1.0} | options)
    with pytest.raises(ConfigError, match=said):
        audit_twin(built, SAMPLED, **({"games": 500} | given))


PLAYED = ["--whole-run", "--steps", "4", "--sample-rate", "0.3", "--trials", "1000"]


def test_the_command_prints_figures_and_curve_and_accuses_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound run is accused in one of a million audits."""
    sound = CliRunner().invoke(app, ["audit", "static", *PLAYED, "--json", "--false-alarms", "1e-6"])
    assert sound.exit_code == 0, sound.output
    found = json.loads(sound.stdout)
    assert (found["games"], found["steps"], found["sample_rate"]) == (1000, 4, 0.3)
    assert [row["epsilon"] for row in found["curve"]] == list(CUTS)
    monkeypatch.setattr(Gaussian, "add", halved)
    done = CliRunner().invoke(app, ["audit", "static", *PLAYED])
    assert done.exit_code == 1
    assert "delta shown of certified at epsilon 0: unit in 0." in done.stdout
    assert "Accused: " in done.stderr
    assert "pairs of games on its twin refute the curve" in done.stderr
    refused = CliRunner().invoke(app, ["audit", "dppg", *PLAYED])
    assert "--whole-run: dppg has no batches to draw" in refused.stderr


@pytest.mark.parametrize(
    ("name", "games", "played", "why"),
    [
        ("static", 1200, 1200, ""),
        ("quantile", 1200, 1200, ""),
        ("adaclip", 1200, 120, "adaclip clips in coordinates of its own"),
        ("rldp_published", 1200, 120, "rldp_published reads statistics without noise"),
        ("adaclip", 100, 100, ""),
    ],
)
def test_games_that_are_played_alone_are_a_tenth_and_say_so(name: str, games: int, played: int, why: str) -> None:
    short = Schedule(sample_rate=0.3, steps=2, delta=1e-5)
    found = audited(name, short, games=games, noise_multiplier=4.0)
    assert found.games == played
    assert bool(found.fewer) == bool(why)
    if why:
        assert f"because {why}" in found.fewer
        assert found.fewer.endswith("--trials 12000 plays 1200 pairs.")
