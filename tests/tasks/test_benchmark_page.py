"""The page of benchmarks: the papers' numbers as they print them, and measured ones with what the ledger certifies."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dptune.core.errors import ConfigError
from dptune.core.files import write_json
from dptune.privacy.run_folder import RunFolder
from tasks.report.benchmarks import CLAIMED, FinishedStudy, answers_by_study, benchmark_of, page, read_studies
from tests.browser import samples


def result(mechanism: str, budget: float | None, bleu: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    certified = "inf" if budget is None else budget - 0.004
    return {
        "label": f"small.{mechanism}",
        "model": "small",
        "mechanism": mechanism,
        "budget_epsilon": budget,
        "seed": seed,
        "unit": "record",
        "units": 41220,
        "delta": 8e-6,
        "accounting": "certified",
        "telemetry": "research",
        "data": "benchmark e2e (part train)",
        "noise_multiplier": 0.81,
        "sample_rate": 0.0062,
        "planned_releases": 60,
        "epsilon_published": certified,
        "epsilon_certified": certified,
        "after": {"eval_perplexity": 9.5, "public_perplexity": 9.4},
        "scores": {"bleu_e2e": bleu, "chrf": 20.0},
        "signatures": {"bleu_e2e": "sacrebleu BLEU"},
        "decoding": "greedy",
        "inputs": 630,
        "seconds": 100.0,
        **more,
    }


RESULTS = (
    result("nonprivate", None, 40.0),
    *(result("static", 8, bleu, seed) for seed, bleu in enumerate((9, 10, 11))),
)


def test_measured_scores_stand_with_their_certified_epsilon_and_their_share() -> None:
    text = page([FinishedStudy("bench-e2e-small", RESULTS)])
    assert "### Measured here: bench-e2e-small" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| small | static")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    expected = "small|static|certified|8|7.996|7.996|10 ± 1|20 ± 0|9.5 ± 0|0.25|1.00|3|60|0.0062|0.81|100"
    assert "|".join(cells) == expected
    assert "one record, of 41220 in training" in text
    assert "Perplexity is of all held-out records;" in text
    some = page([FinishedStudy("bench-e2e-small", tuple(one | {"final_records": 500} for one in RESULTS))])
    assert "Perplexity is of at most 500 held-out records, evenly spread over the file;" in some
    assert "bleu_e2e: sacrebleu BLEU." in text


def test_few_seeds_and_missing_runs_are_said() -> None:
    assert "Only 1 seed: too few to tell mechanisms apart" in page([FinishedStudy("bench-e2e-small", RESULTS[:2])])
    assert page([]).count("Nothing was run.") == len(yaml.safe_load(CLAIMED.read_text(encoding="utf-8")))


def test_what_no_paper_printed_has_a_section_of_its_own() -> None:
    sentences = tuple(one | {"data": "benchmark glue (task sst2-sentences, part train)"} for one in RESULTS)
    text = page([FinishedStudy("mine", sentences)])
    assert text.count("## glue sst2-sentences") == 1
    assert "No score of a paper is kept for it." in text
    assert "### Measured here: mine" in text.partition("## glue sst2-sentences")[2]


def test_accuracies_are_shares_of_the_gain_over_a_constant_answer() -> None:
    after = {"eval_perplexity": 2.0, "public_perplexity": 2.0, "eval_largest_class": 0.5, "eval_accuracy": 0.9}
    plain = result("nonprivate", None, 1.0, after=after, scores={}, data="benchmark glue (task sst2, part train)")
    text = page(
        [FinishedStudy("mine", (plain, plain | {"mechanism": "static", "after": after | {"eval_accuracy": 0.6}}))]
    )
    assert "share of the gain over a constant answer (accuracy)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| small | static")]
    assert "| 0.25 | 1.00 |" in line


def test_both_units_are_priced() -> None:
    text = page([FinishedStudy("bench-e2e-small", RESULTS)])
    assert re.search(
        r"at epsilon 8, .* noise (0\.\d+) where a unit is a row, and (0\.\d+) where it is all sentences", text
    )


def test_labels_of_data_name_the_benchmark_and_its_task() -> None:
    assert benchmark_of("benchmark glue (task sst2, part train)") == "glue sst2"
    assert benchmark_of("benchmark wikitext (part train, half private)") == "wikitext"
    assert benchmark_of("UCI Diabetes 130-US Hospitals 1999-2008: real encounters") == "diabetes"
    assert benchmark_of("SYNTHETIC cohort") == ""


def test_every_printed_row_has_a_value_for_each_metric_and_nothing_certifies_a_papers_run() -> None:
    printed = yaml.safe_load(CLAIMED.read_text(encoding="utf-8"))
    tables = [one for claimed in printed.values() for one in (claimed, *claimed.get("further", ()))]
    for table in tables:
        for row in table["rows"]:
            assert all(len(values) == len(table["metrics"]) for values in row["scores"].values()), row
    text = page([])
    heads = [line for line in text.splitlines() if "| claimed ε |" in line]
    assert len(heads) == len(tables)
    assert all("| certified ε, if it had been sampled by Poisson |" in line for line in heads), "they were shuffled"
    assert "| PLRV-O, tables 3-6 | gpt2 | PLRV-O | 1 | not known | 62.73 |" in text
    assert "| roberta-large | LMO-DP | 0.3 | 2.258 |" in text
    assert "| roberta-large | LMO-DP | ∞ | ∞ |" in text
    assert "| RLDP, table 5 | mistral-7b | AdaClip | 2 | not known | -10.48 | 37840.196 | 0.349 |" in text
    assert "| mean share of steps | 29 %, median 27 % | 4.2 | 26.8 %, median 27.5 %" in text
    lmo = next(line for line in text.splitlines() if "| LMO-DP | 0.3 |" in line)
    assert lmo.split("|")[-2].strip() == "0.91", "0.9220 and 0.9620 beside 0.5092"


def test_answers_are_rows_of_their_own() -> None:
    row = {
        "label": "pmixed.shard",
        "unit": "shard",
        "epsilon_certified": 8,
        "perplexity_pooled": 90.5,
        "perplexity_per_block": 99.0,
    }
    told = {
        "name": "wiki",
        "data": "benchmark wikitext (part train, half private)",
        "records": 64,
        "delta": 1e-5,
        "rows": [row],
    }
    assert "| pmixed.shard | shard | 8 | 90.5 | 99 |" in page([], [told])


def test_deltas_are_rounded_up() -> None:
    study = FinishedStudy("bench", (result("static", 8, 9.0, delta=8.0001e-6),))
    assert "delta 8.01e-06; Poisson sampling" in page([study])


def test_the_last_answers_of_each_study_are_read(tmp_path: Path) -> None:
    for order, (name, records) in enumerate((("wiki", 64), ("wiki", 32), ("e2e", 16)), start=1):
        write_json(tmp_path / f"{order}.json", {"name": name, "records": records, "rows": []})
        os.utime(tmp_path / f"{order}.json", (order, order))
    write_json(tmp_path / "skipped.json", {"skipped": "labels"})
    found = answers_by_study([*tmp_path.glob("*.json"), tmp_path / "absent.json"])
    assert {name: one["records"] for name, one in found.items()} == {"wiki": 32, "e2e": 16}


def finished(folder: Path, order: int, experiment: str = "bench", epochs: float = 1.0, **settings: Any) -> None:
    """A finished run's files; ``order`` says when it finished."""
    run = RunFolder(folder / f"run{order}")
    own = {
        "model_name": "small",
        "mechanism": "static",
        "accounting": "certified",
        "epsilon": 8,
        "seed": 0,
        "options": {},
    }
    training = {"epochs": epochs, "learning_rate": 0.01}
    cell = {"experiment": experiment, "training": training, "inputs": {"data": "1"}} | own | settings
    write_json(run.cell, cell)
    write_json(run.result, samples.result("static", 8.0, 0, order=order))
    os.utime(run.result, (order, order))


def orders(study: FinishedStudy) -> list[int]:
    return [one["order"] for one in study.results]


def test_runs_of_earlier_settings_never_mix_with_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "is_finished", property(lambda run: run.result.exists()))
    finished(tmp_path, 1, epochs=0.1, mechanism="plrvo")
    finished(tmp_path, 2, epochs=0.1)
    finished(tmp_path, 3, options={"max_grad_norm": 0.1})
    finished(tmp_path, 4, options={"max_grad_norm": 0.1}, seed=1)
    finished(tmp_path, 5, mechanism="plrvo")
    finished(tmp_path, 6, options={"max_grad_norm": 1.0})
    finished(tmp_path, 7, options={"max_grad_norm": 1.0}, seed=1)
    finished(tmp_path, 8, experiment="another")
    another, bench = read_studies([tmp_path])
    assert (another.name, orders(another), another.left_out) == ("another", [8], 0)
    assert (bench.name, orders(bench), bench.left_out) == ("bench", [5, 6, 7], 4)
    assert bench.results[0]["final_records"] is None
    finished(tmp_path, 9, inputs={"data": "2"})
    assert orders(read_studies([tmp_path])[1]) == [9], "other records are another study"
    told = page([FinishedStudy("bench", RESULTS, 3)])
    assert "3 finished runs of this experiment with earlier settings are left out" in told


def test_only_finished_runs_are_read(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "result.json").write_text(json.dumps(RESULTS[0]))
    assert read_studies([tmp_path]) == []
    with pytest.raises(ConfigError, match="is not a folder"):
        read_studies([tmp_path / "absent"])
