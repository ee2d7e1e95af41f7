"""Public reward of a text: how many of its words sound reassuring, and how many alarming, by two fixed lists."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Lexicon:
    """Lists of words with a good and with a bad sound. Public.

    They are fixed before the run, so that scoring costs no privacy. A reward model that was trained on private
    preferences would need a guarantee of its own.
    """

    good: frozenset[str]
    bad: frozenset[str]

    def score(self, text: str) -> float:
        """Score a text by (good - bad) / (good + bad) over its words, in [-1, 1]; 0 if no word is in either list.

        >>> Lexicon(frozenset({"home"}), frozenset({"urgent"})).score("Home, at home. Urgent care.")
        0.3333333333333333
        """
        words = _WORD.findall(text.lower())
        good, bad = sum(word in self.good for word in words), sum(word in self.bad for word in words)
        return (good - bad) / max(good + bad, 1)


#: The lexicon for narratives of hospital encounters.
CLINICAL = Lexicon(
    good=frozenset({"home", "no", "none", "norm", "not", "physician", "planned", "routine", "unchanged"}),
    bad=frozenset(
        {"changed", "decreased", "died", "emergency", "hospice", "increased", "nursing", "skilled", "trauma"}
        | {"unknown", "urgent"}
    ),
)
