"""A search in the pipeline: what its process prints, what a refusal counts, what its settings and prices are."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_certificate import RELEASE, certificate
from tiny_pipeline import mode, write_params

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.certificate import ScoreTerms, SearchCertificate
from dptune.privacy.release import Release
from dptune.records.reading.read import Sides
from dptune.records.reading.record import Record, Text
from tasks.paths import DATA, EVAL, FAILURES
from tasks.report.search import answer, countings
from tasks.search import publishable as prices_module
from tasks.search import run as records_module
from tasks.search.publishable import _of_winner, choice_prices, score_of
from tasks.search.request import in_the_file, tune_settings
from tasks.search.run import ATTACK_SIDE, TRAIN_SIDE, SearchError, _silent, public_source, read_sides
from tasks.settings.params import Settings, load_settings

SPACE = {"learning_rate": {"log_uniform": [0.001, 0.02]}}


def settings_of(telemetry: Any, **changes: Any) -> Settings:
    write_params({"experiment": {"telemetry": telemetry, "delta": 1e-7}, "data": {"unit": "patient"}})
    return load_settings(overrides={"search": {"epsilon": 1.5, "space": SPACE, "candidates": 3} | changes})


@pytest.fixture
def chatty() -> Iterator[logging.Logger]:
    """A logger of another library, which writes to the error stream itself and past the root logger."""
    log = logging.getLogger("of.a.chatty.library")
    handler = logging.StreamHandler(os.fdopen(2, "w", closefd=False))
    log.addHandler(handler)
    log.propagate = False
    yield log
    log.removeHandler(handler)


def test_whatever_a_candidates_code_prints_goes_to_the_owners_file(
    empty: Path, chatty: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    DATA.mkdir()

    def search() -> None:
        with _silent() as start:
            print("before the plan")
            start(certificate())
            print("candidate 1")
            print("candidate 2", file=sys.stderr)
            os.write(1, b"candidate 3\n")
            os.write(2, b"candidate 4\n")
            logging.getLogger("dptune").warning("candidate 5")
            chatty.error("candidate 6")
            raise RuntimeError("candidate 7")

    with pytest.raises(SearchError):
        search()
    print("after it")
    os.write(2, b"after it too\n")
    told = "".join(capfd.readouterr())
    assert "candidate" not in told.replace("number of candidates", "")
    assert all(said in told for said in ("before the plan", "after it\n", "after it too"))
    kept = FAILURES.read_text()
    assert [number for number in range(1, 8) if f"candidate {number}" not in kept] == []
    assert mode(FAILURES) == 0o600


def test_the_log_of_a_search_rounds_its_price_up(
    empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DATA.mkdir()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(SearchCertificate, "certified", 1.23441)
    with _silent() as start:
        start(certificate())
    assert "searching within epsilon 1.235; the number of candidates is secret" in caplog.text


def sides(train: int, held_out: int, attack: int) -> dict[Path, tuple[Record, ...]]:
    """Records of units 0 to ``train`` and so on, the held-out side beginning at unit 3."""

    def some(first: int, count: int) -> tuple[Record, ...]:
        return tuple(Record(Text(f"{first + one}"), first + one, "file", one) for one in range(count))

    return {TRAIN_SIDE: some(0, train), EVAL: some(3, held_out), ATTACK_SIDE: some(50, attack)}


@pytest.mark.parametrize(("telemetry", "said"), [("private", "and some units"), ("research", "and 2 units")])
def test_a_refusal_counts_no_units_under_private_telemetry(
    telemetry: str, said: str, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sides(5, 4, 1)
    monkeypatch.setattr(records_module, "split_records", lambda file: found.get(file, ()))
    with pytest.raises(ConfigError, match="both sides of the split") as caught:
        read_sides(settings_of(telemetry))
    assert said in str(caught.value)
    assert ("2" in str(caught.value)) is (telemetry == "research")
    assert read_sides(settings_of(telemetry, score="public")).train


def test_the_attackers_side_is_known_to_the_register_and_to_nothing_else(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sides(3, 4, 2)
    monkeypatch.setattr(records_module, "split_records", lambda file: found.get(file, ()))
    read = read_sides(settings_of("private"))
    assert read.test == found[ATTACK_SIDE]
    assert not {*read.test} & {*read.train, *read.eval}


@pytest.mark.parametrize("telemetry", ["private", "research"])
def test_candidates_have_the_experiments_delta_and_telemetry(telemetry: Any, empty: Path) -> None:
    found = tune_settings(settings_of(telemetry), "records", None)
    assert (found.telemetry, found.delta, found.epsilon, found.called) == (telemetry, 1e-7, 1.5, "records")


def test_the_price_of_choosing_counts_the_dearer_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices_module, "_least_noise", lambda *_: 1.0)
    for noise in (1.0, 1e4):  # held-out units are the dearer side, then training units
        searched = certificate(score=ScoreTerms("held_out", 1.0, noise, 100))
        found = {one.way: one for one in choice_prices(searched).countings}
        assert found["search"].epsilon == searched.certified
        assert found["one_shift"].epsilon == searched.epsilon_by("one_shift"), "as verify says"
        sums = (Counter({RELEASE: 120}), Counter({Release(1.0, noise): 3}))
        assert found["composed"].epsilon == max(smallest_epsilon(one, 1e-5) for one in sums)
        assert found["single"].epsilon == smallest_epsilon(Counter({RELEASE: 40}), 1e-5)


def test_a_score_on_training_units_is_part_of_the_price() -> None:
    own = certificate(score=ScoreTerms("train", 1.0, 20.0, 500))
    assert own.score.release is not None
    assert _of_winner(own) == Counter({RELEASE: 40, own.score.release: 1})


def test_a_score_is_told_with_its_noise_and_by_the_right_side_of_the_base() -> None:
    told = score_of(certificate(score=ScoreTerms("held_out", 0.5, 3.0, 100)))
    assert told["deviation"] == pytest.approx(0.015)
    page = {"rehearsed": False, "expected": 3, "epsilon_certified": "1.5", "settings": {"mechanism": "static"}}
    for value, side in ((0.5, "below"), (-0.5, "above")):
        said = answer(page | {"perplexity": {}, "scores": {}, "score": told | {"value": value}})
        assert f"loss on held-out records is 0.500 ± 0.015 nats a token {side} the base model's" in said


def test_the_searchs_own_price_alone_is_called_certified() -> None:
    ways = {"single": 2.0, "search": 3.0, "one_shift": 3.5, "renyi": 4.0, "composed": 5.0, "capped": 6.0}
    rows = countings(
        {
            "prices": {
                "countings": [
                    {"way": way, "runs": 3, "epsilon": "1.5", "noise_multiplier": noise} for way, noise in ways.items()
                ]
            }
        }
    )
    assert [(row.noise, row.dearer) for row in rows if row.certified] == [(3.0, "+50.0 %")]
    assert rows[0].note == "no guarantee for a winner"


def test_a_rehearsal_in_the_pipeline_is_given_public_records_alone() -> None:
    def some(text: str) -> tuple[Record, ...]:
        return (Record(Text(text), 1, "file", 1),)

    source = public_source(Sides(some("train"), eval=some("eval"), test=some("attack"), public=some("public")))
    assert (source.data, source.public) == ((), [{"text": "public"}])


def test_a_refused_option_is_named_as_the_space_has_it(empty: Path) -> None:
    chosen = settings_of("private", space={"mechanism": ["geoclip"], "options.rank": [0, 4]})
    refused = ConfigError("rank", "0 means a full covariance", fix="use a rank such as 32")
    assert in_the_file(refused, chosen).field == "search.space.options.rank"
    assert in_the_file(ConfigError("epsilon", "is 0", fix="raise it"), chosen).field == "search.epsilon"
