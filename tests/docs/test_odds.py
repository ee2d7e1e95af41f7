"""The page "Choose epsilon and delta": its table and its slider against the library."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dptune.privacy.accountants import gdp_delta

_DOCS = Path(__file__).parents[2] / "docs"
_SCRIPT = _DOCS / "assets" / "odds.js"
#: Sets the three inputs of the page in turn, as a browser would, and prints what it says.
_PAGE = """
const fs = require("fs"), held = {};
for (const name of ["epsilon", "delta", "prior", "says"]) held["odds-" + name] = {addEventListener() {}};
globalThis.document = {getElementById: (name) => held[name]};
for (const [epsilon, delta, prior] of %s) {
  Object.assign(held["odds-epsilon"], {value: String(Math.log2(epsilon))});
  held["odds-delta"].value = delta; held["odds-prior"].value = String(prior);
  eval(fs.readFileSync(%s, "utf8")); console.log(held["odds-says"].textContent);
}
"""


def _mu(epsilon: float, delta: float) -> float:
    """The mu of the Gaussian mechanism that is (epsilon, delta)-DP."""
    return float(brentq(lambda mu: gdp_delta(mu, epsilon) - delta, 1e-3, 20))


def rounded_up(bound: float, shown: str) -> float:
    """The bound with as many decimals as ``shown`` has; no bound if it were rounded down."""
    unit = 10.0 ** len(shown.partition(".")[2])
    return math.ceil(bound * unit) / unit


def test_the_bounds_of_the_guarantee_are_rounded_up() -> None:
    page = (_DOCS / "concepts" / "guarantee.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.,]+) \| ([\d.]+) % right \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for epsilon, ratio, right in ((float(row[0]), row[1].replace(",", ""), row[2]) for row in rows):
        assert float(ratio) == rounded_up(math.exp(epsilon), ratio)
        assert float(right) == rounded_up(100 / (1 + math.exp(-epsilon)), right)


def test_the_table_of_odds_is_right() -> None:
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) \|$",
        (_DOCS / "howto" / "choose_epsilon.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 7
    for most, (epsilon, _, guessed, accused) in ((row[1], map(float, row)) for row in rows):
        mu = _mu(epsilon, 1e-5)
        assert float(most) == rounded_up(100 / (1 + math.exp(-epsilon)), most), "a bound"
        assert guessed == pytest.approx(100 * norm.cdf(mu / 2), abs=0.051)
        assert accused == pytest.approx(100 * norm.cdf(mu - norm.isf(0.01)), abs=0.051)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_slider_says_the_same_as_the_library() -> None:
    asked = list(product((0.25, 3, 16), ("1e-5", "1e-9"), (1, 50, 90)))
    page = _PAGE % (json.dumps(asked), json.dumps(str(_SCRIPT)))
    done = subprocess.run(["node", "-e", page], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == len(asked)
    for (epsilon, delta, percent), line in zip(asked, lines, strict=True):
        mu, prior = _mu(epsilon, float(delta)), percent / 100
        cut = mu / 2 + math.log((1 - prior) / prior) / mu
        sure, right = re.findall(r"([\d.]+) % (?:sure|right)", line)
        odds = prior / (1 - prior) * math.exp(epsilon)
        assert float(sure) == rounded_up(100 * odds / (1 + odds), sure)
        best = prior * norm.cdf(mu - cut) + (1 - prior) * norm.cdf(cut)
        assert float(right) == pytest.approx(100 * best, abs=0.051)
