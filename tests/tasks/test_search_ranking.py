"""How well a rehearsal's ranking carries over: what is run for it, what that costs, and what the page says of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, rmtree
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from tiny_pipeline import mode, read_json, write_params

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DivergedError
from dptune.core.files import private_directory, write_json, write_text
from dptune.job.delivery.verification import CARD
from dptune.job.search import rehearsal as rehearsal_module
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import FOLDER, RunFolder, runs_within, said_within
from dptune.privacy.spent_budgets.register import Register
from dptune.records.parquet_file import read_records, write_records
from dptune.training.run import Run
from tasks.paths import REPORT, SPENT
from tasks.report.search import PAGE, RANKING, ranking_text, unranked, write_page
from tasks.search import ranking as module
from tasks.search import run as run_module
from tasks.search.publish import figures_of
from tasks.search.ranking import FILE as OUTCOME
from tasks.search.ranking import rank_correlation
from tasks.search.request import check_search, folder_of, remember_shown, shown
from tasks.search.run import TRAIN_SIDE, read_sides, search_records
from tasks.settings.params import Settings, load_settings

ASKED: dict[str, Any] = {
    "name": "ranked",
    "epsilon": 1,
    "space": {"learning_rate": {"log_uniform": [0.001, 0.02]}},
    "candidates": 3,
    "score": "rehearsal",
    "check_ranking": True,
}


def settings_of(telemetry: str = "research", **search: Any) -> Settings:
    write_params({"experiment": {"telemetry": telemetry}})
    return load_settings(overrides={"search": ASKED | search})


def rehearse(monkeypatch: pytest.MonkeyPatch, *perplexities: float) -> None:
    """Let trials on public records find these perplexities."""
    found = iter(perplexities)
    monkeypatch.setattr(rehearsal_module, "trial", lambda *_: next(found))


def test_private_telemetry_refuses_it_by_name_and_it_is_off_by_default(empty: Path) -> None:
    refused = r"search\.check_ranking: is true, and it shows perplexities of held-out private records.*use false"
    with pytest.raises(ConfigError, match=refused):
        check_search(settings_of("private"))
    check_search(settings_of("private", check_ranking=False))
    write_params()
    assert load_settings().search.check_ranking is False
    with pytest.raises(ConfigError, match=r"check_ranking: is true, and score rehearses nothing"):
        settings_of(score="noisy")


def test_every_setting_is_paid_for_once_and_the_winner_not_again(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it was stopped on the way, and if it is asked for after the search has ended."""
    rehearse(monkeypatch, 3.0, 2.0, 4.0)
    out = search_records(settings_of(check_ranking=False), "cpu")
    assert "ranking" not in read_json(RunFolder(out).results)
    chain = read_ledger(RunFolder(out).adapter / "ledger.jsonl").chain
    run, ran = module.run, []

    def stopped(*given: Any) -> Any:
        if ran:
            raise KeyboardInterrupt
        ran.append(run(*given))
        return ran[0]

    with monkeypatch.context() as patched:
        patched.setattr(module, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            search_records(settings_of(), "cpu")
    assert weights(out / FOLDER) == [], "also where others are still to run: a page may be made meanwhile"
    assert "trains 2 further settings on the private records, within epsilon 1 each and 2 together" in caplog.text
    search_records(settings_of(), "cpu")
    assert "paid before" not in caplog.text, "its own runs are no strangers"
    told = read_json(RunFolder(out).results)
    ranking, runs = told["ranking"], sorted((out / FOLDER).iterdir())
    assert [float(rehearsed) for _, rehearsed, _ in ranking["points"]] == [3.0, 2.0, 4.0]
    private = [float(held_out) for *_, held_out in ranking["points"]]
    assert private[1] == told["perplexity"]["held_out"][1], "the winner's own run"
    assert len(set(private)) == 3
    results = [read_json(RunFolder(one).result)["after"]["eval_perplexity"] for one in runs]
    assert sorted(results) == sorted([private[0], private[2]])
    assert ranking["correlation"] == rank_correlation(list(zip([3.0, 2.0, 4.0], private, strict=True)))
    costs = [read_ledger(RunFolder(one).ledger).epsilons.certified for one in runs]
    assert (ranking["runs"], float(ranking["epsilon"])) == (2, pytest.approx(sum(costs)))
    assert ranking["delta"] == pytest.approx(2 * told["delta"])
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (3, pytest.approx(sum(costs) + float(told["epsilon_certified"])))
    assert read_ledger(RunFolder(out).adapter / "ledger.jsonl").chain == chain
    assert mode(runs[0]) == 0o700
    assert weights(out / FOLDER) == [], "a card beside them would prove one run, and the page chose among them"
    assert weights(out)
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("it is known already"))
    search_records(settings_of(), "cpu")
    assert read_json(RunFolder(out).results) == told
    _weights_that_an_earlier_version_left_go(out)
    assert read_json(RunFolder(out).results) == told
    assert "paid before" not in caplog.text
    _the_page_says_it(out, told)
    _whoever_starts_afresh_is_told_of_all_runs(out, costs, float(told["epsilon_certified"]))


def _weights_that_an_earlier_version_left_go(out: Path) -> None:
    """It kept no outcome of a run, and the page that was made then is not shown for theirs."""
    for run in runs_within(out):
        (run / OUTCOME).unlink()
        write_text(RunFolder(run).adapter / "adapter_model.safetensors", "a stand-in")
    settings, page = settings_of(check_ranking=False), REPORT / PAGE
    write_text(page, "its page")
    remember_shown(settings, page, "its answer")
    assert shown(settings, page) is None
    search_records(settings, "cpu")
    assert weights(out / FOLDER) == []
    assert shown(settings, page) == "its answer"


def weights(folder: Path) -> list[Path]:
    """All files in a folder that hold weights, or say what they cost."""
    return [path for path in folder.rglob("*") if path.suffix == ".safetensors" or path.name == CARD]


def _whoever_starts_afresh_is_told_of_all_runs(out: Path, costs: list[float], own: float) -> None:
    within = f"; 2 runs that check its ranking have spent epsilon {at_most(sum(costs), 4)}, delta 2e-05 beside that, "
    within += f"epsilon {at_most(sum(costs) + own, 4)}, delta 3e-05 in all"
    assert said_within(out) == within
    edited()
    with pytest.raises(ConfigError, match=r"search\.name: .*other settings \(records\)") as caught:
        search_records(settings_of(), "cpu")
    assert within in str(caught.value)


def edited() -> None:
    """Edit every record of the train side; their number stays."""
    records = read_records(TRAIN_SIDE)
    texts = [f"Quite another record: {number}." for number in range(len(records.record))]
    write_records(TRAIN_SIDE, replace(records, text=pa.array(texts)))


def test_a_kill_between_two_steps_changes_nothing_of_what_is_run_or_told(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The winner is told before its ranking is checked; settings that diverged, or have a figure, have ended."""
    rehearse(monkeypatch, 2.0, 3.0, 4.0)
    settings, run = settings_of(), module.run
    out = folder_of(settings)
    ends = iter([DivergedError("the run diverged."), KeyboardInterrupt()])

    def ending(*given: Any) -> None:
        with monkeypatch.context() as diverging:
            diverging.setattr(Run, "end", diverge)
            error = next(ends)
            if isinstance(error, DivergedError):
                run(*given)  # as it does: with its ledger, and with its last checkpoint
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(module, "run", ending)
        with pytest.raises(KeyboardInterrupt):
            search_records(settings, "cpu")
    first = read_json(RunFolder(out).results)
    assert first["released"]
    assert "ranking" not in first
    _the_page_says_that_it_did_not_end(out)
    (diverged,) = runs_within(out)
    assert read_ledger(RunFolder(diverged).ledger).releases
    assert weights(diverged) == []
    ran: list[Path] = []

    def running(prepared: Any, folder: Path, register: Register) -> Any:
        ran.append(folder)
        return run(prepared, folder, register)

    def killed(folder: Path) -> None:
        if RunFolder(folder).adapter.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "run", running)
        patched.setattr(module, "forget_weights", killed)
        with pytest.raises(KeyboardInterrupt):
            search_records(settings, "cpu")
    (folder,) = ran
    assert weights(folder)
    begun = private_directory(out / FOLDER / "begun")
    for file in (RunFolder(begun).ledger, RunFolder(begun).checkpoint):
        copyfile(RunFolder(folder).ledger, file)
    caplog.clear()
    search_records(settings_of(check_ranking=False), "cpu")
    assert weights(folder) == [], "nobody asks for its figure any more"
    assert weights(begun), "it may go on from its checkpoint"
    rmtree(begun)
    assert "these records paid before (2 times, together epsilon" in caplog.text, "no page tells of them"
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("each has ended"))
    _a_run_without_its_ledger_is_not_trusted(settings, diverged)
    search_records(settings, "cpu")
    assert weights(out / FOLDER) == []
    told = read_json(RunFolder(out).results)
    ranking = told.pop("ranking")
    assert told == first
    found = read_json(RunFolder(folder).result)["after"]["eval_perplexity"]
    held_out = [float(one) for *_, one in ranking["points"]]
    assert held_out == [first["perplexity"]["held_out"][1], math.inf, found]
    assert ranking["runs"] == 2


def diverge(*_: Any) -> None:
    raise DivergedError("the run diverged.")


def _a_run_without_its_ledger_is_not_trusted(settings: Settings, run: Path) -> None:
    kept, cell = RunFolder(run).ledger.read_bytes(), RunFolder(run).cell.read_bytes()
    RunFolder(run).ledger.unlink()
    with pytest.raises(
        ConfigError, match=rf"{run.name} has ended, and its ledger, .* is missing.*restore it"
    ) as caught:
        search_records(settings, "cpu")
    assert f"`dptune set-aside {run}` lets the next run start afresh" in str(caught.value)
    assert "another search.name" not in str(caught.value), "which would pay for all of them again"
    assert RunFolder(run).cell.read_bytes() == cell
    RunFolder(run).ledger.write_bytes(kept)


def _the_page_says_that_it_did_not_end(out: Path) -> None:
    assert unranked(out)
    write_page(out, REPORT)
    page = " ".join((REPORT / PAGE).read_text(encoding="utf-8").partition("<script")[0].split())
    assert "How well the ranking carries over" in page
    assert "The check of the ranking has not ended, so its result is not shown." in page
    assert f"own run costs the epsilon above{said_within(out)}." in page
    assert said_within(out)


def test_without_held_out_records_it_is_refused_before_anything_is_tried(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "read_sides", lambda settings: replace(read_sides(settings), eval=[]))
    monkeypatch.setattr(rehearsal_module, "rehearse_space", lambda *_: pytest.fail("for nothing"))
    with pytest.raises(ConfigError, match=r"search\.check_ranking: is true, and no records are held out"):
        search_records(settings_of(), "cpu")


def _the_page_says_it(out: Path, told: dict[str, Any]) -> None:
    write_page(out, REPORT)
    page = (REPORT / PAGE).read_text(encoding="utf-8")
    shown = " ".join(page.partition("<script")[0].split())
    assert "How well the ranking carries over" in shown
    for sentence in ranking_text(told):
        assert sentence in shown
    first, cost = ranking_text(told)
    assert first.startswith(
        "Rank correlation (Spearman) of perplexities in the rehearsal, on public records, with the perplexities"
    )
    assert f": {told['ranking']['correlation']:.2f}, over 3 settings. " in first
    assert cost.startswith("For this, 2 settings beside the chosen one were run on the private records too")
    assert (REPORT / RANKING).exists()
    assert f'"value": {float(told["ranking"]["points"][0][2]):.4f}'.rstrip("0") in page, "a point of the chart"
    figures = figures_of(told)
    assert (figures["ranking.correlation"], figures["ranking.settings"]) == (told["ranking"]["correlation"], 3)
    assert figures["ranking.epsilon_certified"] == float(told["ranking"]["epsilon"])


def test_what_diverges_ranks_last_and_is_paid_for(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse(monkeypatch, 2.0, 3.0, math.inf)

    monkeypatch.setattr(module, "run", diverge)
    told = read_json(RunFolder(search_records(settings_of(), "cpu")).results)
    assert [one[1:] for one in told["ranking"]["points"][1:]] == [["3.0", "inf"], ["inf", "inf"]]
    assert told["ranking"]["correlation"] == pytest.approx(math.sqrt(3) / 2), "two of three are tied on one side"
    assert float(told["ranking"]["epsilon"]) == pytest.approx(2 * float(told["epsilon_certified"]), rel=1e-6)
    first, _ = ranking_text(told)
    assert "over 3 settings, of which 2 diverged and rank last. 1 is" in first


def test_a_correlation_needs_three_points_that_differ() -> None:
    assert rank_correlation([(1, 5), (2, 6), (3, 7)]) == pytest.approx(1)
    assert rank_correlation([(1, 7), (2, 6), (3, math.inf), (math.inf, 5)]) == pytest.approx(-0.4)
    assert rank_correlation([(1, 5), (2, 6)]) is None
    assert rank_correlation([(1, 5), (2, 5), (3, 5)]) is None
    said = {"correlation": None, "runs": 1, "epsilon": "1", "delta": 1e-5}
    (first, _) = ranking_text({"ranking": said | {"points": [[{"batch": 8}, "2", "3"], [{"batch": 9}, "3", "3"]]}})
    assert first.startswith("There is no rank correlation over 2 settings")


def test_the_cost_of_a_ranking_is_told_and_never_rounded_down() -> None:
    points = [[{"batch": 8}, "2", "3"]]
    ranking = {"correlation": None, "runs": 0, "epsilon": "17.941", "delta": 9e-5, "points": points}
    assert "certified \u03b5 = 18 at" in ranking_text({"ranking": ranking})[1]
    assert "certified \u03b5 = 2.05 at" in ranking_text({"ranking": ranking | {"epsilon": "2.041"}})[1]
    plain = {"epsilon_certified": "2", "score": {"on": "rehearsal"}, "prices": None, "perplexity": {}, "scores": {}}
    found = figures_of(plain | {"ranking": ranking})
    assert found == {"epsilon_certified": 2, "ranking.epsilon_certified": 17.941}, "also without any correlation"


def test_a_check_has_begun_before_its_first_run(tmp_path: Path) -> None:
    """A search that was killed within the check of its ranking must not be taken for one that has ended."""
    found = SimpleNamespace(settings=SimpleNamespace(epsilon=1.0), tried=(({"batch": 8}, 2.0), ({"batch": 16}, 3.0)))
    winner: Any = SimpleNamespace(folder=tmp_path)

    def killed(_: Any) -> Any:
        raise KeyboardInterrupt

    write_json(RunFolder(tmp_path).results, {})
    assert not unranked(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        module.rank_privately(cast(Any, found), winner, killed, Register(tmp_path / "spent.jsonl"))
    assert unranked(tmp_path)
    assert mode(tmp_path / FOLDER) == 0o700


def test_a_run_that_was_set_aside_is_paid_for_on_the_page_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The register counts it from its start, and warns of it no longer than it is a stranger."""
    monkeypatch.setattr(module, "price", lambda *_: SimpleNamespace(certified=0.75))
    monkeypatch.setattr(module, "figure_of", lambda prepared, out, work: private_directory(out) and 3.0)
    found = SimpleNamespace(
        settings=SimpleNamespace(epsilon=1.0), tried=(({"batch": 8}, 2.0), ({"batch": 16}, 3.0), ({"batch": 32}, 4.0))
    )

    def prepare(one: Any) -> Any:
        parts = SimpleNamespace(mechanism=None, renyi_filter=None)
        return SimpleNamespace(
            settings=found.settings if one["batch"] == 8 else one, mechanism=parts, schedule=SimpleNamespace(priced=1)
        )

    header = SimpleNamespace(delta=1e-5)
    winner: Any = SimpleNamespace(
        folder=tmp_path, ledger=SimpleNamespace(header=header), perplexity={"held-out private records": (9.0, 2.5)}
    )
    own = module._digest({"batch": 16})
    for name in (f"{own}.set-aside-1", f"{own}.set-aside-2"):
        private_directory(tmp_path / FOLDER / name)
    ranking = module.rank_privately(cast(Any, found), winner, prepare, Register(tmp_path / "spent.jsonl"))
    assert "2 further settings" in caplog.text
    assert "within epsilon 1 each and 4 together with 2 that were set aside, which adds" in caplog.text
    assert (ranking["runs"], float(ranking["epsilon"])) == (4, 3.0)
    assert ranking["delta"] == pytest.approx(4e-5)
    (_, cost) = ranking_text({"ranking": ranking})
    assert cost.startswith(
        "For this, 2 settings beside the chosen one were run on the private records too, in 4 runs with those that "
        "were set aside, which cost certified \u03b5 = 3 at \u03b4 = 4e-05 together, without runs whose "
        "folders were removed."
    )


def test_a_setting_that_was_drawn_twice_is_run_once() -> None:
    tried = (({"batch": 8}, 2.0), ({"batch": 16}, 3.0), ({"batch": 8}, 2.5))
    assert module._distinct(tried) == [({"batch": 8}, 2.25), ({"batch": 16}, 3.0)]


def test_an_ended_search_of_this_name_is_not_taken_for_a_rehearsal_that_diverged(pipeline: Path) -> None:
    settings = settings_of()
    out = folder_of(settings)
    write_json(RunFolder(out).results, {"rehearsed": False, "released": False})
    write_json(RunFolder(out).cell, {"kind": "search"})
    with pytest.raises(ConfigError, match=r"search\.name"):
        search_records(settings)
    assert read_json(RunFolder(out).cell) == {"kind": "search"}, "what prices that search stays as it is"
