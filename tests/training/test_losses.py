"""One loss per sequence: no record can rescale another (P0.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import CPU, adapted, records, row_loss

from dptune.training.data import Tokens
from dptune.training.losses import sequence_losses, token_losses


def batch_losses(model: object, tokens: Tokens, indices: list[int]) -> torch.Tensor:
    ids, mask = tokens.batch(np.array(indices), CPU)
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
    table = torch.randn(97, 97, generator=generator, requires_grad=True)

    def first(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = tokens.batch(np.array(indices), CPU)
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
        ids, mask = tokens.batch(np.array(indices), CPU)
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
