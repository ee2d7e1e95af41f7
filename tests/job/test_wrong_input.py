"""Wrong input ends with status 2 and a last line that says the fix, before anything is charged or left behind."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tuning import checkpoint, rows, write_csv, write_jsonl
from transformers import AutoConfig, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from dptune.cli import app
from dptune.cli.console import check_command
from dptune.core.errors import ConfigError
from dptune.core.files import locked
from dptune.job.settings import TuneSettings
from dptune.records.reading.source import RecordSource


def refused(folder: Path, *arguments: str, model: Path | str | None = None, data: Path | None = None) -> str:
    """The last line of a run that ends with status 2 and leaves no ledger."""
    data = data or write_csv(folder / "records.csv", rows())
    given = ["tune", "--model", str(model or checkpoint()), "--data", str(data), "--out", str(folder / "out")]
    done = CliRunner().invoke(app, [*given, *(() if "--epsilon" in arguments else ("--epsilon", "8")), *arguments])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert not (folder / "out" / "ledger.jsonl").exists()
    return str(done.stderr.strip().splitlines()[-1])


OPTIONS: dict[str, tuple[list[str], str, str]] = {
    "negative epsilon": (["--epsilon", "-1"], "--epsilon: -1.0 is below 1e-06", "give a number at least"),
    "large delta": (["--delta", "0.1"], "--delta: 0.1 is 1 over the", "use 0.001"),
    "delta of one": (["--delta", "1"], "--delta: 1.0 is not below 1", "or leave it out"),
    "missing column": (["--text", "note"], "column 'note': this column does not exist", "name one of 'customer_id'"),
    "missing unit": (["--unit", "patient"], "column 'patient': this column does not exist", "name one of"),
    "two ways": (["--text", "text", "--messages", "m"], "text and messages cannot be given like this", "give text"),
    "no such mechanism": (["--mechanism", "statik"], "--mechanism: 'statik' is unknown", "use one of"),
    "a leak": (["--mechanism", "rldp_published"], "--mechanism: rldp_published has no certified epsilon", "sound one"),
    "no noise": (["--mechanism", "nonprivate"], "--mechanism: nonprivate has no noise", "use static"),
    "mechanism's option": (
        ["--set", "radius=1"],
        "--set radius: mechanism 'static' has no option of this name",
        "of max_grad_norm.",
    ),
    "option without =": (["--set", "radius"], "--set radius: has no '='", "KEY=VALUE"),
    "set twice": (["--set", "max_grad_norm=1", "--set", "max_grad_norm=2"], "is given twice", "give it once"),
    "own noise": (["--set", "noise_multiplier=1"], "--set noise_multiplier: follows from the budget", "leave it out"),
    "target modules": (["--target-modules", "q_proj"], "--target-modules: no layer is called 'q_proj'", "c_attn"),
    "beyond context": (["--max-length", "25"], "--max-length: 25 exceeds the model's 24", "use 24 or less"),
    "large batch": (["--expected-batch-size", "1000"], "--expected-batch-size: 1000 is more than the", "lower it"),
    "device": (["--device", "cuda:9"], "'cuda:9' cannot be used", "use cpu"),
    "dropout on a CPU": (
        ["--dropout", "0.1", "--device", "cpu"],
        "--dropout: on a CPU its masks come from",
        "use CUDA",
    ),
    "few rows": (
        ["--unit", "customer_id", "--physical-batch-size", "2"],
        "--physical-batch-size: 2 is less than the 4 records",
        "--records-per-unit",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_named_with_its_fix(name: str, tmp_path: Path) -> None:
    arguments, problem, fix = OPTIONS[name]
    line = refused(tmp_path, *arguments)
    assert problem in line, line
    assert fix in line.partition("Fix: ")[2], line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["records.csv", "link.csv", "copy.csv"])
def test_private_records_are_not_taken_for_public_ones(name: str, tmp_path: Path) -> None:
    """Controllers, validation and private telemetry would use and show them at no cost."""
    data = write_csv(tmp_path / "records.csv", rows())
    (tmp_path / "link.csv").symlink_to(data)
    shutil.copy(data, tmp_path / "copy.csv")
    line = refused(tmp_path, "--public", str(tmp_path / name), data=data)
    assert "--public: is the file of private records" in line
    with pytest.raises(ConfigError, match="is the file of private records"):
        RecordSource(own := rows(), public=own)


def test_a_misspelt_option_is_named(tmp_path: Path) -> None:
    assert "--epsilom" in refused(tmp_path, "--epsilom", "2")
    with pytest.raises(ConfigError, match=r"epoch: is not a setting\. Fix: use epochs"):
        TuneSettings.of(epsilon=4.0, epoch=2)


REFUSED_AT_ONCE = [
    (["--model", "gpt2"], "--revision: 'gpt2' is not a local directory"),
    (["--model", "./nowhere"], "--model: './nowhere' is not a folder"),
    (["--data", "nowhere.csv"], "nowhere.csv: the file does not exist"),
    (["--data", "records.xyz"], "the ending of records.xyz does not show the format"),
    (["--out", "records.xyz"], "--out: records.xyz is a file"),
    (["--epsilon", "0"], "--epsilon: 0.0 is below 1e-06"),
    (["--text", "a", "--messages", "b"], "--data: text and messages cannot be given like this"),
]
#: Runs each command line that it is given, with a line of its own on stderr before each.
_WITHOUT_TORCH = """
import json, sys
from dptune.cli import app
for line in json.loads(sys.argv[1]):
    print("BEGINS", file=sys.stderr)
    try:
        app(["tune", *line])
    except SystemExit as ended:
        assert ended.code == 2, (line, ended.code)
    assert not {"torch", "transformers"} & set(sys.modules), line
"""


def test_paths_and_options_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """In one process for all, because each takes longer to start than to refuse."""
    (tmp_path / "records.xyz").write_text("text\na\n")
    write_csv(tmp_path / "records.csv", rows())
    usual = {"--model": str(checkpoint()), "--data": "records.csv", "--epsilon": "8"}
    given = [usual | dict(zip(own[::2], own[1::2], strict=True)) for own, _ in REFUSED_AT_ONCE]
    lines = json.dumps([[part for pair in one.items() for part in pair] for one in given])
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, lines], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = done.stderr.split("BEGINS\n")[1:]
    for (_, problem), text in zip(REFUSED_AT_ONCE, shown, strict=True):
        assert problem in text.strip().splitlines()[-1]


def _write(content: bytes, name: str = "records.csv") -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return written


DATA: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "missing file": (lambda folder: folder / "none.csv", [], "the file does not exist"),
    "empty file": (_write(b""), [], "records.csv"),
    "no row": (_write(b"text\n"), [], "give one record at least"),
    "junk bytes": (_write(bytes(range(256))), [], "save it as UTF-8"),
    "not UTF-8": (_write(b"text\nna\xefve\n"), [], "row 2: byte 0xef is not UTF-8"),
    "duplicate columns": (_write(b"text,text\na,b\n"), [], "name every column once"),
    "duplicate keys": (_write(b'{"text": "a", "text": "b"}\n', "r.jsonl"), [], "r.jsonl, row 1"),
    "unknown format": (_write(b"text\na\n", "records.xyz"), [], "the ending of records.xyz does not show the format"),
    "no unit": (
        _write(b"customer_id,text\nc1,a\n,b\n"),
        ["--unit", "customer_id"],
        "row 3, column 'customer_id': names",
    ),
    "duplicate ids": (
        _write(b"visit,text\nv1,a\nv2,b\nv1,c\n"),
        ["--id", "visit"],
        "row 4, column 'visit': the id of row 2 appears again",
    ),
    "table as text": (
        _write(b"a,b,c\n" * 9, "records.txt"),
        [],
        "use --format table; or --records-are lines (or paragraphs), if it is text",
    ),
    "a folder": (lambda folder: folder, [], "Fix: "),
    "few": (_write(b"text\na\n"), [], "Fix: "),
}


@pytest.mark.parametrize("name", DATA)
def test_wrong_records_are_located(name: str, tmp_path: Path) -> None:
    make, arguments, problem = DATA[name]
    line = refused(tmp_path, *arguments, data=make(tmp_path))
    assert problem in line, line
    assert "Fix: " in line


def _copied(folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint(), folder / "model"))


def _without(*names: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        copy = _copied(folder)
        for name in names:
            (copy / name).unlink()
        return copy

    return made


def _changed(name: str, **values: Any) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        copy = _copied(folder)
        content = json.loads((copy / name).read_text()) | values
        (copy / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        return copy

    return made


def _other_family(folder: Path) -> Path:
    copy = _copied(folder)
    sizes = {"n_layer": 1, "n_embd": 16, "dff": 16, "n_head": 2}
    config = AutoConfig.for_model("ctrl", **sizes, vocab_size=400, architectures=["CTRLLMHeadModel"])
    config.save_pretrained(copy)
    return copy


MODELS: dict[str, tuple[Callable[[Path], Path | str], str, str]] = {
    "missing": (lambda folder: folder / "none", "--model: ", "check the path"),
    "hub id without a commit": (
        lambda _: "gpt2",
        "'gpt2' is not a local directory, and no revision is given",
        "40-digit",
    ),
    "no config": (_without("config.json"), "holds no config.json", "save_pretrained wrote"),
    "torn config": (lambda folder: _torn(folder, "config.json"), "--model: ", "check its config.json"),
    "an encoder": (_changed("config.json", model_type="bert", architectures=["BertModel"]), "--model: ", "causal"),
    "no tokenizer": (_without("tokenizer.json", "tokenizer_config.json"), "tokenizer: ", "save the model's tokenizer"),
    "torn tokenizer": (lambda folder: _torn(folder, "tokenizer.json"), "tokenizer: ", "save the model's tokenizer"),
    "no padding": (_changed("tokenizer_config.json", eos_token=None, pad_token=None), "neither a padding", "pad_token"),
    "other tokenizer": (_changed("config.json", vocab_size=50), "has token", "belongs to this model"),
    "no q and v": (_other_family, "--target-modules: not known for model type 'ctrl'", "Wq"),
}


def _torn(folder: Path, name: str) -> Path:
    copy = _copied(folder)
    (copy / name).write_bytes((copy / name).read_bytes()[:20])
    return copy


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_model_is_refused_before_its_weights_and_the_records_are_read(name: str, tmp_path: Path) -> None:
    make, problem, fix = MODELS[name]
    model = make(tmp_path)
    for weights in Path(model).glob("*.safetensors"):
        weights.unlink()
    data = tmp_path / "never read.csv"
    data.write_bytes(bytes(range(256)))
    line = refused(tmp_path, model=model, data=data)
    assert problem in line, line
    assert fix in line.partition("Fix: ")[2], line


def test_another_folder_a_file_and_a_run_under_way_are_no_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("a file")
    assert "--out: " in refused(tmp_path)
    out.unlink()
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert "holds files, but no run" in refused(tmp_path)
    assert (out / "thesis.txt").read_text() == "mine"
    (out / "thesis.txt").unlink()
    with locked(out / "lock"):
        line = refused(tmp_path)
    assert re.search(r"another process works on it( \(process \d+\))?\. Fix: wait for it, or stop it", line)


def test_a_dry_run_counts_the_records_that_units_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two records of each customer are twice the work of one; under private telemetry it is the most that is told."""
    for speed in ("_product_speed", "_vector_speed"):
        monkeypatch.setattr(f"dptune.job.estimate.{speed}", lambda base: 1e6)
    data = str(write_csv(tmp_path / "r.csv", rows()))
    given = ["tune", "--model", str(checkpoint()), "--data", data, "--unit", "customer_id", "--epsilon", "8"]
    given += ["--expected-batch-size", "8", "--epochs", "2", "--physical-batch-size", "4", "--dry-run", "--json"]

    def minutes(*arguments: str) -> float:
        return float(json.loads(CliRunner().invoke(app, [*given, *arguments]).stdout)["estimated_minutes"])

    one = minutes("--records-per-unit", "1")
    assert minutes() == pytest.approx(2 * one, rel=0.05)  # two digits are told
    private = ["--telemetry", "private"]
    assert minutes(*private) == pytest.approx(4 * minutes(*private, "--records-per-unit", "1"), rel=0.05)


def test_a_dry_run_reads_no_weight_and_leaves_nothing(tmp_path: Path) -> None:
    model = _copied(tmp_path)
    weights = {name: torch.full_like(one, math.nan) for name, one in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors")  # a run would refuse them
    data = write_jsonl(tmp_path / "r.jsonl", rows())
    given = ["tune", "--model", str(model), "--data", str(data), "--epsilon", "8", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*given, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["units"] == said["records_train"]
    assert said["noise_multiplier"] > 0
    assert said["estimated_memory_gib"] > 0
    assert said["estimated_minutes"] > 0
    assert float(f"{said['estimated_minutes']:.2g}") == said["estimated_minutes"]
    assert "times their numbers in all steps" in said["estimates_are"]
    assert f"at this epsilon {said['units']} units leave little signal" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_takes_the_configuration_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    """Of Llama 7B's shape: 6.7 billion weights, of which none exists."""
    model, data = tmp_path / "seven", write_jsonl(tmp_path / "r.jsonl", rows(200))
    config = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
    LlamaConfig(**config, max_position_embeddings=4096).save_pretrained(model)
    AutoTokenizer.from_pretrained(checkpoint()).save_pretrained(model)
    given = [
        "tune",
        "--model",
        str(model),
        "--data",
        str(data),
        "--epsilon",
        "8",
        "--dry-run",
        "--json",
        "--physical-batch-size",
        "4",
    ]
    memory = {}
    for more in ([], ["--gradient-checkpointing"], ["--dtype", "bfloat16"]):
        done = CliRunner().invoke(app, [*given, *more])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert said["adapter_parameters"] == 32 * 2 * 8 * (4096 + 4096)
        assert said["noise_multiplier"] > 0
        memory[" ".join(more)] = said["estimated_memory_gib"] * 2**30
    weights = 6_738_415_616
    assert memory[""] > memory["--gradient-checkpointing"] > 4 * weights
    assert 4 * weights > memory["--dtype bfloat16"] > 2 * weights


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rank": 8.5}, "rank: 8.5 is not a whole number"),
        ({"rank": 10**9}, "rank: 1000000000 is above 4096"),
        ({"learning_rate": 1e9}, "learning_rate: 1000000000.0 is above 10"),
        ({"seed": -1}, "seed: -1 is below 0"),
        ({"seed": True}, "seed: True is not a whole number"),
        ({"records_per_unit": 1.5}, "records_per_unit: 1.5 is not a whole number"),
        ({"load_in_4bit": "false"}, "load_in_4bit: 'false' is neither true nor false"),
        ({"gradient_checkpointing": "no"}, "gradient_checkpointing: 'no' is neither true nor false"),
    ],
)
def test_numbers_and_switches_of_the_call_are_checked(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        TuneSettings.of(epsilon=4.0, **given)


def test_names_within_a_spaces_file_are_not_taken_for_options(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("space: {rank: [4, 8]}\n")
    line = refused(tmp_path, "--search", str(space), "--candidates", "3", "--epsilon", "8")
    assert "Fix: use mechanism, learning_rate, expected_batch_size" in line


def test_a_command_that_checks_an_adapter_fits_a_shell() -> None:
    assert check_command(Path("my run/adapter")) == "Check it: dptune verify 'my run/adapter'"


def test_a_full_gpu_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total of 79 GiB.")

    monkeypatch.setattr("dptune.job.run.train", train)
    said = refused(tmp_path)
    assert said.startswith("error: memory is full, the GPU's or the machine's. Fix: lower --physical-batch-size"), said


def test_rows_below_a_units_records_matter_only_where_units_are_a_column(tmp_path: Path) -> None:
    """A record that is a unit of its own brings itself; the same option is refused of a column's (``OPTIONS``)."""
    data = write_csv(tmp_path / "r.csv", rows())
    given = [
        "tune",
        "--model",
        str(checkpoint()),
        "--data",
        str(data),
        "--epsilon",
        "8",
        "--dry-run",
        "--physical-batch-size",
        "1",
    ]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert "--physical-batch-size: 1 is less than the 4" in refused(
        tmp_path, "--physical-batch-size", "1", "--unit", "customer_id"
    )
    one = [*given, "--unit", "customer_id", "--records-per-unit", "1"]
    assert CliRunner().invoke(app, one).exit_code == 0


def test_public_records_without_loss_are_blamed_before_anything_is_booked(tmp_path: Path) -> None:
    """Of private records it is a note for their owner alone: a refusal would tell of them at no cost."""
    sides = [[{"prompt": f"{n} " + "a b c " * times, "completion": "b"} for n in range(60)] for times in (0, 40)]
    files = [write_jsonl(tmp_path / f"{n}.jsonl", some) for n, some in enumerate(sides)]
    line = refused(tmp_path, "--public", str(files[1]), data=files[0])
    assert "--public: none of the public records has a token that counts in the loss within 23 tokens" in line
    given = ["tune", "--model", str(checkpoint()), "--data", str(files[1]), "--epsilon", "8", "--dry-run"]
    assert CliRunner().invoke(app, [*given, "--public", str(files[0])]).exit_code == 0


def test_columns_that_are_not_read_are_named_to_the_owner(tmp_path: Path) -> None:
    some = [{"text": row["text"], "customer_id": "c", "note": "n"} for row in rows()]
    data = write_jsonl(tmp_path / "r.jsonl", some)
    given = ["tune", "--model", str(checkpoint()), "--data", str(data), "--epsilon", "8", "--dry-run"]
    note = "columns that are not read: 'customer_id', 'note'; name the record's own (--text or others) to choose"
    assert note in " ".join(CliRunner().invoke(app, given).stderr.split())
    assert "not read" not in CliRunner().invoke(app, [*given, "--text", "text"]).stderr
