"""What becomes of a candidate does not follow from how many there are, nor from which one it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from staged_search import Staged

from dptune.core.errors import ConfigError, DivergedError, FullDeviceError
from dptune.privacy.accounting.loss_profile import gaussian_profile
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.selection import selection_epsilon
from dptune.privacy.selection_law import SelectionLaw

pytestmark = pytest.mark.long

#: Numbers of candidates, and which of them fails: alone, first and last of a pass, and left over by whole passes of 4.
PLACES = ((1, 0), (2, 0), (2, 1), (4, 3), (5, 0), (5, 4))
#: The same for passes of 2.
FEW = ((1, 0), (2, 0), (2, 1), (3, 2))


class Stage:
    """Makes staged searches, each in a folder of its own and with patches that end with it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.made = folder, patch, 0

    @contextmanager
    def __call__(self, count: int, victim: int, place: str, errors: list[BaseException]) -> Iterator[Staged]:
        self.made += 1
        (folder := self.folder / str(self.made)).mkdir()
        with self.patch.context() as patch:
            yield Staged(folder, patch, count, victim, place, list(errors))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_a_candidate_that_diverged_once_has_failed_however_many_there_are_and_whenever_it_is_killed(
    stage: Stage,
) -> None:
    """The second time it would succeed, by fresh noise.

    It is known to have failed as soon as its outcome is on disk. A kill before that is like one before its step, at
    every number of candidates: the moment between is the same two lines for all.
    """
    for count, victim in PLACES:
        with stage(count, victim, "complete", [DivergedError("diverged")]) as whole:
            whole.start()
            assert whole.scores.pop(whole.name) is None
            assert [*whole.tries.values()] == [1] * count, "nobody ran again, neither it nor its companions"
            assert whole.winner != whole.name
            assert (whole.winner == "") == (count == 1)
        known = whole.events.index("after outcome of victim") + 1
        for kill in sorted({known - 1, known, *range(1, len(whole.events), 23)}):
            with stage(count, victim, "complete", [DivergedError("diverged")]) as killed:
                killed.kill_at = kill
                with pytest.raises(KeyboardInterrupt):
                    killed.start()
                killed.start()
                scores = killed.scores
                assert (scores.pop(killed.name) is None) == (kill != known - 1), (count, victim, kill)
                assert None not in scores.values()
                assert len(scores) == count - 1


FULL_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
FULL, DISK = torch.OutOfMemoryError("CUDA out of memory."), OSError(28, "No space left on device")
SETTINGS = ConfigError("lora", "changed", fix="change it back")
CRASH = RuntimeError("a crash")


#: Where a candidate fails, by which errors one after the other, what ends the search, whether the candidate has failed
#: in the end, and how often it was opened.
CASES: dict[str, tuple[str, list[BaseException], type[Exception] | None, bool, int]] = {
    # Its own: it counts at once.
    "crash in a step": ("complete", [CRASH], None, True, 1),
    "budget used up": ("begin", [BudgetError("spent")], None, True, 1),
    "diverged in its first checkpoint": ("save", [DivergedError("diverged")], None, True, 1),
    "plan beyond its budget": ("open", [BudgetError("spent")], None, True, 1),
    "diverged at its end": ("end", [DivergedError("diverged")], None, True, 1),
    "crash at its end": ("end", [CRASH], None, True, 1),
    "crash in writing weights": ("weights", [CRASH], None, True, 1),
    "crash in scoring": ("score", [CRASH], None, True, 1),
    # The pass's, or before it is open: once more, and alone.
    "pass once": ("pass", [CRASH], None, False, 2),
    "pass twice": ("pass", [CRASH, CRASH], None, True, 2),
    "set-up once": ("open", [CRASH], None, False, 2),
    "set-up twice": ("open", [CRASH, CRASH], None, True, 2),
    # The device's: the same, and the second time nobody failed.
    "full pass": ("pass", [FULL], None, False, 2),
    "full in a step": ("complete", [FULL], None, False, 2),
    "full at set-up": ("open", [FULL], None, False, 2),
    "full in scoring": ("score", [FULL], None, False, 2),
    "lost device": ("complete", [torch.AcceleratorError("CUDA error")], None, False, 2),
    "full machine in a step": ("complete", [FULL_CPU], None, False, 2),
    "full machine in scoring": ("score", [MemoryError()], None, False, 2),
    "full machine twice": ("weights", [MemoryError(), FULL_CPU], FullDeviceError, False, 3),
    "full pass twice": ("pass", [FULL, FULL], FullDeviceError, False, 3),
    "full in scoring twice": ("score", [FULL, FULL], FullDeviceError, False, 3),
    # The machine's or the settings': the search goes on later.
    "full disk in a step": ("complete", [DISK], OSError, False, 2),
    "full disk for weights": ("weights", [DISK], OSError, False, 2),
    "settings": ("pass", [SETTINGS, SETTINGS], ConfigError, False, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failure_means_the_same_for_each_candidate_of_each_number(case: str, stage: Stage) -> None:
    place, errors, ends_by, fails, tries = CASES[case]
    for count, victim in FEW:
        with stage(count, victim, place, errors) as search:
            search.together = 2
            if ends_by is not None:
                with pytest.raises(ends_by):
                    search.start()
                assert search.name not in search.scores, "it has no outcome yet"
            search.start()
            scores = search.scores
            assert (scores.pop(search.name) is None) == fails, (count, victim)
            assert search.tries[search.name] == tries, (count, victim)
            assert None not in scores.values(), "companions fail by nothing of another's"
            assert len(scores) == count - 1


def test_a_pass_that_does_not_fit_costs_those_in_company_no_step(stage: Stage) -> None:
    """Else candidates would make one step fewer for having companions."""
    made = []
    for count in (1, 2, 5):
        with stage(count, 0, "", []) as search:
            search.never_shared = True
            search.start()
            assert None not in search.scores.values()
            made.append(search.made / count)
    assert len({*made}) == 1
    assert made[0] > 1


@pytest.mark.parametrize("errors", [[CRASH], [FULL, CRASH], [CRASH, FULL]])
def test_a_pass_that_several_cannot_share_is_no_ones_attempt(errors: list[BaseException], stage: Stage) -> None:
    """Afterwards those that were in company have as many attempts as those alone, and a full GPU is no crash."""
    for count, victim in ((1, 0), (2, 0), (2, 1)):
        with stage(count, victim, "pass", errors) as search:
            search.never_shared = True
            search.start()
            assert None not in search.scores.values()
            assert len(search.scores) == count


def test_no_attack_on_what_candidates_become_exceeds_the_certificate(stage: Stage) -> None:
    """One that diverges for outputs of an attacker's choice, in an order of the attacker's choice.

    Exact, on a grid, for one number of mu 1 as each candidate's output and a mean of 2 in passes of 4: certified 5.012
    at delta 1e-5. Where those in company were tried again and those alone were not, this attack shows 5.486.
    """
    tried_again = {}
    for count, victim in ((1, 0), (2, 1), (5, 0), (5, 4)):
        with stage(count, victim, "complete", [DivergedError("diverged")]) as search:
            search.start()
            tried_again[count, victim] = search.scores[search.name] is not None
    alone, together = ({tried_again[one] for one in ones} for ones in ([(1, 0), (5, 4)], [(2, 1), (5, 0)]))
    (alone,), (together,) = alone, together
    law = SelectionLaw.of(2.0)
    certified = selection_epsilon(gaussian_profile(1.0), law, 1e-5)
    assert certified == pytest.approx(5.012, abs=0.002)
    assert attacked(law, alone=alone, together=together) <= certified
    assert attacked(law, alone=False, together=True) == pytest.approx(5.486, abs=0.002), "it would be seen"


def attacked(law: SelectionLaw, *, alone: bool, together: bool) -> float:
    """The epsilon that the attack shows, by whether candidates that diverged are tried again, once."""
    grid = np.linspace(-9, 10, 3801)
    diverges, order = (grid > -0.2) & (grid < 5), slice(None, None, -1)  # the largest number that is left is worst

    def winner(mean: float) -> np.ndarray:
        """The law of the winner's number, worst first, and of there being none."""
        edges = norm.cdf(np.append(-np.inf, np.append((grid[1:] + grid[:-1]) / 2, np.inf)) - mean)
        mass = np.diff(edges)
        failed, below = mass[diverges].sum(), np.append(0.0, np.cumsum(np.where(diverges, 0.0, mass)[order]))
        once, twice = failed + below, failed**2 + (1 + failed) * below
        found = np.zeros(len(below))
        for count, chance in enumerate(law.probabilities, 1):
            lone = int(count % 4 == 1)
            found += chance * (twice if alone else once) ** lone * (twice if together else once) ** (count - lone)
        return np.append(np.diff(found), found[0])

    with_unit, without = winner(1.0), winner(0.0)

    def excess(epsilon: float) -> float:
        return float(np.maximum(with_unit - math.exp(epsilon) * without, 0.0).sum()) - 1e-5

    return float(brentq(excess, 0.0, 40.0))
