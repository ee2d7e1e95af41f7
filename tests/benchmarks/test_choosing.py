"""The summary of what choosing gains."""

from __future__ import annotations

import pytest

from benchmarks.choosing import summary


def test_the_summary_says_shares_of_the_gap_and_ranks() -> None:
    points = [
        {"public": public, "twin": held, "held_out": held} for public, held in ((1.0, 2.3), (2.0, 2.4), (3.0, 2.2))
    ]
    one = {"static at 0.005": 2.6, "static at 0.02": 2.4, "best of ten, uncounted": 2.2, "search": 2.3}
    lines = summary([one | {"rehearsal": 2.2, "points": points}] * 2)
    assert "search has 0.75 of the gap of 0.400 between static at 0.005 and the uncounted best" in lines
    assert "rehearsal has 1.00 of the gap of 0.200 between static at 0.02 and the uncounted best" in lines
    assert lines[-2] == "public: rank correlation with held-out perplexities -0.50, -0.50; its choice has 2.300, 2.300"
    assert lines[-1] == "twin: rank correlation with held-out perplexities 1.00, 1.00; its choice has 2.200, 2.200"
    assert float(next(line for line in lines if line.startswith("search   ")).split()[1]) == pytest.approx(2.3)
