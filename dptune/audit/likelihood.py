"""How surprised a model is by the end of a text, given its beginning: the raw material of every text attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.errors import ConfigError
from dptune.progress import Meter
from dptune.training.losses import token_losses


@dataclass(frozen=True)
class Passage:
    """A text that ends in what an attacker wants to know. Private."""

    prompt: str = field(repr=False)
    ending: str = field(repr=False)


@dataclass(frozen=True)
class EndingLosses:
    """Of each passage's ending given its prompt. Private.

    Attributes:
        total: (passages,) negative log-likelihood, nats.
        tokens: (passages,) tokens of the ending that the model saw; 0 where the text was cut before them.
    """

    total: NDArray[np.float64] = field(repr=False)
    tokens: NDArray[np.int64] = field(repr=False)

    @property
    def mean(self) -> NDArray[np.float64]:
        """(passages,) nats a token; 0 where no token was seen."""
        return self.total / np.maximum(self.tokens, 1)


@torch.no_grad()
def ending_losses(
    model: Any, tokenizer: Any, passages: Sequence[Passage], *, max_length: int, rows: int, label: str = ""
) -> EndingLosses:
    """Score endings as training saw them: one passage a row, cut on the right at ``max_length - 1`` tokens.

    Args:
        model: causal language model in evaluation mode, on its device.
        tokenizer: a fast one, which tells where in the text a token lies.
        rows: physical batch size.
        label: names the progress bar; none without.

    Raises: ConfigError for a tokenizer without offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("model", "its tokenizer tells no offsets", fix="use a fast tokenizer")
    texts = [passage.prompt + passage.ending for passage in passages]
    starts = [len(passage.prompt) for passage in passages]
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False)
    ids = [row[: max_length - 1] for row in encoded["input_ids"]]
    # A token belongs to the ending if any of its characters does.
    belongs = [
        [end > start for _, end in offsets[: max_length - 1]]
        for offsets, start in zip(encoded["offset_mapping"], starts, strict=True)
    ]
    total, counts = np.zeros(len(passages)), np.zeros(len(passages), dtype=np.int64)
    order = np.argsort([len(row) for row in ids], kind="stable")
    with Meter(label, total=len(ids), unit="texts") as meter:
        for first in range(0, len(order), rows):
            chosen = order[first : first + rows]
            losses, valid = _batch(
                model, [ids[i] for i in chosen], [belongs[i] for i in chosen], tokenizer.pad_token_id
            )
            total[chosen], counts[chosen] = losses, valid
            meter.update(first + len(chosen))
    return EndingLosses(total, counts)


def _batch(
    model: Any, rows: list[list[int]], belongs: list[list[bool]], padding: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    device, width = next(model.parameters()).device, max(2, *map(len, rows))
    ids = torch.full((len(rows), width), padding)
    mask, wanted = torch.zeros_like(ids), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (row, mine) in enumerate(zip(rows, belongs, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : max(1, len(row))] = 1  # a row without any token would have nothing to attend to
        wanted[index, : len(row)] = torch.tensor(mine)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    losses, valid = token_losses(logits, ids.to(device), mask.to(device))
    counted = valid & wanted[:, 1:].to(device)
    kept = losses.double().where(counted, 0.0)
    return kept.sum(dim=1).cpu().numpy(), counted.sum(dim=1).cpu().numpy()
