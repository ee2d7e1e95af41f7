"""Random codes in public text, so that a base model pre-trained on it has seen every character of a secret.

Narratives use about half of the letters. A base model that was trained on nothing else cannot learn a secret of the
other letters, and attacks on planted secrets would fail for that reason alone. Hub models have read the whole alphabet.
"""

from __future__ import annotations

import numpy as np

from dptune.corpus.canaries import ALPHABET, SECRET_LENGTH


def with_codes(texts: list[str], share: float, seed: int) -> list[str]:
    """``texts``, of which a ``share`` end in a sentence with a random code of the secrets' alphabet and length.

    Args:
        texts: public.
        share: a number in [0, 1]; rounded to whole texts.
        seed: decides which texts get a code, and which code; public.
    """
    generator = np.random.default_rng(seed)
    told = list(texts)
    for row in generator.permutation(len(texts))[: round(share * len(texts))]:
        told[row] += f" reference code is {''.join(generator.choice(list(ALPHABET), SECRET_LENGTH))}."
    return told
