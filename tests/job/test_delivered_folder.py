"""Everything in a delivered folder is accounted for: bound by the card, known to be harmless and named, or refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import DptuneError
from dptune.core.files import sha256
from dptune.job.delivery import deliverable
from dptune.job.delivery.privacy_section import END, START
from dptune.job.delivery.verification import CARD, CONFIG, RECORDS, WEIGHTS, check_deliverable, section_of
from dptune.privacy.spent_budgets.register import Register

LEDGER = "ledger.jsonl"
Change = Callable[[Path], object]


@lru_cache(maxsize=1)
def run() -> Path:
    """The folder of a finished run."""
    return dptune.tune(checkpoint(), rows(), epsilon=8, unit="customer_id", **QUICK).folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what the run delivered."""
    return Path(shutil.copytree(run() / "adapter", tmp_path / "folder"))


def verify(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["verify", str(path), *options])


def refused(path: Path) -> str:
    """The last line of ``verify``, which ends with status 2, and of the check that all doors make."""
    done = verify(path)
    assert done.exit_code == 2, done.output
    assert "epsilon_certified" not in done.stdout
    return str(done.stderr.strip().splitlines()[-1])


def other_weights(folder: Path, name: str = WEIGHTS) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    weights = load_file(folder / WEIGHTS)
    save_file({key: 2 * value + 1 for key, value in weights.items()}, folder / name, {"format": "pt"})


def text(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")

    return change


def link(name: str, to: Path) -> Change:
    return lambda folder: (folder / name).symlink_to(to)


#: What is added, by the name that the refusal says.
ADDED: dict[str, Change] = {
    "adapter_model.bin": text("adapter_model.bin"),
    "adapter_model-00001-of-00002.safetensors": lambda folder: other_weights(
        folder, "adapter_model-00001-of-00002.safetensors"
    ),
    "adapter_model_2.safetensors": lambda folder: other_weights(folder, "adapter_model_2.safetensors"),
    "adapter_model.safetensors.bak": lambda folder: other_weights(folder, "adapter_model.safetensors.bak"),
    "pytorch_model.bin": text("pytorch_model.bin"),
    "model.safetensors": lambda folder: other_weights(folder, "model.safetensors"),
    "model.safetensors.index.json": text("model.safetensors.index.json"),
    "config.json": text("config.json"),
    "second/adapter_model.safetensors": lambda folder: other_weights(folder, "second/adapter_model.safetensors"),
    ".hidden/adapter_model.safetensors": lambda folder: other_weights(folder, ".hidden/adapter_model.safetensors"),
    ".git/adapter_model.safetensors": lambda folder: other_weights(folder, ".git/adapter_model.safetensors"),
    ".cache/huggingface/w.BIN": text(".cache/huggingface/w.BIN"),
    "vocab.json": text("vocab.json"),
    "tekken.json": text("tekken.json"),
    "additional_chat_templates/rag.jinja": text("additional_chat_templates/rag.jinja"),
    "labels.json": text("labels.json"),
    "certificate.jsonl": text("certificate.jsonl"),
    "modeling.py": text("modeling.py"),
    "notes of ours.md": text("notes of ours.md"),
    "merged": link("merged", checkpoint()),
    "model.gguf": link("model.gguf", Path("/nowhere")),
    "pipe": lambda folder: os.mkfifo(folder / "pipe"),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_delivered_folder_is_refused_by_its_name(name: str, folder: Path) -> None:
    ADDED[name](folder)
    line = refused(folder)
    assert f"{folder / name}" in line
    if name != "certificate.jsonl":  # of which it is said what is wrong with it
        assert (
            f"{folder / name}: is not a file that the run delivered. Fix: remove it, or take the whole folder" in line
        )
    with pytest.raises(DptuneError):
        check_deliverable(folder)


@pytest.mark.parametrize(
    "taken",
    [(CONFIG,), (WEIGHTS,), (CARD,), (CONFIG, WEIGHTS), (CONFIG, CARD), (WEIGHTS, CARD), (CONFIG, WEIGHTS, CARD)],
)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_a_folder_from_which_something_was_taken_is_no_other_kind_of_folder(
    within: bool, other: bool, taken: tuple[str, ...], tmp_path: Path
) -> None:
    """Whether it is given itself, or as the folder of its run, and whether other weights lie there now."""
    whole = Path(shutil.copytree(run(), tmp_path / "run"))
    adapter = whole / "adapter"
    for name in taken:
        if other and name == WEIGHTS:
            other_weights(adapter)
        else:
            (adapter / name).unlink()
    assert str(adapter) in refused(whole if within else adapter)


@pytest.mark.parametrize("taken", [(LEDGER,), (LEDGER, CARD), (LEDGER, CARD, CONFIG)])
def test_the_ledger_of_the_run_does_not_stand_for_that_of_its_adapter(taken: tuple[str, ...], tmp_path: Path) -> None:
    whole = Path(shutil.copytree(run(), tmp_path / "run"))
    for name in taken:
        (whole / "adapter" / name).unlink()
    refused(whole)
    refused(whole / "adapter")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", WEIGHTS, RECORDS, "tokenizer.json"])
def test_a_ledger_alone_certifies_no_file_of_a_model_beside_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    shutil.copyfile(run() / LEDGER, tmp_path / "a" / LEDGER)
    (tmp_path / "a" / name).write_bytes(b"{}")
    assert "is missing. Fix: take the whole folder" in refused(tmp_path / "a")


def test_of_a_ledger_alone_it_is_said_that_no_weights_were_looked_at(tmp_path: Path) -> None:
    for path in (run() / "adapter" / LEDGER, Path(shutil.copyfile(run() / LEDGER, tmp_path / LEDGER)), tmp_path):
        done = verify(path)
        assert done.exit_code == 0
        assert "was read" in done.stdout
        assert "It proves what a run may cost, and binds no weights." in done.stdout
    assert (
        f"Only {run() / 'adapter' / LEDGER} was read: nothing of the 8 files"
        in verify(run() / "adapter" / LEDGER).stdout
    )


def test_a_card_that_names_other_weights_too_does_not_make_them_the_runs(folder: Path) -> None:
    """Whoever edits the card may write the digest of any file there."""
    other_weights(folder, "adapter_model_2.safetensors")
    card, section = folder / CARD, section_of(folder)[0]
    said = card.read_text()
    assert "| adapter_model_2.safetensors | SHA-256 " in section
    card.write_text(said[: said.index(START)] + section + said[said.index(END) + len(END) :])
    assert f"{folder / 'adapter_model_2.safetensors'}: may hold other weights" in refused(folder)


def test_what_the_hub_git_and_file_managers_put_there_is_named(folder: Path) -> None:
    for name in (".gitattributes", "LICENSE", ".git/config", ".cache/huggingface/download/README.md.metadata"):
        text(name)(folder)
    done = verify(folder)
    assert done.exit_code == 0, done.output
    assert "Not compared, and read by nothing: .cache/huggingface, .git, .gitattributes, LICENSE." in done.stdout


def test_links_are_compared_by_what_they_lead_to_and_named(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(tmp_path / "blob")
    (folder / WEIGHTS).symlink_to(tmp_path / "blob")
    done = verify(folder)
    assert done.exit_code == 0
    assert f"Links, whose targets were compared: {WEIGHTS}. Hand on the files themselves." in done.stdout
    other_weights(folder)  # through the link
    assert f"{folder / WEIGHTS}: is not the file that the run delivered" in refused(folder)


def test_what_was_compared_is_said_with_one_digest_that_binds_it_all(folder: Path) -> None:
    done = verify(folder)
    assert done.exit_code == 0
    for path in folder.iterdir():
        assert path.name in done.stdout
    assert f"Base model: {checkpoint().name}; SHA-256 of its configuration and weights " in done.stdout
    assert sha256(folder / CARD) in done.stdout
    assert "Only " not in done.stdout


def test_a_note_beside_a_ledger_is_no_card(tmp_path: Path) -> None:
    shutil.copyfile(run() / LEDGER, tmp_path / LEDGER)
    (tmp_path / CARD).write_text("Our runs.")
    assert verify(tmp_path).exit_code == 0


def test_a_term_during_delivery_says_how_to_go_on_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch systems and containers send SIGTERM; a second try pays nothing more."""
    data, out = write_csv(tmp_path / "records.csv", rows()), tmp_path / "out"
    given = ["--model", str(checkpoint()), "--data", str(data), "--epsilon", "8", "--delta", "0.001", "--epochs", "1"]
    given += ["--expected-batch-size", "8", "--rank", "2", "--target-modules", "c_attn", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(deliverable, "forget_times", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        done = CliRunner().invoke(app, ["tune", *given])
    assert done.exit_code == 130, done.output
    assert re.search(r"^stopped: at release (\d+) of \1; run again to go on$", done.stderr.strip().splitlines()[-1])
    assert not (out / "adapter").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert CliRunner().invoke(app, ["tune", *given]).exit_code == 0
    assert verify(out / "adapter").exit_code == 0
    assert Register(tmp_path / "spent.jsonl").totals()[0].entries == 1
