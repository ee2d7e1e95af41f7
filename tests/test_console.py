"""What commands print: prices rounded up, what an attack showed rounded down, all else to the nearest."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from dptune.audit.step import StepAudit
from dptune.cli.console import show
from dptune.cli.ledgers import _show_search
from dptune.cli.step_audit import _show_audit
from dptune.privacy.certificate import ScoreTerms, SearchCertificate
from dptune.privacy.release import Release
from dptune.privacy.selection_law import SelectionLaw

_UP = ("epsilon", "delta", "epsilon_certified", "search_epsilon_one_shift", "mu_certified", "mu_detectable")
_DOWN = ("epsilon_audited", "mu_alarm", "epsilon_refutable")


def test_a_table_rounds_prices_up_and_what_was_shown_down(capsys: pytest.CaptureFixture[str]) -> None:
    others = ("noise_multiplier", "deltas_of_nothing")
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
    found = SearchCertificate(
        id="abc",
        epsilon=2.0,
        delta=1.0001e-5,
        unit="record",
        units=500,
        data="own",
        telemetry="private",
        law=SelectionLaw.of(3, 2),
        bound="hull",
        space=[{"weight": 1.0, "batch": [8]}],
        kinds=((1.0, ((Release(0.04, 1.2), 40),)),),
        score=ScoreTerms("public", 0.0, 0.0, 100),
        commitment="0" * 64,
    )
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
