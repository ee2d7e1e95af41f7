"""What is chosen from public facts is in range for any number of units, and what is asked for is kept."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_tuning import checkpoint
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.job.base_model import open_base
from dptune.job.estimate import (
    default_rows,
    estimate,
    fixed_bytes,
    memory_warning,
    records_by_width,
    row_bytes,
    rows_of,
)
from dptune.job.preparation import calibrated_schedule, check_mechanism, prepare, weak_signal
from dptune.job.run_spec import default_batch, default_delta, schedule_of, signal_of
from dptune.job.settings import TuneSettings
from dptune.mechanisms.registry import MECHANISMS
from dptune.records.reading.source import RecordSource
from dptune.training.data import Tokens
from dptune.training.models import memory
from dptune.training.models.memory import smaller_forms
from dptune.training.privacy_units import PrivacyUnits


@given(units=st.integers(1, 10**9))
def test_a_default_delta_is_a_power_of_ten_at_most_a_tenth_of_one_over_the_units(units: int) -> None:
    delta = default_delta(units)
    assert delta * 10 * units <= 1 + 1e-9
    assert 100 * delta * 10 * units > 9
    assert f"{delta:e}".startswith("1.000000e-")


@given(units=st.integers(4, 10**8), parameters=st.integers(1, 10**11))
def test_a_default_schedule_is_one_that_can_run(units: int, parameters: int) -> None:
    chosen = schedule_of(TuneSettings(epsilon=4.0), units, parameters, None)
    assert 0 < chosen.sample_rate <= 0.25
    assert chosen.expected_batch_size <= 1024
    # The most below 32,768 units, from which on the batch is 1024.
    assert 12 <= chosen.steps <= max(192, 3 * units // 1024 + 4)
    assert 1 <= chosen.checkpoint_every <= 10
    assert set(chosen.reasons) == {
        "delta",
        "expected_batch_size",
        "epochs",
        "learning_rate",
        "max_length",
        "max_grad_norm",
    }


@given(fewer=st.integers(1, 10**7), more=st.integers(0, 10**7))
def test_more_units_never_make_a_smaller_batch(fewer: int, more: int) -> None:
    assert default_batch(fewer) <= default_batch(fewer + more)


@given(
    units=st.integers(4, 10**7),
    width=st.integers(3, 512),
    most=st.integers(1, 600),
    dimension=st.integers(1, 10**9),
    row=st.floats(1, 1e12),
)
def test_default_micro_batches_hold_a_unit_and_fit_a_cpu_and_few_steps_of_a_gpu_need_two(
    units: int, width: int, most: int, dimension: int, row: float
) -> None:
    chosen = schedule_of(TuneSettings(epsilon=4.0, max_length=width), units, 1000, None)
    few = default_rows(chosen, "cpu", most, dimension, row)
    assert few >= most
    assert few == max(1, most) or few * row <= 5 * 2**30, "no more than 5 GiB, unless one unit takes them"
    assert few >= 16 or (few + 1) * row > 5 * 2**30, "and hardly a row less"
    assert few <= max(16, most)
    rows = default_rows(chosen, "cuda", most, dimension, row)
    assert rows >= max(16, most)
    if rows > max(16, most):
        assert rows * width <= 16 * 512, "no more padded tokens than 16 records of the widest default"
        assert 4 * rows * dimension <= 2**30
    whole = chosen.expected_batch_size + 3 * math.sqrt(chosen.expected_batch_size * (1 - chosen.sample_rate))
    least = max(16, most)
    fitting = max(least, min(16 * 512 // width, 2**28 // dimension))
    passes = math.ceil(math.ceil(whole) / fitting)
    assert rows * passes >= whole, "a batch of three deviations more needs no further micro-batch"
    assert rows == least or (rows - 1) * passes < whole, "and hardly a row more"


def test_a_run_has_the_micro_batches_that_are_chosen_or_asked_for() -> None:
    rows = [{"text": f"Order {n} is late.", "customer_id": n % 8} for n in range(40)]
    base = open_base(checkpoint(), TuneSettings(epsilon=4.0))
    assert prepare(RecordSource(rows), base, TuneSettings(epsilon=4.0, eval_share=0.0)).plan.physical_batch_size == 16
    column = RecordSource(rows, unit="customer_id")
    wide = TuneSettings(epsilon=4.0, records_per_unit=20, eval_share=0.0)
    assert prepare(column, base, wide).plan.physical_batch_size == 20, "it holds all that one unit may bring"
    asked = replace(wide, physical_batch_size=24)
    assert prepare(column, base, asked).plan.physical_batch_size == 24
    on_gpu = replace(base, device=torch.device("cuda"))
    short = TuneSettings(epsilon=4.0, max_length=16)
    assert rows_of(short, on_gpu, schedule_of(short, 1000, 1000, None), 1) == math.ceil(
        128 + 3 * math.sqrt(128 * 0.872)
    )


@pytest.mark.parametrize("settings", [{}, {"task": "classify", "labels": ("a", "b")}, {"train": "all"}])
def test_every_mechanism_with_one_radius_takes_the_one_that_the_rate_was_measured_with(
    settings: dict[str, Any],
) -> None:
    """Comparing mechanisms at their defaults would else compare radii: another one has its own part's default."""

    def radius(mechanism: str, **options: Any) -> Any:
        asked = TuneSettings.of(epsilon=4.0, mechanism=mechanism, options=options, **settings)
        return schedule_of(asked, 2000, 22_000_000, None).options.get("max_grad_norm")

    expected = radius("static")
    assert expected in (0.1, 3)
    for name in ("banded", "plrvo", "lmo_dp", "quantile", "dc_sgd_e", "dc_sgd_p"):
        assert radius(name) == expected, name
        assert radius(name, max_grad_norm=0.7) == 0.7
    for name in ("auto_s", "psac", "laplace", "per_pair", "rldp", "adaclip", "dp_lora_fed"):
        assert radius(name) is None, name
    assert radius("static", clipper="auto_s") is None


def test_a_plug_ins_own_radius_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gentle = replace(MECHANISMS["static"], options={"max_grad_norm": 0.2})
    monkeypatch.setitem(MECHANISMS._values, "gentle", gentle)
    monkeypatch.setitem(MECHANISMS._modules, "gentle", "gentle")
    asked = TuneSettings.of(epsilon=4.0, mechanism="gentle")
    assert "max_grad_norm" not in schedule_of(asked, 2000, 1000, None).options


def test_a_run_that_needs_more_memory_than_is_left_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix that it names is one with which the warning is gone."""
    base, settings = open_base(checkpoint(), TuneSettings(epsilon=4.0)), TuneSettings(epsilon=4.0, eval_share=0.0)
    schedule = schedule_of(settings, 40, base.parameters, base.positions)
    row, fixed = row_bytes(base, schedule.max_length), fixed_bytes(base)
    assert memory_warning(settings, base, schedule, 1) == "", "this machine has the memory of a tiny model"
    monkeypatch.setattr("dptune.job.estimate.available_memory", lambda: fixed + 5.5 * row)
    warned = memory_warning(settings, base, schedule, 1)
    assert "lower physical_batch_size to 5," in warned
    assert memory_warning(replace(settings, physical_batch_size=5), base, schedule, 1) == ""
    assert "lower physical_batch_size to 5," in memory_warning(settings, base, schedule, 5)
    unit_of_six = memory_warning(settings, base, schedule, 6)
    assert "fewer tokens (max_length), gradient_checkpointing, or" in unit_of_six, "six rows need six"
    again = replace(settings, gradient_checkpointing=True)
    kept = row_bytes(base, schedule.max_length, checkpointing=True)
    monkeypatch.setattr("dptune.job.estimate.available_memory", lambda: fixed + 5.5 * kept)
    assert "gradient_checkpointing" not in memory_warning(again, base, schedule, 6)
    monkeypatch.setattr("dptune.job.estimate.available_memory", lambda: 0.9 * fixed)
    assert "max_length" not in memory_warning(settings, base, schedule, 1)
    monkeypatch.setattr("dptune.job.estimate.available_memory", lambda: fixed + 5.5 * row)
    on_gpu = replace(base, device=torch.device("cuda"))
    assert memory_warning(settings, on_gpu, schedule, 1) == ""
    rows = tmp_path / "r.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Order {n} is late."}) + "\n" for n in range(40)))
    given = ["tune", "--model", str(checkpoint()), "--data", str(rows), "--epsilon", "4", "--eval-share", "0"]
    done = CliRunner().invoke(app, [*given, "--dry-run"])
    assert "warning: the run needs some 0.0 GiB of memory" in " ".join(done.output.split())
    assert "Fix: lower --physical-batch-size to 5" in " ".join(done.output.split())


_FITTING: dict[str, dict[str, Any]] = {
    "model.dtype: bfloat16": {"dtype": "bfloat16"},
    "model.load_in_4bit": {"load_in_4bit": True},
}


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"task": "classify", "labels": ("a", "b")}, {"train": "all"}]
)
@pytest.mark.parametrize("left", [0.5, 1.9, 2.0, 2.9, 3.9])
def test_the_fix_of_a_model_larger_than_memory_is_one_that_would_do(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], left: float
) -> None:
    """Each setting that the fix names is taken, and then the model fits; each that it does not name would not do."""

    def refused(**asked: Any) -> str:
        base = open_base(checkpoint(), TuneSettings.of(epsilon=4.0, **asked))
        monkeypatch.setattr(memory, "available_memory", lambda: left * base.parameters)  # bytes of each weight
        try:
            base.check_memory()
        except ConfigError as error:
            return error.fix
        return ""

    monkeypatch.setattr("dptune.training.models.quantization.find_spec", lambda name: name)  # as if installed
    fix = refused(**settings)
    if not fix:
        assert left >= 2
        assert settings == {"dtype": "bfloat16"}
        return
    for named, change in _FITTING.items():
        try:
            still = settings | change == settings or refused(**{**settings, **change})
        except ConfigError:  # does not go with the task, or with what trains
            still = True
        assert (named in fix) == (not still), (named, fix)
    assert fix.endswith("a smaller model, or a machine with more memory")


def test_a_gguf_that_does_not_fit_is_not_told_to_become_bfloat16() -> None:
    """Its conversion takes six bytes a weight, and four were too many."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False))
    model.get_output_embeddings = lambda: None
    assert smaller_forms(model, "float32", gguf=True, head=False) == {"model.load_in_4bit": 56.25}
    assert smaller_forms(model, "float32", gguf=False, head=True) == {"model.dtype: bfloat16": 200}


def test_what_bounds_a_radius_is_held_against_the_one_that_is_taken() -> None:
    base = open_base(checkpoint(), TuneSettings(epsilon=4.0))
    check_mechanism(TuneSettings(epsilon=4.0, mechanism="quantile", options={"highest_radius": 0.5}), base)
    low = TuneSettings(epsilon=4.0, mechanism="quantile", options={"lowest_radius": 0.5})
    with pytest.raises(ConfigError, match=r"starts radii at 0\.1, outside"):
        check_mechanism(low, base)


def test_an_estimate_counts_the_tokens_that_records_are_padded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of 9 tokens is padded to 16 where 512 are allowed, and a unit's records are as wide as its longest."""
    for speed in ("_product_speed", "_vector_speed"):
        monkeypatch.setattr(f"dptune.job.estimate.{speed}", lambda base: 1e6)
    base = open_base(checkpoint(), TuneSettings(epsilon=4.0))
    asked = TuneSettings(epsilon=4.0, max_length=512, expected_batch_size=64)
    schedule = schedule_of(asked, 256, 1000, None)
    lengths = [9, 9, 300, 9, 40, 9, 9]
    tokens = Tokens([np.ones(length, dtype=np.int32) for length in lengths], padding=0, width=512)
    units = PrivacyUnits.of("customer", np.array([0, 0, 1, 1, 2, 2, 3]), most=2)
    brought = records_by_width(tokens, units, schedule, rows=16)
    assert brought == {512: 0.5, 64: 0.5, 16: 0.75}

    def tokens_of_a_step(given: dict[int, float] | None) -> float:
        small = replace(schedule, expected_batch_size=16.0)
        seconds = estimate(base, schedule, 16, given).seconds / schedule.steps
        one, two = (estimate(base, small, 16, {width: 1.0}).seconds / schedule.steps for width in (1, 2))
        fixed = 2 * one - two  # of each micro-batch
        parts = 4 if given is None else sum(math.ceil(4 * each) for each in given.values())
        return (seconds - parts * fixed) / (two - one)

    assert tokens_of_a_step(None) == pytest.approx(4 * 512)
    assert tokens_of_a_step(brought) == pytest.approx(2 * 512 + 2 * 64 + 3 * 16)


def test_an_estimate_counts_what_is_drawn_and_units_without_records() -> None:
    """A unit of 49 short records and a long one mostly brings a short one, and a unit without records brings none."""
    schedule = schedule_of(TuneSettings(epsilon=4.0, max_length=512, expected_batch_size=64), 256, 1000, None)
    lengths = ([9] * 49 + [500]) * 40
    tokens = Tokens([np.ones(length, dtype=np.int32) for length in lengths], padding=0, width=512)
    few = PrivacyUnits.of("customer", np.arange(2000) // 50, most=1)
    brought = records_by_width(tokens, few, schedule, rows=16)
    assert sum(brought.values()) == pytest.approx(1)
    assert brought[16] > 0.8  # the mean is 0.98 with a deviation of 0.02
    absent = SimpleNamespace(members=[np.array([number] * (number % 2)) for number in range(40)], most=1)
    assert records_by_width(tokens, cast(Any, absent), schedule, rows=16) == {16: 0.5}


@pytest.mark.parametrize("text", ["a b.", "a b " * 100])
def test_a_dry_run_tells_of_private_lengths_only_where_the_owner_may_know(text: str, tmp_path: Path) -> None:
    """The dry run of a model with 512 positions uses widths from 512 to 16. It needs no weights, so none are there."""
    own = checkpoint()
    shutil.copytree(own, model := tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    data = tmp_path / "r.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(300)))
    given = ["tune", "--model", str(model), "--data", str(data), "--epsilon", "8", "--dry-run", "--json"]
    found = {}
    for telemetry in ("private", "research"):
        done = CliRunner().invoke(app, [*given, "--telemetry", telemetry])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert said["estimates_are"].startswith("projections from shapes, ") == (telemetry == "private")
        found[telemetry] = said
    ratio = found["research"]["estimated_minutes"] / found["private"]["estimated_minutes"]
    # Under private telemetry all records are taken to be as long as they may be.
    assert ratio < 0.5 if text == "a b." else ratio > 0.5


def test_what_is_asked_for_is_kept_and_needs_no_reason() -> None:
    asked = TuneSettings(
        epsilon=4.0,
        delta=1e-7,
        expected_batch_size=10,
        epochs=2,
        learning_rate=0.1,
        max_length=20,
        options={"max_grad_norm": 2},
    )
    chosen = schedule_of(asked, 100, 1000, 32)
    assert (chosen.delta, chosen.expected_batch_size, chosen.epochs, chosen.learning_rate, chosen.max_length) == (
        1e-7,
        10,
        2,
        0.1,
        20,
    )
    assert chosen.steps == 20
    assert chosen.options == {"max_grad_norm": 2}
    assert not chosen.reasons


@pytest.mark.parametrize(("delta", "units"), [(0.01, 100), (0.5, 2), (1e-3, 5000)])
def test_a_delta_that_publishing_one_unit_would_satisfy_is_refused(delta: float, units: int) -> None:
    with pytest.raises(ConfigError, match=r"delta: .* 1 over the .* units or more.*Fix: use"):
        schedule_of(TuneSettings(epsilon=4.0, delta=delta), units, 1000, None)


def test_a_length_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_length: 33 exceeds the model's 32"):
        schedule_of(TuneSettings(epsilon=4.0, max_length=33), 100, 1000, 32)
    assert schedule_of(TuneSettings(epsilon=4.0), 100, 1000, 32).max_length == 32


@pytest.mark.parametrize(("mechanism", "small"), [("static", 0.02), ("banded", 0.08)])
def test_correlated_noise_has_a_rate_of_its_own_at_the_same_radius(mechanism: str, small: float) -> None:
    """A small model's rate follows the mechanism; a larger model's rate follows its size only."""
    for parameters, rate in ((1000, small), (10**8, 0.005), (10**9, 5e-4)):
        chosen = schedule_of(TuneSettings(epsilon=4.0, mechanism=mechanism), 1000, parameters, None)
        assert (chosen.learning_rate, chosen.options["max_grad_norm"]) == (rate, 0.1)


@pytest.mark.parametrize(("bands", "rate"), [(1, 0.02), (2, 0.04), (4, 0.08), (64, 0.08)])
def test_a_rate_that_was_left_open_follows_the_bands(bands: int, rate: float) -> None:
    settings = TuneSettings(epsilon=4.0, mechanism="banded", options={"bands": bands}, expected_batch_size=8, rank=2)
    base = open_base(str(checkpoint()), settings)
    schedule, found = calibrated_schedule(settings, base, 1000)
    assert found.mechanism.bands == bands
    assert schedule.learning_rate == pytest.approx(rate)
    assert calibrated_schedule(replace(settings, learning_rate=0.3), base, 1000)[0].learning_rate == 0.3
    fewer = schedule_of(settings, 1000, base.parameters, base.positions)
    assert replace(schedule, learning_rate=fewer.learning_rate) == fewer, "nothing that is priced follows the bands"


@given(units=st.integers(4, 10**6), noise=st.floats(0.3, 50.0))
def test_the_signal_of_a_default_run_grows_with_its_units(units: int, noise: float) -> None:
    fewer, more = (schedule_of(TuneSettings(epsilon=4.0), count, 10**8, None) for count in (units, 4 * units))
    assert signal_of(fewer, noise) < signal_of(more, noise)
    assert signal_of(fewer, 2 * noise) == pytest.approx(signal_of(fewer, noise) / 2)


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_a_budget_that_hardly_lets_anything_be_learned_is_named_with_what_would_help(task: str) -> None:
    """And the number of units that the warning names is one without a warning."""
    options: dict[str, Any] = {"task": "classify", "labels": ("0", "1")} if task == "classify" else {}
    settings = TuneSettings(epsilon=1.0, rank=2, max_length=16, **options)
    base = open_base(str(checkpoint()), settings)

    def warned(units: int, settings: TuneSettings = settings) -> str | None:
        return weak_signal(settings, *calibrated_schedule(settings, base, units))

    said = warned(150)
    assert said is not None
    assert "at this epsilon 150 units leave little signal" in said
    assert ("a word for each label" in said) == (task == "classify")
    needed = re.search(r"some ([\d,]+) units in place of 150", said)
    assert needed is not None
    enough = int(needed[1].replace(",", ""))
    assert 150 < enough < 10_000
    assert warned(enough) is None
    assert warned(150, replace(settings, epsilon=30.0)) is None
    by_words = replace(settings, words={"0": " a", "1": " b"}) if task == "classify" else settings
    assert "a word for each label" not in str(warned(150, by_words)), "which this run has already"


def test_a_weak_signal_is_of_the_noise_beside_what_one_unit_moves_at_most() -> None:
    """Groups that are noised each for itself have noise multipliers that are larger, for the same epsilon."""
    found = []
    for mechanism, options in (("static", {}), ("per_pair", {"noise_unit": "pair"})):
        adapted: dict[str, Any] = {"target_modules": ("c_attn", "c_proj"), "mechanism": mechanism, "options": options}
        settings = TuneSettings(epsilon=1.0, rank=2, max_length=16, **adapted)
        base = open_base(str(checkpoint()), settings)
        schedule, calibrated = calibrated_schedule(settings, base, 150)
        found.append((weak_signal(settings, schedule, calibrated), calibrated.mechanism))
    (said, _), (of_pairs, mechanism) = found
    assert mechanism.sensitivity(mechanism.knobs()) > 1
    assert said == of_pairs is not None


def test_a_run_warns_of_a_weak_signal_by_public_facts_alone() -> None:
    """Other records of as many units, and either telemetry: the same words."""
    said = set()
    for telemetry, word in (("private", "a"), ("research", "b")):
        settings = TuneSettings(epsilon=0.5, rank=2, max_length=16, telemetry=telemetry, eval_share=0.0)
        source = RecordSource([{"text": f"{word} {number} {word * 9}"} for number in range(60)], text="text")
        ready = prepare(source, open_base(str(checkpoint()), settings), settings)
        said |= {note for note in ready.notes if "leave little signal" in note}
    assert len(said) == 1


@pytest.mark.parametrize(("train", "rate"), [("all", 1e-3), ("bias", 3e-3), ("head", 0.01), ("layers", 2e-4)])
def test_rates_of_own_weights_say_whether_they_were_tried(train: str, rate: float) -> None:
    own: dict[str, Any] = {"train": train, "train_layers": "last 1" if train == "layers" else None}
    settings = TuneSettings.of(epsilon=8.0, task="classify", labels=("0", "1"), **own)
    schedule = schedule_of(settings, 600, 22_566_146, 512)
    assert (schedule.learning_rate, schedule.head_rate) == (rate, pytest.approx(0.01, rel=1e-4))
    for name in ("learning_rate", "head_rate_ratio"):
        said = schedule.reasons[name]
        assert ("all-MiniLM-L6-v2" in said, "a guess" in said) == (train != "layers", train == "layers")
    texts = schedule_of(TuneSettings.of(epsilon=8.0, **own), 600, 22_566_146, 512)
    assert "a guess" in texts.reasons["learning_rate"], "only classifiers were tried"


@pytest.mark.parametrize("options", [{}, {"task": "classify", "words": {"0": " no", "1": " yes"}}])
def test_a_heads_rate_without_a_head_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="head_rate_ratio: is about a classifier's head, and this run trains none"):
        TuneSettings(epsilon=4.0, head_rate_ratio=3.0, **options)
    assert TuneSettings(epsilon=4.0, **options).rule.head_rate_ratio == 1
