"""Rewards of continuations: a public function of one user's own text, fixed before the run.

The paper on DP policy gradient takes a BERT that was trained on IMDB's labels. ``LearnedReward`` is that kind: a frozen
encoder, and a logistic head on the mean of its states, trained on public texts with labels. No user's record may be
among those texts, or be like them: what the head learned of them reaches the policy, and no epsilon covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar

from dptune.core.errors import ConfigError, first_line
from dptune.core.progress import progress
from dptune.records.reading.record import Labelled, Record
from dptune.training.models.causal import most_positions
from dptune.training.models.model import ModelSource, load_tokenizer
from dptune.training.models.weight_files import check_finite, stored_weights

_ROWS = 64
_HELD_OUT = 5  # every fifth text measures the head, and does not train it
_FEWEST = 50
_DECAY = 3e-3  # weight of ||w||^2 / 2: the best of five on SST-2's dev set, after the head was trained on its test set
_STEPS = 200


class Reward(Protocol):
    """A public function of a user's own prompt and continuation."""

    def scores(self, prompts: Sequence[str], continuations: Sequence[str]) -> torch.Tensor:
        """(users,) scores in [-1, 1]. Each must depend on its own row alone, to the last digit."""
        ...


@dataclass(frozen=True)
class LearnedReward:
    """A frozen encoder with a logistic head: 2 p - 1, where p is the head's probability of the rewarded label.

    It reads prompt and continuation, as the paper's does, and is positive where p is above a half, as the paper's is;
    the paper's is a logit, which has no bound.

    Attributes:
        encoder, tokenizer: the frozen encoder.
        weights: (states + 1,) weights of the head and its bias, float64.
        width: tokens of every text, padding included; longer texts are cut.
        accuracy: share of the held-out fifth of the labelled texts whose label the head gives.
    """

    encoder: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    weights: torch.Tensor = field(repr=False)
    width: int
    accuracy: float

    def scores(self, prompts: Sequence[str], continuations: Sequence[str]) -> torch.Tensor:
        """(users,) scores in [-1, 1]. All texts have one width, so that the length of one moves no other's score."""
        texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
        logits = _states(self.encoder, self.tokenizer, texts, self.width, fixed=True) @ self.weights
        return (logits / 2).tanh().float()


def learned_reward(
    base: ModelSource, texts: Sequence[Record], positive: str, width: int, device: torch.device
) -> LearnedReward:
    """Train a head on public texts with labels: logistic regression on the mean of the frozen encoder's states.

    Args:
        base: the encoder, such as a BERT or a checkpoint of sentence-transformers.
        texts: public records whose content is ``Labelled``; the same ones in the same order give the same head.
        positive: the label that is rewarded. All others are not.
        width: tokens of every text that is scored later.

    Raises: ConfigError for an encoder that cannot be had, or read texts, fewer than 50 texts, and
        a label that none or all have.
    """
    contents = [record.content for record in texts]
    labelled = [content for content in contents if isinstance(content, Labelled)]
    labels = torch.tensor([content.label == positive for content in labelled], dtype=torch.float64)
    if len(labelled) < max(len(contents), _FEWEST):
        problem = f"has {len(labelled)} texts with a label of {len(contents)}"
        raise ConfigError("reward.path", problem, fix=f"name the column (label), and give {_FEWEST} texts or more")
    if len(labels.unique()) < 2:
        others = ", ".join(sorted({content.label for content in labelled})[:5])
        problem = f"{positive!r} is the label of {'all' if labels[0] else 'no'} texts; labels are {others}"
        raise ConfigError("reward.positive", problem, fix="name one of several labels")
    encoder, tokenizer = _load_encoder(base, device), load_tokenizer(base)
    if (most := most_positions(encoder) or width) < width:
        problem = f"{base.source!r} reads {most} tokens, and texts have up to {width}"
        raise ConfigError("reward.encoder", problem, fix="shorten prompt_tokens and new_tokens, or take another")
    try:
        states = _states(encoder, tokenizer, [content.text for content in labelled], width, fixed=False)
    except Exception as error:  # each model has its own way to fail
        problem = f"{base.source!r} cannot read a text ({type(error).__name__}: {first_line(error)})"
        raise ConfigError("reward.encoder", problem, fix="take an encoder, such as a BERT") from error
    if not bool(states.isfinite().all()):  # no user would learn anything, and all would pay
        problem = f"{base.source!r} reads a text as numbers that are not finite in {base.dtype}"
        raise ConfigError("reward.encoder", problem, fix="load it in float32, or take another")
    held_out = torch.arange(len(labels)) % _HELD_OUT == 0
    weights = _fitted(states[~held_out], labels[~held_out])
    right = ((states[held_out] @ weights > 0) == (labels[held_out] > 0.5)).double().mean()
    return LearnedReward(encoder, tokenizer, weights, width, float(right))


def _load_encoder(base: ModelSource, device: torch.device) -> Any:
    disable_progress_bar()
    try:
        encoder = AutoModel.from_pretrained(
            base.location,
            revision=base.revision,
            dtype=getattr(torch, base.dtype),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises any type for a broken checkpoint
        problem = f"{base.source!r} cannot be loaded as an encoder ({first_line(error)})"
        raise ConfigError("reward.encoder", problem, fix="check the name, revision, files and network") from error
    check_finite(base.source, encoder, stored_weights(base.location, base.revision))
    return encoder.to(device).eval().requires_grad_(False)


@torch.no_grad()
def _states(encoder: Any, tokenizer: Any, texts: Sequence[str], width: int, *, fixed: bool) -> torch.Tensor:
    """(texts, states + 1) float64 means of each text's last states, and a 1 for the bias.

    Args:
        fixed: pad to ``width``, with a column of padding at least, and fill up the last batch: a user who leaves moves
            others to other batches. Otherwise pad to the longest text of a batch, which is faster, and for public
            texts alone.
    """
    encoded = tokenizer(list(texts), truncation=True, max_length=width - 1, verbose=False)["input_ids"]
    order = range(len(texts)) if fixed else sorted(range(len(texts)), key=lambda row: len(encoded[row]))
    found: dict[int, torch.Tensor] = {}
    starts: Iterable[int] = range(0, len(texts), _ROWS)
    for first in starts if fixed else progress(starts, "states of the encoder", total=-(-len(texts) // _ROWS)):
        rows = list(order)[first : first + _ROWS]
        longest = width if fixed else 1 + max(len(encoded[row]) for row in rows)
        height = min(_ROWS, len(texts)) if fixed else len(rows)
        ids = torch.full((height, longest), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        mask[:, 0] = 1  # attention over no token gives NaN
        for place, row in enumerate(rows):
            ids[place, : len(encoded[row])] = torch.tensor(encoded[row], dtype=torch.long)
            mask[place, 1 : len(encoded[row])] = 1
        ids, mask = ids.to(encoder.device), mask.to(encoder.device)
        states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state.double() * mask[..., None]
        own = (states.sum(dim=1) / mask.sum(dim=1, keepdim=True))[: len(rows)].cpu()
        found |= dict(zip(rows, own, strict=True))
    means = torch.stack([found[row] for row in range(len(texts))])
    return torch.cat([means, means.new_ones(len(means), 1)], dim=1)


def _fitted(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(states + 1,) weights of the logistic regression with ``_DECAY``, by L-BFGS from zero."""
    weights = torch.zeros(states.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.binary_cross_entropy_with_logits(states @ weights, labels)
        found = found + _DECAY * weights[:-1].square().sum() / 2
        found.backward()
        return found

    optimizer.step(loss)
    return weights.detach()
