"""Gradients that an auditor plants in a run: the mechanism treats them as samples, and their coins come to light."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from scipy.signal import lfilter
from scipy.stats import norm

from dptune.audit.one_run import OneRun, SampleRate, Unseen, audited_sample_rate, one_run
from dptune.audit.refutation import refutation, run_certificate
from dptune.core.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, calibrated, planned
from dptune.mechanisms.registry import MECHANISMS, build, takes_noise
from dptune.privacy.accounting.strategy import row_deviation, square_root
from dptune.privacy.entropy import Entropy, FixedSeed
from dptune.training.crafted_canaries import CraftedCanaries, _Crafted, _Decoder
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec

DRAW = PrivacyUnits.draw
RECORDS, STEPS, RATE, DELTA, COUNT = 24, 20, 0.25, 1e-5, 256


def coins(count: int = COUNT) -> CraftedCanaries:
    return CraftedCanaries(np.random.default_rng(3).random(count) < 0.5, np.zeros(count))


def run(mechanism: Mechanism, canaries: CraftedCanaries, directory: Path, **settings: Any) -> OneRun:
    model, tokens, entropy = tiny.adapted(), tiny.records(RECORDS), FixedSeed(settings.pop("seed", 5))
    units = tiny.each_record(tokens).with_slots(canaries.included)
    plan = tiny.make_plan(len(units), **{"sample_rate": RATE, "steps": STEPS, "checkpoint_every": STEPS} | settings)
    header = tiny.make_header(
        entropy, units, mechanism=mechanism.name, published_accountant=mechanism.published_accountant
    )
    spec = RunSpec(model, tokens, units, mechanism, plan, header, public=tokens, auditor=canaries)
    train(spec, directory, entropy).close()
    return one_run(canaries.scores, canaries.included, DELTA, 0.95)


def pairs() -> int:
    return len(lora_pairs(tiny.adapted()))


def at_epsilon_2(name: str, **entry: Any) -> Mechanism:
    entry = {"pairs": pairs()} | entry
    schedule = Schedule(RATE, STEPS, DELTA)
    return calibrated(
        lambda noise: build(name, entry | {"noise_multiplier": noise}), 2.0, schedule, "certified"
    ).mechanism


def test_without_noise_nearly_every_coin_is_seen(tmp_path: Path) -> None:
    found = run(build("nonprivate", {"pairs": pairs()}), coins(), tmp_path)
    assert found.epsilon_audited > 3


@pytest.mark.parametrize(
    ("name", "options"), [("static", {}), ("per_pair", {}), ("rldp", {}), ("banded", {"bands": 4})]
)
def test_a_run_of_epsilon_2_shows_less_than_2(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """At 95 %, with fixed seeds; and the attack is no straw man: it does better than guessing."""
    canaries = coins()
    found = run(at_epsilon_2(name, **options), canaries, tmp_path)
    assert found.epsilon_audited < 2
    assert canaries.scores[canaries.included].mean() > canaries.scores[~canaries.included].mean()


@pytest.mark.parametrize(("name", "options"), [("static", {}), ("banded", {"bands": 4})])
def test_far_too_little_noise_is_caught(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = run(build(name, options | {"pairs": pairs(), "noise_multiplier": 0.2}), coins(), tmp_path)
    assert found.epsilon_audited > 2


@pytest.mark.parametrize(("name", "options"), [("static", {}), ("banded", {"bands": 4})])
@pytest.mark.parametrize(("share", "rings"), [(1.0, False), (0.2, True)])
def test_a_studys_alarm_rings_for_a_run_with_a_fifth_of_the_noise_that_its_ledger_claims(
    name: str, options: dict[str, Any], share: float, rings: bool, tmp_path: Path
) -> None:
    """At the confidence of each of 30 checks that share a false-alarm rate of 0.001; a bound at delta 1e-5 cannot."""
    claimed, schedule, alarm = at_epsilon_2(name, **options), Schedule(RATE, STEPS, DELTA), 1 - 0.001 / 30
    less = replace(claimed, noise=replace(claimed.noise, noise_multiplier=share * claimed.noise.noise_multiplier))
    canaries = coins()
    run(less, canaries, tmp_path)
    header = tiny.make_header(FixedSeed(5), tiny.each_record(tiny.records(RECORDS)), mechanism=name)
    certified = run_certificate(replace(header, leaks=()), planned(claimed, schedule))
    found = refutation(canaries.scores, canaries.included, certified, DELTA, alarm)
    assert certified.epsilon == pytest.approx(2.0, rel=0.01)
    assert found.epsilon_refutable > 3
    assert bool(found.accusation) == rings
    assert one_run(canaries.scores, canaries.included, DELTA, alarm).epsilon_audited == 0


def decoded(rows: np.ndarray, group: int, broken_at: int | None = None, *, scaled: bool = False) -> float:
    """The score of one canary that may be drawn in each third row from ``group`` on, after these rows.

    Args:
        rows: (rows,) its coordinate in each release.
        broken_at: number of a row before which the process was killed; the row itself was lost.
        scaled: divide each row by the deviation of its noise first, as mechanisms announce it.
    """
    decoder, score, before = _Decoder(), 0.0, 0
    for number, row in enumerate(rows):
        if number == broken_at:
            before = 0
            continue
        value = row / row_deviation(STRATEGY, before) if scaled else row
        turn = np.array([number % len(STRATEGY) == group])
        score += float(decoder.follow(np.array([value]), number, turn, STRATEGY, in_units_of_noise=scaled)[0])
        before += 1
    return score


STRATEGY = square_root(3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_visit_adds_one_to_the_decoded_score(group: int, scaled: bool) -> None:
    """The squares of the strategy add up to 1. A visit whose last rows were not made adds what was."""
    visited = np.zeros(12)
    visited[group::3] = [1, 0, 1, 1]
    last = sum(one**2 for one in STRATEGY[: 3 - group])
    assert decoded(visited, group, scaled=scaled) == pytest.approx(2 + last)


def test_a_visit_adds_one_of_the_first_rows_deviations_for_each_pair() -> None:
    """What a mechanism announces is the deviation of each row's own noise, and later rows have more of it."""
    canaries, sigma, pairs = coins(2), 0.5, 3
    mechanism: Any = SimpleNamespace(bands=len(STRATEGY), coefficients=STRATEGY)
    for row in range(9):
        part = torch.tensor([2.0 if row in (0, 3) else 0.0, 0.0, 0.0])
        deviations = (sigma * row_deviation(STRATEGY, row),) * pairs
        released: Any = SimpleNamespace(gradient=[part] * pairs, deviations=deviations)
        canaries.watch(mechanism, released, [], 1.0, row, np.array([row % 3 == 0, row % 3 == 1]))
    assert canaries.scores[0] == pytest.approx(2 * pairs * 2.0 / sigma, rel=1e-5)
    assert canaries.scores[1] == 0


def test_rows_of_pure_noise_move_the_decoded_score_by_one_deviation_a_visit() -> None:
    """A shift of 1 against a deviation of 1 a visit is all that the dominating Gaussian lets anyone see."""
    noise = np.stack([lfilter([1.0], STRATEGY, one) for one in np.eye(12)])  # C^{-1} z, one z at a time
    moved = [decoded(rows, 0) for rows in noise]
    assert math.hypot(*moved) == pytest.approx(math.sqrt(4))
    plain = [rows[::3].sum() for rows in noise]
    assert math.hypot(*plain) > 1.4 * math.hypot(*moved)


def test_a_killed_process_starts_the_decoder_anew() -> None:
    """Before a canary's first turn after the gap, nothing is added: its visits before it are over."""
    visited = np.zeros(12)
    visited[[0, 6, 9]] = 1
    assert decoded(visited, 0, broken_at=7) == pytest.approx(1 + STRATEGY[0] ** 2 + 1)
    late = np.zeros(12)
    late[8] = 1
    assert decoded(late[:9], 0, broken_at=7) == 0


@pytest.mark.one_case("static", "per_pair", "banded", "quantile", "rldp")
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "dp_lora_fed"])
def test_every_mechanism_takes_them_for_samples(name: str, tmp_path: Path) -> None:
    entry = {"noise_multiplier": 1.0} if takes_noise(name, {}) else {}
    canaries = coins(8)
    run(build(name, entry | {"pairs": pairs()}), canaries, tmp_path)
    assert np.isfinite(canaries.scores).all()
    assert canaries.scores.any()


def test_one_canary_moves_the_release_as_much_as_one_sample_may() -> None:
    """The clipped sums of a batch with one canary and of an empty one differ by the declared sensitivity."""
    from mechanism_steps import started, zeros

    for name in ("static", "per_pair", "auto_s"):
        mechanism = started(name)
        crafted = _Crafted.of(np.array([0]), zeros(), mechanism)
        knobs = mechanism.knobs()
        sums = mechanism.exact_sums([crafted], zeros(), knobs)
        scaled = torch.cat([part / scale for part, scale in zip(sums, mechanism.scales(knobs), strict=True)])
        assert float(scaled.norm()) == pytest.approx(mechanism.clipper.sensitivity(knobs, 3), rel=1e-5)


def twice_as_often(units: PrivacyUnits, sample_rate: float, entropy: Entropy, turn: None = None) -> list[Any]:
    return DRAW(units, 2 * sample_rate, entropy)


def always(units: PrivacyUnits, sample_rate: float, entropy: Entropy, turn: None = None) -> list[Any]:
    return DRAW(units, 1.0, entropy)


@pytest.mark.parametrize(
    ("name", "draw", "refuted"),
    [
        ("static", DRAW, False),
        ("rldp", DRAW, False),
        ("nonprivate", DRAW, False),
        ("static", twice_as_often, True),
        ("rldp", twice_as_often, True),
        ("nonprivate", twice_as_often, True),
        ("static", always, True),
    ],
)
def test_an_error_in_the_draw_is_seen_at_certified_epsilon_2(
    name: str, draw: Callable[..., Any], refuted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fixed seeds. A sound draw is accused in one of a thousand audits. One run's bound on epsilon sees no doubled
    rate: it stays below the 2 that is certified."""
    monkeypatch.setattr(PrivacyUnits, "draw", draw)
    canaries = coins()
    mechanism = build(name, {"pairs": pairs()}) if name == "nonprivate" else at_epsilon_2(name)
    found = run(mechanism, canaries, tmp_path)
    seen = audited_sample_rate(canaries.scores, canaries.included, canaries.moves, RATE, 0.95, 0.999, FixedSeed(1))
    assert isinstance(seen, SampleRate)
    assert (seen.alarm > RATE) == refuted
    assert seen.alarm <= seen.audited <= seen.estimate
    assert seen.refutable < 1
    if draw is twice_as_often and name != "nonprivate":
        assert found.epsilon_audited < 2


@pytest.mark.parametrize("name", ["adaclip", "geoclip", "rldp_published", "autoclip_published"])
def test_what_a_canary_adds_is_not_guessed(name: str, tmp_path: Path) -> None:
    """Clipped in other coordinates, or by the batch itself, canaries have no one size: the draw is not audited."""
    canaries = coins(8)
    run(build(name, {"pairs": pairs(), "noise_multiplier": 1.0}), canaries, tmp_path, steps=2)
    assert np.isnan(canaries.moves).all()
    seen = audited_sample_rate(canaries.scores, canaries.included, canaries.moves, 0.5, 0.95, 0.99, FixedSeed(1))
    assert isinstance(seen, Unseen)
    assert seen.power.startswith("NO POWER on the draw: how much a planted gradient moves a release is not known")


def test_slots_without_an_auditor_are_refused(tmp_path: Path) -> None:
    tokens, entropy = tiny.records(RECORDS), FixedSeed(5)
    units = tiny.each_record(tokens).with_slots(np.ones(8, dtype=bool))
    mechanism = build("static", {"pairs": pairs(), "noise_multiplier": 1.0})
    plan, header = tiny.make_plan(len(units), sample_rate=RATE), tiny.make_header(entropy, units)
    with pytest.raises(ConfigError, match=r"auditor: is missing"):
        train(RunSpec(tiny.adapted(), tokens, units, mechanism, plan, header), tmp_path / "run", entropy)
    assert not (tmp_path / "run").exists()


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"canaries.crafted: 1 is too few"):
        CraftedCanaries.toss(1)
    with pytest.raises(ConfigError, match=r"canaries.crafted: 9999 exceeds"):
        run(build("static", {"pairs": pairs(), "noise_multiplier": 1.0}), coins(9999), tmp_path)
    with pytest.raises(ConfigError, match=r"clips updates of clients"):
        coins().start(build("dp_lora_fed", {"noise_multiplier": 1.0}), [9999], coins().included)
    with pytest.raises(ConfigError, match=r"updates of clients"):
        PrivacyUnits.clients(2, np.arange(4)).with_slots(coins().included)
    with pytest.raises(ConfigError, match=r"slots are not the auditor's"):
        coins().start(build("static", {"noise_multiplier": 1.0}), [9999], ~coins().included)


def test_coins_are_fair_and_new() -> None:
    """4,000 coins leave 2,000 +- 253 (8 standard deviations) with chance 1e-15."""
    one, other = CraftedCanaries.toss(4000), CraftedCanaries.toss(4000)
    assert abs(int(one.included.sum()) - 2000) < 253
    assert (one.included != other.included).any()
    assert str(one) == "CraftedCanaries()"


def test_what_correlated_noise_lets_a_canary_move_is_not_guessed(tmp_path: Path) -> None:
    """One row moves by a visit and by the noise that is taken back: the draw is not audited by single rows."""
    canaries = coins(8)
    run(build("banded", {"pairs": pairs(), "noise_multiplier": 1.0, "bands": 4}), canaries, tmp_path, steps=4)
    assert np.isnan(canaries.moves).all()
    assert canaries.scores.any()


def test_a_banded_runs_canaries_are_drawn_in_their_own_turns_alone(tmp_path: Path) -> None:
    """What the decoder takes for turns is what the run draws by: each slot has every b-th row."""
    canaries, bands = coins(16), 4
    drawn: list[set[int]] = []
    turns: list[np.ndarray] = []
    gradients, watch = canaries.gradients, canaries.watch

    def draw(mechanism: Mechanism, chosen: np.ndarray, zeros: list[torch.Tensor]) -> Any:
        drawn.append(set(chosen.tolist()))
        return gradients(mechanism, chosen, zeros)

    def see(*arguments: Any) -> None:
        turns.append(arguments[-1].copy())
        watch(*arguments)

    canaries.gradients, canaries.watch = draw, see  # type: ignore[method-assign]
    run(build("banded", {"pairs": pairs(), "noise_multiplier": 1.0, "bands": bands}), canaries, tmp_path)
    assert len(drawn) == len(turns) == STEPS
    assert any(drawn)
    for chosen, turn in zip(drawn, turns, strict=True):
        assert all(turn[slot] for slot in chosen)
    assert np.sum(turns, axis=0).tolist() == [STEPS // bands] * 16


def test_a_run_that_starts_again_in_one_process_starts_its_decoder_anew() -> None:
    canaries = coins(2)
    mechanism = build("banded", {"pairs": pairs(), "noise_multiplier": 1.0, "bands": 4})
    for _ in range(2):
        canaries.start(mechanism, [4] * pairs(), canaries.included)
        assert canaries.decoder.last is None
        canaries.decoder.follow(np.ones(2), 0, np.ones(2, dtype=bool), STRATEGY, in_units_of_noise=False)
        assert canaries.decoder.last == 0


def test_noise_is_measured_where_canaries_are_out(tmp_path: Path) -> None:
    """The scores at a noise multiplier of 0.01: each canary that is in moves its coordinate by 1 in each release."""
    canaries = coins()
    run(build("static", {"pairs": pairs(), "noise_multiplier": 0.01}), canaries, tmp_path, sample_rate=1.0, steps=2)
    absent = int((~canaries.included).sum())
    first = math.sqrt(canaries.squares[0] / absent) / canaries.moves[0]
    assert 0.005 < first < 0.5  # noise, and what the records' gradients add


def test_likelihood_ratios_add_up_to_what_the_densities_say() -> None:
    """For one release and one pair, scipy has the log of the density ratio: a canary that is in to one that is out."""
    canaries, rate, move = coins(2), 0.3, 1.7
    canaries.sample_rate = rate
    for found in (np.array([0.4, -1.1]), np.array([2.5, 0.0])):
        canaries._rate(found, move, 1)
    expected = sum(
        np.log((1 - rate) * norm.pdf(found) + rate * norm.pdf(found - move)) - norm.logpdf(found)
        for found in (np.array([0.4, -1.1]), np.array([2.5, 0.0]))
    )
    assert canaries.ratios == pytest.approx(expected, rel=1e-12)


def test_coins_are_guessed_by_likelihood_ratios_only_if_all_releases_have_one() -> None:
    canaries = coins(2)
    assert canaries.guesses_by is canaries.scores
    canaries.moves, canaries.ratios, canaries.rated = [1.0, 1.0], np.ones(2), 2
    assert canaries.guesses_by is canaries.ratios
    canaries.rated = 1
    assert canaries.guesses_by is canaries.scores
