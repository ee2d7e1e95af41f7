"""A search over the pipeline's records: what it reads, what it refuses, and that a stopped one goes on in silence."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import known_prices  # noqa: F401 (replaces the pricing of searches)
import pyarrow as pa
import pytest
from tiny_pipeline import mode, params, read_json, write_params

from dptune.core.declarations import declared
from dptune.core.errors import ConfigError, DataError, DivergedError, DptuneError
from dptune.core.files import locked, private_directory, write_text
from dptune.core.settings import ScheduleSettings
from dptune.job.search import candidates as candidates_module
from dptune.job.search import rehearsal as rehearsal_module
from dptune.job.search.plan import Plan
from dptune.job.search.search import working_folder
from dptune.mechanisms.controllers import rldp
from dptune.mechanisms.planning import price
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.certificate import FILE, read_certificate
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.selection_law import SelectionLaw
from dptune.privacy.spent_budgets.register import Register
from dptune.records.parquet_file import read_about, read_records, write_records
from dptune.training.run import Run
from tasks.paths import FAILURES, REPORT, SEARCH, SPENT, TRAIN
from tasks.report.page import write_index
from tasks.report.search import PAGE, PICTURE, answer, countings, failure_of, write_page
from tasks.search import publishable as told_module
from tasks.search import run as run_module
from tasks.search.publish import figures_of, params_of
from tasks.search.publishable import _of_winner, _scaled, choice_prices
from tasks.search.ranking import FILE as OUTCOME
from tasks.search.request import check_search, folder_of, tune_settings
from tasks.search.run import TRAIN_SIDE, SearchError, read_sides, search_records
from tasks.settings.params import Settings, load_settings

SPACE = {"learning_rate": {"log_uniform": [0.001, 0.02]}}
#: A search of seconds: the older bound is computed at once.
QUICK: dict[str, Any] = {"name": "tiny", "epsilon": 1, "space": SPACE, "candidates": 3, "bound": "one_shift"}


def settings_of(telemetry: str = "private", **changes: Any) -> Settings:
    write_params({"experiment": {"telemetry": telemetry}})
    return load_settings(overrides={"search": QUICK | changes})


@pytest.fixture(autouse=True)
def _unpriced(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The ways to count take seconds, and most tests are about something else."""
    if "price" not in request.node.name:
        monkeypatch.setattr(told_module, "choice_prices", lambda certificate: NoPrices())


class NoPrices:
    def to_json(self) -> None:
        return None


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of candidates that is drawn."""
    monkeypatch.setattr(SelectionLaw, "draw", lambda law, entropy: 3)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"space": {"batch": {"uniform": [1, 2]}}}, "search.space.batch: .*takes no range"),
        ({"space": {"options.max_grad_norm": [1, 1]}}, "search.space.options.max_grad_norm: names a value twice"),
        ({"space": {"options.max_grad_norm": [0.1, "0.1"]}}, "search.space.options.max_grad_norm: names a value twice"),
        ({"space": [{"rank": [1, 2]}]}, "search.space: rank: is not a setting that a search may choose"),
        ({"space": {}}, "search.space: is empty"),
        ({"space": {"mechanism": ["static"]}}, "search.space: holds one point"),
        ({"candidates": 1}, "search.candidates: 1 is below"),
        ({"most": 2}, "search.most: 2 is below the mean"),
        ({"shape": -1}, "search.shape"),
        ({"score": "loss"}, "search.score"),
        ({"score": {"on": "test"}}, r"search.score.on: 'test' is unknown"),
        ({"score": {"clip": 0}}, "search.score.clip: 0 is not a positive number"),
        ({"epsilon": 0}, "search.epsilon: 0 is below"),
        ({"time_limit": 60}, "search.time_limit: there is no such entry"),
        ({"name": "../x"}, "search.name"),
        ({"again": "perhaps"}, "search.again"),
    ],
)
def test_a_refused_search_is_named(changed: dict[str, Any], named: str, empty: Path) -> None:
    write_params()
    with pytest.raises(ConfigError, match=named):
        load_settings(overrides={"search": QUICK | changed})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"search": {"model": "other"}}, "search.model: 'other' is not in experiment.models"),
        ({"experiment": {"models": {"b": {"source": "x"}}}}, "search.model: is empty, and experiment.models has 2"),
        ({"data": {"unit": "patient"}, "training": {"physical_batch_size": 2}}, "training.physical_batch_size"),
        ({"training": {"sampler": "balls_in_bins"}}, "training.sampler: balls_in_bins does not go with a search"),
    ],
)
def test_what_candidates_cannot_follow_is_refused_before_any_work(
    changed: dict[str, Any], named: str, empty: Path
) -> None:
    write_params(changed)
    with pytest.raises(ConfigError, match=named):
        check_search(load_settings())


def test_candidates_have_every_setting_of_training_and_lora(empty: Path) -> None:
    """But for warm-up and checkpoints: candidates have different numbers of steps."""
    rule = {"optimizer": "sgd", "momentum": 0.5, "average": "ema", "average_decay": 0.5, "schedule": "linear"}
    write_params({"training": {**rule, "autocast": "bfloat16"}, "lora": {"dropout": 0.1, "rank": 3}})
    settings = load_settings()
    check_search(settings)
    found = tune_settings(settings, "records", None)
    assert found.lora == settings.lora
    assert found.rule == settings.training.rule
    for name in declared(ScheduleSettings):
        left = name in ("warmup_steps", "checkpoint_every")
        assert getattr(found, name) == (None if left else getattr(settings.training, name)), name


def test_a_space_that_is_given_replaces_the_files(empty: Path) -> None:
    """A distribution is stated as a whole: what a profile leaves out must not come from params.yaml."""
    write_params()
    chosen = load_settings(overrides={"search": {"space": {"batch": [8, 16]}}})
    assert chosen.search.asked.space.to_json() == [{"weight": 1.0, "batch": [8, 16]}]
    assert chosen.search.candidates == params()["search"]["candidates"]


def test_the_records_are_those_of_the_split_without_canaries(pipeline: Path) -> None:
    sides = read_sides(settings_of())
    texts = {record.content.text for record in sides.train}  # type: ignore[union-attr]
    assert texts == set(read_records(TRAIN_SIDE).text.to_pylist())
    planted = {text for text in read_records(TRAIN).text.to_pylist() if text} - texts
    assert planted, "the file that cells read holds canaries"
    assert len(sides.train) + len(planted) <= len(read_records(TRAIN).record)


def test_records_that_are_missing_or_split_by_another_unit_are_refused(pipeline: Path) -> None:
    write_params({"data": {"unit": "patient"}})
    assert read_about(TRAIN_SIDE)["unit"] == "record"
    with pytest.raises(ConfigError, match=r"data\.unit: is patient, and .* was split by record"):
        search_records(load_settings(overrides={"search": QUICK}))
    TRAIN_SIDE.unlink()
    with pytest.raises(DataError, match="dvc repro split"):
        search_records(settings_of())
    assert not SEARCH.exists()
    assert not SPENT.exists()


def test_a_stopped_search_goes_on_and_says_nothing_of_its_candidates(
    pipeline: Path, three: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings, working = settings_of(), working_folder(SEARCH / "tiny")

    def full(*_: Any) -> None:
        names = [one.name for one in Plan.read(working).candidates]
        logging.getLogger("of.another.library").warning("candidate %s", names[0])
        warnings.warn(f"candidate {names[0]}", stacklevel=1)
        raise OSError(28, "No space left on device", str(working / names[0] / "ledger.jsonl"))

    with monkeypatch.context() as patch:
        patch.setattr(candidates_module, "noisy_score", full)
        with pytest.raises(SearchError, match="goes on with the same plan") as caught:
            search_records(settings, "cpu")
    plan = Plan.read(working)
    told = f"{caught.value}\n{caplog.text}"
    assert "the number of candidates is secret" in told
    assert not [one.name for one in plan.candidates if one.name in told]
    assert FAILURES.read_text().count(f"candidate {plan.candidates[0].name}") >= 2, (
        "the owner's file says what happened"
    )
    assert "No space left on device" in FAILURES.read_text()
    assert mode(FAILURES) == 0o600
    assert mode(working) == 0o700
    monkeypatch.setattr(SelectionLaw, "draw", lambda law, entropy: 9)  # nothing is drawn again
    out = search_records(settings, "cpu")
    found = read_certificate(RunFolder(out).adapter / FILE)
    assert (found.id, found.commitment) == (plan.id, plan.commitment)
    assert not working.exists()
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (1, pytest.approx(found.certified))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "lock"}
    assert search_records(settings, "cpu") == out, "a finished one is left as it is"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    _others_are_refused(settings)


def test_a_search_without_a_winner_says_that_the_budget_is_spent(
    pipeline: Path, three: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its candidates diverged or crashed; a second call says the same, and costs nothing."""
    ends = iter([DivergedError("the run diverged."), RuntimeError("a crash"), DivergedError("the run diverged.")])

    def fail(run: Any) -> None:
        raise next(ends, None) or RuntimeError("a crash")

    monkeypatch.setattr(Run, "end", fail)
    for _ in range(2):
        caplog.clear()
        out = search_records(settings_of(), "cpu")
        assert "every candidate failed, so the base model is the result, and the budget is spent" in caplog.text
    assert not RunFolder(out).adapter.exists()
    assert failure_of(out) == "every candidate failed"
    certificate = read_certificate(out / FILE)
    told = read_json(RunFolder(out).results)
    assert float(told["epsilon_certified"]) == certificate.certified <= 1
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (1, pytest.approx(certificate.certified))
    sentence = write_page(out, REPORT)
    assert sentence.startswith("Every candidate failed, so the base model is the result: nothing was released")
    page = " ".join((REPORT / PAGE).read_text(encoding="utf-8").partition("<script")[0].split())
    assert sentence in page
    assert "the budget is spent all the same: certified ε = 1 for the whole search" in page
    assert f"dptune verify {(out / FILE).as_posix()}" in page
    assert "0.001 to 0.02, uniform in the logarithm" in page
    for gone in ("winner", "The price of choosing", "Perplexity", "adapter"):
        assert gone not in page
    assert figures_of(told) == {"epsilon_certified": certificate.certified}
    assert not {*params_of(told)} & {"winner.mechanism"}


def _others_are_refused(settings: Settings) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_module, "open_base", lambda *_: pytest.fail("the model was read first"))
        with pytest.raises(ConfigError, match=r"search\.again: these records paid before \(once"):
            search_records(settings_of(name="second"), "cpu")
    with pytest.raises(ConfigError, match=r"search\.name: .* other settings .* another search\.name") as caught:
        search_records(settings_of(epsilon=2), "cpu")
    assert caught.value.field == "search.name"
    with pytest.raises(ConfigError, match=r"search\.space\.batch"):
        search_records(settings_of(name="third", again=True, space={"batch": [8, 100_000]}), "cpu")
    assert len(Register(SPENT).totals()) == 1


def test_a_search_by_patients_is_priced_and_told_for_research(
    pipeline: Path, three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.corpus.split import split
    from tasks.stage import run_stage

    over = {"search": QUICK | {"score": "public"}, "data": {"unit": "patient"}}
    write_params({"data": {"unit": "patient"}})
    run_stage(split)
    out = search_records(load_settings(overrides=over), "cpu")
    told = read_json(RunFolder(out).results)
    assert (told["unit"], told["telemetry"]) == ("patient", "research")
    assert set(told["perplexity"]) == {"held_out", "public"}
    assert all(before != after for before, after in told["perplexity"].values())
    assert "on held-out private records" in answer(told)
    prices = told["prices"]
    found = {one["way"]: one for one in prices["countings"]}
    certificate = read_certificate(RunFolder(out).adapter / FILE)
    assert float(found["search"]["epsilon"]) == certificate.certified <= 1
    assert found["single"]["noise_multiplier"] < prices["noise_multiplier"]
    assert found["composed"]["runs"] == 3
    run, now = _of_winner(certificate), prices["noise_multiplier"]
    alone = _scaled(run, found["single"]["noise_multiplier"] / now)
    assert smallest_epsilon(alone, certificate.delta) == pytest.approx(1, rel=2e-3)
    assert float(found["single"]["epsilon"]) == smallest_epsilon(run, certificate.delta)
    assert float(found["renyi"]["epsilon"]) > certificate.certified
    rising = [noise for way, _, noise in prices["curve"] if way == "composed"]
    assert rising == sorted(rising)
    write_page(out, REPORT)
    page = " ".join((REPORT / PAGE).read_text(encoding="utf-8").partition("<script")[0].split())
    assert "NOT the figures on held-out private records" in page
    for row in countings(told):
        assert row.name in page
    assert (REPORT / PICTURE).exists()
    assert figures_of(told)["held_out_perplexity"] == told["perplexity"]["held_out"][1]
    assert choice_prices(certificate).to_json() == json.loads(json.dumps(prices)), "of the certificate alone"


def test_a_rehearsal_reads_public_records_and_trains_once(pipeline: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_params({"training": {"expected_batch_size": 8, "epochs": 0.15}})
    chosen = load_settings(overrides={"search": QUICK | {"score": "rehearsal", "candidates": 2}})
    out = search_records(chosen, "cpu")
    told = read_json(RunFolder(out).results)
    assert len(told["tried"]) == 2
    assert caplog.text.count("rehearsed: ") == 2
    assert not (RunFolder(out).adapter / FILE).exists()
    (spent,) = Register(SPENT).totals()
    assert (spent.entries, spent.epsilon) == (1, pytest.approx(float(told["epsilon_certified"])))
    sentence = write_page(out, REPORT)
    write_index()
    assert "` is the best of 2 settings that were rehearsed on public records: " in sentence
    page = (REPORT / PAGE).read_text(encoding="utf-8")
    assert "What was rehearsed" in page
    assert "The price of choosing" not in page
    index = (REPORT / "index.html").read_text(encoding="utf-8")
    assert "dptune search: tiny" in index
    assert "is the best of 2 settings" in index


def diverge(run: Any) -> None:
    raise DivergedError("the run diverged.")


def _edited_records_are_refused(settings: Settings, out: Path, outcome: str) -> None:
    """Whether the page's results say how the run ended, or its folder alone."""
    whole, told = TRAIN_SIDE.read_bytes(), RunFolder(out).results.read_bytes()
    records = read_records(TRAIN_SIDE)
    texts = pa.array([f"Quite another record: {number}." for number in range(len(records.record))])
    write_records(TRAIN_SIDE, replace(records, text=texts))
    with pytest.raises(ConfigError, match=r"search\.name: .*other settings \(records\)"):
        search_records(settings, "cpu")
    write_text(out / OUTCOME, outcome)
    RunFolder(out).results.unlink()
    with pytest.raises(ConfigError, match=r"search\.name: .*other settings \(records\)"):
        search_records(settings, "cpu")
    TRAIN_SIDE.write_bytes(whole)
    RunFolder(out).results.write_bytes(told)


def _a_missing_ledger_is_refused(settings: Settings, out: Path, outcome: str) -> None:
    """Likewise: the run would be taken for a new one, and what it has spent for nothing."""
    ledger, cell, told = RunFolder(out).ledger, RunFolder(out).cell, RunFolder(out).results
    kept = {path: path.read_bytes() for path in (ledger, cell, told)}
    ledger.unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"search\.name: .*tiny has ended, and its ledger, .* is missing"):
            search_records(settings, "cpu")
        assert cell.read_bytes() == kept[cell]
        write_text(out / OUTCOME, outcome)
        told.unlink(missing_ok=True)
    for path, content in kept.items():
        path.write_bytes(content)


def test_a_diverged_run_whose_noise_moved_is_priced_by_its_plan(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last noise, held from the first step on, would have another price than the plan."""
    run_once, plans, ends = run_module.run_once, [], []

    def priced(prepared: Any) -> float:
        mechanism = prepared.mechanism
        return price(mechanism.mechanism, prepared.schedule.priced, mechanism.renyi_filter).certified

    def watched(prepared: Any, out: Path, register: Register) -> Any:
        plans.append(priced(prepared))
        try:
            return run_once(prepared, out, register)
        finally:
            ends.append(priced(prepared))

    monkeypatch.setattr(rehearsal_module, "trial", lambda *_: 3.0)
    monkeypatch.setattr(rldp, "moved_noise", lambda now, start, action, spent: start / 2)
    monkeypatch.setattr(run_module, "run_once", watched)
    monkeypatch.setattr(Run, "end", diverge)
    space = SPACE | {
        "mechanism": ["rldp"],
        "options.move_noise": [True],
        "options.interval": [1],
        "options.warmup": [1],
    }
    out = search_records(settings_of(score="rehearsal", candidates=2, space=space), "cpu")
    assert read_ledger(RunFolder(out).ledger).header.renyi_filter is not None
    assert [float(read_json(RunFolder(out).results)["epsilon_certified"])] == plans
    assert 0.9 < plans[0] <= 1
    assert ends != plans
    (total,) = Register(SPENT).totals()
    assert total.epsilon == pytest.approx(plans[0])


def test_two_rehearsals_of_one_name_do_not_run_at_once(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(score="rehearsal")
    out = private_directory(folder_of(settings))
    monkeypatch.setattr(rehearsal_module, "rehearse_space", lambda *_: pytest.fail("it replaces the other's choice"))
    with (
        locked(RunFolder(out).lock),
        pytest.raises(DptuneError, match=r"tiny: another process works on it( \(process \d+\))?\. Fix: wait"),
    ):
        search_records(settings, "cpu")


def test_a_rehearsal_whose_private_run_diverges_has_ended(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so again when it is run again, costs nothing more, and is not resumed with other noise, even if it was
    killed before it could say so."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsal_module, "trial", lambda *_: 3.0)
    rehearsal = {"score": "rehearsal", "candidates": 2}
    with monkeypatch.context() as patched:
        patched.setattr(Run, "end", diverge)
        patched.setattr(run_module, "told_of_nothing", killed)
        with pytest.raises(KeyboardInterrupt):
            search_records(settings_of(**rehearsal), "cpu")
    monkeypatch.setattr(run_module, "run_once", lambda *_: pytest.fail("a run that diverged has ended"))
    out = search_records(settings_of(**rehearsal), "cpu")
    assert "the private run diverged, so the base model is the result, and the budget is spent" in caplog.text
    released = read_ledger(RunFolder(out).ledger).releases
    assert released
    assert not RunFolder(out).adapter.exists()
    told = read_json(RunFolder(out).results)
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (1, pytest.approx(float(told["epsilon_certified"])))
    assert 0.9 < total.epsilon <= 1
    sentence = write_page(out, REPORT)
    assert sentence.startswith("The private run diverged at the settings that were rehearsed on public records, so ")
    page = " ".join((REPORT / PAGE).read_text(encoding="utf-8").partition("<script")[0].split())
    assert sentence in page
    assert f"dptune verify {RunFolder(out).ledger.as_posix()}" in page
    assert "What was rehearsed" in page
    for gone in ("winner", "candidate", "The price of choosing", "Perplexity on", "adapter", "certificate"):
        assert gone not in page
    assert figures_of(told) == {"epsilon_certified": float(told["epsilon_certified"])}
    kept = (out / OUTCOME).read_text()
    (out / OUTCOME).unlink()  # as an earlier version left it
    caplog.clear()
    assert search_records(settings_of(**rehearsal), "cpu") == out
    assert "the private run diverged" in caplog.text
    assert read_json(RunFolder(out).results) == told
    _edited_records_are_refused(settings_of(**rehearsal), out, kept)
    _a_missing_ledger_is_refused(settings_of(**rehearsal), out, kept)
    assert read_ledger(RunFolder(out).ledger).releases == released
    monkeypatch.setattr(rehearsal_module, "rehearse_space", lambda *_: pytest.fail("it is refused at once"))
    with pytest.raises(ConfigError, match=r"search\.name: .* rehearsed for something else \(epsilon\)"):
        search_records(settings_of(**rehearsal, epsilon=2), "cpu")
