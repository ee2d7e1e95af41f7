"""A search from records to a winner: secrecy, kills, failures, and what verify makes of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tuning import QUICK, checkpoint, rows
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError, DivergedError, DptuneError
from dptune.core.files import NO_TIME
from dptune.job.base_model import open_base
from dptune.job.delivery.finished_adapter import open_adapter
from dptune.job.delivery.verification import CardError, check_deliverable
from dptune.job.preparation import PreparedRun, prepare
from dptune.job.sampling import Sampled
from dptune.job.search import candidates as candidates_module
from dptune.job.search import search as search_module
from dptune.job.search.candidates import charge_score, is_charged, score_header
from dptune.job.search.plan import Journal, Plan
from dptune.job.search.score import ONE, best_of, clipped_sum, draw_noise, noisy_score
from dptune.job.search.search import NoWinnerError, search, working_folder
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.privacy.certificate import FILE, ScoreTerms, commitment_of, exceeds, read_certificate
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.selection_law import SelectionLaw
from dptune.privacy.spent_budgets.register import Register
from dptune.records.reading.source import RecordSource
from dptune.training import run as training_run

pytestmark = pytest.mark.long

SPACE = {"learning_rate": {"log_uniform": [0.001, 0.05]}}


def asked(**changes: Any) -> SearchSettings:
    return SearchSettings.of({"space": SPACE, "candidates": 3, "together": 2} | changes)


@pytest.fixture(scope="module")
def prepared() -> PreparedRun:
    chosen = TuneSettings(epsilon=8.0, delta=1e-3, eval_share=0.2, telemetry="private", **QUICK)
    source = RecordSource(rows(60, 30), unit="customer_id", public=rows(6))
    return prepare(source, open_base(str(checkpoint()), chosen), chosen, scored=True)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of candidates that the law draws."""

    def fix(count: int) -> None:
        monkeypatch.setattr(SelectionLaw, "draw", lambda law, entropy: count)

    return fix


def listing(folder: Path) -> dict[str, tuple[int, int, float]]:
    """Size, mode and time of every file of a delivered folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mode & 0o777, path.stat().st_mtime)
        for path in folder.rglob("*")
    }


def start(prepared: PreparedRun, folder: Path, **changes: Any) -> Any:
    return search(prepared, asked(**changes), folder / "out", Register(folder / "spent.jsonl"))


def test_the_winner_leaves_with_a_certificate_and_nothing_tells_how_many_there_were(
    prepared: PreparedRun, drawn: Any, tmp_path: Path
) -> None:
    seen = []
    for count in (1, 4):
        drawn(count)
        (folder := tmp_path / str(count)).mkdir()
        found = start(prepared, folder)
        out = folder / "out"
        assert found.certificate is not None
        assert found.epsilons.certified == found.certificate.certified <= 8
        assert found.certificate.one_candidate < found.certificate.certified
        assert not working_folder(out).exists()
        assert {path.name for path in folder.iterdir()} == {"out", "spent.jsonl", ".spent.jsonl.lock"}
        assert check_deliverable(out / "adapter").header.search == found.certificate.id
        assert read_ledger(out / "adapter" / "ledger.jsonl").epsilons.certified == math.inf
        files = listing(out / "adapter")
        assert all(mode in (0o600, 0o700) and time == NO_TIME for _, mode, time in files.values())
        assert {path.stat().st_mtime for path in (out, *out.iterdir())} == {NO_TIME}, (
            "the end tells how many there were"
        )
        seen.append({name: mode for name, (_, mode, _) in files.items()})
        # Digits of random numbers aside, no size follows the number.
        text = (out / "adapter" / FILE).read_text()
        seen[-1]["lines"] = text.count("\n")
        kinds, winner = found.certificate.kinds, found.certificate.winner
        assert winner is not None
        assert not exceeds(read_ledger(out / "adapter" / "ledger.jsonl").composition, kinds[0][1])
        said = CliRunner().invoke(app, ["verify", str(out / "adapter"), "--json"])
        assert json.loads(said.stdout)["epsilon_certified"] == pytest.approx(found.certificate.certified)
        alone = CliRunner().invoke(app, ["verify", str(out / "adapter" / FILE), "--json"])
        assert json.loads(alone.stdout)["epsilon_certified"] == pytest.approx(found.certificate.certified)
        opened = open_adapter(out)
        assert opened.epsilon == found.certificate.certified
        card = Sampled([{"text": "a"}], {"texts": 1}, {}, opened).card("a.jsonl", "0")
        assert "(what is proved, of the whole search)" in card
        assert "- A record that crashes a run" in card
        again = start(prepared, folder)  # a finished search is loaded, and nothing runs
        assert again.certificate == found.certificate
        with pytest.raises(ConfigError, match=r"search\.again"):
            search(prepared, asked(), folder / "second", Register(folder / "spent.jsonl"))
        with pytest.raises(ConfigError, match="other settings"):
            start(prepared, folder, candidates=4)
    assert seen[0] == seen[1]
    _edited_deliverables_are_refused(tmp_path / "4" / "out" / "adapter")


def _edited_deliverables_are_refused(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole.replace(b'"units":', b'"units":1'))
    with pytest.raises(LedgerError, match="edited"):
        check_deliverable(folder)
    (folder / FILE).write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(CardError, match="no winner"):
        check_deliverable(folder)
    (folder / FILE).unlink()
    with pytest.raises(CardError):  # the card promised the search's epsilon
        check_deliverable(folder)
    (folder / FILE).write_bytes(whole)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(CardError, match="other weights"):
        check_deliverable(folder)


def test_a_search_that_is_killed_anywhere_goes_on_with_the_same_plan(
    prepared: PreparedRun, drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(3)
    working, plans = working_folder(tmp_path / "out"), []
    for place, name in (
        (search_module, "write_certificate"),
        (Register, "add_search"),
        (candidates_module, "train_together"),
        (candidates_module, "charge_score"),
        (candidates_module, "noisy_score"),
        (search_module, "write_winner"),
        (search_module, "deliver"),
    ):
        with monkeypatch.context() as patched:

            def die(*_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

            patched.setattr(place, name, die)
            with pytest.raises(KeyboardInterrupt):
                start(prepared, tmp_path)
        assert working.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in working.rglob("*") if path.is_file())
        left = {path.name for path in (tmp_path / "out").iterdir()}
        assert left <= {"lock", "cell.json", "booking.json", "result.json"}
        plans.append(Plan.read(working))
        drawn(9)  # what is drawn is never drawn again
    assert len({plan.commitment for plan in plans[1:]}) == 1
    assert len(plans[1].candidates) == 9  # nothing had run without a certificate: that plan was discarded
    found = start(prepared, tmp_path)
    assert found.certificate is not None
    assert found.certificate.commitment == plans[-1].commitment
    assert not working.exists()
    assert len(Register(tmp_path / "spent.jsonl").totals()) == 1
    assert Register(tmp_path / "spent.jsonl").totals()[0].entries == 1
    header, kind = found.ledger, found.certificate.kinds[0][1]
    assert not exceeds(header.composition, kind)


def test_failures_count_and_never_win(
    prepared: PreparedRun, drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(3)
    end, failed = training_run.Run.end, []

    def fail(run: Any) -> None:
        if len({*failed, run.directory.name}) <= 2:
            failed.append(run.directory.name)
            raise DivergedError("the run diverged.") if len(failed) % 2 else RuntimeError("crash")
        end(run)

    monkeypatch.setattr(training_run.Run, "end", fail)
    found = start(prepared, tmp_path, keep_losers=True)
    working = working_folder(tmp_path / "out")
    plan = Plan.read(working)
    assert len(plan.candidates) == 3
    ended = Journal(working, plan.id).outcomes
    assert [ended[name]["score"] for name in {*failed}] == [None, None]
    (winner,) = {*ended} - {*failed}
    assert found.certificate is not None
    assert found.certificate.winner is not None
    assert found.certificate.winner.score == ended[winner]["score"]
    for name in ended:  # no failure costs more than a candidate may
        assert not exceeds(
            read_ledger(working / "candidates" / name / "ledger.jsonl").composition, found.certificate.kinds[0][1]
        )


def test_where_all_fail_the_price_is_paid_and_nothing_is_delivered(
    prepared: PreparedRun, drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(2)

    def fail(run: Any) -> None:
        raise DivergedError("the run diverged.")

    monkeypatch.setattr(training_run.Run, "end", fail)
    for _ in range(2):
        with pytest.raises(NoWinnerError, match="budget is spent"):
            start(prepared, tmp_path)
    assert not (tmp_path / "out" / "adapter").exists()
    found = read_certificate(tmp_path / "out" / FILE)
    assert found.complete
    assert found.winner is None
    assert Register(tmp_path / "spent.jsonl").totals()[0].epsilon == pytest.approx(found.certified)


def test_a_failure_of_a_shared_pass_is_nobodys(
    prepared: PreparedRun, drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(2)

    def crash(base: Any, runs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(candidates_module, "train_together", crash)
    start(prepared, tmp_path, keep_losers=True)
    working = working_folder(tmp_path / "out")
    assert [one["score"] is not None for one in Journal(working, Plan.read(working).id).outcomes.values()] == [True] * 2
    # Both are trained with noise of their own, from the same start.
    states = {(path / "score.jsonl").read_text().count('"kind":"release"') for path in working.glob("candidates/*")}
    assert states == {1}


def test_a_working_folder_that_others_read_or_that_lost_its_plan_is_refused(
    prepared: PreparedRun, drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(1)
    with monkeypatch.context() as patched:

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(search_module, "run_candidates", die)
        with pytest.raises(KeyboardInterrupt):
            start(prepared, tmp_path)
    working = working_folder(tmp_path / "out")
    working.chmod(0o755)
    with pytest.raises(ConfigError, match="read by others"):
        start(prepared, tmp_path)
    working.chmod(0o700)
    whole = json.loads((working / "plan.json").read_text())
    (working / "plan.json").write_text(json.dumps(whole | {"candidates": whole["candidates"] * 2}))
    with pytest.raises(ConfigError, match="another search"):
        start(prepared, tmp_path)
    (working / "plan.json").unlink()
    with pytest.raises(ConfigError, match="counts as spent"):
        start(prepared, tmp_path)


def test_a_public_score_needs_public_records_and_costs_no_noise(
    prepared: PreparedRun, drawn: Any, tmp_path: Path
) -> None:
    drawn(2)
    with pytest.raises(ConfigError, match="public"):
        search(replace(prepared, public=None), asked(score="public"), tmp_path / "none", Register(tmp_path / "s.jsonl"))
    found = start(prepared, tmp_path, score="public")
    assert found.certificate is not None
    assert found.certificate.score.on == "public"
    assert not (tmp_path / "out" / "adapter" / "score.jsonl").exists()
    assert found.perplexity


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"space": {"mechanism": ["static", "nonprivate"]}}, "mechanism"),
        ({"space": {"mechanism": ["static", "autoclip_published"]}}, "certified"),
        ({"space": {"mechanism": ["static", "no_such"]}}, "mechanism"),
        ({"space": {"options.no_such": [1, 2]}}, "options.no_such"),
        ({"space": {"expected_batch_size": [8, 100000]}}, "batch"),
        ({"score": {"on": "held_out", "noise_multiplier": 0.01}}, "search.score.noise_multiplier"),
    ],
)
def test_what_cannot_be_a_candidate_is_refused_before_anything_is_drawn(
    prepared: PreparedRun, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(DptuneError, match=named):
        start(prepared, tmp_path, **changes)
    assert not working_folder(tmp_path / "out").exists()
    assert not (tmp_path / "spent.jsonl").exists()


def test_one_unit_moves_the_sum_by_at_most_one() -> None:
    random = np.random.default_rng(1)
    losses, before = random.normal(2, 3, 50), random.normal(2, 3, 50)
    losses[3], losses[4], before[5] = np.nan, np.inf, -np.inf
    for gone in range(50):
        kept = np.arange(50) != gone
        moved = clipped_sum(losses, before, 0.5) - clipped_sum(losses[kept], before[kept], 0.5)
        assert abs(moved) <= ONE
    assert clipped_sum(np.full(7, np.nan), np.zeros(7), 0.5) == 7 * ONE
    order = random.permutation(50)
    assert clipped_sum(losses[order], before[order], 0.5) == clipped_sum(losses, before, 0.5)


def test_a_score_has_the_noise_that_is_charged_and_a_public_divisor() -> None:
    terms = ScoreTerms("held_out", 0.5, 2.0, 40)
    entropy, zero = FixedSeed(4), np.zeros(10)
    drawn = [noisy_score(zero, zero, terms, draw_noise(entropy)) for _ in range(2000)]
    assert np.std(drawn) == pytest.approx(2.0 * 0.5 / 40, rel=0.06)
    assert np.mean(drawn) == pytest.approx(0, abs=0.002)
    better = [noisy_score(zero - 0.1, zero, terms, draw_noise(entropy)) for _ in range(2000)]
    assert np.mean(better) == pytest.approx(10 * 0.1 / 40, abs=0.002)


def test_the_first_of_equal_scores_wins_and_failures_never_do() -> None:
    assert best_of([-math.inf, -2.0, 0.0, 0.0]) == 2
    assert best_of([-5.0, -math.inf]) == 0
    assert best_of([-math.inf, -math.inf]) is None


def test_a_score_is_charged_once_and_before_it_is_drawn(prepared: PreparedRun, tmp_path: Path) -> None:
    plan = Plan("id", "00" * 32, (), ())
    terms = ScoreTerms("held_out", 1.0, 2.0, 6)
    shared = candidates_module.SearchRun(
        prepared,
        plan,
        terms,
        tmp_path,
        Journal.create(tmp_path, plan.id),
        None,
        (prepared.evaluation, prepared.held_out),
        None,  # type: ignore[arg-type]
    )
    path, header = tmp_path / "score.jsonl", score_header(shared)
    path.write_bytes(b"")  # killed before the first line: nothing was charged
    assert not is_charged(path)
    for _ in range(2):
        charge_score(path, header, terms)
        assert is_charged(path)
        assert read_ledger(path).composition == Counter([terms.release])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # killed before the ledger's end
    charge_score(path, header, terms)
    assert (read_ledger(path).complete, read_ledger(path).releases) == (True, 1)
    assert header.search == "id"


def test_the_plan_is_bound_by_its_commitment_and_comes_back(tmp_path: Path) -> None:
    from dptune.job.search.kinds import CandidateKind

    space = asked(candidates=6)
    kinds = (CandidateKind(1.0, {"learning_rate": 0.001}, {"noise_multiplier": 1.0, "given": (1.0, 0.5)}, Counter()),)
    plan = Plan.draw(space, kinds, FixedSeed(2))
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600
    assert plan.commitment != commitment_of(b"", {"candidates": []})
    assert len({one.name for one in plan.candidates}) == len(plan.candidates)
    others = [replace(plan, salt="00" * 32), replace(plan, candidates=plan.candidates[::-1])]
    assert len({plan.commitment, *(other.commitment for other in others)}) == 3
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(DptuneError, match="not complete JSON"):
        Plan.read(tmp_path)


def test_candidates_of_one_configuration_have_noise_of_their_own(
    prepared: PreparedRun, drawn: Any, tmp_path: Path
) -> None:
    drawn(2)
    one = {"learning_rate": [0.01, 0.010000000000000002]}
    start(prepared, tmp_path, space=one, keep_losers=True)
    from safetensors.torch import load_file

    files = list(working_folder(tmp_path / "out").glob("candidates/*/.adapter.partial/*.safetensors"))
    files += list((tmp_path / "out" / "adapter").glob("*.safetensors"))
    states = [load_file(path) for path in files]
    assert len(states) == 2
    assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])
