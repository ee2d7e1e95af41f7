"""One loss per sequence: no record can rescale another (P0.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import DEVICE, adapted, llama, records, row_loss, trainable
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from dptune.core.settings import Lora
from dptune.training import losses
from dptune.training.data import Tokens
from dptune.training.losses import model_losses, sequence_losses, token_losses
from dptune.training.models.model import attach_lora


def batch_losses(model: object, tokens: Tokens, indices: list[int]) -> torch.Tensor:
    ids, mask = tokens.batch(np.array(indices), DEVICE)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits  # type: ignore[operator]
    return sequence_losses(logits, ids, mask)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_loss_is_the_records_own_mean(family: str) -> None:
    model, tokens = adapted(family), records(6)
    expected = torch.stack([row_loss(model, row) for row in tokens.rows])
    torch.testing.assert_close(batch_losses(model, tokens, list(range(6))), expected)


@pytest.mark.parametrize("others", [[1, 2, 3], [3, 2, 1], [2], [], [4, 5, 5, 5]])
def test_loss_and_gradient_ignore_the_other_records(others: list[int]) -> None:
    """Changed, permuted, removed: the first record's loss, and its gradient at the logits, stay."""
    tokens = records(6)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(97, 97, generator=generator).to(DEVICE).requires_grad_()

    def first(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = tokens.batch(np.array(indices), DEVICE)
        logits = table[ids]
        losses = sequence_losses(logits, ids, mask)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        return losses[0].detach(), gradient[0, : len(tokens.rows[0])]

    torch.testing.assert_close(first([0, *others]), first([0]), rtol=1e-6, atol=1e-9)


def test_the_hubs_own_loss_is_a_trap() -> None:
    """``labels=`` averages over the tokens of the whole batch, so that a neighbour rescales a record's gradient."""
    model, tokens = adapted(), records(2)
    tokens.rows[:] = [tokens.rows[0][:3], np.arange(1, 13, dtype=np.int32)]

    def gradient_norm_of_first(indices: list[int]) -> float:
        ids, mask = tokens.batch(np.array(indices), DEVICE)
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(inputs_embeds=embedded, attention_mask=mask, labels=labels, use_cache=False).loss
        (gradient,) = torch.autograd.grad(loss * len(indices), embedded)
        return float(gradient[0].norm())

    assert gradient_norm_of_first([0, 1, 1]) < 0.7 * gradient_norm_of_first([0])


def test_padding_has_neither_loss_nor_gradient() -> None:
    ids, mask = torch.tensor([[3, 4, 5, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    logits = torch.randn(1, 5, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    losses, valid = token_losses(logits, ids, mask)
    assert valid.tolist() == [[True, True, False, False]]
    assert (losses[0, 2:] == 0).all()
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert (gradient[0, 2:] == 0).all()
    assert (gradient[0, :2] != 0).any()


def test_a_single_token_has_loss_zero() -> None:
    logits = torch.randn(1, 3, 9)
    assert sequence_losses(logits, torch.tensor([[3, 0, 0]]), torch.tensor([[1, 0, 0]])).tolist() == [0.0]


def test_half_precision_logits_give_float32() -> None:
    logits = torch.randn(1, 3, 9).to(torch.bfloat16)
    assert sequence_losses(logits, torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.long)).dtype == torch.float32


# --- the loss without logits


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return made


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("positions", [1, 5, 1000])
def test_the_loss_without_logits_is_the_same(family: str, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and the gradients of every adapter weight, whichever pieces the positions come in."""
    monkeypatch.setattr(losses, "_FEWEST", positions)
    for name in ("_LOGITS_ON_CPU", "_LOGITS"):
        monkeypatch.setattr(losses, name, 0)
    model, tokens = adapted(family, randomised=True), records(5)
    ids, mask = tokens.batch(np.arange(5), DEVICE)
    weights = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5], device=DEVICE)
    found, expected = [], []
    for store, computed in (
        (found, model_losses(model, ids, mask)),
        (expected, sequence_losses(model(input_ids=ids, attention_mask=mask).logits, ids, mask)),
    ):
        store += [computed.detach(), *torch.autograd.grad((computed * weights).sum(), list(trainable(model).values()))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_far_apart_logits_give_a_finite_loss() -> None:
    """The likelihood of the target underflows; its logarithm does not."""
    hidden = torch.tensor([[[1.0], [1.0], [1.0]]], requires_grad=True)
    weight = torch.tensor([[0.0], [500.0], [-500.0]])
    computed = losses._HeadLosses.apply(hidden, weight, torch.tensor([[0, 2, 1]]), torch.ones(1, 3, dtype=torch.long))
    assert float(computed) == pytest.approx((1000.0 + 0.0) / 2)


def test_whole_logits_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and backwards; the plain way makes them, so the watch would see them."""
    config = GPT2Config(vocab_size=997, n_positions=32, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    base = GPT2LMHeadModel(config).requires_grad_(False).to(DEVICE)
    model, tokens = attach_lora(base, Lora(rank=2, dropout=0.0), init_seed=0), records(8, longest=29)
    ids, mask = tokens.batch(np.arange(8), DEVICE)
    whole = ids.numel() * 997
    monkeypatch.setattr(losses, "_FEWEST", 16)
    for name in ("_LOGITS_ON_CPU", "_LOGITS"):
        monkeypatch.setattr(losses, name, 0)
    with Largest() as watch:
        model_losses(model, ids, mask).sum().backward()
    with Largest() as plain:
        sequence_losses(model(input_ids=ids, attention_mask=mask).logits, ids, mask).sum().backward()
    assert plain.numel >= whole
    assert watch.numel < 0.1 * whole


def test_one_rows_infinities_stay_in_it() -> None:
    """Also beside padding, whose gradient is exactly zero."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 3, generator=generator)
    ids, mask = torch.randint(0, 7, (2, 4), generator=generator), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])

    def gradient(spoiled: bool) -> torch.Tensor:
        hidden = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
        if spoiled:
            hidden[1, 0], hidden[0, 2] = float("inf"), float("nan")  # the last real position predicts nothing
        hidden.requires_grad_()
        return torch.autograd.grad(losses._HeadLosses.apply(hidden, weight, ids, mask).sum(), hidden)[0]

    assert torch.equal(gradient(True)[0], gradient(False)[0])
    assert (gradient(True)[0, 2:] == 0).all()
    assert not torch.isfinite(gradient(True)[1, 0]).any()


@pytest.mark.parametrize("reason", ["family", "bias", "trained", "adapter"])
def test_other_heads_take_the_way_through_logits(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = llama()
    if reason == "family":
        base.config.model_type = "another"
    elif reason == "bias":
        base.lm_head = torch.nn.Linear(32, 97, device=DEVICE).requires_grad_(False)
    elif reason == "trained":
        base.lm_head.weight.requires_grad_(True)
    targets = ("q_proj", "lm_head") if reason == "adapter" else ("q_proj",)
    model = attach_lora(base, Lora(rank=2, dropout=0.0, target_modules=targets), init_seed=0)
    if reason == "trained":
        model.get_output_embeddings().weight.requires_grad_(True)  # PEFT froze it
    ids, mask = records(2).batch(np.arange(2), DEVICE)
    monkeypatch.setattr(losses._HeadLosses, "apply", lambda *_: pytest.fail("took the short way"))
    assert model_losses(model, ids, mask).shape == (2,)
