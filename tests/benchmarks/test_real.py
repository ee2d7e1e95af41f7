"""The benchmarks on real models, with a tiny model and invented rows: list, stop and resume, report."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_tuning

from benchmarks.real import __main__ as command
from benchmarks.real import plan, work
from benchmarks.real.data import Rows, Sst2
from benchmarks.real.plan import Case, Run
from benchmarks.real.report import numbers, report, weights_numbers
from docs.generate import weights_table
from dptune.core.errors import ConfigError
from dptune.core.interrupts import ends_like_ctrl_c
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder

QUICK = {"rank": 2, "target_modules": ("c_attn",), "max_length": 24, "epochs": 2.0, "expected_batch_size": 8.0}


def texts(_: Path) -> Rows:
    rows = tiny_tuning.rows(60)
    return Rows(rows[:40], rows[40:50], rows[50:], {"text": "text"})


def pairs(_: Path) -> Rows:
    rows = [{"prompt": f"{n}: ", "completion": f"A{n}."} for n in range(60)]
    return Rows(rows[:40], rows[40:50], rows[50:], {"prompt": "prompt", "completion": "completion"})


def labelled(_: Path) -> Rows:
    rows = [{"text": f"{n} is {'good' if n % 2 else 'bad'}", "label": str(n % 2)} for n in range(60)]
    return Rows(rows[:40], rows[40:50], rows[50:], {"text": "text", "label": "label"})


def case(name: str, part: str, read: Any, **changes: Any) -> Case:
    return Case(name, part, f"Invented {name}", "smollm2", read, {**QUICK, **changes}, 16, new_tokens=8)


CASES = (
    case("words", "diabetes-text", texts, unit="customer_id"),
    case("pairs", "e2e", pairs),
    case("labels", "sst2", labelled, task="classify", labels=("0", "1")),
)


@pytest.fixture
def bench(tmp_path: Path) -> work.Bench:
    return work.Bench(tmp_path / "out", tmp_path, "cpu", {"smollm2": str(tiny_tuning.checkpoint())})


def carry_out(bench: work.Bench, *runs: Run) -> list[str]:
    return work.carry_out_all(bench, runs, minutes=5)[1]


def test_a_part_begins_with_every_budget_once_and_names_differ() -> None:
    for part in command.PARTS:
        runs = plan.runs_of(part)
        assert len({run.name for run in runs}) == len(runs)
    first = plan.runs_of("sst2")[: len(plan.BUDGETS)]
    assert [(run.budget, run.seed) for run in first] == [(budget, 0) for budget in plan.BUDGETS]
    for one in plan.CASES:
        if one.grid_budget is not None:
            assert len(plan.grid(one)) == 25
            assert plan.grid(one)[0].name in {run.name for run in plan.runs_of(one.part)}  # made once for both


def test_stopped_runs_go_on_and_nothing_is_charged_twice(bench: work.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(CASES[0], 8.0)
    ledger = RunFolder(bench.folder(run)).ledger

    @contextmanager
    def after_some_steps(_: float) -> Iterator[None]:
        def stop() -> None:
            while not (ledger.exists() and ledger.read_bytes().count(b"\n") >= 3):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop, daemon=True).start()
        with ends_like_ctrl_c():
            yield

    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(work, "stops_after", after_some_steps)
        assert work.carry_out_all(bench, [run], 1, said.append) == (0, [])
    assert said == ["Stopped; the same command goes on from here."]
    charged = read_ledger(ledger).releases
    assert not bench.results
    assert not carry_out(bench, run)
    line = bench.results[run.name]
    contents = read_ledger(ledger)
    assert 0 < charged < contents.releases == line["settings"]["steps"]
    assert contents.complete
    booked = (bench.folder(run).parent / "spent.jsonl").read_text().splitlines()
    assert [json.loads(one)["kind"] for one in booked] == ["register", "run"]
    assert line["epsilon_certified"] <= 8
    assert line["unit"] == "customer_id"
    assert line["seconds"] == pytest.approx(json.loads((bench.out / "seconds.json").read_text())[run.name], abs=0.1)
    before = (bench.out / "results.jsonl").read_bytes()
    assert not carry_out(bench, run)  # what is done is not done again
    assert (bench.out / "results.jsonl").read_bytes() == before


def test_the_time_ends_by_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), work.stops_after(0.001):
        time.sleep(10)


def test_a_report_has_every_kind_of_run_and_says_what_has_not_run(bench: work.Bench) -> None:
    words, written, labels = CASES
    runs = [
        Run(words, 8.0),
        Run(words, 8.0, seed=1),
        Run(words, None, "nonprivate"),
        Run(written, 8.0),
        Run(labels, 8.0),
    ]
    runs.append(Run(words, 8.0, "rldp_published", changes={"options": {"interval": 2, "warmup": 2}}))
    assert not carry_out(bench, *runs)
    found = bench.results
    assert found["words-none-nonprivate-seed0"]["epsilon_certified"] == "inf"
    published = found[runs[-1].name]
    assert published["epsilon_certified"] == "inf"
    assert published["epsilon_published"] <= 8.0
    values = [found[run.name]["scores"]["perplexity"][0] for run in runs[:2]]
    assert found[runs[3].name]["floors"]["a slot template"]["bleu_e2e"] < 10  # of 100
    lines = report(found, ["diabetes-text", "e2e", "sst2", "defaults"], CASES)
    own = next(line for line in lines if line.startswith("| static (DP-SGD) | 8 |"))
    assert f"**{sum(values) / 2:.4g}** +- " in own
    assert own.split(" | ")[-2] == "2"
    assert any(line.startswith("| without privacy, same steps | none | none |") for line in lines)
    untuned = found[runs[0].name]["floors"]["the untuned model"]["perplexity"]
    assert f"| the untuned model |  | 0 | {untuned:.4g} |  |  |" in lines
    assert any(line.startswith("| a slot template |") for line in lines)
    assert any(line.startswith("| a constant answer |  |  | 50 |") for line in lines)
    missing = next(line for line in lines if line.startswith("Has not run: "))
    assert "static at epsilon 3 (seed 0, 1, 2)" in missing
    assert "static at epsilon 8 (seed 2)" in missing
    size = found[runs[0].name]["base"]["parameters"] / 1e6
    assert f"({size:.1f} million parameters)" in next(line for line in lines if line.startswith("### Invented words"))
    pictured = numbers(found, words)["diabetes-text"]
    assert [sorted(run["scores"]) for run in pictured["runs"]] == [sorted(round(value, 2) for value in values)]
    assert pictured["runs"][0]["certified"] <= 8.0
    assert "without privacy, same steps" in pictured["floors"].values()
    listed = command.listed([*runs, Run(words, 1.0)], found)
    assert listed[-2:] == [f"{len(runs)} of {len(runs) + 1} runs are done.", listed[-1]]
    assert "1 of the others may take" in listed[-1]


def invented(run: Run, accuracy: float, trained: int = 5, commit: str = "x") -> dict[str, Any]:
    """The line of a run that nobody made."""
    base = {"parameters": 2_000_000, "weights": None, "trained": trained}
    about = {"base": base, "units": 40, "unit": "record", "delta": 1e-3, "tested": 10, "device": "a CPU"}
    asked = {"case": run.case.name, "budget": run.budget, "system": run.system, "changes": run.changes}
    prices = dict.fromkeys(("epsilon_certified", "epsilon_published"), run.budget)
    scores = {"accuracy": [accuracy, 0.1], "loss": [0.5, 0.1], "f1": [accuracy, 0.1]}
    return {**about, **asked, **prices, "scores": scores, "commit": commit, "floors": {}, "dev": {}}


def test_a_head_and_next_to_no_noise_have_rows_of_their_own_and_are_in_no_picture() -> None:
    case = next(one for one in plan.CASES if one.name == "sst2-6920")
    runs = {run.name: run for run in plan.runs_of("sst2") if run.case is case}
    plain, head, clipped, other = (
        runs[f"sst2-6920-{name}"]
        for name in ("eps3-static-seed0", "eps3-static-seed0-train=head", "eps1000-static-seed0", "eps3-quantile-seed0")
    )
    found = {head.name: invented(head, 0.7, 2)}
    with pytest.raises(SystemExit, match="no such run is done"):
        numbers(found, case)
    found |= {plain.name: invented(plain, 0.8), clipped.name: invented(clipped, 0.9)}
    found |= {other.name: invented(other, 0.6, commit="another")}
    lines = report(found, ["sst2"], (case,))
    rows = [row.split(" | ")[:4] for row in lines if "**" in row]
    assert rows == [
        ["| static (DP-SGD)", "1000", "1000", "**90**"],
        ["| static (DP-SGD)", "3", "3", "**80**"],
        ["| static (DP-SGD), head alone", "3", "3", "**70**"],
        ["| quantile", "3", "3", "**60**"],
    ]
    assert "; 5 trained weights, 2 trained weights (head alone); " in "".join(lines)
    pictured = numbers(found, case)["sst2"]
    assert [run["scores"] for run in pictured["runs"]] == [[80.0]]
    assert pictured["commit"] == "x"


def test_a_grid_names_the_best_setting_beside_the_defaults(bench: work.Bench) -> None:
    one = Case("labels", "sst2", "Invented", "smollm2", labelled, {}, 16, (0.1, 0.2), (1.0,), 40, 8.0)
    plain, *others = plan.grid(one)
    found = {run.name: invented(run, score) for run, score in ((plain, 0.5), (others[0], 0.7), (others[1], 0.6))}
    assert "| dev rows |" not in "".join(report(found, ["defaults"], (one,)))
    found[others[0].name]["dev"] = {"accuracy": [0.4, 0.65]}  # before training, and after
    assert any(row.endswith("| 65 | 0.5 | 70 |") for row in report(found, ["defaults"], (one,)))
    lines = report(found, ["defaults"], (one,))
    said = "With every default left alone: test accuracy, % **50**; the best of 2 settings: **70**."
    assert said in lines
    assert lines[-3].endswith("| 70 |")
    none = report({}, ["defaults"], (one,))
    assert none == ["### Invented, SmolLM2-135M-Instruct", "", "The grid of 6 settings at epsilon 8 has not run.", ""]


def test_each_choice_of_weights_takes_the_best_of_its_trials_on_other_sentences(
    bench: work.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs have the rate of the trial with the best dev score, and wait until all trials have run."""
    monkeypatch.setattr(plan, "TRIED", {"bias": (0.02, 0.01, 0.002, 0.001)})
    settings = {"max_length": 24, "epochs": 2.0, "expected_batch_size": 8.0, "task": "classify", "labels": ("0", "1")}
    case = Case("weights", "weights", "Invented", "smollm2", labelled, settings, 16)
    stand_in = Case("weights-trials", "weights", "Invented others", "smollm2", labelled, settings, 16)
    runs = plan.by_weights(case, stand_in)
    trials, finals = runs[:4], runs[4:]
    assert [run.case.name for run in runs] == ["weights-trials"] * 4 + ["weights"] * 9
    assert all(run.budget == 3.0 for run in trials)
    assert all(run.trials == tuple(trials) for run in finals)  # shared by all budgets and seeds
    first = next(run for run in finals if run.budget == 8.0)
    assert carry_out(bench, first)[0].startswith(
        "weights-eps8-static-seed0-train=bias: weights-eps8-static-seed0-train=bias: 4 of the 4 trials"
    )
    assert not carry_out(bench, *trials, first)
    found = bench.results
    best = max(trials, key=lambda run: (found[run.name]["dev"]["accuracy"][1], -found[run.name]["dev"]["loss"][1]))
    line = found[first.name]
    assert line["settings"]["learning rate"] == best.changes["learning_rate"]
    assert line["settings"]["train"] == "bias"
    assert line["memory"] > 0
    # A trial that diverged is not chosen; where all did, the runs say so.
    worse = {trial.name: dict(found[trial.name], dev={"accuracy": [0.5, 0.4], "loss": [1, 1]}) for trial in trials}
    worse[trials[3].name]["dev"] = {"accuracy": [0.5, 0.9], "loss": [1, 1]}
    assert plan.chosen(first, worse)["learning_rate"] == trials[3].changes["learning_rate"]
    diverged = {trial.name: {"diverged": "nan"} for trial in trials}
    assert plan.chosen(first, worse | {trials[3].name: {"diverged": "nan"}}) == {**first.changes, **trials[0].changes}
    with pytest.raises(ConfigError, match="all trials that choose its rate and radius diverged"):
        plan.chosen(first, diverged)
    lines = report(found, ["weights"], (case, stand_in))
    assert "1 of 9 runs, at rates that 4 of 4 trials chose (Invented others)." in lines
    row = next(line for line in lines if line.startswith("| `bias` |")).split(" | ")
    accuracy = 100 * line["scores"]["accuracy"][0]
    assert row[2:6] == [f"{best.changes['learning_rate']:g}", "not run", "not run", f"{accuracy:.1f} (one run)"]
    missing = next(line for line in lines if line.startswith("Has not run: "))
    assert "bias at epsilon 8 (seed 1, 2)" in missing
    assert "bias at epsilon 1 (seed 0, 1, 2)" in missing
    kept = weights_numbers(found, (case, stand_in))
    (one,) = kept["runs"]
    batch, weights = line["settings"]["expected batch"], line["base"]["trained"]
    assert one["noise"] == pytest.approx(line["noise_multiplier"] * one["radius"] / batch, rel=0.01)
    assert one["noise_length"] == pytest.approx(one["noise"] / one["radius"] * weights**0.5, rel=0.01)
    assert [trial["rate"] for trial in kept["trials"]] == [trial.changes["learning_rate"] for trial in trials]
    assert weights_table.on_page("no marker") == "no marker"


def test_the_stand_in_shares_no_sentence_with_the_private_runs(tmp_path: Path) -> None:
    place = tmp_path / "benchmarks/sst2/sentences"
    place.mkdir(parents=True)
    for part in ("train", "dev", "test"):
        rows = "".join(f"{number % 2} {part} sentence {number}\n" for number in range(5000))
        (place / f"stsa.binary.{part}").write_text(rows)
    case, stand_in = (one for one in plan.CASES if one.part == "weights")
    private, public = ({row["text"] for row in one.read(tmp_path).train} for one in (case, stand_in))
    assert len(private) == len(public) == 1000
    assert not private & public


def test_missing_data_are_named_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"and \.test there, or name the folder"):
        Sst2()(tmp_path)
    with pytest.raises(SystemExit, match="is missing"):
        command.main(["--part", "e2e", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"])
