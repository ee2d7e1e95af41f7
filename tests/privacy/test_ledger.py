"""The ledger: on disk before it counts, never torn, never edited, never past the budget."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.privacy import ledger_file
from dptune.privacy.accountants import pld_epsilon
from dptune.privacy.accounting.renyi_filter import RenyiFilter, renyi_cost
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import FIXED_SEED_LEAK
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, chain_after, discard_unborn, read_ledger
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import ACCOUNTINGS, RunHeader

DELTA = 1e-5
RELEASE, OTHER = Release(1.0, 4.0), Release(1.0, 2.0)
Lines = list[bytes]


def header(**changes: Any) -> RunHeader:
    values = {
        "mechanism": "static",
        "published_accountant": "gdp_clt",
        "accounting": "certified",
        "epsilon": None,
        "delta": DELTA,
        "unit": "record",
        "units": 10,
    }
    return RunHeader(**(values | changes))


def price(composition: Composition) -> float:
    return pld_epsilon(composition, DELTA)


def written(path: Path, releases: int = 4, finish: bool = True) -> Path:
    ledger = Ledger.create(path, header(), Counter())
    for _ in range(releases):
        ledger.charge(RELEASE)
    if finish:
        ledger.finish()
    ledger.close()
    return path


def charge_resumed(path: Path, planned: Composition, times: int) -> None:
    with Ledger.resume(path, planned) as ledger:
        for _ in range(times):
            ledger.charge(next(iter(planned)))


@cache
def whole() -> bytes:
    """A finished ledger: line 1 is the run, lines 2 to 5 releases, line 6 the end."""
    with tempfile.TemporaryDirectory() as directory:
        return written(Path(directory) / "ledger.jsonl").read_bytes()


def chained(*records: dict[str, Any]) -> bytes:
    """The format, written down a second time: sha256 over the chain so far and the line without its chain."""
    chain, lines = "0" * 64, []
    for record in records:
        body = json.dumps(record, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256((chain + body).encode()).hexdigest()
        lines.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    return "".join(lines).encode()


def run_line(**changes: Any) -> dict[str, Any]:
    return {"kind": "run", **header().to_dict(), **changes}


def release_line(step: float, **changes: Any) -> dict[str, Any]:
    return {"kind": "release", "step": step, **RELEASE.to_dict(), **changes}


# --- charging ---------------------------------------------------------------------------------------------


def test_a_charge_is_written_and_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, header(), Counter())
    synced: list[bytes] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    ledger.charge(RELEASE)
    assert synced
    assert synced[-1] == path.read_bytes()
    assert synced[-1].count(b'"kind":"release"') == 1


def test_a_new_ledger_syncs_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut can take the whole file, charges included, after noisy values were made."""
    kinds: list[bool] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        kinds.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    Ledger.create(tmp_path / "run" / "ledger.jsonl", header(), Counter()).close()
    assert True in kinds


def test_pf6_charges_only_add_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, header(), Counter())
    seen = [price(ledger.composition)]
    for release in (OTHER, RELEASE, Release(1.0, 8.0)):
        ledger.charge(release)
        seen.append(price(ledger.composition))
    assert seen == sorted(seen)
    assert ledger.composition == read_ledger(path).composition


@pytest.mark.parametrize("accounting", ["certified", "published"])
def test_past_the_budget_is_refused_and_nothing_is_written(tmp_path: Path, accounting: str) -> None:
    head = header(accounting=accounting, epsilon=5.0)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", head, Counter())
    while head.within_budget(ledger.composition + Counter({OTHER: 1})):
        ledger.charge(OTHER)
    before = (ledger.path.read_bytes(), ledger.releases, ledger.chain, Counter(ledger.composition))
    with pytest.raises(BudgetError, match="5"):
        ledger.charge(OTHER)
    assert (ledger.path.read_bytes(), ledger.releases, ledger.chain, ledger.composition) == before
    spent = getattr(head.price(ledger.composition), accounting)
    assert ledger.releases > 0
    assert spent <= 5.0 < getattr(head.price(ledger.composition + Counter({OTHER: 1})), accounting)


def test_a_planned_run_may_use_its_whole_plan_and_no_more(tmp_path: Path) -> None:
    budget = price(Counter({RELEASE: 3}))
    ledger = Ledger.create(tmp_path / "ledger.jsonl", header(epsilon=budget), Counter({RELEASE: 3}))
    for _ in range(3):
        ledger.charge(RELEASE)
    with pytest.raises(BudgetError):
        ledger.charge(RELEASE)


def test_an_unplanned_release_is_priced_with_everything_before_it(tmp_path: Path) -> None:
    budget = price(Counter({RELEASE: 3}))
    ledger = Ledger.create(tmp_path / "ledger.jsonl", header(epsilon=budget), Counter({RELEASE: 3}))
    ledger.charge(RELEASE)
    ledger.charge(Release(1.0, 5.0))
    ledger.charge(RELEASE)
    with pytest.raises(BudgetError):
        ledger.charge(RELEASE)


def test_an_overspent_plan_creates_no_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(BudgetError):
        Ledger.create(path, header(epsilon=1.0), Counter({OTHER: 100}))
    assert not path.exists()


def test_a_leaky_plan_is_refused_at_any_budget(tmp_path: Path) -> None:
    leaky = Release(1.0, 100.0, raw_inputs=("loss",))
    with pytest.raises(BudgetError):
        Ledger.create(tmp_path / "ledger.jsonl", header(epsilon=1e6), Counter({leaky: 1}))


def test_a_fixed_seed_is_refused_by_certified_accounting() -> None:
    with pytest.raises(ConfigError, match="accounting"):
        header(epsilon=1.0, leaks=(FIXED_SEED_LEAK,))


def test_a_fixed_seed_voids_the_certified_epsilon(tmp_path: Path) -> None:
    head = header(accounting="published", epsilon=50.0, leaks=(FIXED_SEED_LEAK,))
    with Ledger.create(tmp_path / "ledger.jsonl", head, Counter({RELEASE: 1})) as ledger:
        ledger.charge(RELEASE)
    found = read_ledger(tmp_path / "ledger.jsonl").epsilons
    assert found.certified == float("inf")
    assert FIXED_SEED_LEAK in found.leaks


def test_after_the_end_nothing_is_charged_or_resumed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, header(), Counter())
    ledger.finish()
    with pytest.raises(LedgerError):
        ledger.charge(RELEASE)
    with pytest.raises(LedgerError, match="finished"):
        Ledger.resume(path, Counter())


def test_an_existing_ledger_is_never_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="exists"):
        Ledger.create(path, header(), Counter())
    assert path.read_bytes() == before


def test_the_file_is_its_owners(tmp_path: Path) -> None:
    assert stat.S_IMODE(written(tmp_path / "ledger.jsonl").stat().st_mode) == 0o600


# --- noise that moves -------------------------------------------------------------------------------------

FILTER = RenyiFilter(order=4.0, budget=0.02)
INHERITED = ((Release(0.05, 0.9), 2),)
moving = st.builds(
    Release,
    st.just(0.05),
    st.sampled_from([0.6, 0.8, 1.0, 1.5, 4.0]),
    adaptive=st.sampled_from([True, True, True, False]),
    raw_inputs=st.sampled_from([(), (), (), (), ("loss",)]),
    part=st.sampled_from([None, None, None, None, 0, 1]),
)


@settings(max_examples=25)
@given(
    wanted=st.lists(moving, min_size=1, max_size=10),
    accounting=st.sampled_from(["certified", "noise_only", "published"]),
    inherited=st.sampled_from([(), INHERITED]),
    share=st.sampled_from([0.9, 1.0, 1.1, 30.0]),
)
def test_a_ledger_admits_what_pricing_the_whole_would(
    wanted: list[Release], accounting: str, inherited: Any, share: float
) -> None:
    """The running sum decides as all releases summed and priced again would, leaks and parts and all."""
    epsilon = share * FILTER.limit(DELTA)
    head = header(accounting=accounting, epsilon=epsilon, renyi_filter=FILTER, inherited=inherited)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        plan: Composition = Counter()
        assume(head.within_budget(plan))
        with Ledger.create(path, head, plan) as ledger:
            for release in wanted:
                expected = head.within_budget(ledger.composition + Counter({release: 1}))
                assert ledger.admits(release) == expected
                if expected:
                    ledger.charge(release)
                assert ledger.spent == FILTER.spent(ledger.composition)
        if ledger.releases:
            with Ledger.resume(path, plan) as again:
                assert again.spent == FILTER.spent(again.composition)


def test_the_gate_decides_as_pricing_the_whole_over_long_streams(tmp_path: Path) -> None:
    """Streams that fill their budget, and in which leaks, parts and what was inherited decide; also after a resume."""
    drawn = random.Random(5)
    keeper = RenyiFilter.plan(4.0, DELTA, 0.1, 30)
    decided: Counter[bool] = Counter()
    for trial in range(24):
        parts = (None, None, 0, 1)
        inherited = tuple(
            (Release(0.1, drawn.choice([2.0, 5.0]), part=drawn.choice(parts)), 2) for _ in range(trial % 3)
        )
        epsilon, accounting = drawn.choice([3.9, 4.0, 4.001, 8.0]), ACCOUNTINGS[trial % 3]
        head = header(accounting=accounting, epsilon=epsilon, renyi_filter=keeper, inherited=inherited)
        path = tmp_path / f"{trial}.jsonl"
        if not head.within_budget(Counter()):
            continue
        ledger = Ledger.create(path, head, Counter())
        for step in range(40):
            release = Release(
                0.1,
                drawn.choice([0.9, 1.2, 1.5, 3.0]),
                adaptive=drawn.random() < 0.8,
                raw_inputs=("norms",) if drawn.random() < 0.02 else (),
                part=drawn.choice([0, 1]) if drawn.random() < 0.05 else None,
            )
            expected = head.within_budget(ledger.composition + Counter({release: 1}))
            assert ledger.admits(release) == expected, (trial, step)
            decided[expected] += 1
            if expected:
                ledger.charge(release)
            if step == 20:
                ledger.close()
                ledger = Ledger.resume(path, Counter())
        ledger.close()
    assert min(decided.values()) > 100


def test_what_was_planned_is_not_admitted_beside_what_came_instead(tmp_path: Path) -> None:
    """A plan is cleared in advance; once the noise has moved, that clearance holds no more."""
    plain, louder = (Release(0.05, noise, adaptive=True) for noise in (1.0, 0.8))
    keeper = RenyiFilter(order=4.0, budget=20 * renyi_cost(4.0, 0.05, 1.0))
    head = header(epsilon=1.01 * keeper.limit(DELTA), renyi_filter=keeper)
    with Ledger.create(tmp_path / "ledger.jsonl", head, Counter({plain: 20})) as ledger:
        for release in (louder, plain):
            while ledger.admits(release):
                ledger.charge(release)
        assert ledger.composition[plain] < 20
        assert ledger.composition[louder] > 0
        assert keeper.admits(ledger.composition)
        with pytest.raises(BudgetError):
            ledger.charge(plain)


def test_a_fixed_plan_is_not_admitted_beside_adaptive_releases_that_spent_its_budget(tmp_path: Path) -> None:
    """The filter decides on adaptive releases alone, so that a plan of others, once cleared, must be priced again."""
    fixed, moving = (Release(0.05, 1.0, adaptive=adaptive) for adaptive in (False, True))
    keeper = RenyiFilter(order=4.0, budget=20 * renyi_cost(4.0, 0.05, 1.0))
    head = header(epsilon=1.01 * keeper.limit(DELTA), renyi_filter=keeper)
    with Ledger.create(tmp_path / "ledger.jsonl", head, Counter({fixed: 20})) as ledger:
        while ledger.admits(moving):
            ledger.charge(moving)
        assert ledger.composition[moving] == 20
        with pytest.raises(BudgetError):
            ledger.charge(fixed)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_run_is_priced_once_and_a_charge_prices_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adaptive: bool
) -> None:
    """Nor does a charge look at the releases before it: what it does is the same at the first and at the last."""
    steps = 60
    releases = [Release(0.05, 20.0 + (0.1 * step if adaptive else 0.0), adaptive=adaptive) for step in range(steps)]
    head = header(epsilon=1.01 * FILTER.limit(DELTA), renyi_filter=FILTER if adaptive else None)
    prices: list[int] = []
    costs: list[int] = []
    real_price, real_cost = RunHeader.price, RenyiFilter.cost
    monkeypatch.setattr(RunHeader, "price", lambda *given: prices.append(1) or real_price(*given))
    monkeypatch.setattr(RenyiFilter, "cost", lambda *given: costs.append(1) or real_cost(*given))
    with Ledger.create(tmp_path / "ledger.jsonl", head, Counter({releases[0]: steps})) as ledger:
        assert len(prices) == 1
        each = []
        for release in releases:
            costs.clear()
            ledger.charge(release)
            each.append(len(costs))
        assert len(prices) == 1
        assert set(each) == ({2} if adaptive else {0})


def test_without_a_filter_there_is_no_spend(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.jsonl", header(), Counter()) as ledger:
        assert ledger.spent is None


# --- a full disk ------------------------------------------------------------------------------------------


def failing_write(portion: float, error: int | None) -> Callable[[int, bytes], int]:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        done = real(descriptor, data[: int(len(data) * portion)])
        if error is not None:
            raise OSError(error, os.strerror(error))
        return done

    return write


@pytest.mark.parametrize(
    ("portion", "error"), [(0.5, None), (0.0, errno.ENOSPC), (0.5, errno.ENOSPC), (1.0, errno.EIO)]
)
def test_a_failed_write_counts_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: float, error: int | None
) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", header(), Counter())
    ledger.charge(RELEASE)
    before = ledger.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(portion, error))
        with pytest.raises(LedgerError, match="nothing was released"):
            ledger.charge(RELEASE)
    assert (ledger.path.read_bytes(), ledger.releases) == (before, 1)
    ledger.charge(OTHER)
    ledger.finish()
    assert read_ledger(ledger.path).composition == Counter({RELEASE: 1, OTHER: 1})


def test_a_failed_sync_counts_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", header(), Counter())

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(LedgerError):
            ledger.charge(RELEASE)
    assert read_ledger(ledger.path).releases == ledger.releases == 0


def test_a_failed_write_that_cannot_be_undone_closes_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line stays in the file: a further charge would be glued to it and lost."""
    ledger = Ledger.create(tmp_path / "ledger.jsonl", header(), Counter())

    def ftruncate(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(0.5, None))
        patch.setattr(os, "ftruncate", ftruncate)
        with pytest.raises(LedgerError):
            ledger.charge(RELEASE)
    with pytest.raises(LedgerError):
        ledger.charge(RELEASE)


def test_a_ledger_that_cannot_be_started_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", failing_write(0.5, None))
    with pytest.raises(LedgerError):
        Ledger.create(tmp_path / "ledger.jsonl", header(), Counter())
    assert not (tmp_path / "ledger.jsonl").exists()


# --- damage -----------------------------------------------------------------------------------------------


def edit(old: bytes, new: bytes, index: int) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        assert old in lines[index]
        return [*lines[:index], lines[index].replace(old, new), *lines[index + 1 :]]

    return change


DAMAGE: dict[str, tuple[Callable[[Lines], Lines], int]] = {
    "delta edited": (edit(b"1e-05", b"1e-03", 0), 1),
    "budget edited": (edit(b'"epsilon":null', b'"epsilon":2.0', 0), 1),
    "noise edited": (edit(b'"noise_multiplier":4.0', b'"noise_multiplier":9.0', 2), 3),
    "rate edited": (edit(b'"sample_rate":1.0', b'"sample_rate":0.5', 1), 2),
    "space added": (edit(b'"kind"', b' "kind"', 3), 4),
    "key repeated": (edit(b'"noise_multiplier":4.0', b'"noise_multiplier":9.0,"noise_multiplier":4.0', 1), 2),
    "end edited": (edit(b'"releases":4', b'"releases":5', 5), 6),
    "lines swapped": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3),
    "middle line removed": (lambda lines: [*lines[:2], *lines[3:]], 3),
    "last release removed": (lambda lines: [*lines[:4], lines[5]], 5),
    "line duplicated": (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
    "run line removed": (lambda lines: lines[1:], 1),
    "run line duplicated": (lambda lines: [lines[0], *lines], 2),
    "last line torn": (lambda lines: [*lines[:5], lines[5][:-9]], 6),
    "newline lost": (lambda lines: [*lines[:5], lines[5][:-1]], 6),
    "middle line torn": (lambda lines: [*lines[:2], lines[2][:40] + b"\n", *lines[3:]], 3),
    "middle line glued": (lambda lines: [*lines[:2], lines[2][:-1], *lines[3:]], 3),
    "garbage": (lambda lines: [*lines[:2], b"\x00\xff\xfe\n", *lines[2:]], 3),
    "blank line": (lambda lines: [*lines[:2], b"\n", *lines[2:]], 3),
    "no object": (lambda lines: [*lines[:2], b"[1]\n", *lines[2:]], 3),
    "carriage return": (lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], 1),
    "deeply nested": (lambda lines: [*lines[:2], b"[" * 100_000 + b"\n", *lines[2:]], 3),
    "line after the end": (lambda lines: [*lines, lines[4]], 7),
    "blank after the end": (lambda lines: [*lines, b"\n"], 7),
    "empty": (lambda lines: [], 1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_and_its_line_named(tmp_path: Path, name: str) -> None:
    change, number = DAMAGE[name]
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(change(whole().splitlines(keepends=True))))
    with pytest.raises(LedgerError, match=rf"ledger\.jsonl, line {number}:"):
        read_ledger(path)


@given(position=st.integers(0, len(whole()) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused_and_its_line_named(position: int, flip: int) -> None:
    data = bytearray(whole())
    data[position] ^= flip
    number = whole().count(b"\n", 0, position) + 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        path.write_bytes(data)
        with pytest.raises(LedgerError, match=rf"line {number}:"):
            read_ledger(path)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        path.write_bytes(data)
        with pytest.raises(LedgerError, match="line 1:"):
            read_ledger(path)


def test_the_undamaged_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(whole())
    contents = read_ledger(path)
    assert (contents.composition, contents.releases, contents.complete) == (Counter({RELEASE: 4}), 4, True)
    assert contents.epsilons.certified == price(Counter({RELEASE: 4}))


def test_whole_lines_cut_from_the_end_leave_an_unfinished_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(whole().splitlines(keepends=True)[:4]))
    assert not read_ledger(path).complete
    assert chain_after(path, 3) is not None
    assert chain_after(path, 4) is None


def test_the_format_is_what_it_says(tmp_path: Path) -> None:
    """A second writer of the format makes the same bytes."""
    lines = [json.loads(line) for line in whole().splitlines()]
    for line in lines:
        del line["chain"]
    assert chained(*lines) == whole()


BAD_RECORDS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "format of the future": ([run_line(format=99)], 1),
    "unknown accounting": ([run_line(accounting="hope")], 1),
    "budget is text": ([run_line(epsilon="2")], 1),
    "delta is text": ([run_line(delta="1e-5")], 1),
    "delta out of range": ([run_line(delta=2.0)], 1),
    "leaks are null": ([run_line(leaks=None)], 1),
    "leaks are text": ([run_line(leaks="seed")], 1),
    "no run line": ([release_line(0)], 1),
    "step skipped": ([run_line(), release_line(1)], 2),
    "noise is zero": ([run_line(), release_line(0, noise_multiplier=0)], 2),
    "raw inputs are null": ([run_line(), release_line(0, raw_inputs=None)], 2),
    "raw inputs are text": ([run_line(), release_line(0, raw_inputs="loss")], 2),
    "unknown kind": ([run_line(), {"kind": "refund"}], 2),
    "step is true": ([run_line(), release_line(0), release_line(True)], 3),
    "step is a float": ([run_line(), release_line(0), release_line(1.0)], 3),
    "step repeated": ([run_line(), release_line(0), release_line(1), release_line(1)], 4),
    "step skipped later": ([run_line(), release_line(0), release_line(1), release_line(3)], 4),
    "no step": ([run_line(), {key: value for key, value in release_line(0).items() if key != "step"}], 2),
    "a key after the step": ([run_line(), release_line(0), release_line(1, tail=0)], 3),
    "end says more": ([run_line(), {"kind": "end", "releases": 0, "refund": 1}], 2),
    "end miscounts": ([run_line(), release_line(0), {"kind": "end", "releases": 0}], 3),
    "release after end": ([run_line(), {"kind": "end", "releases": 0}, release_line(0)], 3),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_well_chained_line_must_still_make_sense(tmp_path: Path, name: str) -> None:
    records, number = BAD_RECORDS[name]
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(chained(*records))
    with pytest.raises(LedgerError, match=rf"line {number}:"):
        read_ledger(path)


def test_a_noise_of_another_version_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(chained(run_line(), release_line(0, noise="of tomorrow")))
    with pytest.raises(LedgerError, match=r"line 2: names a noise 'of tomorrow' .* Fix: verify it with the version"):
        read_ledger(path)


kinds = st.builds(
    Release,
    sample_rate=st.sampled_from([0.25, 1.0, 1e-6]),
    noise_multiplier=st.floats(0.3, 30.0),
    sensitivity=st.sampled_from([1.0, 2.0]),
    statistics=st.sampled_from([("gradient sum",), ('a "step":1', "é,\\\n")]),
    claims=st.sampled_from([(), (("step", 3.0),)]),
    part=st.none() | st.integers(0, 3),
)


@given(some=st.lists(kinds, min_size=1, max_size=4), order=st.lists(st.integers(0, 3), max_size=30))
def test_any_run_is_written_as_the_format_says_and_read_back(some: list[Release], order: list[int]) -> None:
    """Also through the short cuts for kinds of release that came before: the same bytes, chains and releases."""
    charged = [some[index % len(some)] for index in order]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        with Ledger.create(path, header(), Counter()) as ledger:
            for release in charged:
                ledger.charge(release)
            chain = ledger.chain
        head = json.loads(path.read_bytes().splitlines()[0])
        del head["chain"]
        lines = [{"kind": "release", "step": step, **one.to_dict()} for step, one in enumerate(charged)]
        assert path.read_bytes() == chained(head, *lines)
        contents = read_ledger(path)
        assert (contents.composition, contents.releases, contents.chain) == (Counter(charged), len(charged), chain)
        stated = [json.loads(line)["chain"] for line in path.read_bytes().splitlines()]
        assert [chain_after(path, number) for number in range(len(charged) + 2)] == [*stated, None]


def mixed() -> bytes:
    """Two kinds of release in turn, so that most lines are spelt like one before them."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        with Ledger.create(path, header(run_id="0" * 32), Counter()) as ledger:
            for step in range(12):
                ledger.charge((RELEASE, OTHER)[step % 2])
            ledger.finish()
        return path.read_bytes()


MIXED = mixed()


@given(position=st.integers(MIXED.index(b"\n") + 1, len(MIXED) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_found_in_lines_like_those_before(position: int, flip: int) -> None:
    data = bytearray(MIXED)
    data[position] ^= flip
    number = MIXED.count(b"\n", 0, position) + 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        path.write_bytes(data)
        with pytest.raises(LedgerError, match=rf"line {number}:"):
            read_ledger(path)


@given(first=st.integers(1, 12), second=st.integers(1, 12), kind=st.sampled_from(["swap", "drop", "repeat", "copy"]))
def test_whole_lines_that_move_are_found(first: int, second: int, kind: str) -> None:
    lines = MIXED.splitlines(keepends=True)
    if kind == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    elif kind == "drop":
        del lines[first]
    elif kind == "repeat":
        lines.insert(first, lines[first])
    else:
        lines[first] = lines[second]
    damaged = b"".join(lines)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        path.write_bytes(damaged)
        if damaged == MIXED:
            assert read_ledger(path).complete
            return
        with pytest.raises(LedgerError, match=r"line \d+:"):
            read_ledger(path)


def test_no_kind_of_release_is_needed_in_memory_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "_MOST_KNOWN", 2)
    path = tmp_path / "ledger.jsonl"
    charged = [Release(1.0, float(2 + step % 5)) for step in range(40)]
    with Ledger.create(path, header(), Counter()) as ledger:
        for release in charged:
            ledger.charge(release)
    assert read_ledger(path).composition == Counter(charged)


def test_a_missing_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"none\.jsonl"):
        read_ledger(tmp_path / "none.jsonl")
    with pytest.raises(LedgerError, match=r"none\.jsonl"):
        Ledger.resume(tmp_path / "none.jsonl", Counter())


# --- resuming ---------------------------------------------------------------------------------------------


@given(cut=st.integers(1, len(whole().splitlines(keepends=True)[3]) - 1))
def test_resume_cuts_only_the_unacknowledged_tail(cut: int) -> None:
    lines = whole().splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        path.write_bytes(b"".join(lines[:3]) + lines[3][:cut])
        with Ledger.resume(path, Counter()) as ledger:
            assert path.read_bytes() == b"".join(lines[:3])
            assert ledger.composition == Counter({RELEASE: 2})
            ledger.charge(RELEASE)
        assert path.read_bytes() == b"".join(lines[:4])


def test_resume_cuts_nothing_of_a_damaged_ledger(tmp_path: Path) -> None:
    lines = whole().splitlines(keepends=True)
    path = tmp_path / "ledger.jsonl"
    damaged = b"".join([*lines[:2], lines[2][:40] + b"\n", lines[3]])
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match="line 3"):
        Ledger.resume(path, Counter())
    assert path.read_bytes() == damaged


def test_a_resumed_ledger_continues_as_if_never_closed(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl", releases=2, finish=False)
    with Ledger.resume(path, Counter()) as ledger:
        assert ledger.header == read_ledger(path).header
        ledger.charge(RELEASE)
        ledger.charge(RELEASE)
        ledger.finish()
    head = json.loads(path.read_bytes().splitlines()[0])
    assert head["run_id"] != json.loads(whole().splitlines()[0])["run_id"]
    assert read_ledger(path).composition == Counter({RELEASE: 4})


def test_resume_holds_the_budget_against_a_longer_plan(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.jsonl", price(Counter({RELEASE: 3}))
    with Ledger.create(path, header(epsilon=budget), Counter({RELEASE: 3})) as ledger:
        ledger.charge(RELEASE)
    with pytest.raises(BudgetError):
        charge_resumed(path, Counter({RELEASE: 50}), times=3)
    assert price(read_ledger(path).composition) <= budget


def test_resume_holds_the_budget_against_another_plan(tmp_path: Path) -> None:
    """What was already charged counts, though the new plan alone would fit."""
    path, budget = tmp_path / "ledger.jsonl", price(Counter({RELEASE: 3}))
    with Ledger.create(path, header(epsilon=budget), Counter({RELEASE: 3})) as ledger:
        for _ in range(3):
            ledger.charge(RELEASE)
    with pytest.raises(BudgetError):
        charge_resumed(path, Counter({Release(1.0, 5.0): 3}), times=1)
    assert price(read_ledger(path).composition) <= budget


def test_a_second_descriptor_is_locked_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, header(), Counter()) as ledger:
        before = path.read_bytes()
        with pytest.raises(LedgerError, match="another process"):
            Ledger.resume(path, Counter())
        assert path.read_bytes() == before
        ledger.charge(RELEASE)
    Ledger.resume(path, Counter()).close()


def test_another_process_is_locked_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    take = f"import fcntl; fcntl.flock(open({str(path)!r}, 'rb+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with Ledger.create(path, header(), Counter()):
        assert subprocess.run([sys.executable, "-c", take], capture_output=True, check=False).returncode != 0
    assert subprocess.run([sys.executable, "-c", take], capture_output=True, check=False).returncode == 0


def test_a_refused_resume_gives_the_lock_back(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError):
        Ledger.resume(path, Counter())
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_ledger_without_its_first_line_is_discarded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(whole().splitlines()[0][:50])
    discard_unborn(path)
    assert not path.exists()


def test_a_ledger_with_its_first_line_is_never_discarded(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl", releases=0, finish=False)
    discard_unborn(path)
    assert path.exists()


def test_a_ledger_that_another_process_is_starting_is_not_discarded(tmp_path: Path) -> None:
    """Between its creation and its first line a ledger is empty, and locked: its charges will go to this file."""
    path = tmp_path / "ledger.jsonl"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(LedgerError):
            discard_unborn(path)
        assert path.exists()


# --- round trips ------------------------------------------------------------------------------------------


@given(
    epsilon=st.none() | st.floats(0.01, 100),
    units=st.integers(1, 10**9),
    data=st.text(max_size=20),
    leaks=st.lists(st.text(max_size=10), max_size=2).map(tuple),
    planned=st.none() | st.builds(RenyiFilter, st.floats(1.01, 100), st.floats(1e-6, 10)),
)
def test_header_round_trip(
    epsilon: float | None, units: int, data: str, leaks: tuple[str, ...], planned: RenyiFilter | None
) -> None:
    head = header(epsilon=epsilon, units=units, data=data, leaks=leaks, renyi_filter=planned, accounting="published")
    assert RunHeader.from_dict(json.loads(json.dumps(head.to_dict()))) == head


@given(st.lists(st.sampled_from([RELEASE, OTHER, Release(0.5, 1.0, sensitivity=2.0, raw_inputs=("x",))]), max_size=8))
def test_what_was_charged_is_what_is_read(charged: list[Release]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        with Ledger.create(path, header(), Counter()) as ledger:
            for release in charged:
                ledger.charge(release)
        contents = read_ledger(path)
    assert contents.composition == Counter(charged)
    assert contents.releases == len(charged)


def test_a_ledger_that_was_cut_behind_a_result_beside_it_is_refused(tmp_path: Path) -> None:
    """Resumed, it would release again what was released, and never say so."""
    path = written(tmp_path / "ledger.jsonl", releases=4)
    (tmp_path / "result.json").write_text('{"releases": 4}')
    content = path.read_bytes().splitlines(keepends=True)
    for lines in range(1, 5):
        path.write_bytes(b"".join(content[:lines]))
        with pytest.raises(LedgerError, match=rf"holds {lines - 1} releases, but files beside it rely on 4"):
            Ledger.open(path, header(), Counter({RELEASE: 4}))
    path.write_bytes(b"".join(content[:5]))
    Ledger.open(path, header(), Counter({RELEASE: 4})).close()
