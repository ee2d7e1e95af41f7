"""Optimisers, schedules and averages: what each does to the weights, and that a killed run goes on with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import adapted, each_record, make_header, make_plan, records, trainable, weights

from dptune.core import declarations, settings
from dptune.core.errors import ConfigError
from dptune.core.settings import UpdateRule
from dptune.mechanisms.interfaces import Knobs, Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build
from dptune.privacy.accounting.strategy import optimised, row_deviations
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger import Ledger
from dptune.training import run as training_run
from dptune.training.checkpoints import CheckpointError, progress_of
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.optimizers import (
    AVERAGED,
    OPTIMIZERS,
    AdamBC,
    OptimizerKind,
    State,
    apply_average,
    average_weights,
    kind_of,
    make_optimizer,
    moments,
    set_rate,
    tell_noise,
)
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import Run, StepReport
from dptune.training.spec import RunSpec

RULES = [
    UpdateRule(),
    UpdateRule(optimizer="adam_bc"),
    UpdateRule(optimizer="sgd"),
    UpdateRule(schedule="linear", average="tail", average_share=0.5),
    UpdateRule(optimizer="sgd", schedule="cosine", average="ema"),
]


class ProcessGoneError(Exception):
    """The process is gone."""


def run(
    folder: Path,
    rule: UpdateRule,
    name: str = "static",
    stop: int = 0,
    steps: int = 6,
    watch: Callable[[StepReport], None] | None = None,
    **entry: Any,
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A run's model, and the weights after each step; it is stopped after ``stop`` steps."""
    model, tokens, entropy, seen = adapted(), records(), FixedSeed(3), []
    units = each_record(tokens)
    mechanism = build(name, {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))} | entry)
    plan = replace(make_plan(steps=steps, sample_rate=0.2, checkpoint_every=1), rule=rule)
    header = make_header(entropy, units, mechanism=mechanism.name, published_accountant=mechanism.published_accountant)

    def on_step(report: StepReport) -> None:
        seen.append(weights(model))
        if watch:
            watch(report)
        if report.step == stop:
            raise ProcessGoneError

    spec = RunSpec(model, tokens, units, mechanism, plan, header, public=tokens)
    train(spec, folder, entropy, on_step).close()
    return model, seen


def quadratic(rule: UpdateRule, gradients: list[float], variances: list[float], rate: float = 0.1) -> list[float]:
    """One weight moved by these gradients, whose noise has these variances."""
    weight = torch.zeros(1)
    optimizer = make_optimizer(rule, [weight], rate)
    found = []
    for gradient, variance in zip(gradients, variances, strict=True):
        weight.grad = torch.tensor([gradient])
        released = Released([], [], None, Knobs((1.0,), 1.0), (math.sqrt(variance),))
        tell_noise(optimizer, released, [1], 1.0)
        optimizer.step()
        found.append(float(weight))
    return found


GRADIENTS = [0.3, -0.1, 0.7, 0.2, -0.5, 0.1, 0.1, 0.9]


def test_without_noise_adam_bc_is_adam() -> None:
    adam = quadratic(UpdateRule(), GRADIENTS, [0.0] * 8)
    assert quadratic(UpdateRule(optimizer="adam_bc"), GRADIENTS, [0.0] * 8) == pytest.approx(adam, rel=1e-5)


def test_adam_bc_is_the_formula_of_its_paper() -> None:
    """Written down a second time, with noise that differs from step to step."""
    variances, floor = [0.05, 0.01, 0.02, 0.03, 0.001, 0.01, 0.2, 0.0], 0.25
    theta = m = v = phi = 0.0
    expected = []
    for step, (gradient, variance) in enumerate(zip(GRADIENTS, variances, strict=True), start=1):
        m, v, phi = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2, 0.999 * phi + 0.001 * variance
        second = 1 - 0.999**step
        root = math.sqrt(max(v / second - phi / second, floor * phi / second))
        theta -= 0.1 * m / (1 - 0.9**step) / root
        expected.append(theta)
    found = quadratic(UpdateRule(optimizer="adam_bc", noise_floor=floor), GRADIENTS, variances)
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_noise_that_adam_bc_takes_out_is_that_of_correlated_rows() -> None:
    """The moving average of V_h at beta 0.999 over the reference strategy, at rows 0, 1, 9 and 71."""
    weight = torch.zeros(1)
    optimizer = AdamBC([weight], 0.1, 0.5)
    found = []
    for row, deviation in enumerate(row_deviations(optimised(8, 72), 72)):
        weight.grad = torch.ones(1)
        tell_noise(optimizer, Released([], [], None, Knobs((1.0,), 1.0), (float(deviation) * 64,)), [1], 64.0)
        optimizer.step()
        found.append(float(optimizer.state[weight]["noise_sq"]) / (1 - 0.999 ** (row + 1)))
    assert [found[row] for row in (0, 1, 9, 71)] == pytest.approx([2.24070, 2.63779, 3.02734, 3.23975], abs=1e-5)


def test_no_step_of_adam_bc_is_larger_than_its_floor_allows() -> None:
    """Gradients of nothing but noise: the corrected moment is negative half of the time."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(1000)
    optimizer = AdamBC([weight], 1.0, 0.5)
    for _ in range(30):
        before, weight.grad = weight.clone(), torch.randn(1000, generator=generator)
        tell_noise(optimizer, Released([], [], None, Knobs((1.0,), 1.0), (1.0,)), [1], 1.0)
        optimizer.step()
        state = optimizer.state[weight]
        corrected = state["exp_avg"] / (1 - 0.9 ** float(state["step"]))
        assert bool(((weight - before).abs() <= corrected.abs() / 0.5**0.5 * (1 + 1e-4) + 1e-6).all())


def test_sgd_adds_up_its_gradients() -> None:
    rule = UpdateRule(optimizer="sgd", momentum=0.5)
    assert quadratic(rule, [1.0, 0.0, 0.0], [0.0] * 3) == pytest.approx([-0.1, -0.15, -0.175])


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        (UpdateRule(), [1, 1, 1, 1, 1, 1]),
        (UpdateRule(schedule="linear"), [1, 1, 1, 0.75, 0.5, 0.25]),
        (UpdateRule(schedule="linear", final_share=0.2), [1, 1, 1, 0.8, 0.6, 0.4]),
        (UpdateRule(schedule="cosine"), [1, 1, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_schedules_after_a_warm_up_of_two_steps(rule: UpdateRule, shares: list[float]) -> None:
    assert [rule.rate_share(row, 6, 2) for row in range(6)] == pytest.approx(shares)
    plan = replace(make_plan(steps=6, learning_rate=2.0, warmup_steps=2), rule=rule)
    assert [plan.learning_rate_at(step) for step in range(6)] == pytest.approx(
        [2 * share * warm for share, warm in zip(shares, [0.5, 1, 1, 1, 1, 1], strict=True)]
    )


def test_a_schedule_follows_the_ledger_and_a_warm_up_the_weights() -> None:
    """After a kill releases run ahead of steps: the rate must still have fallen at the last release."""
    plan = replace(make_plan(steps=6, learning_rate=1.0, warmup_steps=2), rule=UpdateRule(schedule="linear"))
    assert plan.learning_rate_at(3, 5) == pytest.approx(0.25)
    assert plan.learning_rate_at(0, 0) == 0.5


@pytest.mark.parametrize(
    ("rule", "first", "share"),
    [(UpdateRule(average="tail", average_share=0.5), 3, None), (UpdateRule(average="ema"), 0, 0.9)],
)
def test_a_run_ends_with_the_average_and_trains_with_the_last(
    tmp_path: Path, rule: UpdateRule, first: int, share: float | None
) -> None:
    plain, steps = run(tmp_path / "plain", UpdateRule())
    averaged, same = run(tmp_path / "averaged", rule)
    for one, other in zip(steps, same, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(steps[-1][name], weight) for name, weight in trainable(plain).items())
    factors = [1.0 if share is None else share ** (5 - row) for row in range(6)][first:]
    for name, weight in trainable(averaged).items():
        mean = sum(factor * step[name].double() for factor, step in zip(factors, steps[first:], strict=True))
        torch.testing.assert_close(weight.double(), torch.as_tensor(mean) / sum(factors), rtol=1e-6, atol=1e-9)


def test_a_tail_has_at_least_as_many_rows_as_the_noise_has_bands() -> None:
    rule = UpdateRule(average="tail", average_share=0.1)
    assert [rule.first_averaged(100, bands) for bands in (1, 16, 200)] == [90, 84, 0]


@pytest.mark.parametrize("rule", RULES)
def test_a_stopped_run_goes_on_with_all_that_the_rule_remembers(
    tmp_path: Path, rule: UpdateRule, opened: list[Ledger]
) -> None:
    """Its checkpoint holds the optimiser and the average after every step; the process stops before the next."""
    with pytest.raises(ProcessGoneError):
        run(tmp_path, rule, stop=4)
    for ledger in opened:
        ledger.close()
    assert progress_of(tmp_path / "checkpoint.safetensors").step == 3
    model, rest = run(tmp_path, rule)
    assert len(rest) == 2  # one release of six was charged and lost
    found = {name for name, _ in state_of(tmp_path, rule)}
    wanted = (*OPTIMIZERS[rule.optimizer].state, *(AVERAGED if rule.average != "none" else ()))
    assert found == {one.name for one in wanted}
    assert all(bool(torch.isfinite(weight).all()) for weight in trainable(model).values())


def state_of(folder: Path, rule: UpdateRule) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    tensors = load_file(folder / "checkpoint.safetensors")
    return [(key.split(".")[1], value) for key, value in tensors.items() if key.startswith("optimizer.")]


class Gradients(NamedTuple):
    """What replaces the released gradients of a run: they depend on the number of the release alone."""

    monkeypatch: pytest.MonkeyPatch

    def fix(self) -> None:
        privatise = Mechanism.privatise

        def fixed(mechanism: Mechanism, batches: Any, zeros: Any, *given: Any) -> Released:
            row = given[-1]
            draw = torch.Generator().manual_seed(row)
            gradient = [torch.randn(len(zero), generator=draw) for zero in zeros]
            released = privatise(mechanism, batches, zeros, *given)
            return replace(released, gradient=gradient, deviations=(0.3 + 0.1 * row,) * len(zeros))

        self.monkeypatch.setattr(Mechanism, "privatise", fixed)

    def stop_before(self, step: int) -> None:
        begin = Run.begin

        def stopped(run: Run) -> Any:
            if run.step == step:
                self.monkeypatch.setattr(Run, "begin", begin)
                raise ProcessGoneError
            return begin(run)

        self.monkeypatch.setattr(Run, "begin", stopped)


@pytest.mark.parametrize("rule", [*RULES, *(replace(RULES[1], average=name) for name in ("ema", "tail"))])
def test_a_run_stopped_three_times_ends_with_the_weights_of_an_unbroken_one(
    tmp_path: Path, rule: UpdateRule, monkeypatch: pytest.MonkeyPatch, opened: list[Ledger]
) -> None:
    """To the bit: moments, momentum, the noise that adam_bc takes out and the mean are all gone on with."""
    gradients = Gradients(monkeypatch)
    gradients.fix()
    whole, _ = run(tmp_path / "whole", rule)
    for step in (1, 3, 5):
        gradients.stop_before(step)
        with pytest.raises(ProcessGoneError):
            run(tmp_path / "broken", rule)
        opened[-1].close()
    broken, rest = run(tmp_path / "broken", rule)
    assert len(rest) == 1
    assert all(torch.equal(weight, trainable(broken)[name]) for name, weight in trainable(whole).items())


def test_the_rate_of_a_step_is_that_of_its_release_in_the_ledger(tmp_path: Path, opened: list[Ledger]) -> None:
    rule, rates = UpdateRule(schedule="linear"), {}
    with pytest.raises(ProcessGoneError):
        run(tmp_path, rule, stop=4)  # its checkpoint is of step 3, so that release 4 is lost
    opened[-1].close()

    def note(report: StepReport) -> None:
        rates[report.step, report.releases] = report.public["learning_rate"]

    run(tmp_path, rule, watch=note)
    plan = replace(make_plan(steps=6, sample_rate=0.2, checkpoint_every=1), rule=rule)
    assert rates == {(step, step + 1): plan.learning_rate_at(step - 1, step) for step in (4, 5)}


def test_adam_bc_is_told_of_noise_and_never_of_how_many_were_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, drawn = [], []

    def tell(*given: Any) -> None:
        told.append(given[3])
        tell_noise(*given)

    monkeypatch.setattr(training_run, "tell_noise", tell)
    draw = PrivacyUnits.draw

    def noted(*given: Any) -> Any:
        drawn.append(draw(*given))
        return drawn[-1]

    monkeypatch.setattr(PrivacyUnits, "draw", noted)
    run(tmp_path, UpdateRule(optimizer="adam_bc"))
    assert len({len(batch) for batch in drawn}) > 1
    expected = make_plan(steps=6, sample_rate=0.2, checkpoint_every=1).expected_batch_size
    assert told == [expected] * 6


def test_a_tail_of_the_whole_run_is_its_mean() -> None:
    rule, weight = UpdateRule(average="tail", average_share=1.0), torch.zeros(2)
    optimizer = make_optimizer(rule, [weight], 0.1)
    for value in (1.0, 2.0, 6.0):
        weight.fill_(value)
        average_weights(rule, optimizer, [weight], 0, 0)
    apply_average(rule, optimizer, [weight])
    assert weight.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("rule", RULES[1:3])
def test_another_optimisers_checkpoint_is_refused(tmp_path: Path, rule: UpdateRule, opened: list[Ledger]) -> None:
    with pytest.raises(ProcessGoneError):
        run(tmp_path, UpdateRule(), stop=3)
    for ledger in opened:
        ledger.close()
    with pytest.raises(CheckpointError, match="is missing or does not belong there"):
        run(tmp_path, rule)


@pytest.mark.parametrize("name", ["static", "per_pair", "quantile", "banded", "rldp", "laplace"])
@pytest.mark.parametrize("optimizer", ["adam_bc", "sgd"])
def test_every_rule_goes_with_every_mechanism_that_states_its_noise(tmp_path: Path, name: str, optimizer: Any) -> None:
    entry = {"bands": 2} if name == "banded" else {"interval": 1, "warmup": 0} if name == "rldp" else {}
    model, steps = run(tmp_path, UpdateRule(optimizer=optimizer), name, **entry)
    assert len(steps) == 6
    assert any(not torch.equal(steps[0][key], weight) for key, weight in trainable(model).items())


@pytest.mark.parametrize("name", ["geoclip", "adaclip"])
def test_adam_bc_is_refused_where_the_noise_of_a_pair_is_not_known(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"which {name} does not state"):
        run(tmp_path, UpdateRule(optimizer="adam_bc"), name)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_low_floor_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(tmp_path, UpdateRule(optimizer="adam_bc", noise_floor=0.01))
    assert "noise_floor 0.01 is below 2.1" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "none such"),
        ("schedule", "step"),
        ("average", "mean"),
        ("momentum", 1.0),
        ("momentum", 0.0),
        ("noise_floor", 0.0),
        ("final_share", -0.1),
        ("average_share", 1.1),
        ("average_decay", math.nan),
        ("average_decay", "0.9"),
    ],
)
def test_a_rule_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        UpdateRule(**{field: value})
    assert caught.value.field == field


def test_optimisers_know_their_declaration() -> None:
    for rule in RULES:
        assert kind_of(make_optimizer(rule, [torch.zeros(1)], 0.1)) is OPTIMIZERS[rule.optimizer]


@pytest.mark.parametrize(
    ("state", "value", "problem"),
    [
        (State("a"), torch.zeros(2), None),
        (State("a"), torch.zeros(3), "type or shape"),
        (State("a"), torch.zeros(2, dtype=torch.float64), "type or shape"),
        (State("a", least=0.0), torch.tensor([1.0, -1.0]), "less than it can be"),
        (State("a", number=True), torch.tensor(1.0), None),
        (State("a", number=True), torch.zeros(2), "type or shape"),
        (State("a", number=True, counts="steps"), torch.tensor(4.0), "another step"),
        (State("a", number=True, counts="part of steps"), torch.tensor(4.0), None),
        (State("a", number=True, counts="part of steps"), torch.tensor(6.0), "another step"),
    ],
)
def test_a_value_that_no_run_leaves_is_found(state: State, value: torch.Tensor, problem: str | None) -> None:
    found = state.problem(value, torch.zeros(2), 5)
    assert found is None if problem is None else problem in str(found)


class Turned(torch.optim.Optimizer):
    """A planted optimiser: momentum whose sign turns with each step, and a count that the checkpoint must keep."""

    def __init__(self, weights: list[torch.Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["turns"], state["pull"] = torch.zeros((), dtype=torch.int64), torch.zeros_like(weight)
                state["turns"] += 1
                state["pull"].mul_(-0.5).add_(weight.grad)
                weight.add_(state["pull"], alpha=-group["lr"])


PLANTED = OptimizerKind(
    make=lambda weights, rate, rule: Turned(weights, rate),
    made=Turned,
    state=(State("turns", number=True, dtype=torch.int64, counts="steps"), State("pull", moment="momentum")),
)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> UpdateRule:
    """A rule with an optimiser that is declared as a new one is: an entry, and a name."""
    monkeypatch.setitem(OPTIMIZERS, "turned", PLANTED)  # type: ignore[arg-type]
    monkeypatch.setattr(settings, "Optimizer", Literal["adamw", "adam_bc", "sgd", "turned"])
    monkeypatch.setattr(declarations, "_declared", declarations._declared.__wrapped__)  # fields' types were kept
    return UpdateRule(optimizer="turned")  # type: ignore[arg-type]


def test_a_new_optimiser_is_resumed_to_the_bit(
    tmp_path: Path, planted: UpdateRule, monkeypatch: pytest.MonkeyPatch, opened: list[Ledger]
) -> None:
    test_a_run_stopped_three_times_ends_with_the_weights_of_an_unbroken_one(tmp_path, planted, monkeypatch, opened)
    kept = state_of(tmp_path / "whole", planted)
    assert {name for name, _ in kept} == {"turns", "pull"}


def test_a_checkpoint_of_a_new_optimiser_is_checked_by_its_declaration(
    tmp_path: Path, planted: UpdateRule, opened: list[Ledger]
) -> None:
    with pytest.raises(ProcessGoneError):
        run(tmp_path, planted, stop=4)
    for ledger in opened:
        ledger.close()
    file = tmp_path / "checkpoint.safetensors"
    with safe_open(file, framework="pt") as opened_file:
        about, tensors = opened_file.metadata(), {key: opened_file.get_tensor(key) for key in opened_file.keys()}  # noqa: SIM118
    key = next(key for key in tensors if key.startswith("optimizer.turns."))
    save_file(tensors | {key: tensors[key] + 1}, file, metadata=about)
    with pytest.raises(CheckpointError, match=r"another step than 3 \(turns\)"):
        run(tmp_path, planted)


def test_controllers_read_the_moment_that_a_new_optimiser_declares(planted: UpdateRule) -> None:
    weight = torch.zeros(2)
    optimizer = make_optimizer(planted, [weight], 0.1)
    assert moments(optimizer, [weight], "momentum") == []
    weight.grad = torch.ones(2)
    optimizer.step()
    assert [one.tolist() for one in moments(optimizer, [weight], "momentum")] == [[1.0, 1.0]]
    assert moments(optimizer, [weight], "second_moment") == []


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_heads_rate_is_a_multiple_of_the_others(optimizer: Any) -> None:
    """Every optimiser: the head moves as with the larger rate, everything else as with the run's."""

    def moved(ratio: float, rates: list[float]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(3, 2, requires_grad=True) for _ in range(3)]
        rule = UpdateRule(optimizer=optimizer, head_rate_ratio=ratio)
        found = make_optimizer(rule, weights, rates[0], head=weights[2:])
        for rate in rates:
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            set_rate(found, rate)
            found.step()
        assert kind_of(found) is OPTIMIZERS[optimizer]
        assert set(found.state[weights[2]]) >= {one.name for one in OPTIMIZERS[optimizer].state}
        return [weight.detach() for weight in weights]

    rates = [0.01, 0.02, 0.005]
    together, ten = moved(10.0, rates), [10 * rate for rate in rates]
    for index, expected in enumerate((moved(1.0, rates), moved(1.0, rates), moved(1.0, ten))):
        torch.testing.assert_close(together[index], expected[index], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(together[2], moved(1.0, rates)[2])


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1000.1, float("nan"), "ten"])
def test_a_ratio_with_which_no_head_can_train_is_refused(ratio: Any) -> None:
    with pytest.raises(ConfigError, match="head_rate_ratio"):
        UpdateRule(head_rate_ratio=ratio)
