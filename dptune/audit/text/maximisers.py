"""Gradient maximisers: of many samples of a public model, those whose gradients can be told apart best.

An attack finds a canary by how far the weights moved along its gradient. A private run clips that gradient, so its norm
counts for nothing; samples chosen by their norm are found no better than others (`python -m benchmarks.canaries`). So
what is maximised is the *separation*: the distance, in standard deviations, between a run with the text and one without
it, for a linear attack on the sum of all clipped gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.text.likelihood import TOKENS, sampled_texts
from dptune.core.progress import progress
from dptune.core.settings import Lora
from dptune.training.data import Tokens, tokenize
from dptune.training.gradients.parameter_groups import trained_blocks
from dptune.training.gradients.per_sample import per_sample_gradients
from dptune.training.models.model import attach_lora

#: Samples of which one is kept.
CHOICE = 8
_TOGETHER = 256  # texts that are kept of one round of samples, and compared with one another
_MU = 0.92  # of a certified epsilon of 4 at delta 1e-5: the separation of a canary that nothing else covers
_ROWS = 64

Gradients = NDArray[np.float32]


def maximisers(
    model: Any,
    tokenizer: Any,
    count: int,
    public: Sequence[str],
    *,
    choice: int = CHOICE,
    tokens: int = TOKENS,
    seed: int = 0,
) -> list[str]:
    """Choose at most ``count`` of ``choice`` times as many samples of a public model, by their separation.

    The model, the public texts and the seed decide them, and nothing else does; they depend on no private record.

    Args:
        model: causal language model on its device. It is left as it was.
        count: number of texts; there are fewer if the model repeats itself.
        public: public texts like the private records, beside which canaries must be told apart.
        choice: number of samples of which one is kept.
        tokens: most tokens of a text.
        seed: public; of the samples and of the adapters whose gradients are compared.
    """
    texts, kept = sampled_texts(model, tokenizer, choice * count, tokens=tokens, seed=seed), list[str]()

    def gradients(several: Sequence[str]) -> Gradients:
        return adapter_gradients(model, tokenize(list(several), tokenizer, tokens + 2), seed=seed)

    beside = gradients(public)
    size = choice * _TOGETHER
    for first in progress(range(0, len(texts), size), "maximisers", total=-(-len(texts) // size)):
        several = texts[first : first + size]
        found = separations(gradients(several), beside)
        best = np.argsort(-found, kind="stable")[: len(several) // choice]
        kept += [several[place] for place in np.sort(best)]
    return kept


def separations(canaries: Gradients, others: Gradients) -> NDArray[np.float64]:
    """(canaries,) separations, each beside all other canaries and ``others``, from gradients of any norm.

    Noise that hides a canary: Gaussian noise in which it would have 0.92 alone; the other canaries, each in by a fair
    coin; and the others' gradients, each taken or left. A canary's own coin is no noise (Sherman and Morrison).

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.maximisers import separations
        >>> alone, alike = np.eye(3)[:1], np.array([[0, 1.0, 0], [0, 1.0, 0.1]])
        >>> separations(np.concatenate([alone, alike]), np.zeros((0, 3))).round(2).tolist()
        [0.92, 0.84, 0.84]
    """
    own, known = (torch.nn.functional.normalize(torch.from_numpy(each).double(), dim=1) for each in (canaries, others))
    every = torch.cat([own / 2, known])  # own noise I / mu^2 + every' every, inverted by the Woodbury identity
    inside = torch.eye(len(every), dtype=torch.float64) + _MU**2 * every @ every.T
    across = every @ own.T
    signal = _MU**2 * (1 - _MU**2 * (across * torch.linalg.solve(inside, across)).sum(dim=0))
    return (signal / (1 - signal / 4)).sqrt().numpy()


def adapter_gradients(model: Any, texts: Tokens, *, seed: int = 0) -> Gradients:
    """(texts, parameters) gradients of each text's mean loss by fresh LoRA adapters of default settings.

    Args:
        model: causal language model on its device. It is left as it was.
        seed: public; of the adapters.
    """
    adapted = attach_lora(model, Lora(dropout=0.0), seed).eval()
    try:
        blocks, device, found = trained_blocks(adapted), next(adapted.parameters()).device, []
        for first in range(0, len(texts.rows), _ROWS):
            ids, mask = texts.compact(np.arange(first, min(first + _ROWS, len(texts.rows))), device)
            found.append(per_sample_gradients(adapted, blocks, ids, mask, None, len(ids)).matrix().float().cpu())
    finally:
        adapted.unload()
    return np.asarray(torch.cat(found).numpy())
