"""Runs that share a forward pass end where each would have ended alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, each_record, make_header, make_plan, records, weights, with_prompts

from dptune.core.errors import ConfigError, DivergedError
from dptune.core.settings import Lora
from dptune.mechanisms.registry import build
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.training.data import Tokens
from dptune.training.gradients import shared_pass
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.shared_pass import rehearse_pass, shared_copy, train_together
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import RawStatistics, Run, StepReport
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec, TrainingPlan

STEPS = 5
MECHANISMS: dict[str, dict[str, Any]] = {
    "static": {},
    "quantile": {},
    "dp_lora": {},
    "ffa": {"like": "dp_lora", "freeze_down": True},
    "geoclip": {},
    "rldp": {"interval": 2, "warmup": 1, "batch_size": 2},
    "autoclip_published": {},
    "plrvo": {},
    "banded": {"bands": 2},
    "nonprivate": {},
}


class Cell:
    """A run that can be opened alone or beside others, from an equal start."""

    def __init__(self, name: str, seed: int, units: PrivacyUnits, plan: TrainingPlan, **header: Any) -> None:
        self.name, self.seed, self.units, self.plan, self.header = name, seed, units, plan, header
        self.entropy = FixedSeed(seed)
        self.model: Any = None

    def spec(self, base: Any, tokens: Tokens) -> RunSpec:
        self.model = attach_lora(shared_copy(base), Lora(rank=4, alpha=8, dropout=0.0), init_seed=self.seed)
        noise = {} if self.name == "nonprivate" else {"noise_multiplier": 0.7}
        sizes = {"pairs": len(lora_pairs(self.model))}
        if self.name == "plrvo":
            noise = {"k": 40.0, "theta": 1e-3}
        self.entropy = FixedSeed(self.seed)
        mechanism = build(self.name, MECHANISMS[self.name] | noise | sizes)
        header = make_header(
            self.entropy,
            self.units,
            mechanism=self.name,
            published_accountant=mechanism.published_accountant,
            accounting="noise_only",
            run_id=f"run{self.seed}",  # correlated noise deals units into groups by it
            **self.header,
        )
        return RunSpec(self.model, tokens, self.units, mechanism, self.plan, header, public=records(4, seed=9))


def cells(tokens: Tokens, names: list[str], **plan: Any) -> list[Cell]:
    planned = make_plan(steps=STEPS, physical_batch_size=3, **plan)
    return [Cell(name, number + 1, each_record(tokens), planned) for number, name in enumerate(names)]


def alone(cell: Cell, base: Any, tokens: Tokens, directory: Path) -> dict[str, torch.Tensor]:
    train(cell.spec(base, tokens), directory, cell.entropy).close()
    return weights(cell.model)


def opened(
    cell: Cell, base: Any, tokens: Tokens, directory: Path, on_step: Callable[[StepReport], None] = lambda report: None
) -> Run:
    return open_run(cell.spec(base, tokens), directory, cell.entropy, on_step)


def side_by_side(base: Any, runs: list[Run]) -> list[Exception | None]:
    ended = train_together(base, runs)
    for run in runs:
        run.ledger.close()
    return ended


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_runs_on_prompts_end_where_each_would_alone(tmp_path: Path) -> None:
    base, tokens = FAMILIES["gpt2"](), with_prompts(records())
    group = cells(tokens, ["static", "dp_lora"], sample_rate=0.5, learning_rate=1e-3)
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in group]
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    assert side_by_side(base, runs) == [None] * len(group)
    for cell, weights_alone in zip(group, expected, strict=True):
        assert_close(weights(cell.model), weights_alone)
    plain = cells(tokens, ["static"], sample_rate=0.5, learning_rate=1e-3)[0]
    other = alone(plain, base, records(), tmp_path / "plain")
    assert any(not torch.equal(other[name], value) for name, value in expected[0].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mechanism_ends_where_it_would_alone(family: str, tmp_path: Path) -> None:
    """Each run's own mechanism, seed and coins; tolerance 1e-4 of each weight. Batches are packed across runs."""
    base, tokens = FAMILIES[family](), records()
    group = cells(tokens, list(MECHANISMS), sample_rate=0.5, learning_rate=1e-3)
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in group]
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    assert side_by_side(base, runs) == [None] * len(group)
    for cell, weights_alone in zip(group, expected, strict=True):
        assert_close(weights(cell.model), weights_alone)
        ours, theirs = (read_ledger(tmp_path / name / "ledger.jsonl") for name in (str(cell.seed), f"alone{cell.seed}"))
        assert ours.releases == theirs.releases == STEPS
        if cell.name != "rldp":  # whose noise follows releases, which agree to rounding only
            assert ours.composition == theirs.composition


def test_a_patients_records_stay_one_unit_across_packing(tmp_path: Path) -> None:
    base, tokens = FAMILIES["gpt2"](), records(12)
    units = PrivacyUnits.of("patient", np.repeat(np.arange(6), 2), 2)
    plan = make_plan(of=6, sample_rate=0.6, steps=STEPS, physical_batch_size=5, learning_rate=1e-3)
    group = [Cell("static", seed, units, plan) for seed in (1, 2, 3)]
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in group]
    side_by_side(base, [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group])
    for cell, weights_alone in zip(group, expected, strict=True):
        assert_close(weights(cell.model), weights_alone)


def test_bfloat16(tmp_path: Path) -> None:
    """Half precision errs by 4e-3 of a gradient; tolerance 5 % of what moved."""
    base, tokens = FAMILIES["llama"](), records()
    group = cells(tokens, ["static", "static"], autocast="bfloat16", learning_rate=1e-3)
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in group]
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    start = [weights(run.spec.model) for run in runs]
    side_by_side(base, runs)
    for cell, before, after in zip(group, start, expected, strict=True):
        for name, value in weights(cell.model).items():
            assert float((value - after[name]).norm()) < 0.05 * float((after[name] - before[name]).norm())


def test_weights_that_are_no_numbers_stay_with_their_run(tmp_path: Path) -> None:
    """The other runs move bit for bit as they do beside a healthy one; the broken one is refused at its end."""
    base, tokens = FAMILIES["gpt2"](), records()

    def ended(folder: str, broken: bool) -> tuple[list[Exception | None], list[dict[str, torch.Tensor]]]:
        group = cells(tokens, ["static", "static", "static"], sample_rate=1.0)
        runs = [opened(cell, base, tokens, tmp_path / folder / str(cell.seed)) for cell in group]
        if broken:
            with torch.no_grad():
                runs[1].pairs[0].up.weight.fill_(float("nan"))
        return side_by_side(base, runs), [weights(cell.model) for cell in group]

    (healthy, expected), (errors, found) = ended("healthy", False), ended("broken", True)
    assert healthy == [None] * 3
    assert [type(error) for error in errors] == [type(None), DivergedError, type(None)]
    for number in (0, 2):
        assert all(torch.equal(value, expected[number][name]) for name, value in found[number].items())


class BrokeError(Exception):
    """What a run may raise on its own."""


@pytest.mark.parametrize("place", ["begin", "complete", "on_step"])
def test_a_run_that_fails_leaves_the_others_alone(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tokens = FAMILIES["gpt2"](), records()
    group = cells(tokens, ["static", "quantile", "static"], learning_rate=1e-3)
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in group]

    def stop(report: StepReport) -> None:
        if place == "on_step" and report.step == 2:
            raise BrokeError

    runs = [
        opened(cell, base, tokens, tmp_path / str(cell.seed), stop if n == 1 else lambda _: None)
        for n, cell in enumerate(group)
    ]
    if place != "on_step":
        real = getattr(Run, place)

        def failing(run: Run, *arguments: Any) -> Any:
            if run is runs[1] and run.step == 2:
                raise BrokeError
            return real(run, *arguments)

        monkeypatch.setattr(Run, place, failing)
    errors = side_by_side(base, runs)
    assert [type(error) for error in errors] == [type(None), BrokeError, type(None)]
    for number in (0, 2):
        assert_close(weights(group[number].model), expected[number])
    assert not read_ledger(tmp_path / "2" / "ledger.jsonl").complete


@pytest.mark.parametrize("place", ["own", "pass"])
def test_a_runs_own_failure_is_told_before_the_others_go_on_and_a_passs_never(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may go on for hours, and be killed: a failure that nobody wrote down would be another attempt."""
    base, tokens = FAMILIES["gpt2"](), records()
    told: list[Exception] = []
    first, second = cells(tokens, ["static", "static"], sample_rate=1.0)
    specs = [replace(cell.spec(base, tokens), on_failure=told.append) for cell in (first, second)]
    runs = [
        open_run(one, tmp_path / name, cell.entropy)
        for one, name, cell in zip(specs, "ab", (first, second), strict=True)
    ]
    begin = Run.begin

    def begun(run: Run) -> Any:
        assert len(told) == (place == "own" and run is runs[1])
        if place == "own" and run is runs[0]:
            raise BrokeError
        return begin(run)

    def failing(*_: Any) -> None:
        raise BrokeError

    monkeypatch.setattr(Run, "begin", begun)
    if place == "pass":
        monkeypatch.setattr(shared_pass, "model_losses", failing)
    errors = side_by_side(base, runs)
    assert [type(error) for error in told] == ([BrokeError] if place == "own" else [])
    assert isinstance(errors[0], BrokeError)
    assert (errors[1] is None) == (place == "own")


@pytest.mark.parametrize("batch", [1, None])
@pytest.mark.parametrize("shared", [True, False])
def test_a_runs_own_crash_over_its_gradients_is_told(
    batch: int | None, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two micro-batches, and after the last: its clipper and its noise are its own."""
    base, tokens = FAMILIES["gpt2"](), records()
    told: list[Exception] = []
    (cell,) = cells(tokens, ["static"], sample_rate=1.0)
    spec, watching = replace(cell.spec(base, tokens), on_failure=told.append), RawStatistics.watching

    def failing(raw: RawStatistics, gradients: Any) -> Any:
        for number, one in enumerate(watching(raw, gradients), 1):
            if number == batch:
                raise BrokeError
            yield one
        raise BrokeError

    monkeypatch.setattr(RawStatistics, "watching", failing)
    if shared:
        assert [type(error) for error in side_by_side(base, [open_run(spec, tmp_path, cell.entropy)])] == [BrokeError]
    else:
        with pytest.raises(BrokeError):
            train(spec, tmp_path, cell.entropy)
    assert [type(error) for error in told] == [BrokeError]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rehearsed_pass_reads_no_record_and_moves_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tokens = FAMILIES[family](), records()
    group, shapes = cells(tokens, ["static", "ffa"], learning_rate=1e-3), []
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in group]
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    before, losses = [weights(cell.model) for cell in group], shared_pass.model_losses

    def seen(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shapes.append(ids.shape)
        if len(shapes) == 1:
            assert (ids == tokens.padding).all()
        return losses(model, ids, mask)

    monkeypatch.setattr(shared_pass, "model_losses", seen)
    rehearse_pass(base, runs)
    assert [run.ledger.releases for run in runs] == [0, 0]
    for cell, start in zip(group, before, strict=True):
        assert all(torch.equal(value, start[name]) for name, value in weights(cell.model).items())
    assert side_by_side(base, runs) == [None, None]
    assert len({*shapes}) == 1, "a step takes the memory of the rehearsal"
    assert len(shapes) > 1
    for cell, end in zip(group, expected, strict=True):
        assert_close(weights(cell.model), end)


def test_a_clipper_that_fails_ends_its_own_run_alone(tmp_path: Path) -> None:
    """The gradients of a run are asked for by its own clipper, which may be a plug-in."""
    base, tokens = FAMILIES["gpt2"](), records()
    told: list[Exception] = []
    first, second = cells(tokens, ["static", "static"])
    spec = replace(first.spec(base, tokens), on_failure=told.append)

    def failing(source: Any) -> Any:
        raise BrokeError

    object.__setattr__(spec.mechanism.clipper, "gradients", failing)
    runs = [open_run(spec, tmp_path / "a", first.entropy), opened(second, base, tokens, tmp_path / "b")]
    errors = side_by_side(base, runs)
    assert [type(error) for error in errors] == [BrokeError, type(None)]
    assert told == errors[:1]
    assert runs[1].ledger.releases == STEPS


def test_a_budget_that_is_used_up_ends_one_run_only(tmp_path: Path) -> None:
    """The ledger of the second run holds releases that nobody remembers, so its plan does not fit any more."""
    base, tokens = FAMILIES["gpt2"](), records()
    group = cells(tokens, ["static", "static"])

    def kill(report: StepReport) -> None:
        if report.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_together(base, [opened(group[1], base, tokens, tmp_path / "2", kill)])
    spent = read_ledger(tmp_path / "2" / "ledger.jsonl").releases
    assert spent == 1
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    monkey = runs[1]
    monkey.ledger.admits = lambda release: monkey.ledger.releases < 3  # type: ignore[method-assign]
    errors = side_by_side(base, runs)
    assert errors[0] is None
    assert isinstance(errors[1], BudgetError)
    assert read_ledger(tmp_path / "1" / "ledger.jsonl").releases == STEPS
    assert read_ledger(tmp_path / "2" / "ledger.jsonl").releases == 3


def test_killed_together_and_resumed_together(tmp_path: Path) -> None:
    """What a dead process charged stays charged; each run goes on from its own checkpoint and ends with its plan."""
    base, tokens = FAMILIES["gpt2"](), records()

    def kill(report: StepReport) -> None:
        if report.step == 4:
            raise KeyboardInterrupt

    group = cells(tokens, ["static", "rldp"], checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        train_together(base, [opened(cell, base, tokens, tmp_path / str(cell.seed), kill) for cell in group])
    assert [read_ledger(tmp_path / str(cell.seed) / "ledger.jsonl").releases for cell in group] == [4, 4]
    again = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    assert [run.step for run in again] == [2, 2]
    assert side_by_side(base, again) == [None, None]
    assert [run.ledger.releases for run in again] == [STEPS, STEPS]
    assert [run.step for run in again] == [3, 3]  # two releases were lost with the process


def test_an_error_in_the_shared_pass_never_leaves_a_run_with_half_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first micro-batch fails: its run gets that error, and every other run whose units were in it gets one too."""
    base, tokens = FAMILIES["gpt2"](), records()
    group = cells(tokens, ["static", "static"], sample_rate=1.0)  # 8 and 8 units, 3 a micro-batch: the third holds both
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    real, calls = shared_pass.model_losses, iter(range(100))

    def failing(*arguments: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(shared_pass, "model_losses", failing)
    before = [weights(run.spec.model) for run in runs]
    errors = side_by_side(base, runs)
    assert [type(error) for error in errors] == [MemoryError, RuntimeError]
    for run, start in zip(runs, before, strict=True):
        assert all(torch.equal(value, start[name]) for name, value in weights(run.spec.model).items())


def test_neighbours_in_a_pass_do_not_change_one_bit() -> None:
    """A record's gradient is the same whichever records of its own and of other runs share the micro-batch."""
    base, tokens = FAMILIES["gpt2"](), records()
    plan = make_plan(steps=1, physical_batch_size=4)
    found = []
    for others in ([[1, 2], [3]], [[], [5, 6, 7]], [[4], []], [[], []]):
        group = [Cell("static", seed, each_record(tokens), plan) for seed in (1, 2)]
        runs = [fake_run(cell, base, tokens) for cell in group]
        stacks, layout = shared_pass._stack_pairs(runs), shared_pass.Layout.of(runs[0].pairs)
        batches = [[np.array([0]), *(np.array([one]) for one in others[0])], [np.array([one]) for one in others[1]]]
        steps = {n: shared_pass.Step(runs[n].spec.mechanism.knobs(), batch) for n, batch in enumerate(batches)}
        shared = shared_pass._Pass(base, runs, stacks, layout, steps)
        (first, *_) = shared.gradients(0)
        found.append(first.matrix()[0])
    assert all(torch.equal(one, found[0]) for one in found)
    assert float(found[0].norm()) > 0


def fake_run(cell: Cell, base: Any, tokens: Tokens) -> Any:
    spec = cell.spec(base, tokens)
    with torch.no_grad():
        for pair in lora_pairs(spec.model):
            pair.up.weight.copy_(0.2 * torch.randn(pair.up.weight.shape, generator=torch.Generator().manual_seed(3)))
    return SimpleNamespace(spec=spec, pairs=lora_pairs(spec.model))


def test_runs_that_cannot_share_a_pass_are_refused_and_closed(tmp_path: Path) -> None:
    base, tokens = FAMILIES["gpt2"](), records()
    group = cells(tokens, ["static", "static"])
    other = Cell("static", 9, each_record(tokens), make_plan(steps=STEPS, physical_batch_size=4))

    def refused(match: str, *runs: Run) -> None:
        with pytest.raises(ConfigError, match=match):
            train_together(base, runs)
        for run in runs:
            with pytest.raises(LedgerError, match="closed"):
                run.ledger.charge(run.spec.mechanism.release(run.spec.mechanism.knobs(), run.spec.plan.sample_rate))

    first = opened(group[0], base, tokens, tmp_path / "a")
    refused("physical_batch_size", first, opened(other, base, tokens, tmp_path / "b"))
    refused("another base", opened(group[0], FAMILIES["gpt2"](), tokens, tmp_path / "c"))
    refused(
        "other records",
        opened(group[0], base, tokens, tmp_path / "d"),
        opened(group[1], base, records(), tmp_path / "e"),
    )


def test_runs_of_other_adapters_entropy_or_kind_are_refused_too(tmp_path: Path) -> None:
    """Before any charge: a run on the output layer would fail after one, at every retry."""
    base, tokens = FAMILIES["gpt2"](), records()
    first, second = (
        opened(cell, base, tokens, tmp_path / str(n)) for n, cell in enumerate(cells(tokens, ["static"] * 2))
    )

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            shared_pass._check(base, [first, replace(second, **changes)])

    shared_pass._check(base, [first, second])
    refused("other adapters", pairs=[replace(pair, scaling=9.0) for pair in second.pairs])
    refused("other adapters", pairs=[replace(pair, dropout=0.5) for pair in second.pairs])
    refused("other adapters", pairs=second.pairs[:1])
    refused("entropy", entropy=OsEntropy())
    local = build("dp_lora_fed", {"noise_multiplier": 1.0, "pairs": len(second.pairs)})
    refused("trains locally", spec=replace(second.spec, mechanism=local))
    with pytest.raises(ConfigError, match="output layer"):
        shared_pass._check(base, [replace(first, pairs=[replace(first.pairs[0], name="base_model.model.lm_head")])])
    for run in (first, second):
        run.ledger.close()
        assert run.ledger.releases == 0


def test_a_failed_runs_ledger_is_closed_and_the_base_is_in_evaluation_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tokens = FAMILIES["gpt2"]().train(), records()
    group = cells(tokens, ["static", "static"])
    runs = [opened(cell, base, tokens, tmp_path / str(cell.seed)) for cell in group]
    modes: list[bool] = []
    real = shared_pass.model_losses

    def failing(model: Any, *arguments: Any) -> torch.Tensor:
        modes.append(any(module.training for module in model.modules()))
        if len(modes) > 4:
            raise MemoryError
        return real(model, *arguments)

    monkeypatch.setattr(shared_pass, "model_losses", failing)
    assert all(train_together(base, runs))
    assert not any(modes)
    for run in runs:
        with pytest.raises(LedgerError, match="closed"):
            run.ledger.finish()


def test_adapters_cost_a_copy_and_the_base_does_not() -> None:
    base = FAMILIES["llama"]()
    twin = shared_copy(base)
    ours = {name: parameter.data_ptr() for name, parameter in base.named_parameters()}
    assert {name: parameter.data_ptr() for name, parameter in twin.named_parameters()} == ours
    attach_lora(twin, Lora(rank=2, dropout=0.0), init_seed=0)
    assert not any("lora" in name for name, _ in base.named_parameters())
