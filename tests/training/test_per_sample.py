"""Per-sample gradients equal a loop with batch size 1, and Opacus."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from tiny_models import DEVICE, FAMILIES, adapted, llama, records, row_gradient, trainable, with_prompts

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.training import losses
from dptune.training.data import Tokens
from dptune.training.evaluation import perplexity
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.per_sample import Taps, per_sample_gradients
from dptune.training.losses import model_losses, sequence_losses
from dptune.training.models.model import attach_lora


def flat(gradients: object, units: int) -> torch.Tensor:
    """(units, parameters) from one-hot weighted sums: what ``weighted_sum`` can see is all there is."""
    norms = gradients.norms()  # type: ignore[attr-defined]
    rows = []
    for unit in range(units):
        factors = torch.zeros_like(norms)
        factors[unit] = 1.0
        rows.append(torch.cat(gradients.weighted_sum(factors)))  # type: ignore[attr-defined]
    return torch.stack(rows)


def computed(model: object, tokens: object, owners: list[int] | None = None, **options: object) -> torch.Tensor:
    count = len(tokens.rows)  # type: ignore[attr-defined]
    ids, mask = tokens.batch(np.arange(count), DEVICE)  # type: ignore[attr-defined]
    owners = owners or list(range(count))
    gradients = per_sample_gradients(
        model, lora_pairs(model), ids, mask, torch.tensor(owners, device=DEVICE), max(owners) + 1, **options  # type: ignore[arg-type]
    )  # fmt: skip
    return flat(gradients, max(owners) + 1)


def looped(model: object, tokens: object) -> torch.Tensor:
    return torch.stack([row_gradient(model, row) for row in tokens.rows])  # type: ignore[attr-defined]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Worst entry, relative to the record's own largest entry."""
    return float(((found - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)).max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropped_in", [False, True], ids=["first step", "trained"])
def test_equal_to_batch_size_one(family: str, dropped_in: bool) -> None:
    """Right-padded records of 3 to 12 tokens; also at B = 0, where the gradient of A is exactly zero."""
    model, tokens = adapted(family, randomised=dropped_in), records(6)
    assert error(computed(model, tokens), looped(model, tokens)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plain_head", [True, False], ids=["loss in pieces", "loss of logits"])
def test_prompts_are_read_and_have_no_loss(family: str, plain_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the loop; a record that is all prompt has a gradient of exactly zero and stays a row."""
    if not plain_head:
        monkeypatch.setattr(losses, "_PLAIN_HEADS", ())
    model, tokens = adapted(family, randomised=True), with_prompts(records(8))
    found, expected = computed(model, tokens), looped(model, tokens)
    silent = torch.tensor([3, 7], device=DEVICE)
    assert not found[silent].any()
    kept = torch.tensor([0, 1, 2, 4, 5, 6], device=DEVICE)
    assert error(found[kept], expected[kept]) < 1e-5
    assert not torch.allclose(found[2], looped(model, records(8))[2].double(), rtol=0.1)


@pytest.mark.parametrize("plain_head", [True, False])
def test_models_attend_to_prompts_and_see_masks_of_zeros_and_ones(
    plain_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our masks also say which tokens count; a model that multiplies by its mask would take a 2 for more attention."""
    if not plain_head:
        monkeypatch.setattr(losses, "_PLAIN_HEADS", ())
    model, tokens = adapted(randomised=True), records(8)
    ids, mask = with_prompts(tokens).batch(np.arange(8), DEVICE)
    plain_ids, plain_mask = tokens.batch(np.arange(8), DEVICE)
    assert torch.equal(ids, plain_ids)
    seen = []
    decoder = model.get_base_model().transformer
    decoder.register_forward_pre_hook(lambda _, args, given: seen.append(given["attention_mask"]), with_kwargs=True)
    model_losses(model, ids, mask)
    perplexity(model, with_prompts(tokens), 8)
    assert torch.equal(seen[0], plain_mask)
    assert sorted(set(seen[1].flatten().tolist())) == [0, 1]
    assert int(seen[1].sum()) == int(plain_mask.sum())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_other_target_modules(family: str) -> None:
    targets = {"gpt2": ("c_attn", "c_proj", "c_fc"), "llama": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")}
    model = attach_lora(FAMILIES[family](), Lora(rank=2, dropout=0.0, target_modules=targets[family]), init_seed=1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(std=0.2)
    tokens = records(4)
    assert error(computed(model, tokens), looped(model, tokens)) < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bfloat16_autocast_stays_near_and_never_clips_in_half_precision(family: str) -> None:
    model, tokens = adapted(family, randomised=True), records(6)
    found, expected = computed(model, tokens, autocast=torch.bfloat16), looped(model, tokens)
    assert found.dtype == torch.float64
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_p03_neighbours_do_not_change_one_bit(family: str, autocast: torch.dtype | None) -> None:
    """Batches have a public shape, so that no kernel rounds one record by what others it came with."""
    model, tokens = adapted(family, randomised=True), records(6)
    pairs, first = lora_pairs(model), []
    for others in ([1, 2, 3], [5, 4, 4], []):
        ids, mask = tokens.batch(np.array([0, *others]), DEVICE, height=4)
        owners = torch.tensor([0, 1, 2, 3][: 1 + len(others)] + [1 + len(others)] * (3 - len(others)), device=DEVICE)
        gradients = per_sample_gradients(model, pairs, ids, mask, owners, 1 + len(others), autocast=autocast)
        first.append(flat(gradients, 1)[0])
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])


def test_rows_that_only_fill_the_batch_belong_to_nobody() -> None:
    model, tokens = adapted(randomised=True), records(2)
    ids, mask = tokens.batch(np.array([0, 1]), DEVICE, height=5)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens.padding] = float("nan")
    gradients = per_sample_gradients(
        model, lora_pairs(model), ids, mask, torch.tensor([0, 1, 2, 2, 2], device=DEVICE), 2
    )
    assert gradients.norms().shape[0] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_those_of_each_pair_in_its_place(family: str) -> None:
    """To float64's rounding, of the very gradients that are summed; pairs of Llama have two sizes, in turn."""
    model, tokens = adapted(family, randomised=True), records(4)
    ids, mask = tokens.batch(np.arange(4), DEVICE)
    pairs = lora_pairs(model)
    gradients = per_sample_gradients(model, pairs, ids, mask, torch.arange(4, device=DEVICE), 4)
    sizes = [pair.size for pair in pairs]
    assert (len(set(sizes)) > 1) == (family != "gpt2")
    expected = torch.stack([part.norm(dim=1) for part in flat(gradients, 4).split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(gradients.norms(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(flat(gradients, 4).float(), looped(model, tokens), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients.matrix(), flat(gradients, 4), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fewest", [7, 10, 11])
def test_p03_a_record_that_joins_moves_no_bit_where_the_loss_comes_in_pieces(
    family: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of full length and a victim that moves down the batch; 13 positions a row leave remainders."""
    for name in ("_LOGITS_ON_CPU", "_LOGITS"):
        monkeypatch.setattr(losses, name, 0)
    monkeypatch.setattr(losses, "_FEWEST", fewest)
    model = adapted(family, randomised=True)
    tokens = Tokens([np.arange(start, start + 13, dtype=np.int32) for start in range(1, 6)], padding=0, width=14)
    pairs, found = lora_pairs(model), []
    for others in ([], [1], [1, 2], [4, 3, 2]):
        ids, mask = tokens.batch(np.array([*others, 0]), DEVICE, height=4)
        found.append(flat(per_sample_gradients(model, pairs, ids, mask, None, len(others) + 1), len(others) + 1)[-1])
    assert all(torch.equal(one, found[0]) for one in found)


def test_all_pieces_of_the_loss_have_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels round by shape: a shorter last piece would treat the records in it in another way."""
    for name in ("_LOGITS_ON_CPU", "_LOGITS"):
        monkeypatch.setattr(losses, name, 0)
    monkeypatch.setattr(losses, "_FEWEST", 10)
    sizes: list[int] = []
    real = torch.Tensor.softmax

    def noted(self: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        sizes.append(len(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "softmax", noted)
    model, tokens = adapted(randomised=True), records(3)
    computed(model, tokens)
    positions = 3 * (tokens.width - 1)
    assert positions % 10
    assert sizes == [10] * (positions // 10 + 1)


def test_a_units_gradient_is_the_sum_of_its_rows() -> None:
    model, tokens = adapted(randomised=True), records(5)
    expected = looped(model, tokens)
    found = computed(model, tokens, owners=[0, 1, 0, 1, 2])
    expected = torch.stack([expected[0] + expected[2], expected[1] + expected[3], expected[4]])
    assert error(found, expected) < 1e-5


def test_losses_come_with_the_gradients_and_carry_no_graph() -> None:
    model, tokens = adapted(), records(3)
    ids, mask = tokens.batch(np.arange(3), DEVICE)
    losses = per_sample_gradients(model, lora_pairs(model), ids, mask, None, 3).losses()
    assert losses.shape == (3,)
    assert not losses.requires_grad


def test_a_record_whose_loss_is_not_a_number_does_not_spread() -> None:
    model = adapted("llama", randomised=True)
    tokens = records(4)
    for row in tokens.rows:
        row[row == 5] = 6
    clean = computed(model, tokens)
    tokens.rows[2][1] = 5
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("nan")
    found = computed(model, tokens)
    assert (found[2] == 0).all()
    torch.testing.assert_close(found[[0, 1, 3]], clean[[0, 1, 3]], rtol=1e-5, atol=1e-7)


def test_records_without_a_second_token_have_no_gradient() -> None:
    """All of a batch may be such records; a crash here would depend on private data."""
    model, tokens = adapted(randomised=True), records(2)
    tokens.rows[:] = [tokens.rows[0][:1], tokens.rows[1][:1]]
    assert (computed(model, tokens) == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trainable_parameter_is_in_exactly_one_pair(family: str) -> None:
    model = adapted(family)
    covered = [id(parameter) for pair in lora_pairs(model) for parameter in pair.parameters]
    assert sorted(covered) == sorted(id(parameter) for parameter in trainable(model).values())


@pytest.mark.parametrize("name", ["lm_head.weight", "norm.weight"])
def test_a_trainable_parameter_outside_the_pairs_is_refused(name: str) -> None:
    model = adapted("llama")
    for full_name, parameter in model.named_parameters():
        if full_name.endswith(name):
            parameter.requires_grad_(True)
    with pytest.raises(ConfigError, match=name):
        lora_pairs(model)


def test_an_adapter_of_another_name_is_refused() -> None:
    from peft import LoraConfig

    model = adapted("llama")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    with pytest.raises(ConfigError, match="second"):
        lora_pairs(model)


def test_hooks_are_gone_afterwards_even_after_an_error() -> None:
    model, tokens = adapted(), records(2)
    computed(model, tokens)
    pairs = lora_pairs(model)
    with pytest.raises(AttributeError):
        per_sample_gradients(torch.nn.Identity(), pairs, *tokens.batch(np.arange(2), DEVICE), torch.arange(2), 2)
    assert not any(layer._forward_hooks for pair in pairs for layer in (pair.down, pair.up))


def test_a_layer_that_runs_twice_is_refused() -> None:
    base = llama()
    base.model.layers[1].self_attn = base.model.layers[0].self_attn
    model = attach_lora(base, Lora(rank=2, dropout=0.0), init_seed=0)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj ran twice"):
        computed(model, records(2))


def test_a_layer_that_no_loss_depends_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns would hold whatever was in that memory: another record's gradient, say."""
    model, tokens = adapted(randomised=True), records(2)
    last = model.get_base_model().transformer.h[-1].attn
    real = last.forward

    def cut(*arguments: object, **options: object) -> object:
        output, *rest = real(*arguments, **options)
        return (output.detach(), *rest)

    monkeypatch.setattr(last, "forward", cut)
    with pytest.raises(ConfigError, match=r"h\.1\.attn\.c_attn got no gradient"):
        computed(model, tokens)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_equal_to_opacus(family: str) -> None:
    opacus = pytest.importorskip("opacus")
    model, tokens = adapted(family, randomised=True), records(5)
    ours = computed(model, tokens)
    names = list(trainable(model))
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")
    ids, mask = tokens.batch(np.arange(5), DEVICE)
    logits = wrapped(input_ids=ids, attention_mask=mask, use_cache=False).logits
    sequence_losses(logits, ids, mask).sum().backward()
    by_name = dict(wrapped._module.named_parameters())
    theirs = torch.cat([by_name[name].grad_sample.flatten(1) for name in names], dim=1)
    assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_leaves_nothing_to_the_garbage_collector(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a circle of references holds stays for hundreds of steps: activations of some gigabytes."""
    model, tokens, held = adapted(family), records(3), list[weakref.ref[Taps]]()
    backward = Taps.backward
    monkeypatch.setattr(Taps, "backward", lambda taps, of: (held.append(weakref.ref(taps)), backward(taps, of))[1])
    gc.collect()
    gc.disable()
    try:
        computed(model, tokens)
        assert [taps() for taps in held] == [None]
    finally:
        gc.enable()
