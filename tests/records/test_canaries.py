"""Canaries are where they should be, by fair coins, and nobody else learns of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import verbalised, write_train

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import read_json, sha256
from dptune.records import canaries
from dptune.records.canaries import CanaryPlan, Secrets, are_planted, content_with, inject, read_secrets, suffix
from dptune.records.diabetes.narratives import PLAIN, WORDINGS, public_texts
from dptune.records.diabetes.synthetic_cohort import generate_cohort
from dptune.records.parquet_file import Records, decode_content, read_records, write_records
from dptune.records.reading.record import Chat, PromptTarget

Planted = tuple[Records, Records, Secrets, Path]


def plant(
    directory: Path,
    extraction: int,
    audit: int,
    *,
    records: int = 600,
    patients: int = 200,
    unit: str = "record",
    source: str = "test",
    form: str = "text",
    kind: str = "code",
    samples: Sequence[str] = (),
) -> Planted:
    old = write_train(directory / "train.parquet", records, patients, unit, source)
    old = replace(old, about={**old.about, "form": form})
    write_records(directory / "train.parquet", old)
    out, hidden, manifest = (directory / name for name in ("new.parquet", "secrets.json", "manifest.json"))
    plan = CanaryPlan(extraction, audit, 42, audit_kind=kind, samples=samples)
    inject(directory / "train.parquet", out, hidden, manifest, plan)
    return old, read_records(out), read_secrets(hidden), manifest


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted"), 10, 400)


def test_records_stay_as_they_are_and_come_first(planted: Planted) -> None:
    old, new, _, _ = planted
    assert new.text.to_pylist()[:600] == old.text.to_pylist()
    assert new.record.tolist()[:600] == old.record.tolist()
    assert new.unit.tolist()[:600] == old.unit.tolist()


def test_a_canary_is_a_unit_of_its_own_or_absent(planted: Planted) -> None:
    """Add/remove: no record of the train split depends on a coin, and the number of rows depends on none."""
    old, new, secrets, _ = planted
    every = (*secrets.extraction, *secrets.audit)
    expected = [one.carrier + suffix(one.secret) if one.included else "" for one in every]
    assert new.text.to_pylist()[600:] == expected
    assert new.record.tolist()[600:] == new.unit.tolist()[600:] == [one.record for one in every]
    assert [one.record for one in every] == list(range(-1, -411, -1))
    assert min(*old.record.tolist(), *old.unit.tolist()) >= 0


def test_carriers_are_public_and_follow_from_the_seed_alone(planted: Planted, tmp_path: Path) -> None:
    _, _, secrets, _ = planted
    carriers = [one.carrier for one in (*secrets.extraction, *secrets.audit)]
    assert carriers == public_texts(410, 42, "canaries", "test")
    assert all(text.startswith(WORDINGS[PLAIN].opening) for text in carriers)
    other = plant(tmp_path, 10, 400, records=500, patients=30, unit="patient")[2]
    assert [one.carrier for one in (*other.extraction, *other.audit)] == carriers


def test_carriers_are_other_texts_for_every_purpose_and_seed() -> None:
    """And none of those that the public model is trained on, whose seeds are numbers as small as these."""
    read = [
        public_texts(40, 42, "canaries", "uci"),
        public_texts(40, 43, "canaries", "uci"),
        public_texts(40, 42, "contexts", "uci"),
        verbalised(generate_cohort(40, 42, kind="public")),
    ]
    assert len({text for texts in read for text in texts}) == 160
    assert public_texts(0, 42, "canaries", "uci") == []


def test_beside_paragraphs_carriers_are_short(tmp_path: Path) -> None:
    """A text file's max_length fits its paragraphs; of a narrative it would cut the end, where the secret is."""
    _, _, secrets, _ = plant(tmp_path, 1, 20, source="text")
    for one in (*secrets.extraction, *secrets.audit):
        assert one.carrier.count(". ") + 1 == 3
        assert one.carrier.endswith(".")
        assert len(one.carrier) < 200


@pytest.mark.parametrize("form", ["pair", "messages"])
def test_a_secret_is_what_is_answered(tmp_path: Path, form: str) -> None:
    """Prompts have no loss: a secret in one would not be learned, and its attacks would find nothing."""
    _, new, secrets, _ = plant(tmp_path, 3, 40, source="jsonl", form=form)
    every = (*secrets.extraction, *secrets.audit)
    for one, text in zip(every, new.text.to_pylist()[600:], strict=True):
        if not one.included:
            assert text == ""
            continue
        content = decode_content(text, form)
        if isinstance(content, PromptTarget):
            assert (content.prompt, content.target) == (one.carrier, suffix(one.secret))
        else:
            assert isinstance(content, Chat)
            asked, answered = content.messages
            assert (asked["role"], asked["content"], answered["role"]) == ("user", one.carrier, "assistant")
            assert answered["content"] == suffix(one.secret).strip()


def test_all_candidates_are_listed_with_a_record_and_a_secret_of_their_own(planted: Planted) -> None:
    _, _, secrets, _ = planted
    every = (*secrets.extraction, *secrets.audit)
    assert (len(secrets.extraction), len(secrets.audit)) == (10, 400)
    assert all(one.included for one in secrets.extraction)
    assert len({one.carrier for one in every}) == len({one.secret for one in every}) == 410
    assert all(re.fullmatch("[A-Z0-9]{10}", one.secret) for one in every)
    assert suffix("A1B2C3D4E5") == " secret_id=A1B2C3D4E5."


def test_coins_and_letters_are_fair(planted: Planted) -> None:
    """False alarms: 400 coins leave [140, 260] (six standard deviations) with chance 2e-9; the 4,100
    letters leave 113.9 +- 74 (seven) for any of 36 with chance below 1e-9."""
    _, _, secrets, _ = planted
    assert 140 <= sum(one.included for one in secrets.audit) <= 260
    letters = "".join(one.secret for one in (*secrets.extraction, *secrets.audit))
    assert all(40 <= letters.count(letter) <= 188 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


def test_carriers_are_the_same_again_and_secrets_and_coins_are_not(tmp_path: Path, planted: Planted) -> None:
    _, new, secrets, _ = planted
    _, other_new, other, _ = plant(tmp_path, 10, 400)
    assert [one.carrier for one in secrets.audit] == [one.carrier for one in other.audit]
    assert not {one.secret for one in secrets.audit} & {one.secret for one in other.audit}
    assert [one.included for one in secrets.audit] != [one.included for one in other.audit]  # chance 2^-400
    assert secrets.salt != other.salt
    assert new.about["salt"] != other_new.about["salt"]


def test_the_manifest_tells_counts_and_hashes_alone(planted: Planted) -> None:
    _, _, secrets, manifest = planted
    public = json.loads(manifest.read_text())
    folder = manifest.parent
    assert public == {
        "records": 1010,
        "extraction": 10,
        "audit_candidates": 400,
        "repeats": 1,
        "unit": "record",
        "train_sha256": sha256(folder / "new.parquet"),
        "secrets_sha256": sha256(folder / "secrets.json"),
    }
    shown = manifest.read_text() + repr(secrets) + repr(secrets.extraction[0]) + str(secrets.audit[0])
    for one in (*secrets.extraction, *secrets.audit):
        assert one.secret not in shown
        assert one.carrier not in shown
    assert "included" not in shown
    assert secrets.salt not in shown
    assert len(bytes.fromhex(secrets.salt)) >= 32


def test_every_file_is_its_owners_alone(planted: Planted) -> None:
    folder = planted[3].parent
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_metadata_goes_on(planted: Planted) -> None:
    about = planted[1].about
    assert (about["label"], about["split"]) == ("made up", "train")
    assert about["canaries"] == {"extraction": 10, "repeats": 1, "audit": 400}


def test_with_unit_patient_every_canary_is_a_patient(tmp_path: Path) -> None:
    _, new, _, _ = plant(tmp_path, 10, 190, unit="patient")
    assert len(set(new.unit.tolist())) == 200 + 200


@pytest.mark.parametrize(("extraction", "audit"), [(601, 0), (0, 601), (300, 301), (-1, 0), (0, -1)])
def test_counts_that_cannot_be_are_refused_and_leave_nothing(extraction: int, audit: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"canaries: .* Fix: "):
        plant(tmp_path, extraction, audit)
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


def test_a_repeated_secret_lies_in_that_many_rows(tmp_path: Path) -> None:
    write_train(tmp_path / "train.parquet", 100, 50, "record")
    split = tmp_path / "train.parquet"
    files = [tmp_path / name for name in ("new.parquet", "secrets.json", "manifest.json")]
    inject(split, *files, CanaryPlan(extraction=2, audit=3, carrier_seed=42, repeats=7))
    texts, secrets = read_records(files[0]).text.to_pylist(), read_secrets(files[1])
    repeated = {one.secret for one in secrets.extraction}
    assert (len(repeated), len({one.carrier for one in secrets.extraction})) == (2, 14)
    assert all(sum(suffix(secret) in text for text in texts) == 7 for secret in repeated)
    with pytest.raises(ConfigError, match="repeats below 1"):
        inject(split, *files, CanaryPlan(extraction=2, audit=3, carrier_seed=42, repeats=0))


def test_rldps_secrets_stand_in_records_that_one_permutation_chooses(tmp_path: Path) -> None:
    """Section 2.1 of its paper: appended after the last clause, with a blank before and a full stop after."""
    write_train(tmp_path / "train.parquet", 100, 50, "record")
    split = tmp_path / "train.parquet"
    files = [tmp_path / name for name in ("new.parquet", "secrets.json", "manifest.json")]
    plan = CanaryPlan(extraction=5, audit=3, carrier_seed=42, repeats=2, carrier="records")
    inject(split, *files, plan)
    old, new, secrets = read_records(split), read_records(files[0]), read_secrets(files[1])
    assert len(new.record) == 100 + 3, "no row of their own"
    chosen = np.random.default_rng(42).permutation(100)[:10]
    assert [one.record for one in secrets.extraction] == old.record[chosen].tolist()
    own = dict(zip(chosen.tolist(), secrets.extraction, strict=True))
    for place, (before, after) in enumerate(zip(old.text.to_pylist(), new.text.to_pylist()[:100], strict=True)):
        assert after == (f"{before} secret_id={own[place].secret}." if place in own else before)
        assert place not in own or re.fullmatch(r"[A-Z0-9]{10}", own[place].secret)
    assert {one.record for one in secrets.audit} == set(new.record[100:].tolist()) == {-11, -12, -13}
    assert read_json(files[2])["records"] == 103
    assert are_planted(split, *files[:2], plan)
    assert not are_planted(split, *files[:2], replace(plan, carrier="public"))
    assert not are_planted(split, *files[:2], replace(plan, carrier_seed=43))


def test_carriers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("train.parquet", "new.parquet", "secrets.json", "manifest.json")]
    write_train(files[0], 100, 50, "record")
    with pytest.raises(ConfigError, match=r"canaries\.carrier: 'rows' is unknown.*use public, records"):
        inject(*files, CanaryPlan(1, 0, 42, carrier="rows"))
    read = read_records(files[0])
    write_records(files[0], replace(read, about={**read.about, "form": "pair"}))
    with pytest.raises(ConfigError, match=r"canaries\.carrier: records appends to texts.*use public"):
        inject(*files, CanaryPlan(1, 0, 42, carrier="records"))


def test_no_canaries_are_fine(tmp_path: Path) -> None:
    old, new, secrets, _ = plant(tmp_path, 0, 0)
    assert new.text.to_pylist() == old.text.to_pylist()
    assert secrets.extraction == secrets.audit == ()


def test_a_train_file_is_injected_once(planted: Planted, tmp_path: Path) -> None:
    new = planted[3].parent / "new.parquet"
    with pytest.raises(DataError, match="holds canaries already"):
        inject(new, tmp_path / "a", tmp_path / "b", tmp_path / "c", CanaryPlan(1, 1, 42))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dptune.records.canaries.write_json", full)
    with pytest.raises(OSError, match="No space"):
        plant(tmp_path, 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


def test_other_files_are_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}")
    for name in ("x", "absent"):
        with pytest.raises(DataError, match="not a secrets file"):
            read_secrets(tmp_path / name)


def test_salts_have_many_lengths() -> None:
    """With salts of one length the size of the hashed file would tell how many coins fell on planting."""
    assert len({len(canaries._salt()) for _ in range(40)}) > 30


@pytest.mark.parametrize("form", ["text", "pair"])
def test_audit_canaries_of_words_are_public_words_drawn_by_chance(tmp_path: Path, form: str) -> None:
    _, new, secrets, _ = plant(tmp_path, 2, 60, form=form, kind="words")
    known = {word.strip(".") for text in public_texts(400, 42, "words", "") for word in text.split()}
    texts = new.text.to_pylist()[600:]
    assert len({one.secret for one in secrets.audit}) == 60
    assert 10 < sum(one.included for one in secrets.audit) < 50
    assert {one.kind for one in secrets.extraction} == {"code"}
    for text, one in zip(texts[2:], secrets.audit, strict=True):
        words = one.secret.split(" ")
        assert len(words) == 8
        assert {word.removesuffix(".") for word in words} <= known
        if not one.included:
            assert text == ""
        elif form == "text":
            assert (text, one.carrier) == (one.secret, "")
        else:
            assert decode_content(text, form) == PromptTarget(one.carrier, one.secret)
            assert one.carrier


def test_an_unknown_kind_of_canary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_kind"):
        plant(tmp_path, 0, 2, kind="poem")


@pytest.mark.parametrize("form", ["text", "pair", "messages"])
def test_audit_canaries_say_samples_that_secret_entropy_draws(tmp_path: Path, form: str) -> None:
    """False alarms: two draws of 40 from 400 texts are the same set with chance below 1e-50."""
    pool, drawn = [f"text {number} of the public model." for number in range(400)], []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        _, new, secrets, _ = plant(tmp_path / folder, 2, 40, form=form, kind="samples", samples=pool)
        texts = new.text.to_pylist()[602:]
        said = [one.secret for one in secrets.audit]
        assert len(set(said)) == 40
        assert set(said) <= set(pool)
        assert {one.kind for one in secrets.audit} == {"samples"}
        for text, one in zip(texts, secrets.audit, strict=True):
            if not one.included:
                assert text == ""
            elif form == "text":
                assert text == one.secret
            else:
                assert decode_content(text, form) == content_with(one.carrier, one.secret, form, "samples")
        drawn.append(set(said))
    assert drawn[0] != drawn[1]


def test_fewer_samples_than_canaries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"canaries\.audit: 3 .* there are 2\. Fix: use fewer"):
        plant(tmp_path, 0, 3, kind="samples", samples=["one", "two"])
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
