"""Metrics of generated texts against references, each with a signature that says which implementation it is.

A metric without one is not comparable: BLEU of one and the same output moves by four points with letter case alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptune.core.errors import ConfigError
from dptune.generation import captions, coco
from dptune.generation.mauve import Judge, mauve
from dptune.generation.mauve import check as check_mauve
from dptune.generation.words import Words, check_references, ngrams, sacrebleu, version_of_13a, words

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
    return Score(float(np.mean(coco.rouge_l(outputs, references))), f"dptune coco ROUGE-L: beta:1.2|{version_of_13a()}")


def _cider_13a(outputs: Sequence[str], references: References) -> Score:
    """CIDEr-D as coco-caption counts it, but on 13a tokens."""
    return Score(float(np.mean(coco.cider(outputs, references))), f"dptune coco CIDEr-D: {version_of_13a()}")


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
