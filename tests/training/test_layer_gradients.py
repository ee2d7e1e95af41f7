"""Gradients of a model's own weights: norms and sums beside a loop over units, layer kind by layer kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tiny_classifiers import classifier, labelled
from tiny_families import CAUSAL, tiny
from tiny_models import CPU, gpt2, llama, records
from torch import nn

from dptune.core.errors import ConfigError
from dptune.training.data import Tokens
from dptune.training.gradients import layer_gradients as engine
from dptune.training.gradients import layer_kinds
from dptune.training.gradients.gradient_check import in_float64, rehearse
from dptune.training.gradients.layer_gradients import LayerGradients, layer_gradients
from dptune.training.gradients.layer_kinds import Products, Units, square_norms
from dptune.training.gradients.parameter_groups import layer_groups
from dptune.training.losses import model_losses

#: Three units of several rows, among rows that only fill the batch (their owner is 3).
OWNERS, UNITS = [0, 1, 0, 2, 0, 3, 3], 3
HEIGHT = 7
#: A token whose states ``breakable`` models cannot compute.
BROKEN = 96


def trained(model: Any) -> Any:
    """All weights train, and none is zero or one, as biases and norms begin."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(True).eval()


def breakable() -> Any:
    """A model whose gradient of a text with the token ``BROKEN`` is not finite."""
    model = trained(llama())
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = math.inf
    return model


def family(name: str) -> Callable[[], Any]:
    return lambda: tiny(name, **CAUSAL[name])


#: What each brings: layers by their kinds, and how models use them.
MODELS: dict[str, Callable[[], Any]] = {
    "Conv1D, positions of all rows, a tied output layer": gpt2,
    "linear without bias, RMSNorm, untied": llama,
    "an RMSNorm of 1 + weight, a scaled and tied embedding": family("gemma"),
    "positions with an offset, rows times tokens": family("opt"),
    "an embedding that is changed in place, fused queries": family("falcon"),
    "a depthwise convolution, norms of heads": family("lfm2"),
    "a tied output layer whose bias another layer holds": family("roberta"),
    "an encoder's head": lambda: classifier("bert"),
    "a head of a mean": lambda: classifier("bert by the mean of its tokens"),
    "a padding row of positions, types of tokens": lambda: classifier("roberta"),
    "a decoder's head": lambda: classifier("gpt2"),
}


def batch(model: Any, count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    tokens: Tokens = labelled(count) if "Classification" in type(model).__name__ else records(count)
    ids, mask = tokens.batch(np.arange(count), CPU, height=HEIGHT)
    ids = ids.where(ids != BROKEN, BROKEN - 1)
    ids[0, 1] = 0  # a padding token that stands in a text
    return ids, mask


def looped(model: Any, groups: Any, ids: torch.Tensor, mask: torch.Tensor, units: Sequence[Any]) -> list[torch.Tensor]:
    """(units, size) gradients of each group, by plain autograd on each unit's rows."""
    weights = [parameter for group in groups for parameter in group.parameters]
    found = []
    for rows in units:
        of_unit = torch.autograd.grad(model_losses(model, ids[rows], mask[rows]).sum(), weights)
        found.append(torch.cat([gradient.flatten() for gradient in of_unit]).double())
    return list(torch.stack(found).split([group.size for group in groups], dim=1))


def check(found: LayerGradients, expected: list[torch.Tensor], close: float) -> None:
    """Compare norms, and a sum in which each unit and group has another factor."""
    norms = torch.stack([part.norm(dim=1) for part in expected], dim=1)
    assert found.norms() == pytest.approx(norms, rel=close, abs=close * 1e-2 * float(norms.max()))
    factors = torch.rand(norms.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = [(factors[:, [group]] * part).sum(0) for group, part in enumerate(expected)]
    for own, other in zip(found.weighted_sum(factors), sums, strict=True):
        assert float((own - other).norm()) <= close * max(float(other.norm()), 1e-2 * float(norms.max()))


@pytest.mark.parametrize("several", [False, True], ids=["one_row", "several_rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", MODELS)
def test_norms_and_sums_are_those_of_a_loop_over_units(kind: str, dtype: torch.dtype, several: bool) -> None:
    model = trained(MODELS[kind]())
    groups, (ids, mask) = layer_groups(model), batch(model)
    owners = torch.tensor(OWNERS) if several else None
    units = [(torch.tensor(OWNERS) == unit).nonzero()[:, 0] if several else [unit] for unit in range(UNITS)]
    with in_float64(model) if dtype == torch.float64 else nullcontext():
        found = layer_gradients(model, groups, ids, mask, owners, UNITS)
        check(found, looped(model, groups, ids, mask, units), 1e-5 if dtype == torch.float32 else 1e-12)
    for unit, rows in enumerate(units):
        loss = model_losses(model, ids[rows], mask[rows]).mean().detach()
        assert float(found.losses()[unit]) == pytest.approx(float(loss), rel=1e-5)
        assert float(found.tokens()[unit]) == float((mask[rows][:, 1:] == 1).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_every_family_is_right_or_refused_by_name(name: str) -> None:
    model = trained(tiny(name, **CAUSAL[name]))
    ids, mask = batch(model)
    with pytest.raises(ConfigError, match=REFUSED[name]) if name in REFUSED else nullcontext():
        groups = layer_groups(model)
        found = layer_gradients(model, groups, ids, mask, None, 5)
        check(found, looped(model, groups, ids, mask, [[row] for row in range(5)]), 1e-5)


def test_every_weight_is_in_one_group_and_a_tied_one_names_both_uses() -> None:
    model = trained(gpt2())
    groups = layer_groups(model)
    members = [id(parameter) for group in groups for parameter in group.parameters]
    assert sorted(members) == sorted(map(id, model.parameters()))
    assert [group.name for group in groups][:2] == ["transformer.wte+lm_head", "transformer.wpe"]
    assert sum(group.size for group in groups) == sum(parameter.numel() for parameter in model.parameters())


def test_what_does_not_train_is_in_no_group() -> None:
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    groups, (ids, mask) = layer_groups(model), batch(model)
    assert {tuple(parameter.shape) for group in groups for parameter in group.parameters} == {(32,), (96,), (128,)}
    check(
        layer_gradients(model, groups, ids, mask, None, 5),
        looped(model, groups, ids, mask, [[row] for row in range(5)]),
        1e-5,
    )
    with pytest.raises(ConfigError, match=r"^train: no weight of the model is left to train"):
        layer_groups(model.requires_grad_(False))


def test_a_layer_that_runs_twice_has_the_norm_of_the_sum_of_its_runs() -> None:
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    model = trained(model)
    groups, (ids, mask) = layer_groups(model), batch(model)
    units = [(torch.tensor(OWNERS) == unit).nonzero()[:, 0] for unit in range(UNITS)]
    found = layer_gradients(model, groups, ids, mask, torch.tensor(OWNERS), UNITS)
    check(found, looped(model, groups, ids, mask, units), 1e-5)


@pytest.mark.parametrize(
    "at_a_time", [1, 75, 100, 1 << 22], ids=["one_unit", "some_and_a_rest", "two_of_two_rows_and_a_rest", "all_units"]
)
@pytest.mark.parametrize("by", ["grams", "gradients"])
@pytest.mark.parametrize("uses", ["dense", "lookup", "tied", "dense dense", "lookup lookup dense"])
def test_both_ways_to_a_norm_are_the_norm(uses: str, by: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kinds, "_AT_A_TIME", at_a_time)
    monkeypatch.setattr(layer_kinds, "_OF_ENTRY", math.inf if by == "grams" else -math.inf)
    generator, (rows, length, width) = torch.Generator().manual_seed(5), (7, 6, 4)

    def of(use: str, tokens: int) -> Products:
        right = torch.randn(rows, tokens, width, generator=generator, dtype=torch.float64)
        if use == "lookup":
            return Products(torch.randint(length, (rows, tokens), generator=generator), right)
        return Products(torch.randn(rows, tokens, length, generator=generator, dtype=torch.float64), right)

    named = {"tied": ["lookup", "dense"]}.get(uses, uses.split())
    products = [of(use, 3 + number) for number, use in enumerate(named)]
    whole = torch.zeros(rows, length, width, dtype=torch.float64)
    for one in products:
        left = one.left if not one.looks_up else nn.functional.one_hot(one.left, length).double()
        whole += torch.einsum("rtl,rtw->rlw", left, one.right)
    # Of the last owners, no row only fills, and each number of rows a unit can have is the last unit's of some piece.
    for owners, units in ((None, rows), (torch.tensor(OWNERS), UNITS), (torch.tensor([0, 1, 0, 1, 2, 2, 3]), 4)):
        of_units = whole if owners is None else torch.stack([whole[owners == unit].sum(0) for unit in range(units)])
        found = square_norms(products, (length, width), Units.of(owners, units, rows))
        assert found[:units] == pytest.approx(of_units.square().sum((1, 2)), rel=1e-12)


@pytest.mark.parametrize("several", [False, True], ids=["one_row", "several_rows"])
@pytest.mark.parametrize("token", [50, BROKEN], ids=["plain", "not_finite"])
def test_rows_that_only_fill_the_batch_have_no_effect(token: int, several: bool) -> None:
    """In norms, losses or sums, whatever they hold: not even numbers that are not finite."""
    model, owners = breakable(), torch.tensor(OWNERS) if several else None
    groups, (ids, mask) = layer_groups(model), batch(model)
    units = UNITS if several else 5
    before = layer_gradients(model, groups, ids, mask, owners, units)
    ids, mask = ids.clone(), mask.clone()
    ids[5:], mask[5:] = token, 1
    after = layer_gradients(model, groups, ids, mask, owners, units)
    assert torch.equal(before.norms(), after.norms())
    assert torch.equal(before.losses(), after.losses())
    ones = torch.ones_like(before.norms())
    for own, other in zip(before.weighted_sum(ones), after.weighted_sum(ones), strict=True):
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("several", [False, True], ids=["one_row", "several_rows"])
def test_a_unit_whose_gradient_is_not_finite_counts_as_zeros_and_spoils_no_other(several: bool) -> None:
    model, owners = breakable(), torch.tensor(OWNERS) if several else None
    groups, (ids, mask) = layer_groups(model), batch(model)
    units = UNITS if several else 5
    before = layer_gradients(model, groups, ids, mask, owners, units)
    ids = ids.clone()
    ids[1, 1] = BROKEN
    after = layer_gradients(model, groups, ids, mask, owners, units)
    factors = torch.ones_like(before.norms())
    assert torch.equal(after.norms()[1], torch.zeros(len(groups), dtype=torch.float64))
    assert float(after.losses()[1]) == 0.0
    kept = torch.arange(units) != 1
    assert torch.equal(after.norms()[kept], before.norms()[kept])
    sums = after.weighted_sum(factors)
    factors[1] = 0.0
    for own, other in zip(sums, before.weighted_sum(factors), strict=True):
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["positions", "an encoder's head"])
def test_two_passes_give_what_one_does_bit_for_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(MODELS.get(kind, gpt2)())
    groups, (ids, mask) = layer_groups(model), batch(model)
    found = []
    for kept in (math.inf, 0):
        monkeypatch.setattr(engine, "_KEPT", kept)
        found.append(layer_gradients(model, groups, ids, mask, torch.tensor(OWNERS), UNITS))
    assert torch.equal(found[0].norms(), found[1].norms())
    factors = torch.rand(found[0].norms().shape, dtype=torch.float64)
    sums = [one.weighted_sum(factors) for one in found]
    assert all(map(torch.equal, *sums))
    for one in found:
        with pytest.raises(RuntimeError, match="the sum was made already"):
            one.weighted_sum(factors)


class Unsteady(torch.autograd.Function):
    """Passes on, and gives every second backward pass a gradient that is one part in ten million longer."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Unsteady.passes += 1
        gradient = gradient.clone()
        gradient[0] *= 1 + 2e-7 * (Unsteady.passes % 2)
        return gradient


@pytest.mark.parametrize("kept", [math.inf, 0], ids=["one_pass", "two_passes"])
def test_a_second_pass_that_gives_other_gradients_than_the_first_is_refused(
    kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that add up in any order do that: a norm of one pass would not bound what the other adds up."""
    monkeypatch.setattr(engine, "_KEPT", kept)
    model = trained(llama())
    model.model.layers[0].register_forward_hook(lambda _, __, out: Unsteady.apply(out))
    found = layer_gradients(model, layer_groups(model), *batch(model), None, 5)
    ones = torch.ones_like(found.norms())
    said = r"^train: needs two passes over each batch here, and the second gave other gradients"
    with nullcontext() if kept else pytest.raises(ConfigError, match=said):
        found.weighted_sum(ones)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_row_without_gradient_that_is_nan_in_the_second_pass_is_refused(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero times NaN is NaN: one row would turn the sum of all to NaN, whatever its factor."""
    monkeypatch.setattr(engine, "_KEPT", 0)
    model, passes = trained(llama()), iter((0.0, math.nan))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.index_fill(0, torch.tensor(4), next(passes))

    model.model.layers[0].register_forward_hook(lambda _, __, out: out.register_hook(spoil) and None)
    found = layer_gradients(model, layer_groups(model), *batch(model), None, 5, checkpointing=checkpointing)
    said = "Fix: leave gradient_checkpointing out, and lower" if checkpointing else "Fix: lower"
    with pytest.raises(ConfigError, match=f"the second gave other gradients than the first. {said}"):
        found.weighted_sum(torch.ones_like(found.norms()))


def test_two_passes_take_kernels_that_repeat_and_one_pass_leaves_the_choice_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    for kept in (math.inf, 0):
        monkeypatch.setattr(engine, "_KEPT", kept)
        model = trained(llama())
        look = lambda _: asked.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
        model.model.layers[0].register_forward_hook(lambda _, __, out, look=look: out.register_hook(look) and None)
        found = layer_gradients(model, layer_groups(model), *batch(model), None, 5)
        found.weighted_sum(torch.ones_like(found.norms()))
    assert asked == [False, True, True]
    assert not torch.are_deterministic_algorithms_enabled()


class Counted(nn.Module):
    """A norm's place taken by a layer that gives ten times as much each time it runs."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.runs = nn.Parameter(weight.detach().clone()), 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return states * self.weight * 10.0**self.runs


def test_after_one_pass_no_layer_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a unit of norm 1 would move the sum by 10: the layer gives other gradients each time."""
    monkeypatch.setattr(engine, "_KEPT", math.inf)
    model = llama().requires_grad_(False)
    model.model.norm = Counted(model.model.norm.weight)
    found = layer_gradients(model, layer_groups(model), *batch(model), None, 5)
    runs = model.model.norm.runs
    for unit in range(5):
        factors = torch.zeros_like(found.norms())
        factors[unit] = 1 / found.norms()[unit]
        (alone,) = found.weighted_sum(factors, keep=True)
        assert float(alone.norm()) == pytest.approx(1, rel=1e-6)
    assert model.model.norm.runs == runs


def test_what_is_kept_and_overwritten_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may use a tensor of its own as a layer's input, and write into it at its next batch."""
    monkeypatch.setattr(engine, "_KEPT", math.inf)
    model, seen = trained(llama()), []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    found = layer_gradients(model, layer_groups(model), *batch(model), None, 5)
    with torch.no_grad():
        seen[0] *= 10
    with pytest.raises(ConfigError, match=r"[qkv]_proj had its input or gradient overwritten"):
        found.weighted_sum(1 / found.norms())


@pytest.mark.parametrize("kind", ["linear without bias, RMSNorm, untied", "a decoder's head"])
def test_checkpointed_layers_give_the_same(kind: str) -> None:
    model = trained(MODELS[kind]())
    groups, (ids, mask) = layer_groups(model), batch(model)
    plain, found = (
        layer_gradients(model, groups, ids, mask, None, 5, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    assert torch.equal(plain.norms(), found.norms())
    factors = torch.rand(found.norms().shape, dtype=torch.float64)
    assert all(map(torch.equal, plain.weighted_sum(factors), found.weighted_sum(factors)))


def test_in_half_precision_norms_are_those_of_what_is_added_up() -> None:
    """Autograd rounds weights' gradients to bfloat16 there, and so is no measure: the sums of single units are."""
    model = trained(llama())
    groups, (ids, mask) = layer_groups(model), batch(model)
    found = layer_gradients(model, groups, ids, mask, None, 5, autocast=torch.bfloat16)
    exact = layer_gradients(model, groups, ids, mask, None, 5)
    assert found.norms() == pytest.approx(exact.norms(), rel=0.1, abs=1e-2 * float(exact.norms().max()))
    for row in range(5):
        sums = found.weighted_sum(torch.eye(5, dtype=torch.float64)[row][:, None].expand(-1, len(groups)), keep=True)
        assert all(part.dtype == torch.float32 for part in sums)
        norms = torch.stack([part.double().norm() for part in sums])
        assert found.norms()[row] == pytest.approx(norms, rel=1e-5)


def test_a_norm_is_exact_however_much_its_tokens_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices hold the squares of what cancels: rounding of float32 would be larger than this norm's square."""
    monkeypatch.setattr(layer_kinds, "_OF_ENTRY", math.inf)
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 1, 8, generator=generator), torch.randn(3, 1, 5, generator=generator)
    products = Products(left.expand(-1, 2, -1), torch.cat([right, -right * (1 + 1e-5)], dim=1))
    exact = torch.einsum("rtl,rtw->rlw", products.left.double(), products.right.double())
    found = square_norms([products], (8, 5), Units.of(None, 3, 3))
    assert found == pytest.approx(exact.square().sum((1, 2)), rel=1e-5)


def test_a_unit_adds_no_more_than_the_radius() -> None:
    model = trained(llama())
    groups, (ids, mask) = layer_groups(model), batch(model)
    found = layer_gradients(model, groups, ids, mask, None, 5)
    for row in range(5):
        factors = torch.zeros_like(found.norms())
        factors[row] = 1.0 / found.norms()[row].norm()
        length = float(torch.cat(found.weighted_sum(factors, keep=True)).double().norm())
        assert length == pytest.approx(1.0, rel=1e-6)


#: Families that are refused, and what is said of the layer.
REFUSED = {
    "bart": r"layer model\.decoder\.layers\.0\.encoder_attn\.k_proj took no part in the forward pass",
    "bigbird_pegasus": r"layer model\.decoder\.embed_positions saw a tensor of shape \(14,\) for 7 rows of 14 tokens",
    "deepseek_v4": r"layer model\.layers\.0\.self_attn \(DeepseekV4Attention\) has weights of its own \(sinks\)",
    "diffllama": r"layer model\.layers\.0\.self_attn \(DiffLlamaAttention\) has weights of its own \(lambda_q1",
    "falcon_mamba": r"mixer \(FalconMambaMixer\) has weights of its own \(A_log, D\)",
    "gpt_oss": r"self_attn \(GptOssAttention\) has weights of its own \(sinks\)",
    "granitemoe": r"experts \(GraniteMoeExperts\) computes with its weights .* from 3 inputs",
    "jamba": r"mamba \(JambaMambaMixer\) has weights of its own",
    "jetmoe": r"mlp \(JetMoeMoE\) has weights of its own \(bias\)",
    "mamba": r"mixer \(MambaMixer\) has weights of its own",
    "mbart": r"encoder_attn\.k_proj took no part in the forward pass",
    "mixtral": r"layer model\.layers\.0\.mlp\.experts \(MixtralExperts\) computes .* from 3 inputs",
    "olmoe": r"experts \(OlmoeExperts\) computes",
    "phimoe": r"experts \(PhimoeExperts\) computes",
    "qwen3_moe": r"experts \(Qwen3MoeExperts\) computes",
    "recurrent_gemma": r"rg_lru \(RecurrentGemmaRglru\) computes with its weights",
    "rwkv": r"attention \(RwkvSelfAttention\) has weights of its own \(time_decay",
}


@pytest.mark.parametrize("name", ["bart", "bigbird_pegasus", "mamba", "mixtral"])
def test_what_cannot_be_told_apart_by_record_is_refused_by_name(name: str) -> None:
    model = trained(tiny(name, **CAUSAL[name]))
    with pytest.raises(ConfigError, match=rf"^train: .*{REFUSED[name]}.*Fix: leave this layer out"):
        layer_gradients(model, layer_groups(model), *batch(model), None, 5)


class Scaled(nn.Module):
    """A layer of no known kind, whose weight is as large as it is told."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.weight.mean()


_LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(32), "normalises over all records of a batch"),
    "frequencies": (lambda: nn.Embedding(9, 32, scale_grad_by_freq=True), "what all records of a batch look up"),
    "largest norm": (lambda: nn.Embedding(9, 32, max_norm=1.0), "what all records of a batch look up"),
    "sparse": (lambda: nn.Embedding(9, 32, sparse=True), "has sparse gradients"),
    "two inputs": (lambda: nn.Bilinear(32, 32, 32), r"\(weight, bias\) from 2 inputs, where one is supported"),
    "large": (lambda: Scaled(layer_kinds._MOST_WEIGHTS + 1), "is of no known kind, and has more than 131072 weights"),
}


@pytest.mark.parametrize("kind", _LAYERS)
def test_a_layer_that_couples_records_or_is_of_no_known_kind_is_refused_before_it_runs(kind: str) -> None:
    make, said = _LAYERS[kind]
    model = gpt2().requires_grad_(True)
    model.transformer.ln_f = make()
    with pytest.raises(ConfigError, match=rf"^train: layer transformer\.ln_f \(\w+\) .*{said}.*Fix: leave this"):
        layer_groups(model)
    model.transformer.ln_f.requires_grad_(False)
    assert "transformer.ln_f" not in [group.name for group in layer_groups(model)]


def test_whole_gradients_are_refused_with_the_names_of_those_that_need_them() -> None:
    model = trained(gpt2())
    found = layer_gradients(model, layer_groups(model), *batch(model), None, 5)
    with pytest.raises(ConfigError, match=r"^train: is not lora.* adaclip, geoclip and clipper l1 need.*static"):
        found.matrix()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["an encoder's head", "a padding row of positions, types of tokens", "positions"])
def test_a_model_whose_records_are_apart_passes_the_rehearsal(kind: str, checkpointing: bool) -> None:
    model = trained(MODELS.get(kind, gpt2)())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rehearse(model, layer_groups(model), checkpointing=checkpointing)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_model_that_couples_records_is_refused_by_the_rehearsal() -> None:
    model = trained(llama())
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + 0.1 * out.mean(0, keepdim=True))
    with pytest.raises(ConfigError, match=r"^train: layer model\..* gives a record another gradient in a batch"):
        rehearse(model, layer_groups(model))


def test_a_weight_that_is_used_outside_of_its_layer_is_refused_by_the_rehearsal() -> None:
    """No tap sees that use: norms would be those of a part of the gradient."""
    model = trained(llama())
    weight = model.model.layers[0].mlp.down_proj.weight
    model.model.norm.register_forward_hook(lambda _, __, out: out + weight.mean())
    with pytest.raises(ConfigError, match=r"^train: layer model\.layers\.0\.mlp\.down_proj gives a record another"):
        rehearse(model, layer_groups(model))


def test_norms_that_are_not_those_of_the_sums_are_refused_by_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(llama())
    norms = LayerGradients.norms
    monkeypatch.setattr(LayerGradients, "norms", lambda found: norms(found) * 0.99)
    with pytest.raises(ConfigError, match="gives a record another gradient in a batch than alone"):
        rehearse(model, layer_groups(model))
