"""Random codes for public text: a base model that never read a character cannot tell it from its other unread ones.

Narratives use about half of the letters. A model trained on nothing else cannot be taught a secret of the others, and
attacks on planted secrets would look harmless for that reason alone. Hub models have read the whole alphabet.
"""

from __future__ import annotations

import numpy as np

from dptune.corpus.canaries import ALPHABET, SECRET_LENGTH


def with_codes(texts: list[str], share: float, seed: int) -> list[str]:
    """``texts``, of which a ``share`` end in a sentence with a random code of the secrets' alphabet and length.

    Args:
        texts: public.
        share: in [0, 1]; rounded to whole texts.
        seed: of which texts and which codes; public.
    """
    generator = np.random.default_rng(seed)
    told = list(texts)
    for row in generator.permutation(len(texts))[: round(share * len(texts))]:
        told[row] += f" reference code is {''.join(generator.choice(list(ALPHABET), SECRET_LENGTH))}."
    return told
