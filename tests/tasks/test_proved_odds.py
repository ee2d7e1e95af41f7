"""The share of right guesses that a report proves is never below what the best attack on the releases guesses."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm
from test_report import result

from dptune.core.digits import percent_at_most
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from tasks.paths import RUNS
from tasks.report import experiment as module
from tasks.report.claims import meaning, privacy_curve

HEADER = RunHeader("static", "gdp_clt", "certified", None, 1e-5, "record", 800)
GAUSSIAN = (0.4, 1.0, 3.0)


def ledger(path: Path, releases: Composition, header: RunHeader = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with Ledger.create(path, header, releases) as book:
        for release in releases.elements():
            book.charge(release)
    return path


def said(curve: list[tuple[float, float]]) -> float:
    """The share of right guesses that the page states of a run with this curve, between 0 and 1."""
    epsilon = next(epsilon for epsilon, delta in curve if delta == HEADER.delta)
    one = result(certified=epsilon)
    return float(meaning([one], {one["label"]: curve}).partition("at most ")[2].partition(" %")[0]) / 100


def guessed(distance: float) -> float:
    """The share of the best attack, from the total variation distance of what it sees with the unit and without."""
    return (1 + distance) / 2


@pytest.mark.parametrize("noise", GAUSSIAN)
@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_of_one_sampled_gaussian_release(noise: float, rate: float, tmp_path: Path) -> None:
    curve = privacy_curve(ledger(tmp_path / "ledger.jsonl", Counter({Release(rate, noise): 1})))
    assert said(curve) >= guessed(rate * (2 * norm.cdf(1 / (2 * noise)) - 1))


@pytest.mark.parametrize("steps", [4, 30])
def test_of_several_gaussian_releases(steps: int, tmp_path: Path) -> None:
    curve = privacy_curve(ledger(tmp_path / "ledger.jsonl", Counter({Release(1.0, 8.0): steps})))
    assert said(curve) >= guessed(2 * norm.cdf(math.sqrt(steps) / 16) - 1)


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.02, 0.6, 150), (0.2, 2.0, 60)])
def test_of_many_sampled_gaussian_releases(rate: float, noise: float, steps: int, tmp_path: Path) -> None:
    """The attack sums the steps' losses, each rounded down to a grid, as a program of its own computes it."""
    grid, size = 2e-4, 1 << 19
    edges = np.linspace(-12 * noise, 12 * noise + 1, 8001)
    out = np.diff(norm.cdf(edges / noise))
    into = (1 - rate) * out + rate * np.diff(norm.cdf((edges - 1) / noise))
    seen = (out > 0) & (into > 0)
    losses = np.floor(np.log(into[seen] / out[seen]) / grid).astype(int)
    masses = np.bincount(losses % size, weights=into[seen], minlength=size)
    sums = np.fft.irfft(np.fft.rfft(masses) ** steps, size)[: size // 2]
    distance = float(sums @ -np.expm1(-grid * np.arange(size // 2)))
    curve = privacy_curve(ledger(tmp_path / "ledger.jsonl", Counter({Release(rate, noise): steps})))
    assert guessed(distance) <= said(curve) <= guessed(distance) + 0.02, "a bound that says something"


@pytest.mark.parametrize(("epsilon", "tokens"), [(0.05, 40), (0.7, 6)])
def test_of_pure_tokens(epsilon: float, tokens: int, tmp_path: Path) -> None:
    """Each token is the answer of randomised response: right with e**epsilon against 1."""
    token = Release(1.0, 1 / epsilon, noise="pure_token", statistics=("token",))
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    number = np.arange(tokens + 1)
    distance = 0.5 * np.abs(binom.pmf(number, tokens, right) - binom.pmf(number, tokens, 1 - right)).sum()
    curve = privacy_curve(ledger(tmp_path / "ledger.jsonl", Counter({token: tokens})))
    assert said(curve) >= guessed(float(distance)) - 1e-12


def test_of_several_runs_at_a_budget_the_weakest_proof_is_stated() -> None:
    runs = [result(certified=epsilon, label=label) for epsilon, label in ((1.989, "a"), (1.9991, "b"))]
    curves = {"a": [(0.0, 0.2)], "b": [(0.0, 0.1)]}
    assert "right in at most 60 % (ε = 2) of cases" in meaning(runs, curves), "a's share, and b's epsilon"


def test_a_share_is_never_rounded_down() -> None:
    shown = {share: percent_at_most(share) for share in (0.88021, 0.5000001, 0.99961, 0.9999999, 0.55)}
    assert shown == {0.88021: "88.1", 0.5000001: "50.1", 0.99961: "99.97", 0.9999999: "99.99999", 0.55: "55"}


def test_each_cell_of_a_study_has_the_odds_of_its_own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = {f"cell{noise}": Release(1.0, noise) for noise in (8.0, 1.0, 2.0)}
    for name, release in cells.items():
        ledger(RunFolder(RUNS / name).ledger, Counter({release: 1}))
    results = [result(label=f"label of {name}") for name in cells]
    seen: list[Any] = []

    def keep(*arguments: Any) -> None:
        seen.extend(arguments)
        raise InterruptedError

    monkeypatch.setattr(module, "read_study", lambda listed: (results, []))
    monkeypatch.setattr(module, "listed_cells", lambda listed: list(cells))
    monkeypatch.setattr(module, "about_runs", lambda *given: None)
    monkeypatch.setattr(module, "write_report", keep)
    with pytest.raises(InterruptedError):
        module.report("tiny")
    curves = seen[6]
    assert curves == {f"label of {name}": privacy_curve(RunFolder(RUNS / name).ledger) for name in cells}
