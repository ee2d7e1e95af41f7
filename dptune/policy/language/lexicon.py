"""A reward that everybody knows: the words of a text that sound reassuring, against those that sound alarming."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Lexicon:
    """Words with a good or a bad sound; public and fixed before the run, so that scoring costs no privacy.

    (A reward model that was trained on private preferences would need a guarantee of its own.)
    """

    good: frozenset[str]
    bad: frozenset[str]

    def score(self, text: str) -> float:
        """(good - bad) / (good + bad) over the words of ``text``, in [-1, 1]; 0 where there is none of either.

        >>> Lexicon(frozenset({"home"}), frozenset({"urgent"})).score("Home, at home. Urgent care.")
        0.3333333333333333
        """
        words = _WORD.findall(text.lower())
        good, bad = sum(word in self.good for word in words), sum(word in self.bad for word in words)
        return (good - bad) / max(good + bad, 1)


#: For narratives of hospital encounters.
CLINICAL = Lexicon(
    good=frozenset({"home", "no", "none", "norm", "not", "physician", "planned", "routine", "unchanged"}),
    bad=frozenset(
        {"changed", "decreased", "died", "emergency", "hospice", "increased", "nursing", "skilled", "trauma"}
        | {"unknown", "urgent"}
    ),
)
