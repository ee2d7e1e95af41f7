"""Runs of correlated noise that are killed at random moments of a simulated disk, and resumed.

A row is its place in the ledger and is never made again; its noise is fresh, serves one batch, and reaches no file;
after a gap the recursion begins anew. Planted bugs show that the test would see each of these broken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated_disk import Disk, Killed
from tiny_models import adapted, each_record, make_header, make_plan, records

from dptune.core.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises import banded as banded_module
from dptune.mechanisms.noises.banded import BandedGaussian, _Window
from dptune.mechanisms.planning import Schedule, fitted, price
from dptune.mechanisms.registry import build
from dptune.privacy.accounting.strategy import row_deviations
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import Entropy, FixedSeed, OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.training import loop, run_start
from dptune.training import run as running
from dptune.training.checkpoints import progress_of
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.privacy_units import PrivacyUnits, Turn
from dptune.training.run import Run
from dptune.training.spec import OWNER, RunSpec

STEPS, EVERY, BANDS, RATE = 14, 3, 4, 0.2
KILLS = 200
SCHEDULE = Schedule(RATE, STEPS, 1e-5)


@dataclass
class Row:
    """One row that was made: in which process, its z and w, and how many rows its recursion says came before."""

    process: int
    number: int
    z: np.ndarray
    w: np.ndarray
    before: int


@dataclass
class Runs:
    """Runs on a disk that stops their processes, all of whose noise is watched."""

    folder: Path
    patch: pytest.MonkeyPatch
    opened: list[Ledger]
    moments: random.Random = field(default_factory=lambda: random.Random(7))
    kills: int = 0

    def __post_init__(self) -> None:
        self.disk_patch = pytest.MonkeyPatch()
        self.model, self.tokens = adapted(layers=1), records(20)
        self.start = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        follow, draw = _Window.follow, PrivacyUnits.draw

        def watched(window: _Window, normals: torch.Tensor, row: int, *others: Any) -> int:
            z = normals.numpy().copy()
            before = follow(window, normals, row, *others)
            self.rows.append(Row(self.process, row, z, normals.numpy().copy(), before))
            return before

        def drawing(units: PrivacyUnits, rate: float, entropy: Entropy, turn: Turn | None = None) -> Any:
            batch = draw(units, rate, entropy, turn)
            self.drawn += [(self.charged - 1, int(record)) for (record,) in batch]
            return batch

        self.patch.setattr(_Window, "follow", watched)
        self.patch.setattr(PrivacyUnits, "draw", drawing)
        self.patch.setattr(run_start, "rehearse", lambda *_, **__: None)
        self.patch.setattr(run_start, "check_width", lambda *_: None)
        self.patch.setattr(loop, "gradients_of", lambda *_: iter(()))

    def begin(self) -> Disk:
        """A new run on an empty disk."""
        self.folder = self.folder.parent / f"run {self.kills}-{self.moments.random()}"
        self.folder.mkdir()
        self.rows: list[Row] = []
        self.drawn: list[tuple[int, int]] = []
        self.process = 0
        self.disk_patch.undo()
        self.disk_patch = pytest.MonkeyPatch()
        return Disk(self.folder, self.disk_patch, self.moments)

    def mechanism(self) -> Mechanism:
        """What a process of its own builds."""
        entry = {"noise_multiplier": 1.0, "bands": BANDS, "pairs": len(lora_pairs(self.model))}
        return fitted(build("banded", entry), SCHEDULE)

    def run(self) -> None:
        """One process, to its end."""
        self.process += 1
        self.model.load_state_dict(self.start)
        vars(self.model).pop(OWNER, None)  # a process of its own has a model that no run has trained yet
        plan = make_plan(20, sample_rate=RATE, steps=STEPS, checkpoint_every=EVERY)
        units = each_record(self.tokens)
        header = make_header(of=units, mechanism="banded", published_accountant="bandmf")
        loop.train(RunSpec(self.model, self.tokens, units, self.mechanism(), plan, header), self.folder, OsEntropy())

    def killed(self, disk: Disk, operation: int, *, power_cut: bool) -> bool:
        """Whether a process was killed at its ``operation``-th operation, and not finished before it."""
        disk.kill_at(operation)
        try:
            self.run()
        except BudgetError:  # killed so often that no step was ever saved
            return False
        except Killed:
            self.kills += 1
        else:
            return False
        finally:
            for ledger in self.opened:
                ledger.close()
            self.opened.clear()
        disk.restart(power_cut=power_cut)
        self.check()
        return True

    @property
    def charged(self) -> int:
        """Whole lines: one without its newline was never acknowledged."""
        path = self.folder / "ledger.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return sum(b'"kind":"release"' in line and line.endswith(b"\n") for line in lines)

    def check(self) -> None:
        """What must hold at every moment, whatever died when."""
        numbers = [row.number for row in self.rows]
        assert all(one < other for one, other in pairwise(numbers)), "a row was made twice"
        assert not numbers or numbers[-1] < self.charged, "a row is on no ledger"
        assert len({row.z.tobytes() for row in self.rows}) == len(self.rows), "noise served two batches"
        for last, row in zip([None, *self.rows], self.rows, strict=False):
            follows = last is not None and (last.process, last.number) == (row.process, row.number - 1)
            before = last.before + 1 if last is not None and follows else 0
            assert row.before == before, "a recursion went on over a gap, or broke without one"
            if not before:
                assert np.allclose(row.w, row.z / self.mechanism().coefficients[0]), "the past is in a new recursion"
        self.check_files()

    def check_files(self) -> None:
        """No file holds a coordinate of any z or w, as float64 or float32, nor a key of a draw."""
        content = b"".join(path.read_bytes() for path in self.folder.iterdir())
        for row in self.rows:
            for noise in (row.z, row.w):
                for kept in (noise, noise.astype(np.float32)):
                    found = any(kept[start : start + 2].tobytes() in content for start in range(0, len(kept), 16))
                    assert not found, "noise is in a file"

    def finish(self, disk: Disk) -> None:
        """The last process; the whole run then costs what an unbroken one does."""
        disk.restart(power_cut=False)
        try:
            self.run()
        except BudgetError:
            assert self.charged == STEPS
        self.disk_patch.undo()
        self.check()
        contents = read_ledger(self.folder / "ledger.jsonl")
        assert contents.releases == STEPS
        assert contents.epsilons == price(self.mechanism(), SCHEDULE)
        dealt = {row: Turn.of(contents.header.run_id, BANDS, row) for row in range(STEPS)}
        for row, record in self.drawn:
            turn = dealt[row]
            assert turn is not None
            assert turn.holds(np.array([record])), "a unit was drawn in another group's row"
        began = {row.number for row in self.rows if not row.before} - {0}
        restarts = progress_of(self.folder / "checkpoint.safetensors").restarts
        assert began <= set(restarts), "a restart was not counted"
        assert len(restarts) < self.process


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[Ledger]) -> Iterator[Runs]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Runs(tmp_path / "run", monkeypatch, opened)
    yield made
    made.disk_patch.undo()
    torch.set_num_threads(threads)


def until(runs: Runs, kills: int) -> None:
    while runs.kills < kills:
        disk = runs.begin()
        while runs.killed(disk, runs.moments.randint(1, 40), power_cut=runs.moments.random() < 0.5):
            pass
        runs.finish(disk)


@pytest.mark.long
def test_two_hundred_kills_at_random(runs: Runs) -> None:
    until(runs, KILLS)


def test_a_run_goes_on_with_the_noise_that_it_was_charged_with(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run takes noise and strategy from its ledger, for calibration elsewhere ends in other last digits."""
    disk, own = runs.begin(), runs.mechanism()
    while runs.charged < 3:
        runs.killed(disk, 25, power_cut=False)
    first, *others = own.coefficients
    nudged = replace(own, noise=own.noise.correlated.as_charged(1 + 1e-13, (first, *others[:-1], others[-1] + 1e-6)))
    other = replace(own, noise=own.noise.correlated.as_charged(1 + 1e-6, own.coefficients))
    with monkeypatch.context() as patch:
        patch.setattr(runs, "mechanism", lambda: other)
        disk.restart(power_cut=False)
        with pytest.raises(LedgerError, match="differs in noise_multiplier from the row before"):
            runs.run()
        for ledger in runs.opened:
            ledger.close()
        patch.setattr(runs, "mechanism", lambda: nudged)
        runs.run()
    releases = read_ledger(runs.folder / "ledger.jsonl").composition
    assert {(one.noise_multiplier, one.coefficients, one.sensitivity) for one in releases} == {(1, own.coefficients, 1)}
    runs.check()


@pytest.mark.parametrize("keys", [None, np.arange(19), np.arange(21)])
def test_units_without_a_key_each_are_refused_before_anything_is_charged(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, keys: Any
) -> None:
    disk = runs.begin()
    monkeypatch.setattr(f"{__name__}.each_record", lambda tokens: replace(PrivacyUnits.records(20), keys=keys))
    disk.restart(power_cut=False)
    with pytest.raises(ConfigError, match=r"units: do not have a key each.* Fix: make them with PrivacyUnits\.of"):
        runs.run()
    assert not runs.charged
    assert not (runs.folder / "ledger.jsonl").exists()


def test_a_run_that_nobody_kills_is_one_recursion_and_forgets_its_noise(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, mechanism = runs.begin(), runs.mechanism()
    with monkeypatch.context() as patch:
        patch.setattr(runs, "mechanism", lambda: mechanism)
        runs.finish(disk)
    assert mechanism.noise._window.ring is None
    assert [row.before for row in runs.rows] == list(range(STEPS))
    assert row_deviations(runs.mechanism().coefficients, STEPS)[-1] > 1


def shared_window(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    """A window that outlives its process, as one read back from a file would."""
    window = _Window()

    def keep(noise: BandedGaussian, facts: Any) -> None:
        object.__setattr__(noise, "_window", window)

    patch.setattr(BandedGaussian, "start", keep)


def seeded(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    """Noise from a key that every process has again."""
    normal = banded_module.standard_normal
    keys: dict[int, FixedSeed] = {}

    def again(entropy: Entropy, count: int, device: Any) -> Any:
        return normal(keys.setdefault(runs.process, FixedSeed(1)), count, device)

    patch.setattr(banded_module, "standard_normal", again)


def rows_by_step(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    """Rows numbered by the steps in the weights, so that lost rows are made again."""
    begin = Run.begin

    def renumbered(run: Run) -> Any:
        step = begin(run)
        if step is not None:
            object.__setattr__(step, "row", run.step)
        return step

    patch.setattr(Run, "begin", renumbered)


def noise_in_checkpoints(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    """The window is saved with the weights."""
    save = running.save_checkpoint

    def saving(path: Path, model: Any, optimizer: Any, progress: Any) -> None:
        ring = [row.w for row in runs.rows[-1:]]
        progress.controller.update({"window": torch.from_numpy(ring[0])} if ring else {})
        save(path, model, optimizer, progress)

    patch.setattr(running, "save_checkpoint", saving)


@pytest.mark.parametrize(
    ("bug", "seen"),
    [
        (shared_window, "went on over a gap"),
        (seeded, "noise served two batches"),
        (rows_by_step, "a row was made twice"),
        (noise_in_checkpoints, "noise is in a file"),
    ],
)
def test_a_planted_bug_is_seen(runs: Runs, monkeypatch: pytest.MonkeyPatch, bug: Any, seen: str) -> None:
    bug(runs, monkeypatch)
    with pytest.raises(AssertionError, match=seen):
        until(runs, KILLS)


def test_groups_that_move_with_the_process_are_seen(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Turn.of
    with monkeypatch.context() as patch:
        patch.setattr(
            running, "Turn", type("T", (), {"of": staticmethod(lambda run, *rest: of(f"{run}{runs.process}", *rest))})
        )
        with pytest.raises(AssertionError, match="in another group's row"):
            until(runs, KILLS)
