"""The page "RLDP as printed": its numbers are those of claimed.yaml, and what it says of them follows from them."""

from __future__ import annotations

import re
import statistics
from typing import Any

import yaml
from pages import DOCS

from tasks.report.benchmarks import CLAIMED

PRINTED: dict[str, Any] = yaml.safe_load(CLAIMED.read_text(encoding="utf-8"))["diabetes"]
PAGE = (DOCS / "findings" / "rldp.md").read_text(encoding="utf-8")
EPSILONS = (0.5, 2, 4, 5, 8)
MEMBERSHIP, CANARIES = PRINTED["further"]
AGENTS = ("RLDP_H", "RLDP_L")
SAID = {claim["said"]: claim for claim in PRINTED["claims"]}


def cells(table: dict[str, Any], column: int) -> dict[tuple[str, str, float], float]:
    """One column of a table by model, method and epsilon."""
    return {
        (row["model"], row["mechanism"], epsilon): values[column]
        for row in table["rows"]
        for epsilon, values in row["scores"].items()
    }


def beside_baselines(table: dict[str, Any], column: int, agent: str) -> list[tuple[float, list[float]]]:
    """The agent's value in each model and budget, and those of the baselines."""
    found = cells(table, column)
    places = sorted({(model, epsilon) for model, _, epsilon in found})
    methods = sorted({method for _, method, _ in found} - {*AGENTS})
    return [(found[model, agent, e], [found[model, one, e] for one in methods]) for model, e in places]


def rows_of(page: str) -> set[tuple[str, ...]]:
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines}


def test_every_printed_number_stands_on_the_page() -> None:
    names = {"gpt2": "GPT2", "llama-1b": "Llama-1B", "llama-3b": "Llama-3B", "mistral-7b": "Mistral-7B"}
    rows = rows_of(PAGE)
    for row in PRINTED["rows"]:
        values = [row["scores"][epsilon] for epsilon in EPSILONS]
        assert (names[row["model"]], *(f"{own:.3f} < {other:.3f}, {share} %" for own, other, share in values)) in rows
    for row in MEMBERSHIP["rows"]:
        values = [" / ".join(f"{value:.3f}" for value in row["scores"][epsilon]) for epsilon in EPSILONS]
        assert (names[row["model"]], row["mechanism"], *values) in rows
    for row in CANARIES["rows"]:
        values = [
            f"{one:.3f} / {two:.3f} / {1e4 * three:.0f} / {four} / {valid}"
            for one, two, three, four, valid in (row["scores"][epsilon] for epsilon in EPSILONS)
        ]
        assert (names[row["model"]], row["mechanism"], *values) in rows
    for claim in PRINTED["claims"]:
        assert tuple(claim[key] for key in ("said", "printed", "where", "tables")) in rows


def test_tables_2_and_3_give_what_is_said_of_them() -> None:
    reductions = {
        row["model"]: [100 * (1 - own / other) for own, other, _ in map(row["scores"].get, EPSILONS)]
        for row in PRINTED["rows"]
    }
    every = [value for values in reductions.values() for value in values]
    shares = [values[2] for row in PRINTED["rows"] for values in row["scores"].values()]
    assert (len(every), len(shares)) == (20, 20)
    mean = SAID["mean reduction of perplexity"]["tables"]
    assert mean.startswith(f"{statistics.fmean(every):.2f} %, median {statistics.median(every):.2f} %")
    assert SAID["range of the reductions"]["tables"] == f"{min(every):.2f} to {max(every):.2f} %"
    for model, said in (("llama-1b", "Llama-1B"), ("llama-3b", "Llama-3B"), ("mistral-7b", "Mistral-7B")):
        assert SAID[said]["tables"].startswith(f"{min(reductions[model]):.2f} to {max(reductions[model]):.2f} %")
    share = f"{statistics.fmean(shares):.1f} %, median {statistics.median(shares):.1f} %"
    assert SAID["mean share of steps"]["tables"].startswith(share)
    assert SAID["range of that share"]["tables"] == f"{min(shares)} to {max(shares)} %"
    assert SAID["fewer steps"]["tables"].startswith(f"{100 - statistics.fmean(shares):.1f} %")


def test_tables_4_to_9_give_what_is_said_of_them() -> None:
    aucs = cells(MEMBERSHIP, 2)
    assert len(aucs) == len(cells(CANARIES, 0)) == 180
    assert (sum(value < 0.5 for value in aucs.values()), len(aucs)) == (176, 180)
    above = [[own - min(others) for own, others in beside_baselines(MEMBERSHIP, 2, agent)] for agent in AGENTS]
    assert [sum(value > 1e-9 for value in values) for values in above] == [13, 14]
    assert [f"{statistics.median(values):+.4f}" for values in above] == ["+0.0035", "+0.0040"]
    first = beside_baselines(CANARIES, 0, "RLDP_H")
    assert (sum(own < min(others) for own, others in first), sum(own == min(others) for own, others in first)) == (
        11,
        0,
    )
    over = [
        sum(own > max(others) for agent in AGENTS for own, others in beside_baselines(CANARIES, n, agent))
        for n in (1, 2, 3)
    ]
    assert over == [3, 4, 5]
    second, third, valid = (cells(CANARIES, column) for column in (1, 2, 4))
    assert (max(second.values()), min(valid.values()), max(valid.values())) == (0.007, 47, 4000)
    copied = [
        round(1e4 * third[key]) == round(1e3 * second[key]) for key in third if key[0] != "mistral-7b" and key[2] > 0.5
    ]
    assert (sum(copied), len(copied)) == (107, 108)


def test_every_command_of_the_page_names_a_profile_that_is_there() -> None:
    named = set(re.findall(r"profiles/[\w-]+\.yaml", PAGE))
    assert named
    assert [one for one in named if not (DOCS.parent / one).exists()] == []
