"""Groups of correlated noise, at every door of tuning: whoever leaves or is swapped, nobody else's group moves.

A run is stopped where it opens, with the units that it would draw from. Of one that goes on it is checked that it draws
by keys, and by the id in its own ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import gpt2, make_plan
from tiny_models import records as tiny_records
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

from dptune import tune
from dptune.cli import app
from dptune.core.settings import Lora
from dptune.job.base_model import open_base
from dptune.job.search import search as search_module
from dptune.job.settings import TuneSettings
from dptune.job.suggest import suggest
from dptune.policy.tenants.runs import Setting, calibrate_entry, fine_tune, tenants_of
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.records.reading.source import RecordSource
from dptune.training import run_start
from dptune.training.privacy_units import PrivacyUnits, Turn
from dptune.training.spec import RunSpec

Row = dict[str, Any]
RUN, BANDS = "a" * 32, 2
GIVEN: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-3, "telemetry": "private", "mechanism": "banded"} | QUICK
OPTIONS = {"bands": BANDS}


class OpenedError(BaseException):
    """A run was opened; no candidate may take it for its own failure."""


def by_python(found: list[Row], folder: Path, unit: str | None) -> None:
    tune(str(checkpoint()), found, unit=unit, out=folder / "out", options=OPTIONS, **GIVEN)


def by_command(found: list[Row], folder: Path, unit: str | None) -> None:
    given = [
        "--epsilon",
        "8",
        "--delta",
        "1e-3",
        "--telemetry",
        "private",
        "--epochs",
        "2",
        "--expected-batch-size",
        "8",
        "--rank",
        "2",
    ]
    given += ["--mechanism", "banded", "--set", f"bands={BANDS}", "--target-modules", "c_attn"]
    given += ["--model", str(checkpoint()), "--data", str(write_csv(folder / "a.csv", found))]
    given += ["--out", str(folder / "out"), *([] if unit is None else ["--unit", unit])]
    done = CliRunner().invoke(app, ["tune", *given])
    raise done.exception or AssertionError(done.output)


def by_search(found: list[Row], folder: Path, unit: str | None, together: int = 1) -> None:
    space = {"space": {"learning_rate": [0.01, 0.02]}, "candidates": 3, "bound": "one_shift", "together": together}
    tune(str(checkpoint()), found, unit=unit, out=folder / "out", options=OPTIONS, search=space, **GIVEN)


def by_search_together(found: list[Row], folder: Path, unit: str | None) -> None:
    by_search(found, folder, unit, together=3)


def by_suggestion(found: list[Row], folder: Path, unit: str | None) -> None:
    chosen = TuneSettings.of(options=OPTIONS, **GIVEN | {"expected_batch_size": 4})
    suggest(open_base(str(checkpoint()), chosen), chosen, len(found), RecordSource(found, unit=unit), trials=True)


DOORS = [by_python, by_command, by_search, by_search_together, by_suggestion]


def opened(
    door: Callable[..., None], found: list[Row], folder: Path, unit: str | None, patch: pytest.MonkeyPatch
) -> dict[bytes, int]:
    """The group of every record by its tokens, in the run that this door opens."""
    specs: list[RunSpec] = []

    def stop(spec: RunSpec, *_: Any) -> Any:
        specs.append(spec)
        raise OpenedError

    folder.mkdir()
    with patch.context() as patched:
        patched.setattr(run_start, "open_rank", stop)
        patched.setattr(search_module.Plan, "draw", fixed_draw(search_module.Plan.draw))
        with pytest.raises(OpenedError):
            door(found, folder, unit)
    spec, groups = specs[0], dict[bytes, int]()
    for row in range(BANDS):
        for records in spec.units.draw(1.0, OsEntropy(), Turn.of(RUN, BANDS, row)):
            groups.update((spec.tokens.rows[record].tobytes(), row) for record in records)
    return groups


def fixed_draw(draw: Callable[..., Any]) -> Any:
    """A plan of two candidates at least, so that they share a pass."""
    return lambda search, kinds, entropy: next(
        plan for plan in iter(lambda: draw(search, kinds, entropy), None) if len(plan.candidates) > 1
    )


@pytest.mark.parametrize("unit", [None, "customer_id"])
@pytest.mark.parametrize("door", DOORS)
def test_one_who_leaves_or_is_swapped_moves_nobody_at_any_door(
    door: Callable[..., None], unit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 records of 20 customers. The sides of others stay too, so nobody else comes to train, or leaves."""
    everybody, column = rows(60), unit or "text"
    whole = opened(door, everybody, tmp_path / "whole", unit, monkeypatch)
    assert set(whole.values()) == {0, 1}
    swapped = [row | {"customer_id": "new", "text": f"new {row['text']}"} for row in everybody[:1]]
    alone = 3 if unit else 1
    for name, newcomers in (("left", []), ("swapped", swapped)):
        others = [row for row in everybody if row[column] != everybody[0][column]]
        assert len(others) == 60 - alone
        after = opened(door, [*newcomers, *others], tmp_path / name, unit, monkeypatch)
        assert {said: whole[said] for said in after if said in whole} == {
            said: group for said, group in after.items() if said in whole
        }
        assert len(whole.keys() - after.keys()) <= alone
        assert len(after.keys() - whole.keys()) <= len(newcomers)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PrivacyUnits, Turn | None]]:
    """The units and the turn of every draw; each must come with the keys of its units and a turn."""
    found: list[tuple[PrivacyUnits, Turn | None]] = []
    draw = PrivacyUnits.draw

    def noted(units: PrivacyUnits, rate: float, entropy: Any, turn: Turn | None = None) -> Any:
        found.append((units, turn))
        return draw(units, rate, entropy, turn)

    monkeypatch.setattr(PrivacyUnits, "draw", noted)
    return found


@pytest.mark.parametrize("door", [by_python, by_search_together])
def test_runs_deal_by_their_own_ledgers_and_whoever_runs_beside_moves_nobody(
    door: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[Any]
) -> None:
    """A run is dealt by its own id, so no candidate's groups hang on how many there are."""
    ids, create = [], run_start.Ledger.open

    def noted(path: Path, header: Any, planned: Any, *more: Any) -> Any:
        ids.append(header.run_id)
        return create(path, header, planned, *more)

    monkeypatch.setattr(run_start.Ledger, "open", noted)
    monkeypatch.setattr(search_module.Plan, "draw", fixed_draw(search_module.Plan.draw))
    door(rows(60), tmp_path, "customer_id")
    turns = [turn for _, turn in drawn]
    assert {turn.run_id for turn in turns} == set(ids)
    assert len(set(ids)) == len(ids) >= (1 if door is by_python else 2)
    assert {turn.dealt_by for turn in turns} == {"key"}
    contents = read_ledger(RunFolder(tmp_path / "out" / "adapter").ledger)
    assert {release.dealt_by for release in contents.composition} == {"key"}


def test_a_tenants_own_runs_deal_by_the_keys_of_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[Any]
) -> None:
    tokens, keys = tiny_records(40), np.random.default_rng(3).integers(0, 2**63, 40)
    plan = make_plan(8, sample_rate=0.25, steps=4)
    setting = Setting(gpt2(), Lora(4, 8, 0.0), tiny_records(6), plan, {}, 8.0, 1e-3)
    entry = calibrate_entry(setting, "banded", OPTIONS)

    def groups(staying: np.ndarray) -> dict[bytes, int]:
        drawn.clear()
        some = type(tokens)([row for row, here in zip(tokens.rows, staying, strict=True) if here], 0, tokens.width)
        tenant = tenants_of(some, keys[staying], 2)[1]
        fine_tune(setting, tenant, entry.mechanism(), 8.0, OsEntropy(), 0)
        units, found = drawn[0][0], dict[bytes, int]()
        for row in range(BANDS):
            for (record,) in units.draw(1.0, OsEntropy(), Turn.of(RUN, BANDS, row)):
                found[tenant.train.rows[record].tobytes()] = row
        return found

    whole = groups(np.ones(40, dtype=bool))
    assert set(whole.values()) == {0, 1}
    for who in (0, 1, 2, 39):
        after = groups(np.arange(40) != who)
        assert after == {said: whole[said] for said in after}
        assert len(whole) - len(after) <= 1
