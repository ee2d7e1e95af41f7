"""Gradient checkpointing: the same gradients from fewer tensors in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_per_sample import error, flat
from test_together import alone, assert_close, cells, opened, side_by_side
from tiny_families import CAUSAL, tiny
from tiny_models import DEVICE, FAMILIES, adapted, gpt2, records, row_gradient, weights, with_prompts
from torch.profiler import ProfilerActivity, profile

from dptune.core.errors import ConfigError
from dptune.training.gradients import step_memory
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.per_sample import PairGradients, per_sample_gradients
from dptune.training.gradients.shared_pass import train_together
from dptune.training.gradients.step_memory import checkpointed, layers_of
from dptune.training.loop import local_update
from dptune.training.models.model import Lora, attach_lora

LAYERS = 8


def gradients(model: torch.nn.Module, *, checkpointing: bool, **options: object) -> PairGradients:
    count = 6
    ids, mask = with_prompts(records(count)).batch(np.arange(count), DEVICE)
    torch.manual_seed(5)  # dropout's masks
    return per_sample_gradients(
        model, lora_pairs(model), ids, mask, None, count, checkpointing=checkpointing, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_gradients_and_losses_are_those_without_it(family: str, dropout: float, autocast: torch.dtype | None) -> None:
    """The same numbers pass through the same kernels, so that not even round-off differs."""
    model = adapted(family, randomised=True, dropout=dropout)
    kept, again = (gradients(model, checkpointing=one, autocast=autocast) for one in (False, True))
    assert torch.equal(kept.matrix(), again.matrix())
    assert torch.equal(kept.losses(), again.losses())
    assert torch.equal(kept.norms(), again.norms())


@pytest.mark.parametrize("family", ["opt", "bloom", "gpt_neox", "falcon", "mpt", "phi", "gemma2", "mixtral"])
def test_layers_of_other_shapes_run_again_too(family: str) -> None:
    """Some get rows times tokens, some hand on tuples."""
    model = attach_lora(tiny(family, **CAUSAL[family]).to(DEVICE), Lora(2, 4, 0.0), 0)
    kept, again = (gradients(model, checkpointing=one) for one in (False, True))
    assert torch.equal(kept.matrix(), again.matrix())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_loop_over_records(family: str) -> None:
    model = adapted(family, randomised=True)
    found = flat(gradients(model, checkpointing=True), 6)
    expected = torch.stack([row_gradient(model, row) for row in with_prompts(records(6)).rows])
    some = expected.abs().amax(dim=1) > 0  # of a prompt alone nothing is learned
    assert torch.equal(found[~some], torch.zeros_like(found[~some]))
    assert error(found[some], expected[some]) < 1e-5


def most_memory(work: Callable[[], object]) -> int:
    """The most bytes that torch holds at a time beyond those at the start, by its own allocator's account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    assert recorded.profiler is not None
    changes = [event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert changes
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_falls_to_that_of_few_layers(family: str) -> None:
    model = adapted(family, randomised=True, layers=LAYERS)
    kept, again = (most_memory(lambda one=one: gradients(model, checkpointing=one)) for one in (False, True))  # type: ignore[misc]
    assert again < kept / 2, f"{again} of {kept} bytes, at {LAYERS} layers"


def test_runs_that_share_a_pass_end_where_each_ends_without_it(tmp_path: Path) -> None:
    base, tokens, names = gpt2(), records(), ["static", "quantile", "ffa"]
    plain = cells(tokens, names, learning_rate=1e-3)
    expected = [alone(cell, base, tokens, tmp_path / f"alone{cell.seed}") for cell in plain]
    several = cells(tokens, names, learning_rate=1e-3, gradient_checkpointing=True)
    runs = [opened(cell, base, tokens, tmp_path / f"{cell.seed}") for cell in several]
    assert side_by_side(base, runs) == [None] * len(runs)
    for cell, weights_alone in zip(several, expected, strict=True):
        assert_close(weights(cell.model), weights_alone)


def test_a_run_ends_where_it_ends_without_it(tmp_path: Path) -> None:
    ends = []
    for chosen in (False, True):
        (cell,) = cells(records(), ["static"], gradient_checkpointing=chosen)
        ends.append(alone(cell, gpt2(), records(), tmp_path / str(chosen)))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_clients_update_is_that_without_it() -> None:
    model = adapted("llama", randomised=True)
    options = {"rows": 2, "steps": 3, "learning_rate": 0.1}
    kept, again = (
        local_update(model, lora_pairs(model), records(), np.arange(4), checkpointing=one, **options)  # type: ignore[arg-type]
        for one in (False, True)
    )
    assert torch.equal(kept.matrix(), again.matrix())


def test_runs_with_and_without_it_cannot_share_a_pass(tmp_path: Path) -> None:
    base, tokens = gpt2(), records()
    (one,), (_, other) = cells(tokens, ["static"]), cells(tokens, ["static"] * 2, gradient_checkpointing=True)
    runs = [opened(one, base, tokens, tmp_path / "0"), opened(other, base, tokens, tmp_path / "1")]
    with pytest.raises(ConfigError, match=r"training\.gradient_checkpointing: run 1 has another value than run 0"):
        train_together(base, runs)


def test_layers_are_as_before_outside_the_context() -> None:
    model = adapted("llama")
    with checkpointed(model):
        assert all("forward" in vars(layer) for layer in layers_of(model))
    with pytest.raises(ZeroDivisionError), checkpointed(model):
        1 / 0  # noqa: B018
    assert not any("forward" in vars(layer) for layer in layers_of(model))


def test_a_model_without_such_layers_is_refused_by_name() -> None:
    with (
        pytest.raises(ConfigError, match=r"gradient_checkpointing: transformers marks no layers of Linear.* Fix: "),
        checkpointed(torch.nn.Linear(2, 2)),
    ):
        pass


def test_a_layers_own_forward_comes_back() -> None:
    """Hooks of other libraries, and patches, stand in an instance, in the place of its class's method."""
    model = adapted("llama")
    layer, other = layers_of(model)[:1] * 2
    patched = partial(layer.forward)
    layer.forward = patched
    with checkpointed(model):
        assert other.forward is not patched
    assert vars(layer)["forward"] is patched


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one whenever a layer is run so that it keeps its inputs alone."""
    calls: list[object] = []
    real = step_memory.checkpoint
    monkeypatch.setattr(step_memory, "checkpoint", lambda *a, **k: (calls.append(a), real(*a, **k))[1])
    return calls


def test_the_setting_reaches_rehearsal_runs_shared_passes_and_clients(again: list[object], tmp_path: Path) -> None:
    """Equal results show nothing of it: without checkpoints they are the same."""
    base, tokens = gpt2(), records()
    one, two, three = cells(tokens, ["static"] * 3, gradient_checkpointing=True)
    opened(one, base, tokens, tmp_path / "rehearsed").ledger.close()
    rehearsed = len(again)
    assert rehearsed
    alone(two, base, tokens, tmp_path / "alone")
    assert len(again) > 2 * rehearsed
    runs = [opened(cell, base, tokens, tmp_path / f"shared{cell.seed}") for cell in (three, one)]
    again.clear()
    assert side_by_side(base, runs) == [None] * 2
    assert again
    again.clear()
    model = adapted("llama")
    pairs = lora_pairs(model)
    local_update(model, pairs, tokens, np.arange(4), rows=2, steps=1, learning_rate=0.1, checkpointing=True)
    assert again
