"""Somebody else's loader: a sound one is not accused, each planted error is, and what is no loader is refused."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from typer.testing import CliRunner, Result

from dptune.audit.draws import loader_claim as claims
from dptune.audit.draws import loader_test as module
from dptune.audit.draws.loader_claim import TESTED, LoaderClaim, simulated
from dptune.audit.draws.loader_test import LoaderAudit, audit_loader
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.core.progress import Meter
from dptune.privacy.entropy import FixedSeed
from dptune.training.privacy_units import PrivacyUnits

MODULE = "somebodys_loader"
EPOCHS = 30
_LAWS: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws in every run: a sound loader is accused with chance 0.001. Equal claims share a simulated law."""
    loops.coins.bit_generator.state = np.random.default_rng(1).bit_generator.state
    torch.manual_seed(1)
    simulate = module._Law.of

    def shared(of: Callable[[], Any], alarm: float, meter: Meter) -> Any:
        known = inspect.getclosurevars(of).nonlocals
        key = repr((known["claim"], known["count"], known["batches"], alarm)) if "count" in known else object()
        if key not in _LAWS:
            _LAWS[key] = simulate(of, alarm, meter)
        return _LAWS[key]

    monkeypatch.setattr(module._Law, "of", shared)


def claim_of(sampler: Any) -> LoaderClaim:
    most = loops.MOST if sampler == "truncated_poisson" else None
    return LoaderClaim(sampler=sampler, sample_rate=0.1, units=loops.UNITS, max_batch=most)


def audited(loader: Any, sampler: str, epochs: int = EPOCHS, false_alarms: float = 0.001) -> LoaderAudit:
    return audit_loader(loader, claim_of(sampler), false_alarms=false_alarms, entropy=FixedSeed(1), epochs=epochs)


@pytest.mark.one_case
@pytest.mark.parametrize("loader", loops.SOUND_LOADERS)
def test_a_sound_loader_is_not_accused(loader: Callable[[], Any]) -> None:
    found = audited(loader, loader.__name__)
    assert found.accusation is None
    assert "the same batches in every epoch" in found.seen


@pytest.mark.one_case(
    "dropped last batch", "Poisson replaced by shuffle", "the same coins in every epoch", "pairs of ids always together"
)
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(one, marks=pytest.mark.long if one == "truncated by number" else ())
        for one in loops.PLANTED_LOADERS
    ],
)
def test_a_planted_error_is_accused(error: str) -> None:
    loader, sampler = loops.PLANTED_LOADERS[error]
    epochs = 150 if error == "truncated by number" else EPOCHS
    assert audited(loader, sampler, epochs).accusation is not None


@pytest.mark.long
def test_of_200_sound_loaders_few_are_accused() -> None:
    """At 0.001 each, four or more are rarer than 1e-4. Of 200 p-values 20 are 0.1 or less; ten share one law."""
    values, coins = [], np.random.default_rng(1)
    for loader in loops.SOUND_LOADERS * 4:
        claim = claim_of(loader.__name__)
        with Meter("law") as meter:
            law = module._Law.of(partial(simulated, claim, 10, loops.BATCHES, coins), 0.001, meter)
        for _ in range(10):
            entries = module._read(loader, claim, 10, "LOADER")
            assert module._fault(entries, claim) == ""
            values.append(law.p_value(law.far(entries.statistics())))
    assert len(values) == 200
    assert sum(value <= 0.001 for value in values) <= 3
    assert 2 <= sum(value <= 0.1 for value in values) <= 50


def test_each_sampler_is_simulated_by_its_law() -> None:
    coins = np.random.default_rng(1)
    for sampler in TESTED:
        entries = simulated(claim_of(sampler), 300, 10, coins)
        sizes = np.bincount(entries.slots, minlength=3000)
        keys = np.unique(entries.slots * 100 + entries.ids)
        assert len(keys) == len(entries.ids)  # nobody is in one batch twice
        by_epoch = np.bincount(entries.slots // 10 * 100 + entries.ids, minlength=300 * 100)
        if sampler in ("shuffle", "fixed_size"):
            assert set(sizes) == {10}
        if sampler in ("poisson", "balls_in_bins"):  # variance 100 * 0.1 * 0.9
            assert abs(sizes.var() - 9) < 5 * 9 * (2 / 3000) ** 0.5
        assert (set(by_epoch) == {1}) == (sampler in ("shuffle", "balls_in_bins"))
        if sampler == "truncated_poisson":
            full = binom.sf(loops.MOST - 1, 100, 0.1)
            assert sizes.max() == loops.MOST
            assert abs((sizes == loops.MOST).mean() - full) < 5 * (full * (1 - full) / 3000) ** 0.5
        counts = np.bincount(entries.ids, minlength=100)  # each about 300, with a deviation of 17 at most
        assert counts.max() - counts.min() < 10 * 17


def test_the_company_of_ids_is_noticed_for_what_it_is() -> None:
    assert "company" in audited(loops.batches_shuffled, "shuffle").deviations


def test_one_pair_of_a_hundred_units_that_shares_a_coin_is_accused() -> None:
    """4,950 pairs share 3 batches each in 30 epochs, with a deviation of 1.7; this one shares 30."""
    found = audited(loops.poisson_with_a_shared_coin, "poisson")
    assert "closest" in found.deviations
    assert found.accusation is not None


@pytest.mark.parametrize("most", [0, 10**9])
@pytest.mark.parametrize(("units", "epochs"), [(7, 5), (60, 1)])
def test_pairs_are_counted_right_by_dense_and_sparse_tables(
    most: int, units: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_DENSE", most)
    claim = LoaderClaim(sampler="poisson", sample_rate=0.2, units=units)
    entries = simulated(claim, epochs, 5, np.random.default_rng(1))
    batches = [set(entries.ids[entries.slots == slot].tolist()) for slot in range(5 * epochs)]
    shared = [sum({a, b} <= one for one in batches) for a in range(units) for b in range(units) if a != b]
    found = dict(zip(claims.STATISTICS, entries.statistics(), strict=True))
    assert found["together"] == pytest.approx(np.var(shared) * len(shared))
    assert found["closest"] == (max(shared) if most else 0)


def test_the_number_of_epochs_does_not_hang_on_what_the_first_one_brought() -> None:
    """An audit reads about 20,000 ids: 40 epochs of an expected 500, however many were drawn."""
    claim = LoaderClaim(sampler="poisson", sample_rate=0.1, units=500)
    sizes = iter([0, *range(1, 500)])
    entries = module._read(lambda: [list(range(next(sizes))) for _ in range(10)], claim, None, "LOADER")
    assert entries.shape == (40, 10, 500)


def test_an_audit_that_is_too_short_says_so() -> None:
    found = audited(loops.poisson, "poisson", epochs=1)
    assert "one unit that never comes" in found.unseen
    assert "NO POWER on" in found.power


# Loaders of dptune and of Opacus.


def dptune_loader(coins: FixedSeed) -> Iterator[list[int]]:
    nobody = np.zeros(loops.UNITS, dtype=bool)
    units = PrivacyUnits.of("record", np.arange(loops.UNITS), 1, nobody)
    for _ in range(loops.BATCHES):
        yield [int(records[0]) for records in units.draw(0.1, coins)]


def test_the_loader_of_dptune_is_not_accused() -> None:
    assert audited(partial(dptune_loader, FixedSeed(2)), "poisson").accusation is None


@pytest.mark.parametrize(("poisson", "claimed"), [(True, "poisson"), (False, "shuffle"), (False, "poisson")])
def test_the_loader_of_opacus_is_accused_only_where_it_shuffles_and_poisson_is_claimed(
    poisson: bool, claimed: str
) -> None:
    pytest.importorskip("opacus", reason="Opacus is not installed")
    from opacus_loops import opacus_loader

    found = audited(opacus_loader(loops.UNITS, loops.SIZE, poisson=poisson), claimed)
    assert (found.accusation is not None) == (poisson != (claimed == "poisson"))


@pytest.mark.parametrize("claimed", ["poisson", "shuffle"])
def test_the_loader_of_a_trainer_shuffles(claimed: str, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="Opacus is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from opacus_loops import trainer_loader

    found = audited(trainer_loader(loops.UNITS, loops.SIZE, tmp_path), claimed)
    assert (found.accusation is not None) == (claimed == "poisson")


# The command.

CODE = """
import numpy as np
coins = np.random.default_rng(1)

def shuffled():
    return np.split(coins.permutation(60), 6)

def other_ids():
    return np.split(1 + coins.permutation(60), 6)

once = iter(shuffled())
number = 3

def endless():
    while True:
        yield [1]

class Shorter:
    epochs = 0
    def __call__(self):
        self.epochs += 1
        return shuffled()[: 6 if self.epochs == 1 else 5]

shorter = Shorter()

kept = iter(shuffled())

def same():
    return kept

class Stops(Shorter):
    def __call__(self):
        self.epochs += 1
        return shuffled() if self.epochs < 4 else []

stops = Stops()

def fails():
    yield [1]
    raise OSError("the disk is gone.")

def texts():
    return [["a", "b"]]

def shares():
    return [[0.5]]

def masks():
    return [np.arange(60) < 6]

def uneven():
    return [[[1], [2, 3]]]

def columns():
    return [{"ids": [1, 2]}]

def nothing():
    return []
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def command(name: str, *options: str) -> Result:
    given = ("--units", "60", "--sample-rate", str(1 / 6), "--epochs", "10")
    return CliRunner().invoke(app, ["audit-draw", name, *given, *options])


def test_the_command_tells_a_shuffle_from_poisson(folder: Path) -> None:
    done = command(f"{MODULE}:shuffled", "--json")
    assert done.exit_code == 1
    assert "are not poisson at rate 0.1667 of 60 units" in done.stderr.splitlines()[-1]
    assert json.loads(done.stdout)["p_value"] == 0.001
    done = command(f"{MODULE}:shuffled", "--sampler", "shuffle")
    assert done.exit_code == 0, done.stderr
    assert "Not accused" in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no_such_loader:epoch", (), "module no_such_loader cannot be imported"),
        (f"{MODULE}:stop", (), "has no stop"),
        (f"{MODULE}:number", (), "gives a int for an epoch, which is no iterable of batches"),
        (f"{MODULE}:other_ids", (), "holds the id 60, which is not one of the ids from 0 to 59"),
        (
            f"{MODULE}:once",
            (),
            "epoch 2 has 0 batches, and epoch 1 had 6. Fix: what gives the batches can be read only once: name",
        ),
        (
            f"{MODULE}:same",
            (),
            "epoch 2 has 0 batches, and epoch 1 had 6. Fix: what gives the batches can be read only "
            "once: return a fresh one",
        ),
        (f"{MODULE}:stops", (), "epoch 4 has 0 batches, and epoch 1 had 6. Fix: yield as many batches"),
        (f"{MODULE}:shorter", (), "epoch 2 has 5 batches, and epoch 1 had 6. Fix: yield as many batches"),
        (f"{MODULE}:endless", (), "epoch 1 has more than 1060 batches, where 1 / sample_rate is 6"),
        (f"{MODULE}:fails", (), "raised OSError in epoch 1 (the disk is gone at "),
        (f"{MODULE}:texts", (), "batch 1 of epoch 1 holds a str, and no whole numbers"),
        (f"{MODULE}:shares", (), "batch 1 of epoch 1 holds a float, and no whole numbers"),
        (f"{MODULE}:masks", (), "batch 1 of epoch 1 holds a bool, and no whole numbers"),
        (f"{MODULE}:uneven", (), "batch 1 of epoch 1 holds a list, and no whole numbers"),
        (f"{MODULE}:columns", (), "batch 1 of epoch 1 holds a dict, and no whole numbers"),
        (f"{MODULE}:nothing", (), "yields no batch"),
        (f"{MODULE}:shuffled", ("--sampler", "truncated_poisson"), "max_batch: is about truncated_poisson"),
        (f"{MODULE}:shuffled", ("--sample-rate", "1.5"), "sample_rate: 1.5 is not below 1"),
        (f"{MODULE}:shuffled", ("--sample-rate", "0.15", "--sampler", "balls_in_bins"), "0.15 is not 1 / (number of"),
        (f"{MODULE}:shuffled", ("--false-alarms", "0"), "false_alarms: 0.0 is not in [0.0001, 1)"),
    ],
)
def test_what_is_no_loader_is_refused_in_the_last_line(
    folder: Path, name: str, options: tuple[str, ...], words: str
) -> None:
    done = command(name, *options)
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]
    assert words in last
    assert ". Fix: " in last


def test_a_last_batch_that_is_left_out_is_a_claim_of_its_own() -> None:
    """64 ids in batches of 10: six whole ones, and four ids that miss the epoch at random."""
    coins = np.random.default_rng(1)

    def dropped() -> list[NDArray[np.int64]]:
        return np.split(coins.permutation(64), range(10, 64, 10))[:6]

    def found(loader: Any, drop_last: bool) -> LoaderAudit:
        claim = LoaderClaim(sampler="shuffle", sample_rate=10 / 64, units=64, drop_last=drop_last)
        return audit_loader(loader, claim, false_alarms=0.001, entropy=FixedSeed(1), epochs=10)

    assert found(dropped, True).accusation is None
    assert "so that 4 units miss each of them" in str(found(dropped, False).accusation)
    kept = np.split(coins.permutation(64), range(10, 64, 10))
    assert "7 batches instead of 6" in found(lambda: kept, True).fault
    # The same four ids are left out of every epoch.
    assert found(lambda: np.split(coins.permutation(60), 6), True).accusation is not None


@pytest.mark.parametrize("sampler", ["full", "cyclic_poisson", "shufle"])
def test_a_sampler_without_a_law_for_loaders_is_refused(sampler: str) -> None:
    with pytest.raises(ConfigError, match=f"sampler: a loader cannot be tested against '{sampler}'. Fix: use one of"):
        claim_of(sampler)
    with pytest.raises(ConfigError, match="drop_last: does not go with sampler poisson"):
        LoaderClaim(sampler="poisson", sample_rate=0.1, units=64, drop_last=True)


def test_a_claim_of_less_than_one_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="is less than one unit"):
        LoaderClaim(sampler="shuffle", sample_rate=0.001, units=100)
