"""Only what has a certified epsilon may say "differential privacy": on its card, in a command, on a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_sample import texts_adapter
from tiny_tuning import checkpoint
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.core.files import write_text
from dptune.job.delivery import privacy_section as written
from dptune.job.delivery.deliverable import write_card
from dptune.job.delivery.finished_adapter import open_adapter
from dptune.job.delivery.synthetic_card import synthetic_card
from dptune.job.delivery.verification import CARD, CONFIG, RECORDS, WEIGHTS, CardError, check_deliverable
from dptune.job.result import RunResult
from dptune.privacy.accountants import Epsilons
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from tasks.report.claims import GUARANTEE, guarantee, own_conditions, shared_guarantees

PRIVATE = Release(0.1, 4.0)
#: Runs by what is wrong with them: releases, leaks of the run, and the reason that is told; none of a sound one.
RUNS: dict[str, tuple[Release, tuple[str, ...], str]] = {
    "sound": (PRIVATE, (), ""),
    "nonprivate": (Release(0.1, 0.0, noise="none"), (), "gradients without noise"),
    "rldp_published": (replace(PRIVATE, raw_inputs=("raw gradient norms",)), (), "raw gradient norms"),
    "a fixed seed": (PRIVATE, ("not private: a fixed noise seed",), "not private: a fixed noise seed"),
    "noise that bounds nothing": (Release(1.0, 1e-300), (), "its noise is too small"),
}
UNSOUND = [name for name in RUNS if name != "sound"]
RESULT = RunResult({}, {}, base="tiny")


def delivered(name: str, folder: Path, *, scored: bool = False) -> Path:
    """A folder with the ledger of such a run, and its card."""
    release, leaks, _ = RUNS[name]
    folder.mkdir(exist_ok=True)
    header = RunHeader(name, "gdp_clt", "published", None, 1e-5, "record", 10, leaks=leaks)
    with Ledger.create(folder / "ledger.jsonl", header, Counter({release: 2})) as ledger:
        ledger.charge(release)
        ledger.charge(release)
        ledger.finish()
    for file, content in ((WEIGHTS, "a stand-in"), (CONFIG, "{}"), (RECORDS, '{"form": "text", "tokens": 23}')):
        write_text(folder / file, content)
    write_card(folder, replace(RESULT, task="classify" if scored else "generate"))
    return folder


def verify(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["verify", str(folder), *options])


def metadata(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("name", UNSOUND)
def test_without_a_certified_epsilon_the_card_says_so_first_and_verify_ends_with_1(
    name: str, scored: bool, tmp_path: Path
) -> None:
    folder, why = delivered(name, tmp_path / "a", scored=scored), RUNS[name][2]
    card = (folder / CARD).read_text()
    assert metadata(card)["tags"] == ["lora", "transformers"]
    assert card.split("---\n")[2].startswith("# NO GUARANTEE: LoRA adapter ")
    assert "ifferential" not in card
    assert "differential-privacy" not in card
    assert f"- Everything, for: {why}." in card
    for target in (folder, folder / "ledger.jsonl"):
        for option in ((), ("--json",)):
            done = verify(target, *option)
            assert done.exit_code == 1
            assert "guarantee covers" not in done.stdout.lower()
            said = done.stderr.strip().splitlines()[-1]
            assert said.startswith(f"NO GUARANTEE: no epsilon is certified ({why}). Fix: ")
            asked = verify(target, "--no-guarantee", *option)
            assert asked.exit_code == 0
            assert said in asked.stderr
    said = json.loads(verify(folder, "--json").stdout)
    assert (said["epsilon_certified"], said["weights_compared"]) == ("inf", True)
    assert not json.loads(verify(folder / "ledger.jsonl", "--json").stdout)["weights_compared"], "it binds none"


def test_with_one_the_card_says_so_too_and_verify_ends_with_0(tmp_path: Path) -> None:
    folder = delivered("sound", tmp_path / "a")
    card = (folder / CARD).read_text()
    assert metadata(card) == {
        "base_model": "tiny",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["differential-privacy", "lora", "transformers"],
    }
    assert "# LoRA adapter for tiny\n\nFine-tuned with differential privacy by dptune.\n" in card
    assert "NO GUARANTEE" not in card
    assert "Everything" not in card
    done = verify(folder)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "The guarantee covers the trained weights" in done.stdout


@pytest.mark.parametrize("name", UNSOUND)
@pytest.mark.parametrize(
    "claim", ["tags:\n- differential-privacy\n", "Fine-tuned with differential privacy by dptune."]
)
def test_a_card_that_claims_what_its_ledger_does_not_is_refused(name: str, claim: str, tmp_path: Path) -> None:
    """As earlier versions wrote them: of nonprivate runs too."""
    folder = delivered(name, tmp_path / "a")
    text = (folder / CARD).read_text()
    old = text.replace("tags:\n", claim) if claim.startswith("tags") else text.replace("Nothing bounds", f"{claim}\n\n")
    assert old != text
    write_text(folder / CARD, old)
    for options in ((), ("--no-guarantee",)):
        done = verify(folder, *options)
        assert done.exit_code == 2
        assert f"certifies no epsilon ({RUNS[name][2]})" in done.stderr
    with pytest.raises(CardError):
        open_adapter(folder, no_guarantee=True)


@pytest.mark.parametrize("telemetry", ["research", "private"])
@pytest.mark.parametrize("classifies", [False, True])
def test_the_card_of_an_earlier_version_with_a_certified_epsilon_stays_true(
    telemetry: str, classifies: bool, tmp_path: Path
) -> None:
    folder = delivered("sound", tmp_path / "a")
    header = replace(read_ledger(folder / "ledger.jsonl").header, telemetry=telemetry)
    (folder / "ledger.jsonl").unlink()
    with Ledger.create(folder / "ledger.jsonl", header, Counter({PRIVATE: 1})) as ledger:
        ledger.charge(PRIVATE)
        ledger.finish()
    if classifies:
        write_text(folder / "labels.json", '["0", "1"]')
    write_card(folder, RESULT)
    text = (folder / CARD).read_text()
    measure = "Accuracy" if classifies else "Perplexity"
    told = f"- {measure} on held-out private records, which is told beside the weights: the guarantee is about the "
    old = text.replace(written._AUDITED, "not measured")
    old = old.replace(f"- {written._FIGURES}", f"{told}weights alone.")
    old = old.replace(written._LABELS, "The names of the labels, whether they were given or read from the records.")
    assert old.count("\n") == text.count("\n")
    assert (told in old, "whether they were given" in old) == (telemetry == "research", classifies)
    write_text(folder / CARD, old)
    assert verify(folder).exit_code == 0
    write_text(folder / CARD, old.replace("not measured", "2"))
    with pytest.raises(CardError, match=r"says '\| epsilon_audited"):
        check_deliverable(folder)


@pytest.mark.parametrize("name", RUNS)
def test_a_cells_sentence_and_the_card_of_its_texts_follow_the_same_epsilon(name: str, tmp_path: Path) -> None:
    found = open_adapter(delivered(name, tmp_path / "a"), no_guarantee=True)
    prices, why = found.contents.epsilons, RUNS[name][2]
    assert math.isfinite(prices.certified) == (name == "sound")
    text = synthetic_card(found, "a.jsonl", "0", settings={}, figures={}, prompts="", notes=())
    for telemetry in ("research", "private"):
        sentence = guarantee(telemetry, prices, together=(math.inf, 1e-5))
        assert sentence.startswith("The guarantee covers") if name == "sound" else sentence == f"No guarantee: {why}."
    assert text.startswith(f"# {'' if name == 'sound' else 'NO GUARANTEE: '}SYNTHETIC texts: a.jsonl\n")
    assert ("**NO GUARANTEE: " in text) == (name != "sound")
    assert ("cost nothing more" in text) == (name == "sound")
    assert (f"- Everything, for: {why}." in text) == (name != "sound")


def test_a_page_speaks_of_the_guarantee_of_cells_that_have_one() -> None:
    none, sound = {"telemetry": "private", "epsilon_certified": "inf"}, {"telemetry": "research"}
    assert shared_guarantees([none]) == ["No guarantee: no cell has a certified epsilon."]
    mixed = shared_guarantees([none, sound | {"epsilon_certified": 2.0}])
    assert mixed == [GUARANTEE["private"], GUARANTEE["research"]], "the curves of both are on the page"


def test_a_guarantee_covers_weights_where_no_adapter_trained() -> None:
    prices = Epsilons(2.0, 2.0, 2.0)
    cells = [
        {
            "telemetry": "research",
            "epsilon_certified": 2.0,
            "guarantee": guarantee("research", prices, True, train=train),
        }
        for train in ("lora", "bias")
    ]
    assert [one["guarantee"].split(",")[0] for one in cells] == [
        "The guarantee covers the adapter",
        "The guarantee covers the trained weights",
    ]
    assert len(shared_guarantees(cells)) == 2
    assert {own_conditions(one) for one in cells} == {"It includes what the run of its hyper-policy spent."}


@pytest.mark.parametrize("opened", [False, True])
def test_python_samples_no_run_without_a_guarantee_unless_asked(
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an adapter that was opened without one, or has been replaced since: each call is asked."""
    adapter = open_adapter(texts_adapter())
    header = replace(adapter.contents.header, accounting="published", leaks=("a leak",))
    leaky = replace(adapter.contents, header=header)
    given: Any = replace(adapter, contents=leaky) if opened else texts_adapter()
    monkeypatch.setattr("dptune.job.delivery.finished_adapter.check_deliverable", lambda path: leaky)
    with pytest.raises(ConfigError, match=r"has no certified epsilon \(a leak\)") as refused:
        dptune.sample(given, checkpoint(), 2)
    assert refused.value.field == "adapter"
    found = dptune.sample(given, checkpoint(), 2, no_guarantee=True)
    assert "NO GUARANTEE" in found.card("a.jsonl", "0").splitlines()[0]
    with pytest.raises(ConfigError, match="changed after it was opened"):
        dptune.sample(adapter, checkpoint(), 2)
    monkeypatch.undo()
    assert len(dptune.sample(adapter, checkpoint(), 2).rows) == 2
