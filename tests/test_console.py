"""What commands print: prices and noise rounded up, what an attack showed rounded down, all else to the nearest."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_certificate import certificate

from dptune.audit.games.scene import StepAudit
from dptune.cli.answer_commands import generate
from dptune.cli.audit_commands import _show_audit
from dptune.cli.console import show
from dptune.cli.ledgers import _show_search
from dptune.cli.tune_result import attack_of
from dptune.core.errors import ConfigError
from dptune.job.delivery import verification
from dptune.job.delivery.verification import CardError, consistent_certificate
from dptune.job.search.search import certificate_of
from dptune.prediction import deployment
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.release import Release
from dptune.training.privacy_units import PrivacyUnits

_UP = (
    *("epsilon", "delta", "epsilon_certified", "search_epsilon_one_shift", "mu_certified", "mu_detectable"),
    *("certified", "noise_multiplier", "score_noise_multiplier"),  # noise that is typed again must not cost more
)
_DOWN = ("epsilon_audited", "mu_alarm", "epsilon_refutable")


def test_a_table_rounds_prices_up_and_what_was_shown_down(capsys: pytest.CaptureFixture[str]) -> None:
    others = ("sample_rate", "deltas_of_nothing")
    show(dict.fromkeys((*_UP, *_DOWN, *others), 1.23456489), as_json=False)
    shown = dict(line.strip("│").replace(" ", "").split("│") for line in capsys.readouterr().out.splitlines()[1:-1])
    assert [shown[name] for name in _UP] == ["1.23457"] * len(_UP)
    assert [shown[name] for name in _DOWN] == ["1.23456"] * len(_DOWN)
    assert [shown[name] for name in others] == ["1.23456"] * len(others)


def test_prices_in_lists_and_tables_have_their_names_too(capsys: pytest.CaptureFixture[str]) -> None:
    show({"winner": {"epsilon": 1.2345611, "rate": 1.2345611}, "epsilon": [1.2345611, math.inf]}, as_json=False)
    said = capsys.readouterr().out
    assert "epsilon 1.23457, rate 1.23456" in said
    assert "1.23457, inf" in said


def test_a_price_that_is_a_round_number_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    show({"epsilon": 8.0, "delta": 1e-5, "epsilon_certified": 1.0000000000000002, "mu": 0.0}, as_json=False)
    values = [line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert values == ["8", "1e-05", "1", "0"]


def test_the_sentence_of_a_search_rounds_both_of_its_prices_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = certificate(delta=1.0001e-5)
    monkeypatch.setattr(SearchCertificate, "certified", 1.2345611)
    _show_search(found, as_json=False, figures={"search": "abc"})
    assert "The search is (1.23457, 1.01e-05)-DP under" in capsys.readouterr().out


def test_a_warning_about_a_claim_does_not_contradict_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounded to the nearest, both figures would have the same four digits."""
    errors, cheap = (20, 1000, 20, 1000), Release(1.0, 0.1)
    audit = StepAudit("made", 1000, 0.95, 1, 1.0, 1e-5, cheap, errors, errors)
    shown = audit.epsilon_audited
    assert shown > 1
    for claimed in (shown * (1 - 1e-7), shown / 2):
        result = {"epsilon_published": claimed, "epsilon_certified": 9.0, "mechanism": "made", "leaks": []}
        _show_audit(result, audit, Counter([cheap]), 1e-6, as_json=True)
        said = " ".join(capsys.readouterr().err.split())
        lower, upper = (float(said.partition(words)[2].split()[0]) for words in ("epsilon >= ", "more than the "))
        assert claimed <= upper < lower <= shown


def test_noise_that_a_tuned_runs_command_names_is_rounded_up() -> None:
    built = SimpleNamespace(
        knobs=lambda: SimpleNamespace(noise_multiplier=1.2345611), noise=SimpleNamespace(correlated=None), bands=1
    )
    prepared: Any = SimpleNamespace(
        mechanism=SimpleNamespace(mechanism=built),
        schedule=SimpleNamespace(steps=9, sample_rate=0.1),
        settings=SimpleNamespace(options={}, mechanism="static", audit_canaries=0),
    )
    tuned: Any = SimpleNamespace(ledger=SimpleNamespace(header=SimpleNamespace(delta=1e-5)))
    assert "dptune audit static --set noise_multiplier=1.23457 --delta 1e-05" in " ".join(attack_of(tuned, prepared))


def test_what_an_answer_has_spent_is_rounded_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"tokens": 9, "tokens_left": 9, "epsilon": 2.0, "data": "own", "earlier": 0}
    answer = SimpleNamespace(tokens_left=8, epsilon_spent=1.00001, delta=1.0001e-5, unit="record")
    given = SimpleNamespace(
        budget=budget,
        notes=[],
        predictor=SimpleNamespace(close=lambda: None),
        generate=lambda prompt, tokens: [answer],
        text=lambda answers: "a text",
    )
    monkeypatch.setattr(deployment, "deploy", lambda *_, **__: given)
    generate("x", 1, Path("ensemble"), None, "cpu", as_json=False)
    said = "8 of 9 tokens left; epsilon 1.001 of 2 at delta 1.01e-05 spent, for one record."
    assert said in capsys.readouterr().err


def test_a_search_that_costs_more_than_its_budget_is_refused_by_figures_that_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SearchCertificate, "certified", 2.0000001)
    prepared: Any = SimpleNamespace(
        settings=SimpleNamespace(epsilon=2.0, called="own", telemetry="private"),
        schedule=SimpleNamespace(delta=1e-5),
        units=PrivacyUnits.records(9),
    )
    known = certificate()
    kinds: Any = [SimpleNamespace(weight=weight, releases=dict(held), plugins=()) for weight, held in known.kinds]
    asked: Any = SimpleNamespace(law=known.law, bound=known.bound, space=SimpleNamespace(to_json=lambda: known.space))
    with pytest.raises(ConfigError, match=r"the search would cost 2\.001 of 2\b"):
        certificate_of(prepared, asked, kinds, known.score, "abc", "0" * 64)
    monkeypatch.setattr(verification, "read_certificate", lambda file: known)
    with pytest.raises(CardError, match=r"costs 2\.00001, and was to keep within 2\b"):
        consistent_certificate(Path("certificate.jsonl"))
