"""``dptune.tune`` and ``dptune tune``: from files of every kind to an adapter that loads and verifies."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_tuning import QUICK, checkpoint, rows, write_csv, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from typer.testing import CliRunner, Result

import dptune
from dptune.cli import app
from dptune.cli.tune_result import gains
from dptune.core.errors import ConfigError, DptuneError
from dptune.job import run
from dptune.job.base_model import open_base
from dptune.job.delivery.privacy_section import END, START
from dptune.job.delivery.verification import CardError, check_deliverable, section_of
from dptune.job.preparation import PreparedRun, prepare
from dptune.job.result import HELD_OUT, PUBLIC
from dptune.job.settings import TuneSettings
from dptune.privacy.ledger_file import read_ledger
from dptune.records.reading.source import RecordSource
from dptune.training.models.model import trainable_state

ARGUMENTS = ["--epsilon", "8", "--epochs", "2", "--expected-batch-size", "8", "--rank", "2"]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", "--model", str(checkpoint()), *arguments])


def loaded(folder: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint()), str(folder))


def prepared(records: list[dict[str, Any]], **settings: Any) -> PreparedRun:
    chosen = TuneSettings(**{"epsilon": 8.0, **QUICK, **settings})
    return prepare(RecordSource(records, unit="customer_id"), open_base(str(checkpoint()), chosen), chosen)


FILES = {
    "records.csv": lambda path: write_csv(path, rows()),
    "pairs.jsonl": lambda path: write_jsonl(
        path, [{"prompt": f"{n} red cat", "completion": " blue dog."} for n in range(40)]
    ),
    "chats.jsonl": lambda path: write_jsonl(
        path,
        [
            {"messages": [{"role": "user", "content": f"{n} cat "}, {"role": "assistant", "content": "old dog."}]}
            for n in range(40)
        ],
    ),
    "lines.txt": lambda path: path.write_text("".join(f"{n} red cat.\n" for n in range(40))),
}


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_becomes_an_adapter_that_loads_and_verifies(name: str, tmp_path: Path) -> None:
    FILES[name](tmp_path / name)
    unit = ["--unit", "customer_id"] if name == "records.csv" else []
    out = tmp_path / "out"
    done = command("--data", str(tmp_path / name), *unit, *ARGUMENTS, "--out", str(out))
    assert done.exit_code == 0, done.output
    told = re.findall(r"perplexity_(?:before|after)_held_out +│ (\S+)", done.stdout)
    before, after = map(float, told)
    assert ("No better than the base model: perplexity of held-out" in done.stdout) is (after >= before)
    assert ("Better than no tuning: perplexity of held-out" in done.stdout) is (after < before)
    for gloss in ("(what is proved)", "(leaks of the controller ignored)", "not measured"):
        assert gloss in done.stdout
    assert "epsilon_certified is the one that counts: " in done.stdout
    whose = "unit `customer_id` with all its records" if unit else "record"
    assert f", for adding or removing one {whose}." in done.stdout
    assert "statistic of private records" in done.stdout
    contents = check_deliverable(out / "adapter")
    assert contents.complete
    assert contents.epsilons.certified <= 8
    assert contents.header.unit == ("customer_id" if unit else "record")
    model = loaded(out / "adapter")
    assert any(bool(one.any()) for key, one in model.state_dict().items() if "lora_B" in key)
    assert AutoTokenizer.from_pretrained(out / "adapter").pad_token_id is not None
    said = CliRunner().invoke(app, ["verify", str(out / "adapter")])
    assert said.exit_code == 0, said.output
    assert 'Compared: the section "Privacy" of ' in said.stdout
    for file in ("ledger.jsonl", "adapter_model.safetensors", "records.json", "tokenizer.json"):
        assert file in said.stdout.partition("SHA-256 of ")[2].partition(";")[0]
    for file in (out / "adapter").rglob("*"):
        assert str(tmp_path).encode() not in file.read_bytes(), file
        assert str(checkpoint().parent).encode() not in file.read_bytes(), file


@pytest.mark.parametrize(("after", "told"), [(2.9, True), (2.6, True), (math.nan, True), (2.5, False)])
def test_a_model_that_training_made_no_better_is_called_so(after: float, told: bool) -> None:
    (said,) = gains(SimpleNamespace(perplexity={HELD_OUT: (2.6, after)}))
    assert said.startswith("No better than the base model") is told
    assert said.startswith(f"Better than no tuning: perplexity of {HELD_OUT} is 2.5, and was 2.6.") is not told


def test_python_rows_and_a_loaded_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = dptune.tune(
        model, rows(), epsilon=8, delta=1e-3, unit="customer_id", tokenizer=tokenizer, public=rows(10), **QUICK
    )
    assert result.epsilons.certified <= 8
    assert result.ledger.header.delta == 1e-3
    assert set(result.perplexity) == {HELD_OUT, PUBLIC}
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    saved = result.save(tmp_path / "handed on")
    assert check_deliverable(saved).chain == result.ledger.chain
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(loaded(saved)(ids).logits, result.model(ids).logits, atol=1e-5)
    with pytest.raises(DptuneError, match="holds something already"):
        result.save(saved)


def test_a_loaded_model_of_which_some_weights_would_train_is_refused() -> None:
    """Somebody who froze a part of a model expects the rest to train."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    next(iter(model.parameters())).requires_grad_(False)
    with pytest.raises(DptuneError, match="has some weights that train, and the setting train says which do"):
        dptune.tune(model, rows(), epsilon=8, tokenizer=AutoTokenizer.from_pretrained(checkpoint()), **QUICK)


def test_scalings_ranks_and_start_reach_peft_and_the_card(tmp_path: Path) -> None:
    ways = {"rslora": True, "rank_pattern": {"c_attn": 4}, "init_lora_weights": "orthogonal"}
    result = dptune.tune(
        checkpoint(), rows(), epsilon=8, delta=1e-3, unit="customer_id", out=tmp_path / "t", **QUICK, **ways
    )
    saved = result.save(tmp_path / "handed on")
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["rank_pattern"], config["init_lora_weights"]) == (
        True,
        {"c_attn": 4},
        "orthogonal",
    )
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(loaded(saved)(ids).logits, result.model(ids).logits, atol=1e-5)
    card = (saved / "README.md").read_text()
    assert all(
        line in card for line in ("| LoRA scaling | alpha / sqrt(rank) |", "| LoRA ranks of layers | c_attn: 4 |")
    )
    (never_read := tmp_path / "never read.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="init_lora_weights: 'eva' reads records"):
        dptune.tune(checkpoint(), never_read, epsilon=8, init_lora_weights="eva", out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_data_sets_of_the_datasets_library_are_tuned_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the library is not installed: pip install 'dptune[datasets]'")
    records = datasets.Dataset.from_list(rows())
    result = dptune.tune(str(checkpoint()), records, epsilon=8, unit="customer_id", out=tmp_path / "one", **QUICK)
    assert result.ledger.header.unit == "customer_id"
    assert result.ledger.header.units == len(prepared(rows()).units)
    records.save_to_disk(str(tmp_path / "saved"))
    out = ["--out", str(tmp_path / "other")]
    done = command("--data", str(tmp_path / "saved"), "--unit", "customer_id", *ARGUMENTS, *out)
    assert done.exit_code == 0, done.output
    contents = check_deliverable(tmp_path / "other" / "adapter")
    assert contents.header.units == result.ledger.header.units


def test_the_same_command_again_makes_nothing_new(tmp_path: Path) -> None:
    arguments = ["--data", str(write_csv(tmp_path / "r.csv", rows())), *ARGUMENTS, "--out", str(tmp_path / "out")]
    assert command(*arguments).exit_code == 0
    ledger = (tmp_path / "out" / "ledger.jsonl").read_bytes()
    again = command(*arguments, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout.splitlines()[-1])["complete"]
    assert (tmp_path / "out" / "ledger.jsonl").read_bytes() == ledger
    scaled = command(*arguments, "--alpha-pattern", "c_attn=9", "--rslora")
    assert scaled.exit_code == 2
    assert "--alpha-pattern" in scaled.stderr, "another function of the same numbers"
    other = command(*arguments, "--learning-rate", "0.5")
    assert other.exit_code == 2
    assert "--out: " in other.stderr
    assert "--learning-rate: 0.02 then, 0.5 now" in other.stderr
    assert command(*arguments, "--dtype", "float32").exit_code == 0, "what a CPU takes by default"
    halves = command(*arguments, "--dtype", "bfloat16")
    assert "dtype: float32 then, bfloat16 now" in halves.stderr, "also where a device changes the default"
    assert other.stdout == ""  # no table of what will not be done
    write_csv(tmp_path / "r.csv", rows()[1:])
    said = command(*arguments).stderr
    assert "other settings (records" in said
    assert not re.search("[0-9a-f]{32}", said), "a digest of records, or its salt, is for no log"


def test_checkpointing_changes_no_setting_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that did not fit into memory goes on with it, and the training gets it."""
    asked: list[bool] = []
    real = run.train
    monkeypatch.setattr(
        run, "train", lambda spec, *a: (asked.append(spec.plan.gradient_checkpointing), real(spec, *a))[1]
    )
    file, out = write_csv(tmp_path / "a.csv", rows()), tmp_path / "out"
    for more in (["--gradient-checkpointing"], ["--physical-batch-size", "8"]):
        done = command("--data", str(file), "--unit", "customer_id", *ARGUMENTS, "--out", str(out), *more)
        assert done.exit_code == 0, done.output
    assert asked[0]
    assert check_deliverable(out / "adapter").complete


def test_a_base_in_bfloat16_is_tuned_and_named_on_the_card(tmp_path: Path) -> None:
    file, out = write_csv(tmp_path / "a.csv", rows()), tmp_path / "out"
    done = command("--data", str(file), *ARGUMENTS, "--out", str(out), "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert "| base weights | bfloat16 |" in (out / "adapter" / "README.md").read_text()
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.bfloat16), str(out / "adapter")
    )
    dtypes = {"lora" in name: weight.dtype for name, weight in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_a_base_in_4_bits_is_tuned_verified_and_named_on_the_card(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="weights in 4 bits need pip install 'dptune[quantized]'")
    file, out = write_csv(tmp_path / "a.csv", rows()), tmp_path / "out"
    arguments = ["--data", str(file), "--unit", "customer_id", *ARGUMENTS, "--out", str(out), "--load-in-4bit"]
    dry = command(*arguments, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout)["base_weights"] == "bitsandbytes (4 bit)"
    assert command(*arguments).exit_code == 0
    assert check_deliverable(out / "adapter").epsilons.certified <= 8
    assert "| base weights | bitsandbytes (4 bit) |" in (out / "adapter" / "README.md").read_text()
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=asked)
    again = PeftModel.from_pretrained(base, str(out / "adapter"))
    assert any(bool(one.any()) for key, one in again.state_dict().items() if "lora_B" in key)
    other = command(*(one for one in arguments if one != "--load-in-4bit"))
    assert other.exit_code == 2
    assert "--load-in-4bit: True then, False now" in other.output


def test_a_loaded_model_in_4_bits_is_tuned() -> None:
    pytest.importorskip("bitsandbytes", reason="weights in 4 bits need pip install 'dptune[quantized]'")
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=asked).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    result = dptune.tune(model, rows(), epsilon=8, unit="customer_id", tokenizer=tokenizer, **QUICK)
    assert result.epsilons.certified <= 8


def test_private_telemetry_tells_no_statistic_of_private_records(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "r.csv", rows())
    out = tmp_path / "out"
    shortened = ["--max-length", "8"]
    done = command("--data", str(data), *ARGUMENTS, *shortened, "--telemetry", "private", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "warning: records of more than 7 tokens lose what is beyond; private telemetry does not say" in done.stderr
    assert "perplexity_" not in done.stdout
    assert " of 40 " not in done.output, "how many records are cut, say"
    assert "records_" not in done.stdout.replace("records_per_unit", "")
    assert json.loads((out / "result.json").read_text())["after"] == {}
    assert "Not shown: figures come only from public records" in (out / "adapter" / "README.md").read_text()
    assert read_ledger(out / "ledger.jsonl").header.units == 40  # nobody is held out


def test_removing_one_customer_changes_exactly_that_unit() -> None:
    whole = prepared(rows())
    trained = _texts_of_units(whole)
    for customer in ("c0", "c7", "c13"):
        less = [row for row in rows() if row["customer_id"] != customer]
        left, gone = _texts_of_units(prepared(less)), trained - _texts_of_units(prepared(less))
        assert left <= trained
        assert len(gone) <= 1
        assert all(_is_of(unit, customer) for unit in gone)
    assert sum(len(unit) for unit in trained) == len(whole.tokens.rows)


def _texts_of_units(ready: PreparedRun) -> set[frozenset[tuple[int, ...]]]:
    return {frozenset(tuple(ready.tokens.rows[record].tolist()) for record in unit) for unit in ready.units.members}


def _is_of(unit: frozenset[tuple[int, ...]], customer: str) -> bool:
    decode = AutoTokenizer.from_pretrained(checkpoint()).decode
    texts = {row["text"] for row in rows() if row["customer_id"] == customer}
    return all(any(text.startswith(decode(list(ids[:4]))) for text in texts) for ids in unit)


@pytest.mark.long
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    data, out = write_csv(tmp_path / "r.csv", rows()), tmp_path / "out"
    arguments = [
        "--data",
        str(data),
        "--epsilon",
        "8",
        "--epochs",
        "30",
        "--expected-batch-size",
        "8",
        "--out",
        str(out),
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "dptune.cli", "tune", "--model", str(checkpoint()), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    _wait_for_releases(child, out, 15)
    child.send_signal(signal.SIGINT)
    asked = time.monotonic()
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert time.monotonic() - asked < 60
    releases = read_ledger(out / "ledger.jsonl").releases
    assert stderr.strip().splitlines()[-1] == f"stopped: at release {releases} of 139; run again to go on"
    again = command(*arguments)
    assert again.exit_code == 0, again.output
    contents = check_deliverable(out / "adapter")
    assert contents.releases == 139
    assert contents.epsilons.certified <= 8


def _wait_for_releases(child: subprocess.Popen[str], out: Path, count: int) -> None:
    for _ in range(2000):
        lines = (out / "ledger.jsonl").read_bytes().count(b"\n") if (out / "ledger.jsonl").exists() else 0
        if lines > count:
            return
        assert child.poll() is None, child.stderr.read() if child.stderr else ""
        time.sleep(0.05)
    raise AssertionError("no release was made")


def test_a_run_that_ended_before_its_card_was_written_delivers_it(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dptune.job.run.deliver", broken)
    arguments = ["--data", str(write_csv(tmp_path / "r.csv", rows())), *ARGUMENTS, "--out", str(tmp_path / "out")]
    assert command(*arguments).exit_code == 130
    assert not (tmp_path / "out" / "adapter").exists()
    monkeypatch.undo()
    assert command(*arguments).exit_code == 0
    assert check_deliverable(tmp_path / "out" / "adapter").complete


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("delivered") / "out"
    dptune.tune(str(checkpoint()), rows(), epsilon=8, unit="customer_id", out=out, **QUICK)
    return out / "adapter"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("README.md", "| epsilon_certified | 8 ", "| epsilon_certified | 1 "),
        ("README.md", "| delta | 0.001 ", "| delta | 1e-9 "),
        ("README.md", "unit `customer_id`", "unit `record`"),
        ("README.md", "- Other adapters from the same records: their epsilons add up.\n", ""),
        ("README.md", "<!-- dptune: end -->", ""),
        ("README.md", "## Perplexity", "<!-- dptune: checked by `dptune verify` -->\n## Privacy\n"),
        ("ledger.jsonl", '"unit":"customer_id"', '"unit":"record"'),
        ("adapter_model.safetensors", None, None),
        ("adapter_config.json", '"lora_alpha": 16', '"lora_alpha": 64'),
        ("tokenizer.json", None, None),
        ("tokenizer_config.json", None, None),
    ],
)
def test_a_card_a_ledger_or_weights_that_were_changed_are_refused(
    delivered: Path, tmp_path: Path, file: str, old: str | None, new: str | None
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in delivered.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    content = (copy / file).read_bytes()
    changed = (
        content[:-1] + bytes([content[-1] ^ 1]) if old is None else content.replace(old.encode(), str(new).encode())
    )
    assert changed != content
    (copy / file).write_bytes(changed)
    with pytest.raises(DptuneError) as caught:
        check_deliverable(copy)
    assert isinstance(caught.value, CardError) == (file != "ledger.jsonl")
    said = CliRunner().invoke(app, ["verify", str(copy)])
    assert said.exit_code == 2
    assert "Fix:" in said.stderr.strip().splitlines()[-1]


def test_no_file_of_a_delivered_folder_may_change_or_go(delivered: Path, tmp_path: Path) -> None:
    """Whatever is handed on is named by the card, that of a tokenizer which knows chats too."""
    files = [path.name for path in delivered.iterdir() if path.name != "README.md"]
    assert "chat_template.jinja" in files
    for name in files:
        for change in (lambda file: file.write_bytes(file.read_bytes() + b" "), lambda file: file.unlink()):
            copy = Path(shutil.copytree(delivered, tmp_path / "copy"))
            change(copy / name)
            with pytest.raises(DptuneError):
                check_deliverable(copy)
            shutil.rmtree(copy)


def test_a_ledger_that_was_cut_is_refused_though_the_card_says_what_is_left(delivered: Path, tmp_path: Path) -> None:
    """The weights follow from its last releases too, which would be free."""
    copy = Path(shutil.copytree(delivered, tmp_path / "copy"))
    ledger, card = copy / "ledger.jsonl", copy / "README.md"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-3]))
    section, epsilon = section_of(copy)
    assert epsilon < section_of(delivered)[1]
    text = card.read_text()
    card.write_text(text[: text.index(START)] + section + text[text.index(END) + len(END) :])
    with pytest.raises(CardError, match="has no end, so that more may have been released"):
        check_deliverable(copy)
    assert CliRunner().invoke(app, ["verify", str(copy)]).exit_code == 2


def test_what_a_run_leaves_is_its_owners_and_its_ledger_prints_as_one_line(delivered: Path, tmp_path: Path) -> None:
    for path in [delivered.parent, *delivered.parent.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    said = repr(check_deliverable(delivered))
    assert len(said) < 200
    assert "static" in said
    assert "customer_id" in said


def test_words_of_ones_own_may_be_added_to_a_card(delivered: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in delivered.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    card = copy / "README.md"
    card.write_text(card.read_text() + "\n## Contact\n\nUs.\n")
    check_deliverable(copy)


def test_the_digest_of_records_sees_each_record_and_each_unit() -> None:
    salt, other = "00" * 16, rows()
    digest = prepared(rows()).digest(salt)
    assert prepared(rows()).digest(salt) == digest
    other[3]["customer_id"] = other[4]["customer_id"]
    assert prepared(other).digest(salt) != digest
    assert prepared(rows()[:-1]).digest(salt) != digest
    assert prepared(rows()).digest("01" * 16) != digest


def test_mechanisms_that_follow_public_records_ask_for_them() -> None:
    with pytest.raises(ConfigError, match="public: rldp follows the loss on public records"):
        prepared(rows(), mechanism="rldp", options={"interval": 2, "warmup": 2})


@pytest.mark.one_case
@pytest.mark.parametrize(("mechanism", "options"), [("quantile", {}), ("rldp", {"interval": 2, "warmup": 2})])
def test_adaptive_mechanisms_tune_within_the_budget(mechanism: str, options: dict[str, Any], tmp_path: Path) -> None:
    result = dptune.tune(
        str(checkpoint()),
        rows(),
        epsilon=8,
        public=rows(10),
        mechanism=mechanism,
        options=options,
        out=tmp_path,
        **QUICK,
    )
    assert result.epsilons.certified <= 8
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "| epsilon_audited | not in this section, which is written before any attack: a study has it in" in card


def test_adapters_start_alike_whatever_the_records_are(tmp_path: Path) -> None:
    base = open_base(str(checkpoint()), TuneSettings(epsilon=8.0, rank=2))
    one, other = (trainable_state(_attached(base)) for _ in range(2))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def _attached(base: Any) -> Any:
    from dptune.training.models.model import attach_lora

    return attach_lora(base.load(), base.lora, 0)


def test_a_model_is_the_same_by_another_path_and_another_with_other_weights(tmp_path: Path, monkeypatch: Any) -> None:
    """A run may go on from another directory, and not on another model."""
    settings = TuneSettings(epsilon=8, **QUICK)
    shutil.copytree(checkpoint(), tmp_path / "base")
    identity = open_base(str(tmp_path / "base"), settings).identity
    monkeypatch.chdir(tmp_path)
    assert open_base("base", settings).identity == identity
    weights = tmp_path / "base" / "model.safetensors"
    for place in (-1, weights.stat().st_size // 4):
        changed = bytearray(weights.read_bytes())
        changed[place] ^= 1
        weights.write_bytes(changed)
        assert open_base("base", settings).identity != identity
        identity = open_base("base", settings).identity
