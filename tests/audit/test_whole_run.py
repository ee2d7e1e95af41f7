"""Audits of finished runs: what coins, draws and noise show, and what is refused because it does not fit the ledger."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tuning as tiny
from typer.testing import CliRunner, Result

from dptune import tune
from dptune.audit import whole_run
from dptune.audit.one_run import audited_sample_rate
from dptune.audit.whole_run import NoiseBound, audit_run, audited_noise
from dptune.cli import app
from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError, DataError, DptuneError
from dptune.core.files import NO_TIME, read_json, sha256, write_json
from dptune.job.audit_canaries import KeptCanaries
from dptune.job.delivery.deliverable import BEGIN, FINISH, write_audit
from dptune.job.delivery.privacy_section import END, START
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger_file import GENESIS, encode, read_ledger, seal
from dptune.training.privacy_units import PrivacyUnits

COUNT = 120
QUICK: dict[str, Any] = {"epochs": 3, "expected_batch_size": 48, "rank": 4, "target_modules": ("c_attn",)}


def tuned(out: Path, planted: int = COUNT, **settings: Any) -> Path:
    given = {"epsilon": 8, "delta": 1e-5, "eval_share": 0.0, "audit_canaries": planted, **QUICK} | settings
    folder: Path = tune(tiny.checkpoint(), tiny.rows(COUNT), out=out, **given).folder
    return folder


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit-run", *map(str, arguments)])


def coins_file(run: Path) -> Path:
    return run / "audit_canaries.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("other") / "run")


def test_a_sound_run_is_not_accused(finished: Path) -> None:
    """The run is sound: a false alarm has a chance of one in a million over the system's coins and noise."""
    done = command(finished, "--json", "--false-alarms", "1e-6")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["canaries"] == COUNT
    assert found["releases_scored"] == found["releases"]
    assert 7.9 < found["epsilon_certified"] <= 8
    assert 0 <= found["epsilon_audited"] <= found["could_be_shown_at_most"] < 8
    assert found["accusations"] == []
    # Its noise decides it: 400 such runs had 0.46 to 0.81, and 8 of them less than 0.5.
    assert 0.4 < found["noise_detectable"] < 0.85, "beside what the records add; 0.87 without them"
    assert found["sample_rate"] == pytest.approx(48 / 240)
    assert json.loads(command(finished, "--json", "--false-alarms", "1e-6").stdout) == found  # nobody can draw again
    said = command(finished).stdout
    assert "Not accused" in said
    assert "epsilon_audited is at most 3." in said
    assert "proves no privacy" in said
    assert sha256(finished / "ledger.jsonl") in said


def card_of(run: Path) -> Path:
    return run / "adapter" / "README.md"


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_an_audited_card_says_both_numbers_and_that_nothing_compares_one(copy: Path) -> None:
    card, before = card_of(copy), card_of(copy).read_text()
    assert "NOT compared" not in verify(copy).output
    found = json.loads(command(copy, "--card", "--json", "--false-alarms", "1e-6").stdout)
    text = card.read_text()
    assert text.startswith(before.rstrip("\n")), "nothing else of the card changes"
    section = text[len(before.rstrip("\n")) :]
    assert (
        f"| epsilon_audited | {at_least(found['epsilon_audited'], 4)} at least, shown with confidence 0.95" in section
    )
    assert f"| epsilon_certified | {at_most(found['epsilon_certified'], 4)} (what is proved) |" in section
    assert f"| could be shown at most | {at_least(found['could_be_shown_at_most'], 4)}, if all" in section
    assert f"| canaries | {COUNT} gradients" in section
    assert f"| coins | {found['power']}" in section
    assert f"| noise | C{found['noise_power'][1:]} |" in section
    assert "| draw | Could have refuted: a draw at a rate above" in section
    assert "not accused; a sound run is accused with probability 1e-06 at most" in section
    assert sha256(copy / "ledger.jsonl") in section
    assert card.stat().st_mtime == NO_TIME
    command(copy, "--card", "--false-alarms", "1e-6")
    assert card.read_text() == text, "a second audit takes its place"
    said = verify(copy)
    assert said.exit_code == 0
    assert 'NOT compared: the section "Audit" of' in said.stdout
    assert "not about this ledger" not in said.stdout
    assert json.loads(verify(copy, "--json").stdout)["audit_compared"] is False
    assert verify(copy / "adapter").exit_code == 0


@pytest.mark.parametrize("title", ["## Audit", "Audit, checked by dptune verify\n---", "<h2>\uff21udit</h2>"])
def test_a_forged_audit_looks_compared_nowhere_and_is_not_written_beside(title: str, copy: Path) -> None:
    card = card_of(copy)
    card.write_text(card.read_text() + f"\n{title}\n\n| epsilon_audited | 0.01 at least |\n")
    said = verify(copy)
    assert said.exit_code == 0
    assert "NOT compared: the section" in said.stdout
    assert "It is not about this ledger, or there are several." in said.stdout
    refused = command(copy, "--card", "--false-alarms", "1e-6")
    assert refused.exit_code == 2
    assert "that dptune did not write" in refused.stderr
    assert card.read_text().count("epsilon_audited") == 2, "one row of the section Privacy, one of the forgery"


def test_marks_of_an_audit_around_other_sections_take_nothing_away(copy: Path) -> None:
    card = card_of(copy)
    forged = card.read_text().replace(START, f"{BEGIN}\n{START}").replace(END, f"{END}\n{FINISH}")
    card.write_text(forged)
    assert command(copy, "--card", "--false-alarms", "1e-6").exit_code == 2
    assert card.read_text() == forged


def test_an_audit_of_an_earlier_run_is_named(copy: Path) -> None:
    figures = {"epsilon_audited": 0.1, "could_be_shown_at_most": 1.0, "epsilon_certified": 8.0, "delta": 1e-5}
    figures |= {"confidence": 0.95, "canaries": 10, "false_alarms": 0.001}
    write_audit(copy, figures | {"accusations": ["its noise is small"]}, "0" * 64, date(2020, 1, 2))
    text = card_of(copy).read_text()
    assert "| verdict | ACCUSED: its noise is small; a sound run" in text
    assert "| date | 2020-01-02 |" in text
    assert "It is not about this ledger" in verify(copy).stdout
    shutil.rmtree(copy / "adapter")
    with pytest.raises(ConfigError, match="cells of a study have no card"):
        write_audit(copy, figures | {"accusations": []}, "0" * 64, date(2020, 1, 2))


def test_halved_noise_is_accused_though_coins_cannot_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Gaussian.add
    monkeypatch.setattr(
        Gaussian, "add", lambda self, sums, scales, noise, entropy: real(self, sums, scales, noise / 2, entropy)
    )
    run = tuned(tmp_path / "run")
    done = command(run)
    assert done.exit_code == 1, done.output
    assert "Accused: its noise is <= 0." in done.stderr
    (said,) = audit_run(run).accusations
    assert "the mechanism, its accountant or its data handling is wrong" in said


def test_coins_that_are_all_guessed_accuse_a_run_of_small_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that is always right, on a run of certified 1: the accusation says by how many guesses."""
    run = tuned(tmp_path / "run", epsilon=1)
    assert audit_run(run, false_alarms=1e-6).accusations == []
    monkeypatch.setattr(KeptCanaries, "guesses_by", property(lambda canaries: canaries.included.astype(float)))
    found = audit_run(run)
    assert found.coins.epsilon_audited > 1
    assert "coins right, where the certified epsilon 1 allows" in found.accusations[0]
    assert command(run).exit_code == 1


def test_a_draw_that_takes_everybody_is_accused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = PrivacyUnits.draw
    monkeypatch.setattr(PrivacyUnits, "draw", lambda units, rate, entropy, turn=None: draw(units, 1.0, entropy, turn))
    found = audit_run(tuned(tmp_path / "run"))
    assert any("its canaries entered batches at a rate >= 0." in one for one in found.accusations)


def test_the_checks_share_the_false_alarms_and_read_the_dearest_release(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is compared with the least that is charged, the draw with the highest rate; each at a third of 0.3."""
    ledger = read_ledger(finished / "ledger.jsonl")
    (usual,) = ledger.composition
    noisier = replace(usual, noise_multiplier=2 * usual.noise_multiplier)
    mixed = Counter([usual, noisier, replace(usual, sample_rate=usual.sample_rate / 2)])
    monkeypatch.setattr(whole_run, "read_ledger", lambda path: replace(ledger, composition=mixed))
    monkeypatch.setattr(whole_run, "FixedSeed", lambda seed: FixedSeed(3))
    kept = KeptCanaries.read(finished, coins_file(finished))
    kept.included = np.arange(COUNT) < 40
    monkeypatch.setattr(whole_run, "_canaries_of", lambda *_, **__: kept)
    found = audit_run(finished, 0.95, 0.3)
    sure, least = found.against.confidence, usual.effective_noise_multiplier
    assert sure == pytest.approx(0.9)
    assert found.noise == audited_noise(kept.squares, kept.moves, COUNT - 40, least, 0.95, sure)
    assert found.draw == audited_sample_rate(
        kept.scores, kept.included, kept.moves, usual.sample_rate, 0.95, sure, FixedSeed(3)
    )


def test_noise_is_accused_by_the_bound_of_an_alarm_alone() -> None:
    """Not by the bound that is reported, which is wrong in one audit of twenty."""
    assert not NoiseBound(1.0, at_most=0.9, alarm=1.1, detectable=0.5).accused
    assert NoiseBound(1.0, at_most=0.8, alarm=0.9, detectable=0.5).accused


def edited(file: Path, **values: Any) -> None:
    write_json(file, read_json(file) | values)


def with_ledger(run: Path, change: Any) -> None:
    """Rewrite the ledger and its copy beside the adapter with a whole chain, as a forger would."""
    chain, lines = GENESIS, []
    for line in (run / "ledger.jsonl").read_text().splitlines():
        record = json.loads(line)
        del record["chain"]
        written, chain = seal(encode(change(record)), chain)
        lines.append(written)
    (run / "ledger.jsonl").write_bytes(b"".join(lines))


def with_scores(run: Path, **values: Any) -> None:
    """Edit what was seen, and let the ledger's last line name the edited file."""
    edited(coins_file(run), **values)
    digest = sha256(coins_file(run))
    with_ledger(run, lambda one: one | ({"scores": digest} if "scores" in one else {}))


FORGED: dict[str, tuple[Any, str]] = {
    "other coins": (
        lambda run: edited(coins_file(run), included=[1, 0] * (COUNT // 2)),
        "holds other coins than .*ledger.jsonl was begun with",
    ),
    "fewer coins": (
        lambda run: edited(
            coins_file(run),
            **{name: read_json(coins_file(run))[name][:60] for name in ("included", "scores", "ratios")},
        ),
        "holds other coins",
    ),
    "another salt": (lambda run: edited(coins_file(run), salt="00" * 16), "holds other coins"),
    "no salt": (lambda run: edited(coins_file(run), salt=""), "holds other coins"),
    "scores of no information": (
        lambda run: edited(coins_file(run), scores=[0.5 * n for n in range(COUNT)], rated=0),
        "was changed after the run ended",
    ),
    "less noise hidden": (
        lambda run: edited(coins_file(run), squares=[1e6 for _ in read_json(coins_file(run))["squares"]]),
        "was changed after the run ended",
    ),
    "a sum of squares below zero": (
        lambda run: edited(coins_file(run), squares=[-one for one in read_json(coins_file(run))["squares"]]),
        "a sum of squares is negative",
    ),
    "more releases than were charged": (
        lambda run: with_scores(run, moves=[1.0] * 400, squares=[1.0] * 400),
        "holds 400 releases, and .*ledger.jsonl only",
    ),
    "a ledger whose commitment is none": (
        lambda run: with_ledger(run, lambda one: one | ({"coins": ""} if "coins" in one else {})),
        "line 1: .* are not a number with a commitment to its coins",
    ),
    "no coins": (lambda run: coins_file(run).unlink(), "is missing: nobody can audit a run without the coins"),
    "damaged coins": (lambda run: coins_file(run).write_text("{"), "is not complete JSON"),
    "a ledger that names no canaries": (
        lambda run: with_ledger(run, lambda one: {k: v for k, v in one.items() if k not in ("canaries", "coins")}),
        "was trained without the gradients of an auditor",
    ),
    "a ledger without the digest of the scores": (
        lambda run: with_ledger(run, lambda one: {k: v for k, v in one.items() if k != "scores"}),
        "was changed after the run ended",
    ),
    "a ledger of more noise": (
        lambda run: with_ledger(
            run, lambda one: one | ({"noise_multiplier": 9.0} if "noise_multiplier" in one else {})
        ),
        "was delivered by another run than that of",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_does_not_fit_the_ledger_is_refused(name: str, copy: Path) -> None:
    forge, said = FORGED[name]
    forge(copy)
    with pytest.raises(DptuneError, match=said):
        audit_run(copy)
    done = command(copy)
    assert done.exit_code == 2
    assert ". Fix: " in done.stderr.splitlines()[-1]


def test_coins_of_another_run_are_refused(copy: Path, other: Path) -> None:
    shutil.copy(coins_file(other), coins_file(copy))
    with pytest.raises(DataError, match="holds other coins than"):
        audit_run(copy)


def test_the_adapter_of_another_run_is_refused(copy: Path, other: Path) -> None:
    shutil.rmtree(copy / "adapter")
    shutil.copytree(other / "adapter", copy / "adapter")
    with pytest.raises(DataError, match=r"adapter: was delivered by another run than that of .*ledger.jsonl"):
        audit_run(copy)


def test_an_adapter_of_another_base_is_refused_by_its_name(copy: Path) -> None:
    edited(copy / "adapter" / "base.json", name="another-model")
    with pytest.raises(DataError, match=r"is of the base model another-model, and the run trained tiny"):
        audit_run(copy)


def _no_canaries(run: Path) -> Path:
    return tuned(run, planted=0)


def _unfinished(run: Path, finished: Path) -> Path:
    shutil.copytree(finished, run)
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-1]))
    return run


def test_a_run_without_canaries_says_what_it_would_have_needed(tmp_path: Path) -> None:
    done = command(_no_canaries(tmp_path / "run"))
    assert done.exit_code == 2
    assert "was trained without the gradients of an auditor, whose coins an audit guesses" in done.stderr
    assert "Fix: plant them in a new run (dptune tune --audit-canaries 256), which spends again." in done.stderr


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda path, finished: path / "nowhere", "run: .*nowhere does not exist"),
        (lambda path, finished: finished / "ledger.jsonl", "is a file"),
        (lambda path, finished: path, "holds no ledger"),
        (
            lambda path, finished: finished / "adapter",
            "as the adapter that a run delivers. Fix: give the run's own folder",
        ),
        (lambda path, finished: _unfinished(path / "run", finished), "is not finished, and more may be released"),
    ],
)
def test_other_folders_are_refused_by_what_they_are(made: Any, said: str, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        audit_run(made(tmp_path, finished))


@pytest.mark.parametrize("name", ["confidence", "false_alarms"])
@pytest.mark.parametrize("value", [0.0, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(name: str, value: float, finished: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: .* is not between 0 and 1"):
        audit_run(finished, **{name: value})


def test_a_run_of_several_noises_and_rates_is_held_to_what_it_may_do_at_most(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its least noise and its highest rate; and the three checks share the chance of a false alarm."""
    contents = read_ledger(finished / "ledger.jsonl")
    (one,) = contents.composition
    other = replace(one, noise_multiplier=2 * one.noise_multiplier, sample_rate=one.sample_rate / 2)
    mixed = replace(contents, composition=Counter({one: 1, other: contents.releases - 1}))
    monkeypatch.setattr(whole_run, "read_ledger", lambda path: mixed)
    found = audit_run(finished, false_alarms=0.003)
    assert (found.noise.noise_multiplier, found.draw.sample_rate) == (one.noise_multiplier, one.sample_rate)
    assert found.against.confidence == pytest.approx(1 - 0.001, abs=1e-9)


@pytest.mark.parametrize("share", [{"confidence": 1 - 1e-15}, {"false_alarms": 1e-18}])
def test_a_chance_that_is_too_small_to_compute_with_is_refused_by_its_name(
    share: dict[str, float], finished: Path
) -> None:
    (name,) = share
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: leaves a chance of .* too small"):
        audit_run(finished, **share)


def test_no_test_of_noise_that_is_not_gaussian_and_the_true_reason() -> None:
    found = audited_noise([1.0], [1.0], 5, 1.0, 0.95, 0.999, gaussian=False)
    assert not found.accused
    assert found.power == "NO POWER on the noise: this test is for Gaussian noise, and the run added other"


def test_a_run_with_laplace_noise_is_not_judged_as_gaussian(tmp_path: Path) -> None:
    found = audit_run(tuned(tmp_path / "run", mechanism="plrvo"), false_alarms=1e-6)
    assert {release.noise for release in found.contents.composition} == {"laplace_mixture"}
    assert found.noise.power == "NO POWER on the noise: this test is for Gaussian noise, and the run added other"
    assert (found.noise.accused, found.accusations) == (False, [])


def squares_of(noise: float, absent: int, releases: int, rng: np.random.Generator) -> list[float]:
    return [float(noise**2 * rng.chisquare(absent)) for _ in range(releases)]


def bounds(noise: float, runs: int, confidence: float, more: float = 0.0) -> Iterator[float]:
    rng = np.random.default_rng(7)
    for _ in range(runs):
        squares = [one + more for one in squares_of(noise, 50, 20, rng)]
        yield audited_noise(squares, [2.0] * 20, 50, noise / 2, confidence, 0.999).at_most


def test_the_bound_on_noise_covers_the_truth_as_often_as_it_says() -> None:
    """2,000 games at 90 %: at most 200 + 3 standard deviations (40) may fail; other gradients make fewer fail."""
    missed = sum(bound < 0.5 for bound in bounds(1.0, 2000, 0.9))
    assert 60 < missed < 240  # two bounds share the failures, so that it is not much less than stated either
    assert sum(bound < 0.5 for bound in bounds(1.0, 500, 0.9, more=30.0)) < 5


def test_the_bound_on_noise_is_near_the_truth() -> None:
    assert 0.5 < float(np.mean(list(bounds(1.0, 200, 0.95)))) < 0.55


def test_less_noise_in_one_release_is_seen() -> None:
    rng = np.random.default_rng(3)
    squares = squares_of(1.0, 100, 100, rng)
    squares[41] /= 4
    assert audited_noise(squares, [1.0] * 100, 100, 1.0, 0.95, 0.999).accused
    squares[41] *= 4
    assert not audited_noise(squares, [1.0] * 100, 100, 1.0, 0.95, 0.999).accused


@pytest.mark.parametrize("records", [0.0, 0.05, 0.5])
def test_what_is_said_to_be_detectable_is_detected(records: float) -> None:
    """In runs whose records add a share of the noise's variance; half as much noise again is not."""
    rng = np.random.default_rng(5)

    def squares(noise: float) -> list[float]:
        gradients = rng.choice([-1.0, 1.0], (20, 50)) * math.sqrt(records)
        return [float(one) for one in ((noise * rng.standard_normal((20, 50)) + gradients) ** 2).sum(axis=1)]

    def audited(noise: float) -> NoiseBound:
        return audited_noise(squares(noise), [1.0] * 20, 50, 1.0, 0.95, 0.999)

    detectable = float(np.mean([audited(1.0).detectable for _ in range(50)]))
    caught = [sum(audited(share * detectable).accused for _ in range(200)) for share in (1.0, 1.5)]
    assert caught[0] >= 185 > 20 > caught[1]
    if records:
        assert detectable < audited_noise([50.0] * 20, [1.0] * 20, 50, 1.0, 0.95, 0.999).detectable - 0.01


def test_records_that_hide_any_lack_of_noise_are_said_to() -> None:
    found = audited_noise([150.0] * 20, [1.0] * 20, 50, 1.0, 0.95, 0.999)
    assert found.detectable == 0
    assert found.power.startswith("NO POWER on the noise: the gradients of the records")


@pytest.mark.parametrize(
    ("squares", "moves", "absent", "said"),
    [
        ([1.0], [1.0], 0, "no canary was left out"),
        ([], [], 5, "is not known for this mechanism"),
        ([], [1.0], 5, "is not known for this mechanism"),
        ([math.nan], [math.nan], 5, "is not known for this mechanism"),
        ([1.0], [math.inf], 5, "is not known for this mechanism"),
        ([math.nan, 5.0], [1.0, 1.0], 5, "were not measured in every release"),
    ],
)
def test_a_test_of_noise_without_power_says_so(
    squares: list[float], moves: list[float], absent: int, said: str
) -> None:
    found = audited_noise(squares, moves, absent, 1.0, 0.95, 0.999)
    assert not found.accused
    assert (found.at_most, found.detectable) == (math.inf, 0.0)
    assert found.power == f"NO POWER on the noise: {said}" or said in found.power
