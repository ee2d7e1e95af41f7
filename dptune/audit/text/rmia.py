"""RMIA score (Zarifzadeh, Liu and Shokri 2024, arXiv 2312.03262): a text's likelihood against what reference models
give it.

The paper's score is the share of public texts z with p(x) / P(x) >= gamma p(z) / P(z), where p is the likelihood under
the attacked model and P the mean over models that were trained on the text and models that were not. Whatever gamma
and the texts z are, that share never falls where the ratio p(x) / P(x) rises. So this is the ratio itself: it ranks
texts as the paper's score does with infinitely many texts z, without the ties of a few (`tests/audit/test_rmia.py`).

As in the authors' program, the likelihood of a text is the geometric mean over its tokens, which lies in [0, 1]; and
where no reference model was trained on the text, P = ((1 + a) P_out + 1 - a) / 2 with a = 0.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_A = 0.3  # the default of the authors' program; no coin chooses it


def rmia(
    losses: NDArray[np.float64], references: NDArray[np.float64], included: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """(texts,) logarithms of the likelihood ratio, larger if the text looks trained on. Private.

    Args:
        losses: (texts,) mean losses of each text's tokens under the attacked model, in nats.
        references: (models, texts) the same under models of the attacker's own, such as the public model.
        included: (models, texts) whether the model was trained on the text, which each text needs of some and not of
            others; without it no model was trained on any.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.rmia import rmia
        >>> fine_tuned, public = np.array([1.0, 2.0, 3.0]), np.array([[1.5, 2.0, 3.0]])
        >>> rmia(fine_tuned, public).round(2).tolist()
        [-0.3, -1.17, -2.04]
        >>> shadows = np.array([[1.0, 2.0, 3.5], [1.5, 2.0, 3.0]])
        >>> rmia(fine_tuned, shadows, np.array([[True] * 3, [False] * 3])).round(2).tolist()
        [0.22, 0.0, 0.22]
    """
    chances = np.exp(-references)
    if included is None:
        expected = ((1 + _A) * chances.mean(axis=0) + 1 - _A) / 2
    else:
        inside = (chances * included).sum(axis=0) / included.sum(axis=0)
        outside = (chances * ~included).sum(axis=0) / (~included).sum(axis=0)
        expected = (inside + outside) / 2
    return np.asarray(-losses - np.log(expected))
