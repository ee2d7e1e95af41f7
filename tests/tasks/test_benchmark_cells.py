"""Benchmarks run through all stages: labels by a head and by words, texts that are written and scored, fixed parts."""

from __future__ import annotations

import json
import shutil
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_pipeline import cells, merge, read_json, run_stages, write_params

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import write_text
from dptune.privacy.ledger_file import read_ledger
from dptune.records import published_files
from dptune.records.parquet_file import decode_content, form_at, read_records
from dptune.training.tokens.token_file import open_corpus
from flows.prediction import reason_to_skip, skip
from tasks.audit.attacks import audit_cell
from tasks.experiment.cell_list import group_cells
from tasks.experiment.checks import check_models
from tasks.experiment.finetune import run_cell
from tasks.paths import CANARIES, EVAL, POLICY, PREDICTION, PUBLIC_VALIDATION, SPLITS, TOKENS, TRAIN
from tasks.policy.rlhf import cells as policy_cells
from tasks.policy.rlhf import run_cell as run_prompts
from tasks.report.experiment import write_report
from tasks.settings.learned_reward import check_reward
from tasks.settings.params import load_settings
from tasks.settings.policy import rlhf_of
from tasks.split_records import settings_of_records

NO_CANARIES = {"canaries": {"extraction": 0, "audit": 0}, "lora": {"target_modules": None}}
WORDS = {"pretrain": {"merges": "words", "vocabulary": 400}}
FEW = {"generations": 20, "candidates": 3, "records": 6, "shadows": 0}
SST2: dict[str, Any] = merge(
    merge(NO_CANARIES, WORDS),
    {
        "data": {"source": "glue", "path": "sst2", "label": "label", "parts": {"eval": "dev", "public": "dev"}},
        "task": {"kind": "classify", "labels": ["0", "1"]},
        "training": {"max_length": 24, "epochs": 0.3, "expected_batch_size": 16},
    },
)
E2E: dict[str, Any] = merge(
    merge(NO_CANARIES, WORDS),
    {
        "data": {
            "source": "e2e",
            "path": "e2e",
            "unit": "mr",
            "parts": {"eval": "test", "public": "dev", "attack": 0.2},
            "options": {"separator": " ="},
        },
        "task": {"inputs": 3, "max_new_tokens": 4, "metrics": ["bleu_e2e", "cider_13a"]},
        "training": {"max_length": 48, "epochs": 0.3, "records_per_unit": 2},
    },
)


@pytest.fixture
def files(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of both benchmarks' layouts, with rows made up here."""
    monkeypatch.setattr(published_files, "KNOWN", {})
    (empty / "sst2").mkdir()
    for part, count in (("train", 120), ("dev", 20)):
        rows = "".join(
            f"a {['bad', 'good'][number % 2]} cat number {number}\t{number % 2}\n" for number in range(count)
        )
        (empty / "sst2" / f"{part}.tsv").write_text(f"sentence\tlabel\n{rows}")
    (empty / "e2e").mkdir()
    for name, first, count in (("trainset.csv", 0, 120), ("devset.csv", 500, 10), ("testset_w_refs.csv", 900, 10)):
        rows = "".join(f'"name[Bo], near[{first + one // 2}]",Bo is near {first} {one}.\n' for one in range(count))
        (empty / "e2e" / name).write_text(f"mr,ref\n{rows}")
    return empty


def run_one(changes: dict[str, Any], trials: int = 0) -> tuple[Path, dict[str, Any]]:
    """All stages and the static cell, then its audit, with ``trials`` trials of its step; its folder and its result."""
    run_stages(changes)
    check_models(load_settings())
    cell = next(one for one in cells(changes) if one.mechanism == "static")
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    settings = load_settings().audit.model_copy(update=FEW | {"step_trials": trials})
    audit = audit_cell(cell.directory, settings, "cpu")
    assert audit["violations"] == []
    assert audit["membership"]["likelihood"]["members"] == 6
    assert "step" not in audit if not trials else audit["step"]["trials"] == trials
    return cell.directory, read_json(cell.directory / "result.json")


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["head of an encoder", "head of a causal model", "words"])
def test_labels_are_learned_end_to_end(files: Path, way: str, quick_pictures: None) -> None:
    own = {"pretrain": {"shape": "roberta"}} if way == "head of an encoder" else {}
    if way == "words":
        own = {"task": {"words": [" 3", " 4"]}, "data": {"options": {"template": "{first} is"}}}
    folder, result = run_one(merge(SST2, own), trials=0 if way == "words" else 500)
    assert read_records(TRAIN).about["form"] == "label"
    assert len(read_records(EVAL).record) == len(read_records(PUBLIC_VALIDATION).record) == 20
    assert result["task"] == "classify"
    assert result["after"]["eval_largest_class"] == 0.5
    assert 0 <= result["after"]["eval_accuracy"] <= 1
    assert set(result["before"]) == set(result["after"])
    assert result["pairs"][-1] == ("head" if way.startswith("head") else result["pairs"][0])
    assert read_ledger(folder / "ledger.jsonl").header.units == len(read_records(TRAIN).record)
    assert result["epsilon_certified"] <= 0.3
    write_report([result], Path("report"), "sst2")
    page = Path("report/report.html").read_text(encoding="utf-8")
    assert "calibration error" in page
    assert "A constant answer has an accuracy of 0.5000" in page


def test_readmission_is_learned_from_narratives_that_do_not_say_it(empty: Path, quick_pictures: None) -> None:
    own = {"source": "synthetic", "unit": "patient", "label": "readmitted"}
    task = {"kind": "classify", "labels": ["NO", ">30", "<30"]}
    _, result = run_one(merge(NO_CANARIES, {"data": own, "task": task}))
    for file in (TRAIN, EVAL, PUBLIC_VALIDATION):
        found = read_records(file)
        contents = [decode_content(text, form_at(found.about)) for text in found.text.to_pylist()]
        assert {one.label for one in contents} <= set(task["labels"]), file
        assert not any("readmitted" in one.text for one in contents)
        assert all(one.text.endswith("prescribed.") for one in contents), "the clause before it"
    assert result["unit"] == "patient"
    assert result["data"].startswith("SYNTHETIC private cohort")
    assert 0 < result["after"]["eval_accuracy"] < 1


@pytest.mark.parametrize(("source", "label"), [("synthetic", "age"), ("uci", "patient")])
def test_narratives_have_one_label(empty: Path, source: str, label: str) -> None:
    task = {"kind": "classify", "labels": ["a", "b"]}
    write_params(NO_CANARIES, {"data": {"source": source, "label": label}, "task": task})
    with pytest.raises(ConfigError, match="narratives may leave out readmitted alone, to be learned: use readmitted"):
        load_settings()


def test_texts_are_written_and_scored_end_to_end(files: Path, quick_pictures: None) -> None:
    folder, result = run_one(E2E)
    train, held_out = read_records(SPLITS / "train.parquet"), read_records(EVAL)
    attack = read_records(SPLITS / "attack.parquet")
    assert len(train.record) + len(attack.record) == 120
    assert len(attack.record)
    assert not set(train.unit.tolist()) & set(attack.unit.tolist()), "a unit is on one side"
    assert len(held_out.record) == 10
    assert not set(held_out.unit.tolist()) & {*train.unit.tolist(), *attack.unit.tolist()}
    assert set(result["scores"]) == set(result["signatures"]) == {"bleu_e2e", "cider_13a"}
    assert (result["inputs"], result["decoding"]) == (3, "greedy, at most 4 tokens")
    outputs = folder / "outputs.jsonl"
    lines = [json.loads(line) for line in outputs.read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == [f"name : Bo | near : {number} =" for number in (900, 901, 902)]
    assert outputs.stat().st_mode & 0o777 == 0o600
    write_report([result], Path("report"), "e2e")
    assert "sacrebleu BLEU: nrefs:2|case:lc" in Path("report/report.html").read_text(encoding="utf-8")


def test_prompts_that_leave_no_room_are_refused_before_a_cell_trains_and_pays(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task\.max_new_tokens: 500 beside a prompt of \d+ tokens is more than"):
        run_one(merge(E2E, {"task": {"max_new_tokens": 500}}))
    assert not [*Path().rglob("ledger.jsonl")]
    assert not [*Path().rglob("spent.jsonl")]


def test_under_private_telemetry_nothing_is_scored(files: Path) -> None:
    changes = merge(E2E, {"experiment": {"telemetry": "private", "mechanisms": ["static"]}})
    run_stages(changes)
    (cell,) = cells(changes)
    run_cell(cell, "cpu")
    assert "scores" not in read_json(cell.directory / "result.json")
    assert not (cell.directory / "outputs.jsonl").exists()
    labels = merge(SST2, {"experiment": {"telemetry": "private", "mechanisms": ["static"]}})
    run_stages(labels)
    (cell,) = cells(labels)
    run_cell(cell, "cpu")
    assert set(read_json(cell.directory / "result.json")["after"]) == {"public_perplexity"}


@pytest.mark.long
def test_a_learned_controller_takes_words_and_refuses_a_head(files: Path) -> None:
    rldp = {"experiment": {"mechanisms": ["rldp"]}, "mechanisms": {"rldp": {"interval": 2, "warmup": 1}}}
    words = {"task": {"words": [" 3", " 4"]}, "data": {"options": {"template": "{first} is"}}}
    run_stages(merge(SST2, rldp))
    (cell,) = cells(merge(SST2, rldp))
    with pytest.raises(ConfigError, match="head"):
        run_cell(cell, "cpu")
    run_stages(merge(merge(SST2, rldp), words), pretrained=False)
    (cell,) = cells(merge(merge(SST2, rldp), words))
    run_cell(cell, "cpu")


@pytest.mark.long
def test_words_stand_at_the_end_of_texts_that_are_cut(files: Path) -> None:
    words = {"task": {"words": [" 3", " 4"]}, "data": {"options": {"template": "{first} is"}}}
    changes = merge(merge(SST2, words), {"training": {"max_length": 8}})
    run_stages(changes)
    (cell,) = [one for one in cells(changes) if one.mechanism == "nonprivate"]
    run_cell(cell, "cpu")
    (file,) = TOKENS.glob("train-*.arrow")
    rows = open_corpus(file).tokens.rows
    ends = {int(~row[-2]) for row in rows}
    assert len(ends) == 1, "each text's last token is the template's"


def test_cells_of_labels_do_not_share_a_pass(files: Path) -> None:
    changes = merge(SST2, {"experiment": {"cells_together": 8}})
    run_stages(changes)
    assert [len(group.cells) for group in group_cells(cells(changes), 8)] == [1, 1]


def test_prediction_leaves_a_note_for_labels(files: Path) -> None:
    write_params(SST2)
    skip(str(reason_to_skip(load_settings())))
    assert "next tokens" in read_json(PREDICTION / "skipped.json")["reason"]


def test_prediction_can_be_left_out() -> None:
    assert reason_to_skip(load_settings()) is None
    assert reason_to_skip(load_settings(overrides={"prediction": {"models": []}})) == "prediction.models is empty"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": {"labels": ["0"]}}, "name all labels"),
        ({"task": {"labels": []}}, "name all labels"),
        ({"task": {"labels": ["0", "0"]}}, "is given twice"),
        ({"task": {"words": [" good"]}}, "there are 1, and 2 labels"),
        ({"task": {"inputs": 3}}, "a classifier writes nothing"),
        ({"task": {"kind": "generate"}}, "are for kind: classify"),
        ({"task": {"kind": "generate", "labels": []}}, "only task.kind: classify learns labels"),
        ({"data": {"label": None}}, "name the column of the labels"),
        ({"data": {"parts": None}}, "narratives have no labels"),
        ({"canaries": {"audit": 4}}, "sees no secret in a text"),
        ({"audit": {"shadows": 4}}, "which a classifier has none of"),
        ({"data": {"public": "dev.tsv"}}, "data.public is given too"),
        ({"data": {"source": "table", "path": "sst2/train.tsv"}}, "source table has none"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(files: Path, change: dict[str, Any], message: str) -> None:
    write_params(SST2, change)
    with pytest.raises(ConfigError, match=message):
        load_settings()


def test_an_encoder_learns_labels_by_a_head_alone(files: Path) -> None:
    for change in (
        {"task": {"words": [" a", " b"]}},
        {"task": {"kind": "generate", "labels": []}, "data": {"label": None}},
    ):
        write_params(SST2, {"pretrain": {"shape": "roberta"}}, change)
        with pytest.raises(ConfigError, match="is an encoder"):
            check_models(load_settings())


def test_zips_are_read_too(files: Path) -> None:
    with zipfile.ZipFile("e2e.zip", "w") as archive:
        for file in Path("e2e").iterdir():
            archive.write(file)
    run_stages(merge(E2E, {"data": {"path": "e2e.zip"}}), pretrained=False)
    assert (CANARIES / "train.parquet").exists()


def test_a_reward_learns_from_no_part_that_holds_the_users_records(files: Path) -> None:
    """A part that is not named is the training part, whose records are the users'; so it is in a copy of the folder."""
    (files / "copy").symlink_to(files / "sst2")
    glue: dict[str, Any] = {"source": "glue", "path": "sst2", "options": {}}
    own, file = "part 'train' holds the users' own records", "is the file of private records"
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, own),
        ({"options": {"part": "train"}}, own),
        ({"path": "copy"}, own),
        ({"options": {"task": "sst2-sentences"}}, own),
        ({"options": {"part": "dev"}}, ""),
        ({"options": {"task": "qqp"}}, ""),
        ({"source": "table", "path": "sst2"}, file),
        ({"source": "table", "path": "copy/train.tsv"}, "lies in .*sst2, the folder of the users' own records"),
    ]
    for change, refused in cases:
        reward = {"encoder": {"source": "mine"}, "positive": "1"} | glue | change
        write_params(SST2, {"policy": {"rlhf": {"reward": reward}}})
        if not refused:
            assert load_settings().policy.rlhf
            continue
        with pytest.raises(ConfigError, match=rf"reward\.(options|path): {refused}"):
            load_settings()
        # The command has settings of its own, and passes no check of params.yaml.
        write_params(SST2, {})
        (cell, *_) = policy_cells(rlhf_of([f"reward={json.dumps(reward)}"]))
        with pytest.raises(ConfigError, match=rf"reward\.(options|path): {refused}"):
            run_prompts(cell)
        assert not POLICY.exists()


def note_stages(data: dict[str, Any], split: str = "two") -> None:
    """Write dvc.lock as DVC does after it has made records with these values."""
    noted: dict[str, Any] = {f"data.{name}": value for name, value in data.items()}
    stages = {
        "acquire": {"params": {"params.yaml": {"plugins": []} | noted}, "outs": [{"path": "data/raw", "md5": "one"}]},
        "verbalize": {
            "deps": [{"path": "data/raw", "md5": "one"}],
            "outs": [{"path": "data/narratives", "md5": "two"}],
        },
        "split": {"deps": [{"path": "data/narratives", "md5": split}]},
    }
    write_text(Path("dvc.lock"), json.dumps({"stages": stages}))


def test_a_reward_is_judged_by_the_settings_that_made_the_records(files: Path) -> None:
    """And not by params.yaml's of today: neither a new run of old records, nor a finished one of new settings."""
    glue = {"source": "glue", "path": "sst2", "options": {}, "parts": {"eval": "dev", "public": "dev"}}
    synthetic: dict[str, Any] = {"source": "synthetic", "path": None, "options": {}, "parts": None, "label": None}
    reward = glue | {"encoder": {"source": "mine"}, "positive": "1"}
    del reward["parts"]
    (cell, *_) = policy_cells(rlhf_of([f"reward={json.dumps(reward)}"]))
    write_params({})
    note_stages(glue)
    with pytest.raises(ConfigError, match="part 'train' holds the users' own records"):
        run_prompts(cell)
    note_stages(glue, split="older")
    with pytest.raises(DataError, match=r"data/narratives as it is now.* run `dvc repro split`"):
        run_prompts(cell)
    write_params(SST2)
    note_stages(synthetic)
    assert settings_of_records().source == "synthetic"
    assert cell.settings.reward
    check_reward(cell.settings.reward, settings_of_records())
    note_stages({"source": "gone"})
    with pytest.raises(ConfigError, match=r"dvc\.lock: source: .*'gone'"):
        run_prompts(cell)
    assert not POLICY.exists()


def test_a_reward_reads_no_plug_in_as_the_users_do() -> None:
    own: Any = SimpleNamespace(source="mine", path=None, options={"year": 2020}, parts=None)
    for options, alike in (({"year": 2020}, True), ({"year": 2021}, False)):
        reward: Any = SimpleNamespace(source="mine", path=None, options=options)
        if alike:
            with pytest.raises(ConfigError, match="with the options of section data reads the users' own records"):
                check_reward(reward, own)
        else:
            check_reward(reward, own)


def test_a_reward_reads_no_folder_around_the_users_file_and_no_copy_of_it(files: Path) -> None:
    """A benchmark's source looks for its file in all folders of its path, which may be public by name."""
    folder, linked = files / "around", files / "linked"
    for place in (folder / "deep", linked, files / "public"):
        place.mkdir(parents=True)
    shutil.copy("sst2/train.tsv", folder / "deep" / "train.tsv")
    shutil.copy("sst2/dev.tsv", files / "public" / "train.tsv")
    (linked / "train.tsv").symlink_to(folder / "deep" / "train.tsv")
    table: dict[str, Any] = {"source": "table", "path": folder / "deep" / "train.tsv"}
    glue = {"source": "glue", "path": Path("sst2")}
    cases = [
        (table, {"source": "glue", "path": folder}, "holds train.tsv, which has the users' own records"),
        (table, {"source": "glue", "path": linked}, "holds train.tsv"),
        (table, {"source": "glue", "path": files / "sst2"}, "holds train.tsv"),
        (glue, {"source": "table", "path": folder / "deep" / "train.tsv"}, "is a file of sst2, which has the users'"),
        (table, {"source": "glue", "path": files / "public"}, ""),
    ]
    for own, read, refused in cases:
        one: Any = SimpleNamespace(options={}, parts=None, **own)
        reward: Any = SimpleNamespace(options={}, **read)
        with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
            check_reward(reward, one)


def test_a_reward_is_looked_for_where_benchmarks_are(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "elsewhere").mkdir()
    (files / "elsewhere" / "sst2").symlink_to(files / "sst2")
    monkeypatch.setenv("DPTUNE_BENCHMARKS", str(files / "elsewhere"))
    own: Any = SimpleNamespace(source="table", path=files / "sst2" / "train.tsv", options={}, parts=None)
    (files / "run").mkdir()
    monkeypatch.chdir(files / "run")
    reward: Any = SimpleNamespace(source="glue", path=Path("sst2"), options={})
    with pytest.raises(ConfigError, match="holds train"):
        check_reward(reward, own)
