"""Add/remove of one unit, from the user's table on: whoever leaves it, nobody else moves.

Everything is compared by the records' texts, which are distinct, so that no numbering of the pipeline's own is trusted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dptune.records.canaries as canaries_module
from dptune.core.files import sha256, write_json
from dptune.policy.tenants.runs import tenants_of
from dptune.prediction.ensemble import partition
from dptune.privacy.entropy import OsEntropy
from dptune.records.canaries import CanaryPlan, inject
from dptune.records.diabetes.narratives import write_narratives
from dptune.records.diabetes.synthetic_cohort import generate_cohort, synthetic_ids_mapping
from dptune.records.own_files import acquire_text, write_paragraphs
from dptune.records.parquet_file import read_records
from dptune.records.splits import SIDES, split, write_splits
from dptune.training.data import Tokens
from dptune.training.privacy_units import PrivacyUnits, Turn

CLIENTS, TENANTS, SHARDS, GROUPS = 7, 3, 4, 5
CANARIES = {"extraction": 2, "audit": 6, "repeats": 3}
COHORT = generate_cohort(240, 5, kind="private")
PARAGRAPHS = [f"Paragraph {number} of {number % 7} words." for number in range(120)]
SETTINGS = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])

#: A place that a text can have ("side", "client", ...), which one it is, and how often the text is there.
Places = Counter[tuple[str, str, str]]


@dataclass(frozen=True)
class Dealt:
    """Where every text went, and the rows of the canaries with the auditor's file, to the byte."""

    places: Places
    canaries: tuple[Any, ...]


class FixedRandom(random.Random):
    """The auditor's entropy, the same every time."""

    def __init__(self) -> None:
        super().__init__(1)


def dealt(narratives: Path, unit: str) -> Dealt:
    """Split, plant canaries, and deal the training records out to clients, tenants, shards and groups."""
    folder = narratives.parent
    write_splits(narratives, folder, 42, unit)
    places: Places = Counter()
    for side in SIDES:
        places.update(("side", side, text) for text in read_records(folder / f"{side}.parquet").text.to_pylist())
    secrets = folder / "secrets.json"
    plan = CanaryPlan(**CANARIES, carrier_seed=3)
    inject(folder / "train.parquet", folder / "new.parquet", secrets, folder / "manifest", plan)
    train = read_records(folder / "new.parquet")
    texts, patients = train.text.to_pylist(), train.unit
    rows = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
    for number, members in enumerate(PrivacyUnits.clients(CLIENTS, patients).members):
        places.update(("client", str(number), texts[row]) for row in members)
    for tenant in tenants_of(Tokens(rows, 0, 1), patients, TENANTS):
        for name, tokens in (("train", tenant.train), ("held out", tenant.held_out)):
            where = f"{tenant.number} {name}"
            places.update(("tenant", where, row.astype(np.uint8).tobytes().decode()) for row in tokens.rows)
    for key in ("record", "patient"):
        for number, shard in enumerate(partition(texts, patients, key, SHARDS, b"salt")):
            places.update((f"shard by {key}", str(number), texts[row]) for row in shard)
    units = PrivacyUnits.of(unit, patients, 100, np.array([text == "" for text in texts]))
    for group in range(GROUPS):
        batch = units.draw(1.0, OsEntropy(), Turn.of("a" * 32, GROUPS, group))
        places.update(("group", str(group), texts[row]) for members in batch for row in members)
    planted = CANARIES["extraction"] * CANARIES["repeats"] + CANARIES["audit"]
    kept = [column[-planted:] for column in (texts, train.record.tolist(), patients.tolist())]
    return Dealt(places, (*kept, secrets.read_bytes()))


def of_table(frame: pd.DataFrame, unit: str) -> Dealt:
    """From a table with these rows."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        frame.to_csv(folder / "table.csv", index=False, lineterminator="\n")
        (folder / "ids.csv").write_text(synthetic_ids_mapping())
        files = {"diabetic_data.csv": folder / "table.csv", "IDs_mapping.csv": folder / "ids.csv"}
        stated = {"rows": len(frame), "sha256": {name: sha256(file) for name, file in files.items()}}
        write_json(folder / "source.json", {"source": "synthetic", "synthetic": True, "label": "made"} | stated)
        write_narratives(folder / "table.csv", folder / "ids.csv", folder / "source.json", folder / "all.parquet")
        return dealt(folder / "all.parquet", unit)


def of_text(paragraphs: list[str], unit: str) -> Dealt:
    """From a text file of these paragraphs."""
    with TemporaryDirectory() as name:
        (Path(name) / "my.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
        acquire_text(Path(name) / "raw", Path(name) / "my.txt")
        write_paragraphs(Path(name) / "raw", Path(name) / "all.parquet")
        return dealt(Path(name) / "all.parquet", unit)


@pytest.fixture
def fixed_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets, coins and salts are the same in both worlds."""
    monkeypatch.setattr(canaries_module, "SystemRandom", FixedRandom)


def check_nobody_else_moved(before: Dealt, after: Dealt, left: set[str]) -> None:
    """What is gone is what left; what came is nothing; the canaries are as they were."""
    gone, came = before.places - after.places, after.places - before.places
    assert not came, f"{len(came)} places were dealt again"
    assert {text for _, _, text in gone} == left
    assert after.canaries == before.canaries


@pytest.fixture(scope="module")
def whole() -> dict[str, Dealt]:
    """The whole data dealt out, by unit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canaries_module, "SystemRandom", FixedRandom)
        return {
            **{unit: of_table(COHORT, unit) for unit in ("record", "patient")},
            "text": of_text(PARAGRAPHS, "record"),
        }


def texts_of(world: Dealt) -> set[str]:
    return {text for place, _, text in world.places if place == "side"}


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("unit", ["record", "patient"])
@SETTINGS
@given(row=st.integers(0, len(COHORT) - 1))
def test_an_encounter_or_a_patient_leaves_the_table(unit: str, row: int, whole: dict[str, Dealt]) -> None:
    """The first row is the one that used to move most."""
    column = {"record": "encounter_id", "patient": "patient_nbr"}[unit]
    leaving = (COHORT[column] == COHORT[column][row]).to_numpy()
    before, after = whole[unit], of_table(COHORT[~leaving], unit)
    check_nobody_else_moved(before, after, texts_of(before) - texts_of(after))
    sides = [text for place, _, text in (before.places - after.places).elements() if place == "side"]
    assert len(sides) == leaving.sum()


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_every_record_and_every_patient_may_leave(unit: str) -> None:
    """Each in turn, without files."""
    records, patients = (COHORT[name].to_numpy().astype(np.int64) for name in ("encounter_id", "patient_nbr"))
    keys = {"record": records, "patient": patients}[unit]

    def places(staying: np.ndarray) -> dict[int, tuple[str, int]]:
        sides = {row: side for side, rows in split(keys[staying], 42, unit).items() for row in rows}
        members = PrivacyUnits.clients(CLIENTS, patients[staying]).members
        clients = {row: number for number, rows in enumerate(members) for row in rows}
        return {record: (sides[row], clients[row]) for row, record in enumerate(records[staying].tolist())}

    before = places(np.ones(len(keys), dtype=bool))
    for key in np.unique(keys):
        after = places(keys != key)
        assert after == {record: before[record] for record in after}


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("row", [0, 1, len(PARAGRAPHS) - 1])
def test_a_paragraph_leaves_the_text(row: int, whole: dict[str, Dealt]) -> None:
    after = of_text(PARAGRAPHS[:row] + PARAGRAPHS[row + 1 :], "record")
    check_nobody_else_moved(whole["text"], after, {PARAGRAPHS[row]})


@pytest.mark.usefixtures("fixed_entropy")
def test_equal_paragraphs_share_every_place(whole: dict[str, Dealt]) -> None:
    twice = of_text([PARAGRAPHS[0], *PARAGRAPHS, PARAGRAPHS[0]], "record")
    more = Counter({key: 2 for key in whole["text"].places if key[2] == PARAGRAPHS[0]})
    assert twice.places == whole["text"].places + more


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("order", [lambda n: n[::-1], lambda n: np.random.default_rng(0).permutation(n)])
def test_the_order_of_the_table_decides_nothing(order: Callable[[Any], Any], whole: dict[str, Dealt]) -> None:
    shuffled = of_table(COHORT.iloc[order(np.arange(len(COHORT)))], "record")
    assert shuffled == whole["record"]


def test_the_worlds_can_be_told_apart(whole: dict[str, Dealt]) -> None:
    """Every text is distinct, and every place is used; else the tests above could not fail."""
    assert len(texts_of(whole["record"])) == len(COHORT)
    used = {(place, which) for place, which, _ in whole["record"].places}
    counts = Counter(place for place, _ in used)
    expected = {"side": 3, "client": CLIENTS, "tenant": 2 * TENANTS, "shard by record": SHARDS, "group": GROUPS}
    assert counts == expected | {"shard by patient": SHARDS}
    assert len(COHORT["patient_nbr"].unique()) < len(COHORT)


def dense(keys: np.ndarray) -> np.ndarray:
    """Numbers by first appearance: the bug that these tests are there for."""
    return pd.factorize(keys)[0].astype(np.int64)


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("place", ["splits", "clients", "tenants", "groups", "file"])
def test_the_dense_index_is_found_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is planted, the first row that leaves is seen to move others."""
    from dptune.policy.tenants import runs
    from dptune.records import splits
    from dptune.records.diabetes import narratives
    from dptune.training import privacy_units

    if place == "splits":
        real_keys = splits.keys_of
        monkeypatch.setattr(splits, "keys_of", lambda records, unit: dense(real_keys(records, unit)))
    elif place == "file":
        real_write = narratives.write_records

        def numbered(path: Path, records: Any) -> None:
            owners = dense(records.unit)
            real_write(path, type(records)(np.arange(len(owners)), owners, records.text, records.about))

        monkeypatch.setattr(narratives, "write_records", numbered)
    elif place == "groups":
        monkeypatch.setattr(Turn, "of", lambda run, bands, row, of=Turn.of: of(run, bands, row, "rank"))
    else:
        module = {"clients": privacy_units, "tenants": runs}[place]
        real_hash = privacy_units.hash_keys
        monkeypatch.setattr(module, "hash_keys", lambda keys, *salt: real_hash(dense(keys), *salt))
    staying = COHORT["patient_nbr"] != COHORT["patient_nbr"][0]
    before, after = of_table(COHORT, "patient"), of_table(COHORT[staying], "patient")
    with pytest.raises(AssertionError, match="were dealt again"):
        check_nobody_else_moved(before, after, texts_of(before) - texts_of(after))
