"""The alignment score against its formula, with one gradient at a time, and on what a run learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from audit_models import gpt2, tokenizer

from dptune.audit.text.membership import alignment_scores, auc
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora, TrainedWeights
from dptune.training.data import Tokens, tokenize
from dptune.training.models.model import attach_lora
from dptune.training.models.own_weights import start_training

PUBLIC = tokenize(["The patient has diabetes.", "The patient is well.", "Takes insulin."], tokenizer(), 40)
WORDS = (
    "well",
    "sugar",
    "seven",
    "insulin",
    "takes",
    "naive",
    "day",
    "has",
    "old",
    "foot",
    "test",
    "no",
    "yes",
    "cold",
)


def candidates(count: int) -> Tokens:
    chance = np.random.default_rng(3)
    return tokenize([" ".join(f"{word}." for word in chance.choice(WORDS, 4)) for _ in range(count)], tokenizer(), 40)


def model(train: Any = "lora") -> Any:
    frozen = gpt2().requires_grad_(False)
    return start_training(frozen, TrainedWeights(train=train), Lora(rank=8, alpha=4, dropout=0.0), 0).eval()


def weights(adapted: Any) -> list[torch.Tensor]:
    return [weight for weight in adapted.parameters() if weight.requires_grad]


def direction(adapted: Any, row: Any) -> torch.Tensor:
    """The gradient of one text's mean loss by plain backpropagation, of norm 1."""
    ids = torch.tensor(row.astype(np.int64))[None]
    loss = adapted(input_ids=ids, labels=ids).loss
    found = torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, weights(adapted))]).double()
    return found / found.norm()


def learned(rows: list[Any], train: str, steps: int = 6, rate: float = 0.1) -> Any:
    """Released weights: sums of normalised gradients, each with noise."""
    adapted, chance = model(train), torch.Generator().manual_seed(5)
    for _ in range(steps):
        total = torch.stack([direction(adapted, row) for row in rows]).sum(dim=0)
        total += 0.05 * torch.randn(len(total), generator=chance, dtype=total.dtype)
        start = 0
        with torch.no_grad():
            for weight in weights(adapted):
                weight -= rate / len(rows) * total[start : start + weight.numel()].reshape(weight.shape).float()
                start += weight.numel()
    return adapted


@pytest.mark.parametrize("train", ["lora", "bias"])
def test_scores_are_a_matched_filter_against_coloured_noise(train: str) -> None:
    tokens, released, start = candidates(6), learned(list(candidates(6).rows[:3]), train), model(train)
    before = [weight.detach().clone() for weight in weights(start)]
    found = alignment_scores(start, released, tokens, PUBLIC, rows=4)
    assert all(torch.equal(now, then) for now, then in zip(weights(start), before, strict=True))

    own = {"candidates": 0.0, "public": 0.0}
    for share in (0.0, 0.5, 1.0):
        point = model(train)
        with torch.no_grad():
            for weight, old, new in zip(weights(point), before, weights(released), strict=True):
                weight.copy_(old + share * (new - old))
        for name, rows in (("candidates", tokens.rows), ("public", PUBLIC.rows)):
            own[name] = own[name] + torch.stack([direction(point, row) for row in rows]) / 3
    moved = torch.cat([(old - new).reshape(-1) for old, new in zip(before, weights(released), strict=True)]).double()
    one, common = own["candidates"], own["public"]
    noise = torch.eye(len(moved), dtype=torch.float64) + one.T @ one / 4 + common.T @ common
    expected = one @ torch.linalg.solve(noise, moved)
    assert found == pytest.approx(expected.detach().numpy(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("train", ["lora", "all"])
def test_what_trained_scores_above_what_did_not(train: str) -> None:
    tokens = candidates(12)
    coins = np.random.default_rng(1).permutation(12) < 6
    released = learned([row for row, coin in zip(tokens.rows, coins, strict=True) if coin], train)
    found = alignment_scores(model(train), released, tokens, PUBLIC, rows=8)
    assert auc(found[coins], found[~coins]) > 0.9


def test_an_adapter_of_other_layers_is_refused() -> None:
    other = attach_lora(
        gpt2().requires_grad_(False), Lora(rank=2, alpha=4, dropout=0.0, target_modules=("c_proj",)), 0
    ).eval()
    with pytest.raises(ConfigError, match="other weights"):
        alignment_scores(model(), other, candidates(2), PUBLIC, rows=2)
