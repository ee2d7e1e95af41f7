"""Membership scores of single tokens' losses: Error Zone, windows, Min-K% and Min-K%++.

Each is a published attack on fine-tuned language models, as its paper has it; where two texts differ, the docstring
says so. All are functions of the released model, the public model and the text, and larger for members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.text.likelihood import Passage, ending_batches

_SHARE = 0.2  # k of Min-K%: the share of a text's tokens that counts
_SMALLEST, _LARGEST, _SIZES = 2, 40, 10  # window sizes of the paper, geometrically spaced


@dataclass(frozen=True)
class TokenLosses:
    """Each ending's tokens under one model; a (tokens,) array a passage. Private.

    Attributes:
        losses: negative log-likelihoods, nats.
        wrong: whether the model finds another token more likely.
        standard: log-likelihood, less its mean over the vocabulary and divided by its deviation, both under the model's
            own distribution.
    """

    losses: Sequence[NDArray[np.float64]] = field(repr=False)
    wrong: Sequence[NDArray[np.bool_]] = field(repr=False)
    standard: Sequence[NDArray[np.float64]] = field(repr=False)


@torch.no_grad()
def ending_tokens(
    model: Any, tokenizer: Any, passages: Sequence[Passage], *, max_length: int, rows: int, label: str = ""
) -> TokenLosses:
    """Score every token of the endings, as ``likelihood.ending_losses`` does their sums; arguments as there."""
    losses: dict[int, NDArray[np.float64]] = {}
    wrong: dict[int, NDArray[np.bool_]] = {}
    standard: dict[int, NDArray[np.float64]] = {}
    for places, logits, ids, counted in ending_batches(model, tokenizer, passages, max_length, rows, label):
        every = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        targets = ids[:, 1:]
        own = every.gather(-1, targets[..., None])[..., 0].double()
        chances = every.exp()
        mean = (chances * every).sum(-1).double()
        spread = ((chances * every.square()).sum(-1).double() - mean.square()).clamp(min=1e-12).sqrt()
        missed = every.argmax(-1) != targets
        for row, place in enumerate(places.tolist()):
            chosen = counted[row]
            losses[place] = (-own[row, chosen]).cpu().numpy()
            wrong[place] = missed[row, chosen].cpu().numpy()
            standard[place] = ((own - mean) / spread)[row, chosen].cpu().numpy()
    order = range(len(passages))
    return TokenLosses([losses[i] for i in order], [wrong[i] for i in order], [standard[i] for i in order])


def token_scores(adapted: TokenLosses, public: TokenLosses) -> dict[str, NDArray[np.float64]]:
    """(texts,) of each score by its name, larger if the text looks trained on; 0 for a text without tokens.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.token_scores import TokenLosses, token_scores
        >>> def model(losses):
        ...     return TokenLosses([np.array(losses)], [np.array([True, True, False])], [np.zeros(3)])
        >>> found = token_scores(model([1.0, 3.0, 0.1]), model([2.0, 2.5, 0.1]))
        >>> {name: round(float(values[0]), 3) for name, values in found.items()}
        {'error_zone': 0.333, 'windows': 0.75, 'min_k': -3.0, 'min_k_plus': 0.0}
    """
    gains = [before - after for before, after in zip(public.losses, adapted.losses, strict=True)]

    def each(function: Callable[..., float], *parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
        return np.array([function(*one) if len(one[0]) else 0.0 for one in zip(*parts, strict=True)])

    return {
        "error_zone": each(error_zone, gains, adapted.wrong),
        "windows": each(windows, gains),
        "min_k": each(min_k, [-losses for losses in adapted.losses]),
        "min_k_plus": each(min_k, adapted.standard),
    }


def error_zone(gains: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """EZ score (Ilić, Stanojević and Cvejoski 2026, arXiv 2601.12104) on the scale from -1 to 1.

    The paper's score is P / N: what fine-tuning raised, by what it lowered, of the log-likelihoods where the model is
    wrong. Here it is (P - N) / (P + N), which ranks texts alike and is finite. As in the paper's appendix E a text that
    only rose, or where the model is nowhere wrong, ranks highest.

    Args:
        gains: (tokens,) log-likelihoods under the adapted model less those under the public one.
        wrong: (tokens,) whether the adapted model finds another token more likely.
    """
    up, down = gains[wrong].clip(min=0).sum(), (-gains[wrong]).clip(min=0).sum()
    return float((up - down) / (up + down)) if down else 1.0


def windows(gains: NDArray[np.float64]) -> float:
    """WBC score (Chen et al. 2026, arXiv 2601.02751): the share of windows whose sum of gains is positive.

    It is the mean over ten sizes from 2 to 40 tokens. The paper's texts have 512 tokens or more; sizes that do not fit
    are left out, and where none fits the whole text is one window.
    """
    sizes = np.round(_SMALLEST * (_LARGEST / _SMALLEST) ** (np.arange(_SIZES) / (_SIZES - 1))).astype(int)
    total = np.concatenate([[0.0], np.cumsum(gains)])
    shares = [float((total[size:] - total[:-size] > 0).mean()) for size in sizes if size <= len(gains)]
    return float(np.mean(shares)) if shares else float(total[-1] > 0)


def min_k(values: NDArray[np.float64]) -> float:
    """The mean of the lowest fifth of the values, at least one: Min-K% of log-likelihoods (Shi et al. 2024), Min-K%++
    of standardised ones (Zhang et al. 2025).
    """
    return float(np.sort(values)[: max(1, int(_SHARE * len(values)))].mean())
