"""Suggestions follow public records alone, and a trial meets the noise, batch and steps of the private run."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError, DivergedError
from dptune.job import suggest as module
from dptune.job.base_model import open_base
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.job.suggest import FACTORS, length_for, read_public, suggest, unit_norms
from dptune.records.reading.source import RecordSource
from dptune.training.data import Tokens
from dptune.training.losses import model_losses
from dptune.training.models.own_weights import start_training

UNITS = 400


def asked(**changes: Any) -> TuneSettings:
    return TuneSettings(epsilon=4.0, device="cpu", **QUICK | changes)


def asked_of(train: str) -> TuneSettings:
    """Settings without those of adapters."""
    own = {name: value for name, value in QUICK.items() if name not in ("rank", "alpha", "target_modules")}
    return TuneSettings(epsilon=4.0, device="cpu", train=train, **own)


@pytest.fixture
def public(tmp_path: Path) -> RecordSource:
    return RecordSource(str(write_csv(tmp_path / "public.csv", rows(60))))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=300), st.integers(3, 512))
def test_the_length_holds_nearly_all_public_records_and_their_padding(lengths: list[int], most: int) -> None:
    length = length_for(Tokens([np.zeros(n, dtype=np.int32) for n in lengths], 0, 512), most)
    assert 3 <= length <= max(3, most)
    if 3 < length < most:
        assert length % 8 == 0
        assert sum(n < length for n in lengths) >= 0.99 * len(lengths) - 1
        assert max(lengths) >= length - 8


@pytest.mark.parametrize("train", ["lora", "all"])
@pytest.mark.parametrize("unit", [None, "customer_id"])
def test_norms_are_those_of_a_loop_over_units(public: RecordSource, unit: str | None, train: str) -> None:
    settings = asked() if train == "lora" else asked_of(train)
    base = open_base(checkpoint(), settings)
    source = RecordSource(public.data, unit=unit)
    records = read_public(source, base, settings)
    model = start_training(base.load(), settings.trained, base.lora, 0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = unit_norms(model, records, 16)
    members = [one[: records.units.most] for one in records.units.members]
    for norm, unit_records in zip(found, members, strict=True):
        ids, mask = records.tokens.batch(unit_records, torch.device("cpu"))
        gradients = torch.autograd.grad(model_losses(model, ids, mask).sum(), weights)
        assert norm == pytest.approx(math.sqrt(sum(float(one.square().sum()) for one in gradients)), rel=1e-4)


def test_the_radius_clips_nine_in_ten_of_the_public_units(public: RecordSource) -> None:
    base = open_base(checkpoint(), asked())
    found = suggest(base, asked(), UNITS, public)
    low, middle, high = found.norms
    assert found.schedule.options["max_grad_norm"] == pytest.approx(low, rel=0.05)
    assert low <= middle <= high
    assert {"max_grad_norm", "max_length"} <= set(found.schedule.reasons)
    kept = suggest(base, asked(options={"max_grad_norm": 2.0}, max_length=16), UNITS, public).schedule
    assert (kept.options["max_grad_norm"], kept.max_length) == (2.0, 16)
    assert "max_grad_norm" not in suggest(base, asked(mechanism="auto_s"), UNITS, public).schedule.options


def test_a_trial_meets_the_noise_batch_and_steps_of_the_private_run(
    public: RecordSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, whole = [], module.train

    def noted(spec: Any, *others: Any) -> Any:
        specs.append(spec)
        return whole(spec, *others)

    monkeypatch.setattr(module, "train", noted)
    wanted = asked(gradient_checkpointing=True)
    found = suggest(open_base(checkpoint(), wanted), wanted, UNITS, public, trials=True)
    rates = [spec.plan.learning_rate for spec in specs]
    assert rates == [rates[2] * factor for factor in FACTORS]
    assert list(found.trials) == rates
    assert found.schedule.learning_rate == min(found.trials, key=lambda rate: found.trials[rate])
    calibrated = found.mechanism.mechanism.noise.noise_multiplier
    for spec in specs:
        assert spec.mechanism.noise.noise_multiplier == calibrated
        assert (spec.plan.steps, spec.plan.expected_batch_size) == (
            found.schedule.steps,
            found.schedule.expected_batch_size,
        )
        assert spec.plan.gradient_checkpointing, "or trials of a model that fits with it alone would run out of memory"
        assert spec.header.data == "public records"
    assert len({id(spec.mechanism) for spec in specs}) == len(specs)


def test_trials_of_own_weights_train_them(public: RecordSource) -> None:
    wanted = asked_of("bias")
    found = suggest(open_base(checkpoint(), wanted), wanted, UNITS, public, trials=True)
    assert list(found.trials) == [3e-3 * factor for factor in FACTORS]
    assert len(set(found.trials.values())) == len(FACTORS)
    assert found.schedule.options["max_grad_norm"] == pytest.approx(found.norms[0], rel=0.05)


def test_a_diverged_trial_is_not_chosen(public: RecordSource, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, math.inf, 2.0, math.inf, math.inf])
    monkeypatch.setattr(module, "trial", lambda *_: next(values))
    base = open_base(checkpoint(), asked())
    found = suggest(base, asked(learning_rate=0.01), UNITS, public, trials=True)
    assert found.schedule.learning_rate == 0.01
    monkeypatch.setattr(module, "trial", lambda *_: math.inf)
    with pytest.raises(DivergedError, match="lower learning_rate"):
        suggest(base, asked(), UNITS, public, trials=True)


def test_trials_need_public_records_and_a_batch_of_them(public: RecordSource) -> None:
    base = open_base(checkpoint(), asked())
    with pytest.raises(ConfigError, match="public: is missing"):
        suggest(base, asked(), UNITS, trials=True)
    with pytest.raises(ConfigError, match=r"public: has \d+ units to train on, fewer than a batch of 100"):
        suggest(base, asked(expected_batch_size=100), UNITS, public, trials=True)
    banded = asked(mechanism="banded", options={"bands": 4}, expected_batch_size=16)
    with pytest.raises(
        ConfigError, match=r"public: has \d+ units .* fewer than the batches, one for each of 4 bands, of 16"
    ):
        suggest(base, banded, UNITS, public, trials=True)


def test_correlated_noise_is_tried_at_each_rate(public: RecordSource) -> None:
    banded = asked(mechanism="banded", options={"bands": 2}, expected_batch_size=8, epochs=1)
    found = suggest(open_base(checkpoint(), banded), banded, UNITS, public, trials=True)
    assert len(found.trials) == len(FACTORS)
    assert all(map(math.isfinite, found.trials.values()))


@pytest.mark.long
def test_the_command_it_prints_runs(tmp_path: Path) -> None:
    public, private = (write_csv(tmp_path / f"{name}.csv", rows(60)) for name in ("public", "private"))
    model = tmp_path / "a model"
    model.symlink_to(checkpoint())
    given = [
        "--model",
        str(model),
        "--epsilon",
        "4",
        "--expected-batch-size",
        "8",
        "--epochs",
        "2",
        "--set",
        "max_grad_norm=1",
    ]
    said = CliRunner().invoke(app, ["suggest", *given, "--units", "54", "--public", str(public), "--rank", "2"])
    assert said.exit_code == 0, said.output
    assert "--expected-batch-size 8 --epochs 2 " in said.stdout
    command = said.stdout.partition("Use it: dptune ")[2].replace("\n", " ").replace("FILE", shlex.quote(str(private)))
    done = CliRunner().invoke(app, [*shlex.split(command), "--out", str(tmp_path / "out"), "--dry-run"])
    assert done.exit_code == 0, done.output

    space = tmp_path / "space.yaml"
    (written,) = (line for line in said.stdout.splitlines() if line.startswith("space.yaml: "))
    space.write_text(written.removeprefix("space.yaml: "))
    fewer = re.sub(r"--(expected-batch-size|learning-rate|set) \S+ ", "", command)
    searched = [*shlex.split(fewer), "--search", str(space), "--candidates", "2", "--out", str(tmp_path / "best")]
    done = CliRunner().invoke(app, [*searched, "--dry-run"])
    assert done.exit_code == 0, done.output


def test_a_space_lies_around_what_is_suggested(public: RecordSource) -> None:
    """Within what the units bear: a batch is drawn from them, of correlated noise from one of as many groups."""
    base = open_base(checkpoint(), asked())
    given = asked(expected_batch_size=16, learning_rate=0.03, options={"max_grad_norm": 1.0})
    found = suggest(base, given, UNITS)
    assert found.space(UNITS) == {
        "learning_rate": {"log_uniform": [0.01, 0.09]},
        "expected_batch_size": [8.0, 16.0, 32.0],
        "options.max_grad_norm": {"log_uniform": [0.333, 3.0]},
    }
    assert found.space(20)["expected_batch_size"] == [8.0, 16.0]
    assert SearchSettings.of({"space": found.space(UNITS), "candidates": 10}).space
    assert "options.max_grad_norm" not in suggest(base, asked(mechanism="auto_s"), UNITS).space(UNITS)


LORA = [
    *("--target-modules", r".*h\.0\..*(c_attn|c_fc)", "--rank-pattern", "c_fc=4", "--rank-pattern", r"h\.0\.attn.*=2"),
    *("--alpha-pattern", "c_attn=6", "--rslora", "--init", "orthogonal", "--rank", "6"),
]


def test_settings_of_lora_reach_the_adapter_and_the_command_that_is_printed(tmp_path: Path) -> None:
    private = write_csv(tmp_path / "private.csv", rows(60))
    given = ["--model", str(checkpoint()), "--epsilon", "8", "--expected-batch-size", "8", "--epochs", "2", *LORA]
    said = CliRunner().invoke(app, ["suggest", *given, "--units", "54"])
    assert said.exit_code == 0, said.output
    command = said.stdout.partition("Use it: dptune ")[2].replace("\n", " ").replace("FILE", shlex.quote(str(private)))
    words = shlex.split(command)
    assert all(word in words for word in LORA)
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    adapter = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    expected = {"target_modules": LORA[1], "rank_pattern": {"c_fc": 4, r"h\.0\.attn.*": 2}, "r": 6, "use_rslora": True}
    expected |= {"alpha_pattern": {"c_attn": 6}, "init_lora_weights": "orthogonal"}
    assert {name: adapter[name] for name in expected} == expected


@pytest.mark.parametrize("command", ["tune", "suggest"])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            ["--rank-pattern", "c_attn"],
            "--rank-pattern: 'c_attn' is not of the form NAME=NUMBER. Fix: write the layer's name",
        ),
        (["--alpha-pattern", "c_attn=many"], "--alpha-pattern: 'c_attn=many' is not of the form NAME=NUMBER"),
        (["--rank-pattern", "c_attn=2", "--rank-pattern", "c_attn=4"], "--rank-pattern: 'c_attn' is given twice"),
        (["--rank-pattern", "c_attn=0"], "--rank-pattern: c_attn: 0 is not a positive whole number"),
        (["--rank-pattern", "nosuch=4"], "--rank-pattern: no adapted layer is called 'nosuch'"),
        (["--init", "pissa"], "--init"),
        (["--target-modules", "c_(attn"], "--target-modules: 'c_(attn' is not a regular expression"),
    ],
)
def test_wrong_settings_of_lora_are_named(command: str, given: list[str], problem: str, tmp_path: Path) -> None:
    data = ["--data", str(write_csv(tmp_path / "a.csv", rows()))] if command == "tune" else ["--units", "400"]
    said = CliRunner().invoke(app, [command, "--model", str(checkpoint()), "--epsilon", "8", *data, *given])
    assert said.exit_code == 2
    assert problem in " ".join(said.output.split())


def test_public_records_are_read_once_and_cut_as_a_second_reading_would(
    public: RecordSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = asked()
    base = open_base(checkpoint(), settings)
    long = replace(settings, max_length=20)
    whole, again = read_public(public, base, long), read_public(public, base, replace(settings, max_length=9))
    cut = module._cut(whole, 9)
    for ours, theirs in ((cut.tokens, again.tokens), (cut.evaluation, again.evaluation)):
        assert [row.tolist() for row in ours.rows] == [row.tolist() for row in theirs.rows]
        assert (ours.width, ours.padding, ours.truncated) == (theirs.width, theirs.padding, theirs.truncated)
    assert again.tokens.truncated
    read: list[int] = []
    real = module.read_sides
    monkeypatch.setattr(module, "read_sides", lambda source: (read.append(1), real(source))[1])
    found = suggest(base, replace(settings, max_length=None), UNITS, public)
    assert "max_length" in found.schedule.reasons
    assert len(read) == 1


def test_public_units_are_those_of_the_column(public: RecordSource) -> None:
    """A column of units makes one unit of several records: else norms, radius and trials are of single records."""
    settings = asked()
    base = open_base(checkpoint(), settings)
    sources = (RecordSource(public.data, unit=unit) for unit in (None, "customer_id"))
    single, whole = (read_public(source, base, settings) for source in sources)
    assert len(single.units) == len(single.tokens.rows)
    assert len(whole.units) < len(whole.tokens.rows)
    assert whole.units.most == settings.records_per_unit
    trained, compared = ({row.tobytes() for row in tokens.rows} for tokens in (whole.tokens, whole.evaluation))
    assert not trained & compared, "a trial is compared on records that it did not see"
    assert len(whole.tokens.rows) + len(whole.evaluation.rows) == 60


def test_the_command_it_prints_has_the_budget_and_the_bound_that_were_asked_for() -> None:
    """Six digits would round this epsilon up, and a unit would bring four records again."""
    given = ["--model", str(checkpoint()), "--units", "400", "--rank", "2", "--unit", "customer_id"]
    given += ["--epsilon", "1.2345678", "--delta", "0.000123456789", "--records-per-unit", "16"]
    said = " ".join(CliRunner().invoke(app, ["suggest", *given]).stdout.split())
    for option in ("--epsilon 1.2345678 ", "--delta 0.000123456789 ", "--records-per-unit 16"):
        assert option in said.partition("Use it:")[2]


@pytest.mark.parametrize("given", [["--average", "none"], ["--average", "ema", "--schedule", "cosine"], []])
def test_the_command_it_prints_has_the_update_rule_that_was_asked_for(given: list[str]) -> None:
    """Left out where `dptune tune` has it without being asked."""
    asked = ["--model", str(checkpoint()), "--units", "400", "--rank", "2", "--epsilon", "2", *given]
    said = CliRunner().invoke(app, ["suggest", *asked]).stdout.split()
    options = {name: said[place + 1] for place, name in enumerate(said) if name in ("--average", "--schedule")}
    assert options == dict(zip(given[::2], given[1::2], strict=True))
