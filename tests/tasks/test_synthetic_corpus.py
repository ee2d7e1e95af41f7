"""A corpus sampled from a finished cell: its card, its page, and what is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import Page
from tiny_pipeline import built, cells, copied, mode, prepare_environment, quick_pictures, read_json

from dptune.core.digits import at_most
from dptune.core.errors import DptuneError
from dptune.core.files import sha256, write_text
from dptune.job import sampling
from dptune.job.sampling import Sampled
from dptune.privacy.ledger_file import read_ledger
from tasks import synthetic
from tasks.charts.canvas import for_page
from tasks.experiment import adapter_model
from tasks.experiment.finetune import run_cell
from tasks.paths import AUDITS, PUBLIC_MODEL, RUNS, SYNTHETIC
from tasks.report.page import INDEX
from tasks.synthetic import lengths, open_cell, sample_cell
from tests.forked import command, forked

FILES = (".html", ".jsonl", ".md", ".png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with both of its cells, finished."""
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("trained") / "tiny pipeline")
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        quick_pictures(patch)
        for cell in cells():
            write_text(cell.directory / "cell.json", cell.model_dump_json())
            run_cell(cell, "cpu")
    return directory


@pytest.fixture
def study(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a copy of that pipeline."""
    directory = copied(trained, tmp_path / "tiny pipeline")
    prepare_environment(monkeypatch, directory)
    return directory


def run_of(mechanism: str) -> Path:
    (found,) = RUNS.glob(f"*.{mechanism}.*")
    return found


def words(page: Path) -> str:
    return Page(page.read_text("utf-8")).words.replace("\u00a0", " ")


def test_a_corpus_has_its_card_its_page_and_its_place_in_the_index(study: Path) -> None:
    page, answer = sample_cell(run_of("static"), 12)
    name, contents = run_of("static").name, read_ledger(run_of("static") / "ledger.jsonl")
    assert sorted(path.name for path in SYNTHETIC.iterdir()) == [f"{name}{ending}" for ending in FILES]
    assert mode(SYNTHETIC) == 0o700
    assert {mode(path) for path in SYNTHETIC.iterdir() if path.suffix != ".png"} == {0o600}
    texts = [json.loads(line) for line in page.with_suffix(".jsonl").read_text("utf-8").splitlines()]
    assert [list(one) for one in texts] == [["text"]] * 12
    card = page.with_suffix(".md").read_text("utf-8")
    assert f"| {name}.jsonl | SHA-256 {sha256(page.with_suffix('.jsonl'))} |" in card
    assert f"| the adapter's ledger.jsonl | SHA-256 {sha256(run_of('static') / 'ledger.jsonl')} |" in card
    assert "| base model | public |" in card
    assert "was tuned on" not in card, "the cell's own model is no other one"
    cost = at_most(contents.epsilons.certified)
    assert float(cost) >= contents.epsilons.certified * (1 - 1e-9)
    said = (
        f"12 SYNTHETIC texts with the guarantee of `static`: certified ε = {cost} at δ = 1e-05, however many are drawn."
    )
    assert answer == said
    for part in (said.replace("`", ""), "SYNTHETIC texts: a model wrote them", "it cost nothing", "not measured"):
        assert part in words(page)
    assert "No guarantee" not in words(page)
    index = study / "data/report" / INDEX
    assert f'href="../synthetic/{name}.html"' in index.read_text("utf-8")
    assert said.replace("`", "") in words(index)


def test_what_an_audit_showed_is_rounded_down(study: Path) -> None:
    write_text(AUDITS / run_of("static").name / "audit.json", json.dumps({"one_run": {"epsilon_audited": 0.12399}}))
    page, _ = sample_cell(run_of("static"), 3)
    assert ">0.123</td>" in page.read_text("utf-8")


def test_a_cell_without_noise_is_refused_and_if_allowed_its_page_says_no_guarantee(study: Path) -> None:
    said = r"has no certified epsilon \(gradients without noise\)\. Fix: .*NO_GUARANTEE=1"
    with pytest.raises(DptuneError, match=said):
        sample_cell(run_of("nonprivate"), 3)
    assert not SYNTHETIC.exists()
    page, answer = sample_cell(run_of("nonprivate"), 3, no_guarantee=True)
    assert answer.startswith("3 SYNTHETIC texts with NO GUARANTEE: `nonprivate` has no certified ε")
    assert '<span class="badge loud">No guarantee</span>' in page.read_text("utf-8")
    assert "Treat them as private." in words(page)
    assert "it cost nothing" not in words(page)
    assert "NO GUARANTEE" in page.with_suffix(".md").read_text("utf-8")


def test_a_text_is_escaped_everywhere(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil, real = "</script><script>alert(1)</script><img src=x>", sampling.sample

    def sample(*given: Any, **options: Any) -> Sampled:
        found = real(*given, **options)
        return replace(found, rows=[{"text": evil}, *found.rows[1:]], notes=(evil,))

    monkeypatch.setattr(sampling, "sample", sample)
    page, _ = sample_cell(run_of("static"), 3)
    text = page.read_text("utf-8")
    assert "<script>alert" not in text
    assert "<img src=x>" not in text
    assert text.count("&lt;img src=x&gt;") == 2, "once among the texts, once as a note"


def test_ten_texts_at_most_are_shown(study: Path) -> None:
    page, _ = sample_cell(run_of("static"), 11)
    assert page.read_text("utf-8").count("<li><p class=") == 10


def test_a_page_that_fails_leaves_nothing(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        sample_cell(run_of("static"), 3)
    assert list(SYNTHETIC.iterdir()) == []


def _unfinished(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-1]))


def _classifier(run: Path) -> None:
    cell = read_json(run / "cell.json")
    (run / "cell.json").write_text(json.dumps(cell | {"task": {"kind": "classify", "labels": ["a", "b"]}}))


def _other_weights(run: Path) -> None:
    shutil.copy(run_of("nonprivate") / "adapter/adapter_model.safetensors", run / "adapter")


def _other_ledger(run: Path) -> None:
    shutil.copy(run_of("nonprivate") / "ledger.jsonl", run)


def _other_price(run: Path) -> None:
    """Make the ledger of a cell look like that of the same mechanism at another epsilon."""
    result = read_json(run / "result.json")
    (run / "result.json").write_text(json.dumps(result | {"epsilon_certified": 2 * result["epsilon_certified"]}))


def _other_base(run: Path) -> None:
    (PUBLIC_MODEL / "config.json").write_text((PUBLIC_MODEL / "config.json").read_text() + "\n")


def _no_cell(run: Path) -> None:
    (run / "cell.json").write_text('{"kind": "run"}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, r"is not a folder\. Fix: give the folder of a finished cell: `ls data/runs` lists them"),
        (_no_cell, r"it has no cell\.json\. Fix: .*`dptune sample` takes any other adapter"),
        (_unfinished, r"has not ended\. Fix: run its study again"),
        (_classifier, r"is a classifier, which writes no texts\. Fix: give a cell that "),
        (_other_weights, r"\.safetensors: is not what the run of this ledger wrote, .* Fix: restore the weights"),
        (_other_ledger, r"ledger\.jsonl: is the ledger of another cell\. Fix: restore the cell's own"),
        (_other_price, r"ledger\.jsonl: is of another run than result\.json beside it\. Fix: restore the two"),
        (_other_base, r"model\.source: data/models/public is another model than .* Fix: restore that model"),
    ],
)
def test_what_is_no_finished_cell_that_writes_texts_is_refused(
    study: Path, change: Callable[[Path], None], said: str
) -> None:
    run = run_of("static")
    change(run)
    with pytest.raises(DptuneError, match=said):
        sample_cell(run, 3)
    assert not SYNTHETIC.exists()


@pytest.mark.parametrize("ending", FILES)
def test_what_was_sampled_before_is_not_replaced(study: Path, ending: str) -> None:
    SYNTHETIC.mkdir()
    (SYNTHETIC / f"{run_of('static').name}{ending}").write_text("mine")
    with pytest.raises(DptuneError, match=r"exists: data/runs/.* was sampled before\. Fix: move away"):
        sample_cell(run_of("static"), 3)
    assert [path.read_text() for path in SYNTHETIC.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("form", "said"), [("pair", "trained on prompts and completions"), ("messages", "trained on chats")]
)
def test_prompts_are_asked_for(study: Path, monkeypatch: pytest.MonkeyPatch, form: str, said: str) -> None:
    label = read_json(run_of("static") / "result.json")["data"]
    monkeypatch.setattr(adapter_model, "read_about", lambda path: {"label": label, "form": form})
    with pytest.raises(DptuneError, match=rf"prompts: are missing: the cell {said}\. .*PROMPTS=FILE"):
        sample_cell(run_of("static"), 3)
    assert not SYNTHETIC.exists()


def test_prompts_go_with_their_completions(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_model, "read_about", lambda path: {"label": "other records"})
    Path("prompts.txt").write_text("The patient\nA patient\n")
    page, _ = sample_cell(run_of("static"), prompts=Path("prompts.txt"))
    rows = [json.loads(line) for line in page.with_suffix(".jsonl").read_text("utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == ["The patient", "A patient"]
    assert "was not checked." in words(page), "whether the cell trained on prompts"
    assert "and the public prompts" in words(page)


def test_a_page_of_chats_shows_each_message(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that only calls tools is shown by its calls, and the chart counts the characters of answers alone."""
    calls = [{"function": {"name": "<look>"}}]
    asked = [{"role": "user", "content": "Where <is> it?"}, {"role": "assistant", "tool_calls": calls}]
    row = {"messages": [*asked, {"role": "tool", "content": "Here."}, {"role": "assistant", "content": "On its way."}]}
    own = sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *given, **more: replace(own(*given, **more), rows=[row] * 3))
    drawn: list[Any] = []
    monkeypatch.setattr(synthetic, "lengths", lambda name, texts: drawn.append(texts) or lengths(name, texts))
    page, _ = sample_cell(run_of("static"), 3)
    assert drawn == [["On its way."] * 3]
    for said in ("Where &lt;is&gt; it?", "&lt;look&gt;", "Here.", "On its way."):
        assert page.read_text("utf-8").count(said) == 3


def test_no_record_is_needed(study: Path) -> None:
    """Sampling is post-processing."""
    for folder in ("canaries", "splits", "validation", "secrets", "tokens"):
        shutil.rmtree(study / "data" / folder, ignore_errors=True)
    assert open_cell(run_of("static")).form is None
    sample_cell(run_of("static"), 3)


def test_the_command_ends_with_the_cause_and_the_fix(empty: Path) -> None:
    status, _, errors = forked(command("tasks.synthetic", "data/runs/none"), empty)
    assert status == 2
    said = "error: run: data/runs/none is not a folder. Fix: give the folder of a finished cell"
    assert errors.strip().splitlines()[-1].startswith(said)
    with pytest.raises(DptuneError, match=r"run: is missing\. Fix: make sample RUN=data/runs/NAME, a finished cell"):
        synthetic.main()


def test_no_text_at_all_is_refused(study: Path) -> None:
    with pytest.raises(DptuneError, match=r"records: 0 is below 1\. Fix: raise it"):
        sample_cell(run_of("static"), 0)
    assert list(SYNTHETIC.iterdir()) == []


@pytest.mark.parametrize("texts", [["a"], ["a" * n for n in range(1, 500)], ["", "b" * 100_000]])
def test_bars_hold_every_text_once(texts: list[str]) -> None:
    (drawn,) = for_page(lengths("x", texts))
    (rows,) = drawn["datasets"].values()
    assert sum(row["texts"] for row in rows) == len(texts)
    assert len(rows) <= 25
    assert all(row["from"] < row["to"] for row in rows)
