"""The private loop: charge first, noise always, the same step however it is cut up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import (
    DEVICE,
    adapted,
    close,
    each_record,
    gpt2,
    make_header,
    make_plan,
    records,
    release_lines,
    row_gradient,
    trainable,
    weights,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dptune.core.errors import ConfigError, DptuneError
from dptune.mechanisms.planning import Schedule, planned
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import Entropy, FixedSeed, OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.training import loop
from dptune.training import run as running
from dptune.training.gradients import per_sample
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import StepReport
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec, TrainingPlan, header_of


def static(model: Any, noise: float = 1.0, radius: float = 1.0) -> Any:
    options = {"noise_multiplier": noise, "max_grad_norm": radius, "pairs": len(lora_pairs(model))}
    return build("static", options)


def frozen_start(model: Any) -> Any:
    """Clips nothing and hardly adds noise, but enough to satisfy a run that is private in form."""
    return static(model, noise=1e-9, radius=1e3)


def nonprivate(model: Any) -> Any:
    return build("nonprivate", {"pairs": len(lora_pairs(model))})


def trained(directory: Path, plan: TrainingPlan | None = None, entropy: Entropy | None = None, **options: Any) -> Any:
    """A run of ``static`` from a fresh, equal start; returns the model."""
    model, tokens, entropy = options.pop("model", None) or adapted(), records(), entropy or OsEntropy()
    units = options.pop("units", None) or each_record(tokens)
    mechanism = options.pop("mechanism", static)(model)
    header, plan = make_header(entropy, units, mechanism=mechanism.name), plan or make_plan()
    close(train(RunSpec(model, tokens, units, mechanism, plan, header), directory, entropy, **options))
    return model


def applied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What reaches the optimiser at each step, as one vector."""
    seen: list[torch.Tensor] = []
    real = running._apply

    def spy(pairs: Any, gradients: list[torch.Tensor], *rest: Any) -> None:
        seen.append(torch.cat(gradients))
        real(pairs, gradients, *rest)

    monkeypatch.setattr(running, "_apply", spy)
    return seen


class Watching:
    """The system's entropy; notes what was on the disk whenever words were drawn."""

    leaks: tuple[str, ...] = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[tuple[int, int]] = []

    def words(self, count: int) -> NDArray[np.uint64]:
        self.seen.append((release_lines(self.directory), count))
        return OsEntropy().words(count)


def test_every_step_is_on_the_disk_before_its_coins_and_its_noise(tmp_path: Path) -> None:
    entropy = Watching(tmp_path)
    model = trained(tmp_path, make_plan(steps=3), entropy)
    size = sum(p.numel() for pair in lora_pairs(model) for p in pair.parameters)
    assert [step for step, count in entropy.seen if count == size] == [1, 2, 3]
    coins = [step for step, count in entropy.seen if count != size]
    assert sorted(set(coins)) == [1, 2, 3] == list(dict.fromkeys(coins))


def test_p07_each_step_is_charged_once_with_what_it_used(tmp_path: Path) -> None:
    model = adapted()
    trained(tmp_path, make_plan(steps=5), model=model, mechanism=lambda m: static(m, noise=1.25))
    (release,) = read_ledger(tmp_path / "ledger.jsonl").composition.items()
    assert release[1] == 5
    assert (release[0].sample_rate, release[0].effective_noise_multiplier) == (0.5, 1.25)


def test_empty_batches_are_charged_and_noised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No unit enters at a rate of 1e-12: false alarm 3e-11."""
    seen, reports = applied(monkeypatch), []
    model = adapted()
    trained(tmp_path, make_plan(sample_rate=1e-12, steps=3), model=model, on_step=reports.append)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 3
    assert [report.private["batch_units"] for report in reports] == [0.0] * 3
    assert all(float(step.double().std()) == pytest.approx(1.0 / 8e-12, rel=0.1) for step in seen)


def test_p06_the_divisor_is_the_expected_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many records enter (here 8 times Poisson), their sum is divided by 4."""
    seen, model, tokens = applied(monkeypatch), adapted(randomised=True), records()
    drawn: list[list[int]] = []
    real = PrivacyUnits.draw

    def draw(self: PrivacyUnits, *args: Any) -> Any:
        batch = real(self, *args)
        drawn.append([int(record) for unit in batch for record in unit])
        return batch

    monkeypatch.setattr(PrivacyUnits, "draw", draw)
    trained(tmp_path, make_plan(steps=8, learning_rate=1e-6), FixedSeed(2), model=model, mechanism=frozen_start)
    assert len({len(batch) for batch in drawn}) > 2
    for step, batch in zip(seen, drawn, strict=True):
        expected = sum((row_gradient(model, tokens.rows[record]) for record in batch), torch.zeros_like(step)) / 4.0
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-4)


def test_the_step_is_the_clipped_sum_plus_the_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to no noise what is left is the clipped sum, written down here a second time."""
    seen, model, tokens = applied(monkeypatch), adapted(randomised=True), records()
    gradients = [row_gradient(model, row) for row in tokens.rows]
    radius = float(torch.stack([gradient.norm() for gradient in gradients]).median())
    expected = sum(gradient * min(1.0, radius / float(gradient.norm())) for gradient in gradients) / 8.0
    trained(
        tmp_path,
        make_plan(sample_rate=1.0, steps=1),
        model=model,
        mechanism=lambda m: static(m, noise=1e-6, radius=radius),
    )
    torch.testing.assert_close(seen[0], expected, rtol=1e-3, atol=1e-5 * radius)


def test_a_patient_counts_once_however_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, units = applied(monkeypatch), PrivacyUnits.of("patient", np.zeros(8, dtype=np.int64), 8)
    plan = make_plan(of=1, sample_rate=1.0, steps=1)
    model = adapted(randomised=True)
    trained(tmp_path, plan, model=model, units=units, mechanism=lambda m: static(m, noise=1e-6, radius=0.01))
    assert float(seen[0].norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_micro_batches_do_not_change_the_run(tmp_path: Path, rows: int) -> None:
    whole = weights(trained(tmp_path / "whole", make_plan(physical_batch_size=8), FixedSeed(1)))
    cut = weights(trained(tmp_path / "cut", make_plan(physical_batch_size=rows), FixedSeed(1)))
    for name, weight in whole.items():
        torch.testing.assert_close(cut[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_the_systems_entropy_makes_runs_differ(tmp_path: Path) -> None:
    first, second = (weights(trained(tmp_path / name)) for name in ("a", "b"))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_adapters_move_and_the_base_stays_bit_for_bit(tmp_path: Path) -> None:
    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = weights(model)
    trained(tmp_path, model=model)
    assert not any(torch.equal(before[name], after) for name, after in weights(model).items())
    now = dict(model.named_parameters())
    assert all(torch.equal(weight, now[name]) for name, weight in frozen.items())


def test_no_raw_gradient_stays_on_the_parameters(tmp_path: Path) -> None:
    assert all(parameter.grad is None for parameter in trainable(trained(tmp_path)).values())


def test_a_run_in_bfloat16_autocast(tmp_path: Path) -> None:
    model = trained(tmp_path, make_plan(autocast="bfloat16", steps=2))
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in trainable(model).values())


def test_a_run_with_dropout_keeps_its_masks_secret(tmp_path: Path) -> None:
    """Known masks would tie the records of a batch together: their generator must not follow from public seeds.

    All records enter, so that both runs draw equally many masks.
    """
    after = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        trained(tmp_path / name, make_plan(sample_rate=1.0, steps=1), mechanism=nonprivate, model=adapted(dropout=0.5))
        after.append(torch.rand(1))
    assert after[0] != after[1]


def test_with_little_noise_a_run_learns(tmp_path: Path) -> None:
    losses: list[float] = []

    def note(report: StepReport) -> None:
        losses.append(report.private["batch_loss"])

    plan = make_plan(sample_rate=1.0, steps=10)
    trained(tmp_path, plan, mechanism=lambda m: static(m, noise=0.01), on_step=note)
    assert losses[-1] < losses[0] - 0.05


def test_public_figures_are_functions_of_releases_alone(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    trained(tmp_path / "private", on_step=reports.append)
    assert set(reports[0].public) == {"learning_rate", "gradient_norm"}
    assert set(reports[0].knobs) == {"noise_multiplier", "radius_0"}
    assert set(reports[0].private) >= {"batch_units"}
    assert "batch" not in repr(reports[0])
    reports.clear()
    trained(tmp_path / "open", mechanism=nonprivate, on_step=reports.append)
    assert "gradient_norm" in reports[0].private
    assert "gradient_norm" not in reports[0].public


def test_an_observer_cannot_rewrite_the_ledger(tmp_path: Path) -> None:
    reports: list[StepReport] = []

    def meddle(report: StepReport) -> None:
        reports.append(report)
        report.composition.clear()

    model, tokens = adapted(), records()
    spec = RunSpec(model, tokens, each_record(tokens), static(model), make_plan(), make_header())
    ledger = close(train(spec, tmp_path, OsEntropy(), meddle))
    assert ledger.composition == read_ledger(tmp_path / "ledger.jsonl").composition
    assert ledger.composition.total() == 4


def test_a_report_tells_what_was_charged_so_far(tmp_path: Path) -> None:
    totals: list[int] = []
    trained(tmp_path, on_step=lambda report: totals.append(report.composition.total()))
    assert totals == [1, 2, 3, 4]


def test_warm_up_is_linear_then_constant() -> None:
    plan = make_plan(learning_rate=1.0, warmup_steps=4)
    assert [plan.learning_rate_at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert make_plan(learning_rate=2.0, warmup_steps=0).learning_rate_at(0) == 2.0


def test_the_warm_up_reaches_the_optimiser(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    before = weights(adapted())
    plan = make_plan(learning_rate=1.0, warmup_steps=100_000, steps=1)
    after = weights(trained(tmp_path, plan, on_step=reports.append))
    assert reports[0].public["learning_rate"] == pytest.approx(1e-5)
    assert max(float((after[name] - before[name]).abs().max()) for name in after) <= 1.01e-5


@pytest.mark.parametrize("changes", [{"leaks": ()}, {"unit": "patient"}, {"units": 9}, {"mechanism": "other"}])
def test_a_header_that_does_not_describe_the_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """``verify`` believes the header: a run by encounter must not be recorded as one by patient."""
    model, tokens, entropy = adapted(), records(), FixedSeed(1)
    header = make_header(entropy, **changes)
    with pytest.raises(DptuneError):
        close(train(RunSpec(model, tokens, each_record(tokens), static(model), make_plan(), header), tmp_path, entropy))
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize("shared", ["model", "mechanism"])
def test_what_another_run_has_trained_is_refused_before_anything_is_charged(tmp_path: Path, shared: str) -> None:
    """Its releases steer the second run, whose ledger does not hold them."""
    first, tokens = adapted(), records()
    mechanism = build("quantile", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(first))})
    units, entropy = each_record(tokens), OsEntropy()
    spec = RunSpec(first, tokens, units, mechanism, make_plan(), header_of(mechanism, units, entropy, delta=1e-5))
    close(train(spec, tmp_path / "first", entropy))
    fresh = build("quantile", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(first))})
    second = replace(spec, mechanism=fresh) if shared == "model" else replace(spec, model=adapted())
    with pytest.raises(ConfigError, match=f"{shared}: was trained by another run"):
        train(second, tmp_path / "second", entropy)
    assert not (tmp_path / "second" / "ledger.jsonl").exists()


def test_two_open_runs_do_not_share_the_noise_of_past_rows(tmp_path: Path) -> None:
    """Before either has charged anything: their rows would cancel each other's noise, which neither ledger holds."""
    model, tokens = adapted(), records()
    pairs = len(lora_pairs(model))
    mechanism = build("banded", {"noise_multiplier": 1.0, "bands": 2, "pairs": pairs})
    units, entropy = each_record(tokens), OsEntropy()
    spec = RunSpec(model, tokens, units, mechanism, make_plan(), header_of(mechanism, units, entropy, delta=1e-5))
    first = open_run(spec, tmp_path / "first", entropy)
    with pytest.raises(ConfigError, match="mechanism: was trained by another run"):
        open_run(replace(spec, model=adapted()), tmp_path / "second", entropy)
    first.ledger.close()
    assert not (tmp_path / "second" / "ledger.jsonl").exists()


def test_a_divisor_that_does_not_belong_to_the_sample_rate_is_refused(tmp_path: Path) -> None:
    """Eight units at a rate of a half are expected to be four."""
    with pytest.raises(DptuneError, match="expected_batch_size"):
        trained(tmp_path, make_plan(expected_batch_size=5.0))
    assert release_lines(tmp_path) == 0


def test_units_that_cannot_fit_a_micro_batch_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    """Later the refusal would depend on which unit was drawn."""
    units = PrivacyUnits.of("patient", np.array([0, 0, 0, 0, 0, 1, 2, 3]), 5)
    with pytest.raises(DptuneError, match="physical_batch_size"):
        trained(tmp_path, make_plan(of=4, sample_rate=1.0, physical_batch_size=4), units=units)
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_units_of_records_that_the_tokens_lack_are_refused_before_anything_is_charged(
    tmp_path: Path, unit: str
) -> None:
    """Later the refusal would come at the first step that draws one, and cost its charge."""
    units = PrivacyUnits.of(unit, np.arange(len(records().rows) + 1), 1)
    with pytest.raises(DptuneError, match=r"units: name record 8, and the last of tokens\.rows is 7"):
        trained(tmp_path, make_plan(of=9), units=units)
    assert release_lines(tmp_path) == 0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an accelerator's masks come from a longer state")
def test_certified_runs_with_guessable_dropout_masks_are_refused(tmp_path: Path) -> None:
    model, tokens = adapted(dropout=0.1), records()
    spec = RunSpec(model, tokens, each_record(tokens), static(model), make_plan(), make_header(epsilon=50.0))
    with pytest.raises(DptuneError, match="dropout"):
        train(spec, tmp_path, OsEntropy())


def test_a_run_over_its_budget_never_starts(tmp_path: Path) -> None:
    model, tokens = adapted(), records()
    spec = RunSpec(model, tokens, each_record(tokens), static(model), make_plan(), make_header(epsilon=0.1))
    with pytest.raises(DptuneError, match="budget"):
        train(spec, tmp_path, OsEntropy())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_non_private_run_of_one_step_is_no_error(tmp_path: Path) -> None:
    """B starts at zero, so A has no gradient at the first step: that is no broken optimiser."""
    trained(tmp_path, make_plan(sample_rate=1.0, steps=1), mechanism=nonprivate)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1


def test_the_planned_composition_is_what_the_run_makes(tmp_path: Path) -> None:
    model = adapted()
    plan = make_plan()
    trained(tmp_path, plan, model=model)
    schedule = Schedule(plan.sample_rate, plan.steps, 1e-5)
    assert read_ledger(tmp_path / "ledger.jsonl").composition == planned(static(model), schedule)
    assert planned(static(model), schedule) == Counter({static(model).release(static(model).knobs(), 0.5): 4})


def test_the_base_model_may_be_one_layer(tmp_path: Path) -> None:
    assert len(lora_pairs(adapted(layers=1))) == 1
    assert gpt2(layers=1).config.n_layer == 1


class Calls(TorchDispatchMode):
    """Counts operations that compute, and not those that only look at a tensor in another way."""

    #: The last reads a number: AdamW keeps its count of steps, one a weight, in the host's memory.
    LOOKS = (
        "view", "split", "unbind", "slice", "select", "detach", "expand", "unsqueeze", "transpose", "t.default",
        "alias", "_local_scalar_dense",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(look in str(function) for look in self.LOOKS)
        return function(*args, **(kwargs or {}))


def calls_after_the_gradients(layers: int, directory: Path) -> int:
    """Operations of a whole half step: clip, sum, noise, AdamW."""
    model, tokens = adapted(layers=layers, randomised=True), records()
    units, entropy = each_record(tokens), OsEntropy()
    spec = RunSpec(model, tokens, units, static(model), make_plan(steps=9, checkpoint_every=9), make_header())
    run = open_run(spec, directory, entropy)
    for _ in range(2):  # AdamW makes its moments at the first step
        step = run.begin()
        assert step is not None
        gradients = list(loop.gradients_of(run, step.batch or [np.array([0])]))[:1]
        with Calls() as calls:
            run.complete(step, gradients)
    run.ledger.close()
    return calls.count


def test_no_operation_is_repeated_for_every_pair(tmp_path: Path) -> None:
    """Clipping, summing, noise and AdamW take as many calls for six pairs as for two."""
    counts = [calls_after_the_gradients(layers, tmp_path / str(layers)) for layers in (2, 6)]
    assert counts[0] == counts[1]


def test_a_run_shows_the_model_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn; so a compiled model or a captured graph serves every step."""
    shapes: list[torch.Size] = []
    real = per_sample.model_losses

    def noted(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shapes.append(ids.shape)
        return real(model, ids, mask)

    monkeypatch.setattr(per_sample, "model_losses", noted)
    trained(tmp_path, make_plan(steps=6, physical_batch_size=3))
    assert len(shapes) > 6
    assert set(shapes[1:]) == {torch.Size([3, records().width])}  # the first is the rehearsal, before any charge


def test_frozen_weights_get_no_gradient(tmp_path: Path) -> None:
    model = trained(tmp_path)
    assert all(parameter.grad is None for parameter in model.parameters())
