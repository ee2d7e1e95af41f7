"""Metrics of generated texts against references, each with a signature that says which implementation it is.

A metric without one is not comparable: BLEU of one and the same output moves by four points with letter case alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dptune.core.errors import ConfigError
from dptune.generation import captions
from dptune.generation.mauve import Judge, mauve
from dptune.generation.mauve import check as check_mauve

References = Sequence[Sequence[str]]
MAUVE = "mauve"
_GOOGLE = "rouge_l_google"


@dataclass(frozen=True)
class Score:
    """A metric's value on a set of outputs.

    Attributes:
        value: of the whole set, in the metric's usual scale.
        signature: implementation, version and settings.
    """

    value: float
    signature: str


def score(
    outputs: Sequence[str],
    references: References,
    names: Sequence[str] | None = None,
    judge: Judge | None = None,
) -> dict[str, Score]:
    """The named metrics (None: ``USUAL``) of outputs.

    Args:
        outputs: one text for each input.
        references: for each output one or more references.
        judge: the model that ``MAUVE`` needs, and no other metric.

    Raises: ConfigError for an unknown name, a metric that lacks its library, Java or judge, and outputs without
        references.
    """
    check_references(outputs, references)
    found = {}
    for name in check_names(names, judge):
        if name == MAUVE:
            assert judge is not None
            found[name] = Score(*mauve(outputs, references, judge))
        else:
            found[name] = METRICS[name](outputs, references)
    return found


def check_names(names: Sequence[str] | None, judge: Judge | None = None) -> tuple[str, ...]:
    """The names of metrics that can be computed here; None stands for ``USUAL``.

    Args:
        judge: the model that ``MAUVE`` needs.

    Raises: ConfigError for an unknown name, a metric that lacks its library, Java or judge, and a judge without use.
    """
    chosen = USUAL if names is None else tuple(names)
    for name in chosen:
        if name == MAUVE:
            check_mauve(judge)
        elif name not in METRICS:
            known = ", ".join((*METRICS, MAUVE))
            raise ConfigError("metrics", f"{name!r} is unknown", fix=f"use some of {known}")
        elif name in _OF_JAVA:
            captions.check()
        elif name == _GOOGLE:
            _rouge_scorer()
        else:
            sacrebleu()
    if judge is not None and MAUVE not in chosen:
        raise ConfigError(
            "mauve_model", "is used only by the metric mauve", fix="name mauve among the metrics, or leave it out"
        )
    return chosen


def _bleu_e2e(outputs: Sequence[str], references: References) -> Score:
    """BLEU as the E2E challenge counts it, times 100: lower case, 13a, all references of an input together."""
    return _of_sacrebleu(sacrebleu().BLEU(lowercase=True), outputs, references)


def _bleu(outputs: Sequence[str], references: References) -> Score:
    """sacrebleu's default BLEU: letter case counts."""
    return _of_sacrebleu(sacrebleu().BLEU(), outputs, references)


def _chrf(outputs: Sequence[str], references: References) -> Score:
    """chrF2 (Popovic 2015)."""
    return _of_sacrebleu(sacrebleu().CHRF(), outputs, references)


def _of_sacrebleu(metric: Any, outputs: Sequence[str], references: References) -> Score:
    most = max(map(len, references))
    # A column for each place of a reference; None where an input has fewer.
    columns = [[own[place] if place < len(own) else None for own in references] for place in range(most)]
    value = metric.corpus_score(list(outputs), columns).score
    return Score(float(value), f"sacrebleu {type(metric).__name__}: {metric.get_signature()}")


def _nist_e2e(outputs: Sequence[str], references: References) -> Score:
    """NIST as the E2E challenge counts it (mteval-v13a), n-grams up to five."""
    return Score(nist(outputs, references), f"dptune NIST-5: {version_of_13a()}")


def _rouge_l_13a(outputs: Sequence[str], references: References) -> Score:
    """ROUGE-L as coco-caption counts it, but on 13a tokens."""
    return Score(float(np.mean(rouge_l(outputs, references))), f"dptune coco ROUGE-L: beta:1.2|{version_of_13a()}")


def _cider_13a(outputs: Sequence[str], references: References) -> Score:
    """CIDEr-D as coco-caption counts it, but on 13a tokens."""
    return Score(float(np.mean(cider(outputs, references))), f"dptune coco CIDEr-D: {version_of_13a()}")


def _rouge_l_google(outputs: Sequence[str], references: References) -> Score:
    """ROUGE-L of the package rouge-score: the best F of an input's references, on its own words. Not coco's."""
    scorer = _rouge_scorer()
    found = [
        scorer.score_multi(list(own), output)["rougeL"].fmeasure
        for output, own in zip(outputs, references, strict=True)
    ]
    return Score(float(np.mean(found)), "rouge-score rougeL: stemmer:no|multi:best F")


def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError("metrics", f"{_GOOGLE} needs rouge-score", fix="pip install 'dptune[metrics]'") from None
    return RougeScorer(["rougeL"], use_stemmer=False)


def _meteor(outputs: Sequence[str], references: References) -> Score:
    """METEOR 1.5 as the E2E challenge's script and coco-caption call it."""
    return Score(captions.meteor(outputs, references), f"METEOR 1.5: lang:en|norm|{captions.signature()}")


def _rouge_l_ptb(outputs: Sequence[str], references: References) -> Score:
    """coco-caption's ROUGE-L."""
    return Score(captions.rouge_l(outputs, references), f"coco ROUGE-L: beta:1.2|{captions.signature()}")


def _cider_ptb(outputs: Sequence[str], references: References) -> Score:
    """coco-caption's CIDEr-D."""
    return Score(captions.cider(outputs, references), f"coco CIDEr-D: {captions.signature()}")


#: The metrics that are computed where none is named, by their names in results.
_USUAL: Mapping[str, Callable[[Sequence[str], References], Score]] = {
    "bleu_e2e": _bleu_e2e,
    "bleu": _bleu,
    "chrf": _chrf,
    "nist_e2e": _nist_e2e,
    "rouge_l_13a": _rouge_l_13a,
    "cider_13a": _cider_13a,
    _GOOGLE: _rouge_l_google,
}
USUAL = tuple(_USUAL)
#: Those that need Java.
_OF_JAVA: Mapping[str, Callable[[Sequence[str], References], Score]] = {
    "meteor": _meteor,
    "rouge_l_ptb": _rouge_l_ptb,
    "cider_ptb": _cider_ptb,
}
#: Every metric by its name in results, but for ``MAUVE``, which needs a model besides.
METRICS = {**_USUAL, **_OF_JAVA}


# NIST as mteval-v13a and the E2E challenge's scripts count it (Doddington 2002), on 13a tokens in lower case.


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


# Words and n-grams as the captions' metrics count them.


Words = tuple[str, ...]
#: Tokens that coco-caption drops, as far as 13a makes them.
_PUNCTUATION = frozenset(("'", "''", "`", "``", ".", "?", "!", ",", ":", "-", "--", "...", ";", "(", ")", "[", "]"))


def sacrebleu() -> Any:
    """The library of that name. Raises: ConfigError if it is not installed."""
    try:
        import sacrebleu as found
    except ImportError:
        raise ConfigError("metrics", "need sacrebleu", fix="pip install 'dptune[metrics]'") from None
    return found


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    sacrebleu()
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()


def words(text: str, *, punctuation: bool = True) -> Words:
    """The 13a tokens of a text in lower case; without those that coco-caption drops, if ``punctuation`` is False."""
    found = _tokenizer()(text.strip().lower()).split()
    return tuple(word for word in found if punctuation or word not in _PUNCTUATION)


def ngrams(sentence: Words, longest: int) -> Counter[Words]:
    """How often each sequence of 1 to ``longest`` words occurs in a sentence."""
    return Counter(
        sentence[start : start + length]
        for length in range(1, longest + 1)
        for start in range(len(sentence) - length + 1)
    )


def version_of_13a() -> str:
    """What a signature says about these words."""
    return f"tok:13a|case:lc|sacrebleu:{sacrebleu().__version__}"


def check_references(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raises: ConfigError unless every output has a reference, and there is one output at least."""
    if not outputs or len(outputs) != len(references):
        problem = f"there are {len(outputs)} outputs and references for {len(references)}"
        raise ConfigError("references", problem, fix="give one list of references for each output")
    lacking = next((place for place, own in enumerate(references) if not own), None)
    if lacking is not None:
        raise ConfigError("references", f"output {lacking + 1} has none", fix="give it one, or leave the output out")


_ROUGE_BETA = 1.2
_CIDER_LONGEST, _SIGMA = 4, 6.0
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
    return (1 + _ROUGE_BETA**2) * precision * recall / (recall + _ROUGE_BETA**2 * precision)


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
    answers = [[ngrams(_spoken(one), _CIDER_LONGEST) for one in own] for own in references]
    holding: Counter[Words] = Counter(ngram for own in answers for ngram in set().union(*own))
    largest = math.log(len(outputs))
    found = []
    for output, own in zip(outputs, answers, strict=True):
        mine = _vectors(ngrams(_spoken(output), _CIDER_LONGEST), holding, largest)
        likeness = [_likeness(mine, _vectors(answer, holding, largest)) for answer in own]
        found.append(10 * float(np.mean(likeness)))
    return found


def _vectors(counts: Counter[Words], holding: Counter[Words], largest: float) -> _Vectors:
    vectors: list[dict[Words, float]] = [{} for _ in range(_CIDER_LONGEST)]
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
    return total / _CIDER_LONGEST * math.exp(-((mine[2] - other[2]) ** 2) / (2 * _SIGMA**2))
