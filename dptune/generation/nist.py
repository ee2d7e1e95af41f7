"""NIST as mteval-v13a and the E2E challenge's scripts count it (Doddington 2002), on 13a tokens in lower case.

NLTK's ``nist_score`` is another function: it weighs n-grams by the references of one sentence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from dptune.generation.words import Words, ngrams, words

_LONGEST = 5
#: The penalty is one half where an output has two thirds of its references' words.
_BETA = math.log(2) / math.log(1.5) ** 2


def nist(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Sum over n of the information of matched n-grams an n-gram, times the brevity penalty. Of the whole corpus."""
    hits: Counter[Words] = Counter()
    counts: Counter[Words] = Counter()
    totals, said, expected = [0] * _LONGEST, 0, 0.0
    for output, own in zip(outputs, references, strict=True):
        sentence, answers = words(output), [words(one) for one in own]
        most: Counter[Words] = Counter()
        for answer in answers:
            found = ngrams(answer, _LONGEST)
            most |= found
            counts += found
        hits += ngrams(sentence, _LONGEST) & most
        for length in range(_LONGEST):
            totals[length] += max(0, len(sentence) - length)
        said += len(sentence)
        expected += sum(map(len, answers)) / len(answers)
    every = sum(count for ngram, count in counts.items() if len(ngram) == 1)
    gains = [0.0] * _LONGEST
    for ngram, count in hits.items():
        before = counts[ngram[:-1]] if len(ngram) > 1 else every
        gains[len(ngram) - 1] += count * math.log2(before / counts[ngram])
    score = sum(gain / total for gain, total in zip(gains, totals, strict=True) if total)
    return score * _penalty(said, expected)


def _penalty(said: int, expected: float) -> float:
    if not said or not expected:
        return 0.0
    return math.exp(-_BETA * math.log(min(1.0, said / expected)) ** 2)
