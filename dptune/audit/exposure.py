"""Exposure of a planted secret: its rank among secrets that were never planted, in bits (Carlini et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.audit.likelihood import Passage, endings_of_one_prompt
from dptune.corpus.canaries import ALPHABET, SECRET_LENGTH
from dptune.errors import ConfigError, DataError
from dptune.progress import progress


def exposures(
    model: Any,
    tokenizer: Any,
    planted: Sequence[tuple[Passage, str]],
    *,
    candidates: int,
    max_length: int,
    rows: int,
    seed: int = 0,
) -> NDArray[np.float64]:
    """(secrets,) exposures in bits, from 0 (least likely of all) to log2(candidates + 1) (most likely of all).

    Args:
        planted: the passage of each planted secret, whose ending holds it, and the secret. Private.
        candidates: number of random secrets to rank each planted one against, in the same record. A secret that was
            never planted has a uniform rank, see ``chance``.
        seed: seed of the random secrets; public.

    Raises: ConfigError without a secret or a candidate; DataError if a text was cut before its secret, or the
    model's losses are not finite.
    """
    if not planted:
        raise ConfigError("canaries.extraction", "no secret was planted to rank", fix="plant some")
    if candidates < 1:
        raise ConfigError("audit.candidates", f"{candidates} is below 1", fix="use hundreds")
    generator = np.random.default_rng(seed)
    losses = []
    for passage, secret in progress(planted, "exposure", total=len(planted)):
        drawn = generator.choice(list(ALPHABET), size=(candidates, SECRET_LENGTH))
        others = ("".join(row) for row in drawn)
        ranked = [replace(passage, ending=passage.ending.replace(secret, other)) for other in (secret, *others)]
        found = endings_of_one_prompt(model, tokenizer, ranked, max_length=max_length, rows=rows)
        if not found.tokens.all():
            problem = f"a record fills {max_length} tokens, so that its secret was cut off"
            raise DataError(problem, fix="raise training.max_length", file="exposure")
        losses.append(found.total)
    return exposure_of(np.stack(losses))


def exposure_of(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """(secrets,) exposures from (secrets, 1 + candidates) losses, the planted secret's first. Ties count half.

    Raises: DataError if a loss is not finite.
    """
    if not np.isfinite(losses).all():
        raise DataError("a loss is not finite", fix="check the model", file="exposure")
    own, others = losses[:, :1], losses[:, 1:]
    ranks = 1 + (others < own).sum(axis=1) + (others == own).sum(axis=1) / 2
    return np.asarray(np.log2(losses.shape[1]) - np.log2(ranks))


def chance(candidates: int) -> float:
    """Mean exposure in bits of a secret that the model never saw: about 1.44."""
    return float(np.log2(candidates + 1) - np.log2(np.arange(1, candidates + 2)).mean())
