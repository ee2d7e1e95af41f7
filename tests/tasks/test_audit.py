"""The audit of a finished cell: every attack, from its files alone, and refusals in words."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import mannwhitneyu
from tiny_pipeline import (
    UNITS,
    built,
    cells,
    copied,
    merge,
    mode,
    prepare_environment,
    quick_pictures,
    read_json,
    run_stages,
    static,
)

from dptune.audit.refutation import Refutation
from dptune.audit.text.likelihood import Passage
from dptune.audit.verdict import CHECKS
from dptune.audit.whole_run import audit_run
from dptune.core.errors import ConfigError, DataError
from dptune.core.files import sha256, write_json, write_text
from dptune.core.metric import Metric
from dptune.job.audit_canaries import KeptCanaries
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder
from dptune.records.canaries import read_secrets
from dptune.records.parquet_file import read_records
from dptune.training.privacy_units import PrivacyUnits, Turn
from tasks.audit import attacks as audit_task
from tasks.audit import mechanism_attacks, registry
from tasks.audit.attacks import audit_cell, audit_file, audit_key
from tasks.audit.registry import Part, exceeded, violations
from tasks.audit.target import Target, load_target
from tasks.experiment import cell_training
from tasks.experiment.cell_list import write_list
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.mlflow.cell_run import audit_metrics, main_names
from tasks.paths import EVAL, EXPERIMENT, MANIFEST, PUBLIC_MODEL, REPORT, SECRETS, SPLITS, TRAIN, planted_secrets
from tasks.report.experiment import report, write_report
from tasks.settings.experiment import Audit
from tasks.settings.params import load_settings

#: Records are cut at 64 tokens in the tiny pipeline, far before their secrets.
WHOLE = {"training": {"max_length": 400, "epochs": 0.15}}
STEPS = 2
BY_TOKENS = {"likelihood", "calibrated", "rmia", "error_zone", "windows", "min_k", "min_k_plus"}


def settings(**changes: Any) -> Audit:
    """Settings of attacks that take a second; tests that read the step audit set its trials."""
    tiny = {"generations": 40, "candidates": 7, "records": 12, "shadows": 0, "step_trials": 0, "seed": 0}
    return Audit(**({"confidence": 0.95, "false_alarms": 0.001} | tiny | changes))


def run(cell: Cell) -> Path:
    """The folder of the finished cell, as the flow leaves it."""
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    return cell.directory


def like(name: str, *changes: dict[str, Any], **options: Any) -> Cell:
    """A cell of another mechanism than static."""
    chosen = {"mechanisms": {"other": {"like": name} | options}, "experiment": {"mechanisms": ["other"]}}
    return cells(WHOLE, chosen, *changes)[0]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pipeline with a finished private cell that was audited once, and the cell's folder in it."""
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("audited") / "tiny pipeline")
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        quick_pictures(patch)
        cell = run(static(WHOLE))
        audit_cell(cell, settings(step_trials=500), "cpu")
    return directory, cell


@pytest.fixture
def audited(once: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished private cell with its audit, in a copy of the pipeline."""
    template, cell = once
    prepare_environment(monkeypatch, copied(template, tmp_path / "tiny pipeline"))
    quick_pictures(monkeypatch)
    return cell


@pytest.fixture
def finished(audited: Path) -> Path:
    """The same without the audit."""
    audit_file(audited).unlink()
    return audited


def test_every_attack_is_made_and_named_with_its_chance(audited: Path) -> None:
    audit = read_json(audit_file(audited))
    assert mode(audit_file(audited)) == 0o600
    assert audit["one_run"]["canaries"] == 20
    assert audit["one_run"]["epsilon_audited"] <= audit["one_run"]["most"] < 2
    assert audit["extraction"]["generated"] == 40
    assert audit["extraction"]["recited"] == audit["extraction"]["verbatim"] == 0
    assert {f"jaccard_{n}_chance" for n in (1, 2, 3, 4)} <= set(audit["extraction"])
    assert 0 <= audit["exposure"]["mean"] <= audit["exposure"]["most"] <= audit["exposure"]["possible"] == 3
    assert audit["canaries"]["calibrated"]["members"] + audit["canaries"]["calibrated"]["non_members"] == 20
    assert audit["membership"]["likelihood"]["members"] == audit["membership"]["likelihood"]["non_members"] == 12
    assert audit["step"]["epsilon_audited"] <= audit["step"]["epsilon_certified"]
    assert audit["violations"] == []


def ending_by_itself(passage: Passage, target: Target) -> float:
    """The mean log-probability of the tokens that have a character of the ending, without an end-of-text token."""
    made = target.tokenizer(passage.text, add_special_tokens=False, return_offsets_mapping=True)
    limit = target.cell.training.max_length - 1
    ids, ends = made["input_ids"][:limit], [end for _, end in made["offset_mapping"]][:limit]
    with torch.no_grad():
        logs = target.adapted(input_ids=torch.tensor([ids])).logits.double().log_softmax(-1)[0]
    found = [float(logs[at - 1, ids[at]]) for at in range(1, len(ids)) if ends[at] > len(passage.prompt)]
    return sum(found) / len(found)


def test_membership_has_the_means_and_the_one_auc_of_rldps_equations(finished: Path) -> None:
    """Equations 37 to 39, with each ending scored alone in a plain loop."""
    found = audit_cell(finished, settings(generations=1), "cpu")["membership"]
    assert set(found) == BY_TOKENS
    target = load_target(finished, settings(), torch.device("cpu"), 1)
    scores = []
    for path in (SPLITS / "train.parquet", EVAL):
        passages = audit_task._sample(read_records(path), target)
        scores.append([ending_by_itself(one, target) for one in passages])
    members, others = scores
    figures, every = found["likelihood"], [*members, *others]
    assert figures["mean_log_probability"] == pytest.approx(sum(every) / len(every), abs=1e-5)
    assert figures["mean_perplexity"] == pytest.approx(sum(math.exp(-one) for one in every) / len(every), rel=1e-5)
    statistic = mannwhitneyu(members, others).statistic / (len(members) * len(others))
    rounding = 1.5 / (12 * 12)  # may tie one pair
    assert figures["auc"] == pytest.approx(statistic, abs=rounding)
    metrics = audit_metrics({"membership": found})
    assert {f"audit_membership_likelihood_{name}" for name in ("auc", "mean_log_probability")} <= set(metrics)


def test_no_secret_and_no_record_is_in_the_audit(audited: Path) -> None:
    written = audit_file(audited).read_text()
    secrets = read_secrets(planted_secrets())
    assert not any(one.secret in written for one in (*secrets.extraction, *secrets.audit))
    assert "patient" not in written


def test_private_telemetry_attacks_no_persons_records(pipeline: Path) -> None:
    """Canaries lie in public texts: their attacks need no record, and shadow models train on public ones."""
    two_pairs = {"lora": {"target_modules": ["c_attn", "c_fc"]}}
    directory = run(static(WHOLE, two_pairs, {"experiment": {"telemetry": "private"}}))
    for side in ("train", "attack"):
        (SPLITS / f"{side}.parquet").unlink()
    audit = audit_cell(directory, settings(shadows=4), "cpu")
    assert "membership" not in audit
    assert {"exposure", "extraction", "one_run"} < set(audit)
    assert set(audit["canaries"]) == {*BY_TOKENS, "alignment", "shadows"}


def test_shadow_models_give_likelihood_ratios(finished: Path) -> None:
    audit = audit_cell(finished, settings(shadows=4, records=0), "cpu")
    assert set(audit["canaries"]) == {*BY_TOKENS, "alignment", "shadows"}


def test_crafted_canaries_are_audited_and_their_coins_stay_here(pipeline: Path) -> None:
    directory = run(static(WHOLE, {"canaries": {"crafted": 16}}))
    audit = audit_cell(directory, settings(), "cpu")
    assert audit["crafted"]["canaries"] == 16
    assert audit["crafted"]["confidence"] == audit["one_run"]["confidence"] == 0.975, "two kinds share the error"
    assert (audit["crafted"]["watched"], audit["crafted"]["releases"]) == (STEPS, STEPS)
    assert mode(RunFolder(directory).crafted) == 0o600
    assert RunFolder(directory).crafted.is_relative_to(SECRETS.absolute())  # never in a cache
    assert not [path for path in directory.rglob("*") if "crafted" in path.name]
    assert read_json(directory / "result.json")["crafted"] == 16


def test_a_finished_cell_is_audited_in_its_folder_and_nowhere_else(pipeline: Path, tmp_path: Path) -> None:
    directory = run(static(WHOLE, {"canaries": {"crafted": 16}}))
    found = audit_run(directory)
    contents = read_ledger(directory / "ledger.jsonl")
    assert (found.coins.canaries, found.watched, found.accusations) == (16, STEPS, [])
    assert contents.header.coins == KeptCanaries.read(directory, RunFolder(directory).crafted).commitment
    assert contents.scores == sha256(RunFolder(directory).crafted)
    moved = Path(shutil.copytree(directory, tmp_path / "elsewhere" / directory.name))
    with pytest.raises(DataError, match=rf"Fix: put {directory.name} back under its name into data/runs of the"):
        audit_run(moved)
    renamed = Path(shutil.copytree(directory, directory.with_name("renamed")))
    with pytest.raises(DataError, match=r"renamed.json: is missing: .* Fix: restore it; or give the run its own name"):
        audit_run(renamed)
    shutil.rmtree(renamed)
    stored = read_json(RunFolder(directory).crafted)
    write_json(RunFolder(directory).crafted, stored | {"included": [1 - coin for coin in stored["included"]]})
    with pytest.raises(DataError, match=r"holds other coins than .*ledger.jsonl was begun with"):
        audit_run(directory)


def test_a_cell_without_canaries_says_what_an_audit_would_need(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"was trained without the gradients .* \(canaries.crafted\)"):
        audit_run(finished)


def test_a_resumed_run_keeps_what_its_auditor_saw(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = static(WHOLE, {"canaries": {"crafted": 16}})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cell_training, "write_policy", killed)
        with pytest.raises(KeyboardInterrupt):
            run(cell)
    before = read_json(RunFolder(cell.directory).crafted)
    run(cell)
    assert read_json(RunFolder(cell.directory).crafted) == before
    assert len(before["moves"]) == STEPS


def test_coins_are_kept_under_the_ledgers_lock_and_before_the_first_charge(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written earlier, they could be another process's by the time this one has the ledger."""
    cell = static(WHOLE, {"canaries": {"crafted": 16}})
    seen: list[tuple[bool, int]] = []
    kept, charge = KeptCanaries.kept, Ledger.charge

    def noted(canaries: Any, booked: Any) -> Any:
        assert not RunFolder(cell.directory).crafted.exists()
        with pytest.raises(LedgerError, match="another process is charging it"):
            Ledger.resume(cell.directory / "ledger.jsonl", Counter())
        return kept(canaries, booked)

    def charged(ledger: Ledger, release: Release) -> Any:
        seen.append((RunFolder(cell.directory).crafted.exists(), ledger.releases))
        return charge(ledger, release)

    monkeypatch.setattr(KeptCanaries, "kept", noted)
    monkeypatch.setattr(Ledger, "charge", charged)
    run(cell)
    assert seen == [(True, release) for release in range(STEPS)]


@pytest.mark.parametrize("damage", ["other coins", "none"])
def test_a_run_goes_on_with_its_own_coins_or_not_at_all(
    damage: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static(WHOLE, {"canaries": {"crafted": 16}})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cell_training, "write_policy", killed)
        with pytest.raises(KeyboardInterrupt):
            run(cell)
    file = RunFolder(cell.directory).crafted
    real = cell_training.crafted_canaries

    def meanwhile(*given: Any) -> Any:
        """Somebody changes the file after it was read, as the lock of the ledger is not held yet."""
        canaries, stored = real(*given), read_json(file)
        if damage == "none":
            file.unlink()
        else:
            write_json(file, stored | {"included": [1 - coin for coin in stored["included"]]})
        return canaries

    monkeypatch.setattr(cell_training, "crafted_canaries", meanwhile)
    lines = (cell.directory / "ledger.jsonl").read_text()
    with pytest.raises(DataError, match=r"does not hold the coins that this run's releases were made with. Fix: "):
        run(cell)
    assert (cell.directory / "ledger.jsonl").read_text() == lines


@pytest.mark.parametrize("part", ["one_run", "crafted"])
def test_more_than_is_certified_is_a_violation(part: str) -> None:
    found = Refutation(certified=1.5, confidence=0.9999, guesses=20, correct=20, needed=19, epsilon_refutable=1.7)
    audit = {"label": "small.static", "alarm_confidence": 0.9999, "epsilon_certified": 1.5, part: found.to_dict()}
    (said,) = violations(audit)
    assert said.startswith(f"small.static: an attack on its canaries ({part}) guesses 20 of 20 coins right, where the")
    assert said.endswith("the mechanism, its accountant or its data handling is wrong")
    assert violations(audit | {part: replace(found, correct=18).to_dict()}) == []


def test_a_step_beyond_its_certificate_is_a_violation() -> None:
    step = {"epsilon_alarm": 3.0, "epsilon_certified": 2.0, "mu_alarm": 0.4, "mu_certified": 0.5}
    audit = {"label": "a", "alarm_confidence": 0.9999, "epsilon_certified": "inf", "step": step}
    assert "white-box" in violations(audit)[0]
    assert "mu >= 0.6" in violations(audit | {"step": step | {"epsilon_alarm": 1.0, "mu_alarm": 0.6}})[0]
    assert violations(audit | {"step": step | {"epsilon_certified": "inf"}}) == []


def test_alarms_are_rarer_than_reports_and_shared_by_all_cells(audited: Path) -> None:
    few = read_json(audit_file(audited))
    many = audit_cell(audited, settings(step_trials=500), "cpu", cells=100, seeds=5)
    assert many == read_json(audit_file(audited)), "what is returned is what is written"
    assert 1 - many["alarm_confidence"] == pytest.approx(0.001 / 700, rel=1e-6)  # seven comparisons in a cell
    assert many["step"]["alarm_confidence"] == many["alarm_confidence"]
    assert [many[part]["confidence"] for part in ("one_run", "whole_run")] == [pytest.approx(0.99)] * 2
    assert few["one_run"]["confidence"] == 0.95, "one bound keeps the whole error"
    assert many["one_run"]["epsilon_refutable"] <= few["one_run"]["epsilon_refutable"]
    assert few["step"]["mu_alarm"] <= few["step"]["mu_audited"]


def _noise_times(factor: float) -> Callable[[str, dict[str, Any]], Any]:
    real = mechanism_attacks.build

    def built(name: str, options: dict[str, Any]) -> Any:
        return real(name, options | {"noise_multiplier": factor * options["noise_multiplier"]})

    return built


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.0001])
def test_a_step_with_other_noise_than_the_ledgers_is_no_audit(
    finished: Path, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twice the noise nothing is ever shown, and the silence would say nothing about the run."""
    monkeypatch.setattr(mechanism_attacks, "build", _noise_times(factor))
    with pytest.raises(
        DataError, match=r"ledger.jsonl: was charged for another step .* noise_multiplier .* in place of"
    ):
        audit_cell(finished, settings(step_trials=500, generations=1, records=0), "cpu")
    assert not audit_file(finished).exists()


def test_a_ledger_that_was_charged_for_more_noise_is_found_out(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the noise: a sound step is accused in one of a thousand audits; the alarm is shared by seven comparisons."""
    directory = run(static(WHOLE, {"experiment": {"epsilons": [8]}}))
    sound = audit_cell(directory, settings(step_trials=1000, generations=2, records=0), "cpu")
    assert sound["violations"] == []
    assert 0.5 < sound["step"]["noise_detectable"] < 1
    real = Gaussian.add
    monkeypatch.setattr(
        Gaussian, "add", lambda self, sums, scales, noise, entropy: real(self, sums, scales, noise / 2, entropy)
    )
    step, games = audit_cell(directory, settings(step_trials=1000, generations=2, records=0), "cpu")["violations"]
    assert "a white-box attack on one of its steps shows mu >=" in step
    assert "pairs of games on its twin refute the curve whose epsilon at 1e-05 is certified as" in games


@pytest.mark.usefixtures("quick_pictures")
def test_every_attack_says_what_it_could_have_refuted(pipeline: Path) -> None:
    directory = run(static(WHOLE, {"canaries": {"crafted": 16}}))
    audit = audit_cell(directory, settings(step_trials=500, false_alarms=0.01), "cpu")  # 20 coins show little at less
    assert "could have refuted the certified epsilon" in audit["one_run"]["power"]
    assert re.match("could have refuted: a draw at a rate above|NO POWER on the draw", audit["draw"]["power"])
    assert audit["draw"]["sample_rate"] == pytest.approx(16 / (UNITS + 16))
    assert "noise below" in audit["step"]["power"]
    write_report([read_json(directory / "result.json")], REPORT, "tiny", [audit])
    page = (REPORT / "report.html").read_text()
    for part in ("one_run", "crafted", "draw", "sampling", "step", "whole_run"):
        assert audit[part]["power"][1:] in page, "a sentence begins with a capital letter"


def test_entries_above_the_charged_rate_are_a_violation() -> None:
    audit = {"label": "a", "alarm_confidence": 0.9999, "epsilon_certified": "inf"}
    draw = {"alarm": 0.3, "sample_rate": 0.25}
    assert "a sample rate >= 0.3 at confidence 0.9999, but 0.25 is charged" in violations(audit | {"draw": draw})[0]
    assert violations(audit | {"draw": draw | {"alarm": 0.25}}) == []


@pytest.mark.parametrize("name", ["static", "quantile"])
def test_a_draw_at_twice_the_rate_is_found_out_without_any_canary_in_the_run(
    name: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any mechanism: the draw of the run's units is repeated. Accused falsely in one of 6,000 audits."""
    cell = like(name)
    directory = run(cell)
    audited = audit_cell(directory, settings(generations=1, records=0), "cpu")
    assert audited["violations"] == []
    assert audited["sampling"]["units"] == UNITS
    real = PrivacyUnits.draw
    monkeypatch.setattr(PrivacyUnits, "draw", lambda units, rate, entropy, *_: real(units, 2 * rate, entropy))
    found = audit_cell(directory, settings(generations=1, records=0), "cpu")
    (sentence,) = found["violations"]
    assert sentence.startswith(f"{cell.label}: ")
    assert "not Poisson samples" in sentence
    assert "units drawn in all" in sentence


def test_a_draw_that_ignores_the_groups_of_correlated_noise_is_found_out(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit is charged for every other row. Accused falsely in one of 6,000 audits."""
    directory = run(like("banded", bands=2))
    audited = audit_cell(directory, settings(generations=1, records=0), "cpu")
    assert audited["violations"] == []
    assert audited["sampling"]["sample_rate"] == pytest.approx(2 * 16 / UNITS)
    monkeypatch.setattr(Turn, "holds", lambda turn, numbers: np.ones(len(numbers), dtype=bool))
    found = audit_cell(directory, settings(generations=1, records=0), "cpu")
    assert "a unit is in one batch twice" in found["violations"][0]


def test_a_plan_with_another_rate_than_the_ledgers_is_found_out(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mechanism_attacks.plan_of
    monkeypatch.setattr(
        mechanism_attacks, "plan_of", lambda training, units, size, delta: real(training, units, 2 * size, delta)
    )
    found = audit_cell(finished, settings(generations=1, records=0), "cpu")
    assert "not Poisson samples" in found["violations"][0]


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize("name", ["geoclip", "rldp_published"])
def test_planted_gradients_that_cannot_see_the_draw_say_why(name: str, pipeline: Path) -> None:
    options = {"accounting": "published"} if name == "rldp_published" else {}
    directory = run(like(name, {"canaries": {"crafted": 16}}, **options))
    audit = audit_cell(directory, settings(generations=1, records=0), "cpu")
    assert audit["draw"]["power"].startswith("NO POWER on the draw: how much a planted gradient moves")
    assert audit["violations"] == []
    write_report([read_json(directory / "result.json")], REPORT, "tiny", [audit])
    assert audit["draw"]["power"] in (REPORT / "report.html").read_text()


def test_the_step_of_a_cell_that_moves_its_noise_at_once_is_audited(pipeline: Path) -> None:
    directory = run(like("rldp", move_noise=True, interval=1, warmup=0, batch_size=2))
    assert len(read_ledger(directory / "ledger.jsonl").composition) == STEPS
    audit = audit_cell(directory, settings(step_trials=500, generations=1, records=0), "cpu")
    assert audit["step"]["trials"] == 500
    assert "whole_run" not in audit  # a twin has no ledger that limits its noise


@pytest.mark.parametrize("name", ["banded", "rldp_published"])
def test_whole_runs_are_played_with_the_rate_steps_and_noise_of_the_ledger(name: str, pipeline: Path) -> None:
    options = {"accounting": "published"} if name == "rldp_published" else {"bands": 2}
    directory = run(like(name, **options))
    found = audit_cell(directory, settings(step_trials=500, generations=1, records=0), "cpu")
    games, ledger = found["whole_run"], read_ledger(directory / "ledger.jsonl")
    assert games["steps"] == ledger.releases
    assert games["sample_rate"] == pytest.approx(16 / UNITS)
    assert games["epsilon_certified"] == found["epsilon_certified"]
    assert games["epsilon_published"] == pytest.approx(found["epsilon_published"])
    assert 0 <= games["mu_audited"] <= float(games["mu_certified"])
    assert games["games"] == (1000 if name == "banded" else 100)  # a controller that reads raw statistics plays alone
    assert games["accusation"] is None


def _no_ledger(directory: Path) -> None:
    (directory / "ledger.jsonl").unlink()


def _unfinished(directory: Path) -> None:
    lines = (directory / "ledger.jsonl").read_text().splitlines(keepends=True)
    (directory / "ledger.jsonl").write_text("".join(lines[:-1]))


def _damaged(directory: Path) -> None:
    text = (directory / "ledger.jsonl").read_text()
    (directory / "ledger.jsonl").write_text(text.replace('"sample_rate"', '"sample_Rate"', 1))


def _other_secrets(directory: Path) -> None:
    stored = read_json(planted_secrets())
    stored["audit"][0]["included"] = 1 - stored["audit"][0]["included"]
    planted_secrets().write_text(json.dumps(stored))


def _other_adapter(directory: Path) -> None:
    config = read_json(directory / "adapter" / "adapter_config.json")
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))


def _renamed_weights(directory: Path) -> None:
    """PEFT would warn, load nothing, and attack the base model."""
    file = directory / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("h.0", "h.7"): value for name, value in load_file(file).items()}, file)


def _another_runs_adapter(directory: Path) -> None:
    file = directory / "adapter" / "adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)


def _another_cells_ledger(directory: Path) -> None:
    cell = read_json(directory / "cell.json")
    write_text(directory / "cell.json", json.dumps(cell | {"delta": 1e-6}))


def _other_model(directory: Path) -> None:
    config = read_json(PUBLIC_MODEL / "config.json")
    (PUBLIC_MODEL / "config.json").write_text(json.dumps(config, indent=1))


def _other_data(directory: Path) -> None:
    shutil.copy(TRAIN, EVAL)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_ledger, r"ledger.jsonl: is missing: an adapter without its ledger has no epsilon to check"),
        (_unfinished, r"ledger.jsonl: is not finished"),
        (_damaged, r"ledger.jsonl: is damaged"),
        (_other_secrets, r"secrets/[0-9a-f]{16}.json: is not what was planted"),
        (_other_adapter, r"adapter: does not fit data/models/public"),
        (_renamed_weights, r"adapter_model.safetensors: its weights belong to another model"),
        (_another_runs_adapter, r"adapter_model.safetensors: is not what the run of this ledger wrote"),
        (_another_cells_ledger, r"ledger.jsonl: is the ledger of another cell"),
        (_other_model, r"was trained with another base model"),
        (_other_data, r"was trained with other data"),
    ],
)
def test_what_does_not_belong_together_is_refused(finished: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(finished)
    with pytest.raises(DataError, match=rf"{message}.* Fix: "):
        audit_cell(finished, settings(), "cpu")
    assert not audit_file(finished).exists()


@pytest.mark.usefixtures("quick_pictures")
def test_without_canaries_only_what_needs_none_is_attacked(pipeline: Path) -> None:
    """A deliverable: from the split to the report, the records alone are trained on."""
    none = {"canaries": {"extraction": 0, "audit": 0, "crafted": 0}}
    run_stages(none, pretrained=False)
    trained, split = (read_records(path) for path in (TRAIN, SPLITS / "train.parquet"))
    assert trained.text.equals(split.text)
    assert trained.record.tolist() == split.record.tolist()
    directory = run(static(WHOLE, none))
    result = read_json(directory / "result.json")
    assert result["units"] == len(split.record)
    audit = audit_cell(directory, settings(step_trials=500), "cpu")
    assert {"one_run", "exposure", "extraction", "canaries", "crafted"}.isdisjoint(audit)
    assert {"membership", "step", "epsilon_published", "epsilon_noise_only", "epsilon_certified"} < set(audit)
    write_json(EXPERIMENT, {"cells": [directory.name]})
    report()
    page = (REPORT / "report.html").read_text()
    assert "Does an attack agree with the ledger?" in page
    assert audit_metrics(audit).items() <= read_json(REPORT / "cells.json")[audit["label"]].items()


def test_an_audit_is_made_again_when_something_changed(finished: Path) -> None:
    key = audit_key(finished, settings())
    assert audit_key(finished, settings()) == key
    assert audit_key(finished, settings(seed=1)) != key
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(audit_task.ATTACKS, "louder", lambda target: {})
        assert audit_key(finished, settings()) != key, "an attack that is new is made on finished cells"
    MANIFEST.touch()
    assert audit_key(finished, settings()) == key


def test_the_report_shows_audits(audited: Path, tmp_path: Path) -> None:
    audit = read_json(audit_file(audited))
    result = read_json(audited / "result.json")
    write_report([result], tmp_path / "report", "tiny", [audit | {"violations": ["small: something is wrong"]}])
    page = (tmp_path / "report" / "report.html").read_text()
    assert "BUG: small: something is wrong" in page
    assert "ε audited" in page
    metrics = read_json(tmp_path / "report" / "cells.json")
    assert set(audit_metrics(audit)) <= set(metrics[audit["label"]])
    for name in ("audit.png", "roc.png"):
        assert (tmp_path / "report" / "figures" / name).read_bytes().startswith(b"\x89PNG")


def test_bad_settings_are_named(pipeline: Path) -> None:
    for field, value in (("confidence", 1), ("generations", 0), ("shadows", 3), ("step_trials", 10)):
        with pytest.raises(ConfigError, match=rf"audit\.{field}"):
            load_settings(overrides=merge({}, {"audit": {field: value}}))


NEW = Part(
    "louder",
    "canaries_louder",
    "canaries that became likelier",
    comparisons=1,
    accused=lambda figures, confidence: exceeded("it", "a share", figures["share"], 0.5, "certified", confidence),
    power=True,
    metrics=(
        Metric("audit_louder_share", "share that became likelier", source="auditor", shown=("tracking", "scores")),
    ),
)


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize("private", [False, True])
def test_a_new_attack_is_in_every_place_that_lists_attacks(
    finished: Path, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the false alarms, may accuse, and is in the audit, the cells' figures, MLflow's and on the page."""
    monkeypatch.setattr(registry, "PARTS", (*registry.PARTS, replace(NEW, private=private)))
    found = {"louder": {"share": 0.75, "power": "a share above 0.5 is refuted"}}
    monkeypatch.setitem(audit_task.ATTACKS, "canaries_louder", lambda target: found)
    audit = audit_cell(finished, settings(records=0), "cpu")
    assert audit["louder"] == found["louder"]
    assert 1 - audit["alarm_confidence"] == pytest.approx(0.001 / 8, rel=1e-6)
    (said,) = audit["violations"]
    assert "it shows a share >= 0.75" in said
    assert audit_metrics(audit)["audit_louder_share"] == 0.75
    assert "audit_louder_share" in main_names()
    write_list(EXPERIMENT, "tiny", [finished])
    report("tiny")
    page = (REPORT / "report.html").read_text(encoding="utf-8")
    assert "<h2>Canaries that became likelier</h2>" in page
    assert "share that became likelier</th>" in page
    assert '<td>canaries that became likelier</td><td class="text">A share above 0.5 is refuted.</td>' in page


def test_a_new_attack_on_persons_records_is_not_made_under_private_telemetry(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PARTS", (*registry.PARTS, replace(NEW, private=True)))
    made: list[Target] = []
    monkeypatch.setitem(audit_task.ATTACKS, "canaries_louder", lambda target: made.append(target) or {"louder": {}})
    directory = run(static(WHOLE, {"experiment": {"telemetry": "private"}}))
    audit = audit_cell(directory, settings(), "cpu")
    assert not made
    assert "louder" not in audit


def test_every_part_of_an_audit_is_made_by_an_attack() -> None:
    assert {part.attack for part in registry.PARTS} == set(audit_task.ATTACKS)
    assert len({part.key for part in registry.PARTS}) == len(registry.PARTS)
    assert sum(part.comparisons for part in registry.PARTS if part.key == "step") == CHECKS
