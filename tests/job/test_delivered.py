"""What is delivered is a function of releases and public facts: two worlds of one release deliver the same bytes."""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_process import killed_at_each_call
from same_release import differences, same_release, told
from test_classify import encoder
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import DivergedError
from dptune.core.files import NO_TIME
from dptune.job import run as tuning_run
from dptune.job.delivery.deliverable import deliver as deliver_folder
from dptune.job.delivery.verification import check_deliverable
from dptune.job.delivery.weights import partial_of
from dptune.job.result import HELD_OUT, PUBLIC, RunResult
from dptune.job.run import Tuned
from dptune.job.search import candidates as candidates_module
from dptune.job.search.plan import Plan
from dptune.job.search.space import Space
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.selection_law import SelectionLaw
from dptune.training.data import Tokens

CUSTOMERS = 24
#: The files of every delivered adapter.
FILES = {
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "base.json",
    "chat_template.jinja",
    "ledger.jsonl",
    "records.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
CLASSIFY: dict[str, Any] = {
    "task": "classify",
    "text": "text",
    "rank": 2,
    "expected_batch_size": 8,
    "epochs": 1,
    "max_length": 20,
}


def records(world: int) -> list[dict[str, Any]]:
    """Records of the same customers: of the second world more of them, all longer, with one label and other words."""
    if world == 0:
        listed = [(customer, f"{customer} red cat.", customer % 2) for customer in range(CUSTOMERS)]
    else:
        listed = [(n % CUSTOMERS, f"old dog {n} " + "blue " * 30, 0) for n in range(CUSTOMERS * 3)][::-1]
    return [
        {"customer_id": f"c{customer}", "text": text, "mr": text[:4], "ref": text[4:], "label": f"{label}"}
        for customer, text, label in listed
    ]


def texts(world: list[dict[str, Any]], **more: Any) -> Tuned:
    return dptune.tune(checkpoint(), world, epsilon=8, unit="customer_id", text="text", **QUICK | more)


def pairs(world: list[dict[str, Any]], **more: Any) -> Tuned:
    given = {"prompt": "mr", "completion": "ref"} | QUICK | more
    return dptune.tune(checkpoint(), world, epsilon=8, unit="customer_id", **given)


def head(world: list[dict[str, Any]], **more: Any) -> Tuned:
    return dptune.tune(str(encoder()), world, epsilon=8, unit="customer_id", labels=("0", "1"), **CLASSIFY | more)


def words(world: list[dict[str, Any]], **more: Any) -> Tuned:
    given = CLASSIFY | {"words": {"0": "cat", "1": "dog"}, "template": "{text} new", "target_modules": ("c_attn",)}
    return dptune.tune(checkpoint(), world, epsilon=8, unit="customer_id", **given | more)


def searched(world: list[dict[str, Any]], **more: Any) -> Tuned:
    asked = {"space": {"learning_rate": [0.01, 0.02]}, "candidates": 2, "together": 2, "bound": "one_shift"}
    return texts(world, search=asked, eval_share=0.2, delta=1e-3, epochs=1, **more)


KINDS: dict[str, tuple[Callable[..., Tuned], set[str]]] = {
    "texts": (texts, FILES),
    "pairs": (pairs, FILES),
    "head": (head, FILES | {"labels.json"}),
    "words": (words, FILES | {"labels.json", "words.json"}),
    "search": (searched, FILES | {"certificate.jsonl", "score.jsonl"}),
}


def deliver(kind: str, world: int, folder: Path, **more: Any) -> Tuned:
    """Deliver of a world of one release; of a search the number of candidates is the world's own too."""
    draw = Plan.draw
    with pytest.MonkeyPatch.context() as patch:
        same_release(patch)
        # The winner's score is paid; a commitment hides the plan behind its secret salt.
        patch.setattr(candidates_module, "noisy_score", lambda *_: 0.5)
        patch.setattr(SelectionLaw, "draw", lambda law, entropy: 1 + 2 * world)
        patch.setattr(Space, "draw", lambda space, entropy: (0, space.kinds()[0][1]))
        patch.setattr(Plan, "draw", classmethod(lambda cls, *given: replace(draw(*given), id="one", salt="ab" * 32)))
        patch.setattr(Plan, "commitment", property(lambda plan: "0" * 64))
        return KINDS[kind][0](records(world), out=folder / "out", **more)


@pytest.mark.parametrize("kind", KINDS)
def test_two_worlds_of_one_release_deliver_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """Research telemetry, under which the owner is shown most."""
    public = [{"text": f"red dog {n}", "mr": "red", "ref": f"dog {n}", "label": f"{n % 2}"} for n in range(6)]
    delivered, shown = [], []
    for world in (0, 1):
        (folder := tmp_path / str(world)).mkdir()
        found = deliver(kind, world, folder, public=public)
        delivered.append(told(found.save(folder / "handed on")))
        assert differences(delivered[-1], told(found.folder / "adapter")) == ""
        assert found.epsilons.certified <= 8
        shown.append((found.perplexity or found.scores).get(HELD_OUT))
    assert differences(*delivered) == ""
    assert set(delivered[0]) == KINDS[kind][1]
    assert {time for _, _, time in delivered[0].values()} == {NO_TIME}
    assert kind == "search" or shown[0] != shown[1], "the worlds differ in nothing"
    card = delivered[0]["README.md"][0].decode()
    assert "- public records: " in card
    assert "held-out private records" not in card.partition("<!-- dptune: end -->")[2]


def test_texts_of_two_worlds_of_one_release_have_the_same_card(tmp_path: Path) -> None:
    cards = []
    for world in (0, 1):
        (folder := tmp_path / str(world)).mkdir()
        found = dptune.sample(deliver("texts", world, folder).folder / "adapter", checkpoint(), 3)
        found.save(folder / "synthetic.jsonl")
        cards.append({name: (folder / name).read_bytes() for name in ("synthetic.jsonl", "synthetic.md")})
    assert cards[0] == cards[1]


def test_what_the_owner_was_shown_stays_in_the_runs_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["tune", "--model", str(checkpoint()), "--data", str(write_csv(tmp_path / "secret name.csv", rows()))]
    done = CliRunner().invoke(
        app, [*given, "--epsilon", "8", "--epochs", "1", "--expected-batch-size", "8", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    kept = RunResult.read(out / "result.json").by_records()[HELD_OUT]["perplexity"]
    assert f"{kept[1]:.6g}" in done.stdout
    assert f"it stays in {out / 'result.json'}" in done.stdout
    assert (out / "result.json").stat().st_mode & 0o777 == 0o600
    for path in (out / "adapter").iterdir():
        # A perplexity is sought with one decimal, because three digits alone also stand in checksums.
        for private in (f"{kept[0]:.1f}", f"{kept[1]:.1f}", "secret name"):
            assert private.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("worth", [math.inf, math.nan])
def test_no_figure_of_held_out_records_decides_whether_a_run_delivers(
    worth: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it ended would tell of them, at no price; one of public records does decide."""
    measure, about = tuning_run.perplexity, [HELD_OUT]

    def measured(model: Any, tokens: Tokens, *given: Any, **more: Any) -> float:
        return worth if (len(tokens.rows) == 5) == (about[0] == PUBLIC) else measure(model, tokens, *given, **more)

    monkeypatch.setattr(tuning_run, "perplexity", measured)
    found = texts(rows(), out=tmp_path / "out", public=rows(5))
    again = texts(rows(), out=tmp_path / "out", public=rows(5))
    for one in (found, again):
        assert [math.isfinite(value) for value in one.perplexity[HELD_OUT]] == [False, False]
        assert all(map(math.isfinite, one.perplexity[PUBLIC]))
    about[0] = PUBLIC
    with pytest.raises(DivergedError, match="perplexity on public records is"):
        texts(rows(), out=tmp_path / "other", public=rows(5))


def test_records_without_a_token_that_counts_refuse_no_run(tmp_path: Path) -> None:
    """Prompts alone fill the batches: the owner is warned, and whether that is so is not told by a refusal."""
    long = [{"mr": "z" * 40, "ref": f"dog {n}", "customer_id": f"c{n}"} for n in range(60)]
    data = str(write_csv(tmp_path / "a.csv", long))
    given = ["--data", data, "--prompt", "mr", "--completion", "ref", "--epsilon", "8", "--epochs", "1"]
    done = CliRunner().invoke(app, ["tune", "--model", str(checkpoint()), *given, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "records have no token that counts in the loss" in done.stderr
    assert "perplexity_" not in done.stdout


def test_a_card_that_an_earlier_version_wrote_is_written_again_without_private_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = texts(rows(), out=tmp_path / "out")
    card = found.folder / "adapter" / "README.md"
    now = card.read_text()
    card.write_text(now.replace("Not shown: figures", "- held-out private records: 9.5 before, 8.5 after\n\nFigures"))
    assert "8.5 after" in card.read_text()
    saved = texts(rows(), out=tmp_path / "out").save(tmp_path / "handed on")
    assert (saved / "README.md").read_text() == card.read_text() == now
    assert "showed figures of held-out private records; it was written again" in caplog.text
    caplog.clear()
    card.write_text(now + "\nOurs.\n")
    texts(rows(), out=tmp_path / "out")
    assert card.read_text().endswith("Ours.\n")
    assert "written again" not in caplog.text


def test_a_delivered_folder_goes_into_a_zip_file(tmp_path: Path) -> None:
    """Which knows no time before 1980."""
    adapter = texts(rows(), out=tmp_path / "out").folder / "adapter"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for path in adapter.iterdir():
            file.write(path, path.name)


def test_a_process_that_is_killed_at_any_call_leaves_the_folder_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning_run, "deliver", stop)
        with pytest.raises(KeyboardInterrupt):
            texts(records(0), out=tmp_path / "kept")
    folder = RunFolder(tmp_path / "out")

    def prepare() -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", folder.path)
        (partial_of(folder) / ".records.json.elsewhere-1.partial").write_text("half")

    for calls in killed_at_each_call(lambda: deliver_folder(folder, RunResult.read(folder.result)), prepare):
        if not folder.adapter.exists():  # the next process goes on so
            deliver_folder(folder, RunResult.read(folder.result))
        assert {path.name for path in folder.adapter.rglob("*")} == FILES, calls
        check_deliverable(folder.adapter)


def test_a_copy_is_whole_or_absent(tmp_path: Path) -> None:
    found = texts(records(0), out=tmp_path / "out")
    target = tmp_path / "deep" / "copy"
    for calls in killed_at_each_call(lambda: found.save(target), lambda: shutil.rmtree(target, ignore_errors=True)):
        if not target.exists():
            found.save(target)
        assert {path.name for path in target.rglob("*")} == FILES, calls
        assert [path.name for path in target.parent.iterdir()] == ["copy"], calls
