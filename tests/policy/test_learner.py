"""The loop and release that all three packages share: charge before draw."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dptune.policy.method import NAME, Dppg
from dptune.policy.user_updates import updates_left
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_header import RunHeader

ROOMS = Path(__file__).parents[2] / "dptune" / "policy"
METHOD = Dppg(noise_multiplier=1.0, critic="none")
HEADER = RunHeader(NAME, "dppg", "certified", 5.0, 1e-5, "user", 8)


class Counting(OsEntropy):
    """Entropy that counts how often it is asked."""

    asked = 0

    def words(self, count: int) -> NDArray[np.uint64]:
        self.asked += 1
        return super().words(count)


def test_what_the_budget_refuses_draws_no_noise(tmp_path: Path) -> None:
    """A single update is released twice: the second release about the same users exceeds the run's budget."""
    entropy = Counting()
    with Ledger.open(tmp_path / "ledger.jsonl", HEADER, METHOD.planned(2)) as ledger:
        _, release = next(updates_left(ledger, METHOD, 2, 4, entropy))
        release([torch.ones(4, 3)], [1.0])
        before = entropy.asked
        with pytest.raises(BudgetError):
            release([torch.ones(4, 3)], [1.0])
        assert 0 < before == entropy.asked
        assert ledger.composition == Counter([METHOD.release(0)])


def test_a_restart_goes_on_after_the_last_charge(tmp_path: Path) -> None:
    """The update that was charged last is skipped, whether or not it was completed."""
    path, header = tmp_path / "ledger.jsonl", replace(HEADER, epsilon=None)
    with Ledger.open(path, header, METHOD.planned(4)) as ledger:
        ledger.charge(METHOD.release(0))
    with Ledger.open(path, header, METHOD.planned(4)) as ledger:
        numbers = []
        for number, release in updates_left(ledger, METHOD, 4, 2, OsEntropy()):
            release([torch.zeros(2, 3)], [1.0])
            numbers.append(number)
        assert numbers == [1, 2, 3]
        assert ledger.composition == METHOD.planned(4)


@pytest.mark.parametrize("room", ["environments", "language", "tenants"])
def test_no_room_charges_or_draws_by_itself(room: str) -> None:
    """UCB-VI is the exception, as no policy gradient: its counters are one release, which its task charges first."""
    own: dict[str, Any] = {}
    for file in sorted((ROOMS / room).glob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
        names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        if found := names & {"charge", "noisy_means", "release_means", "standard_normal", "Gaussian"}:
            own[file.stem] = found
    assert own == ({"baselines": {"standard_normal"}} if room == "environments" else {})
