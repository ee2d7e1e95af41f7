"""ROUGE-L and CIDEr-D by coco-caption's formulas, on 13a tokens in lower case without punctuation.

The originals tokenise with Stanford's PTB tokenizer, which needs Java: hence the names ``rouge_l_13a`` and
``cider_13a``; ``captions`` has those. On the 630 outputs of E2E's own baseline the two differ by .0012 and .0114.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from dptune.generation.words import Words, ngrams, words

_BETA = 1.2
_LONGEST, _SIGMA = 4, 6.0
_spoken = partial(words, punctuation=False)
#: Weights and norms of a sentence's n-grams by n, and the number of its bigrams.
_Vectors = tuple[list[dict[Words, float]], list[float], int]


def rouge_l(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Each item's F (beta 1.2) of the longest common subsequence: the best precision and the best recall of all."""
    return [
        _rouge(_spoken(output), [_spoken(one) for one in own]) for output, own in zip(outputs, references, strict=True)
    ]


def _rouge(sentence: Words, answers: list[Words]) -> float:
    common = [_common(sentence, answer) for answer in answers]
    precision = max(found / max(1, len(sentence)) for found in common)
    recall = max(found / max(1, len(answer)) for found, answer in zip(common, answers, strict=True))
    if not precision or not recall:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def _common(one: Words, other: Words) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, candidate in enumerate(other, start=1):
            before, row[place] = row[place], before + 1 if word == candidate else max(row[place], row[place - 1])
    return row[-1]


def cider(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Each item's CIDEr-D (Vedantam et al. 2015). N-grams are weighed by how many items' references hold them.

    Scores of items depend on all items: an average over parts is no score of the whole, and one item alone scores 0.
    """
    answers = [[ngrams(_spoken(one), _LONGEST) for one in own] for own in references]
    holding: Counter[Words] = Counter(ngram for own in answers for ngram in set().union(*own))
    largest = math.log(len(outputs))
    found = []
    for output, own in zip(outputs, answers, strict=True):
        mine = _vectors(ngrams(_spoken(output), _LONGEST), holding, largest)
        likeness = [_likeness(mine, _vectors(answer, holding, largest)) for answer in own]
        found.append(10 * float(np.mean(likeness)))
    return found


def _vectors(counts: Counter[Words], holding: Counter[Words], largest: float) -> _Vectors:
    vectors: list[dict[Words, float]] = [{} for _ in range(_LONGEST)]
    for ngram, count in counts.items():
        vectors[len(ngram) - 1][ngram] = count * (largest - math.log(max(1, holding[ngram])))
    norms = [math.sqrt(sum(weight**2 for weight in vector.values())) for vector in vectors]
    return vectors, norms, sum(count for ngram, count in counts.items() if len(ngram) == 2)


def _likeness(mine: _Vectors, other: _Vectors) -> float:
    """Mean over n of the clipped cosine, times the penalty for another length."""
    total = 0.0
    for vector, answer, norm, its_norm in zip(mine[0], other[0], mine[1], other[1], strict=True):
        shared = sum(min(weight, answer.get(ngram, 0.0)) * answer.get(ngram, 0.0) for ngram, weight in vector.items())
        total += shared / (norm * its_norm) if norm and its_norm else 0.0
    return total / _LONGEST * math.exp(-((mine[2] - other[2]) ** 2) / (2 * _SIGMA**2))
