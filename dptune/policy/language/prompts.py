"""Prompts as tensors of one fixed width, and the stream of users to whom they belong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError


@dataclass(frozen=True)
class Prompts:
    """Token ids and attention mask of N prompts, (N, width + 1) each, padded on the left. Private, unless simulated."""

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, texts: list[str], tokenizer: Any, width: int) -> Prompts:
        """Encode the first ``width`` tokens of every text. A text without any token becomes one padding token.

        The first of the width + 1 columns is always padding. If a batch could be without padding, an accelerator might
        run another kernel for it, and then the length of one user's prompt would change the others' numbers.
        """
        encoded = (
            tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] if texts else []
        )
        ids = torch.full((len(texts), width + 1), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            first = tokens[:width]
            ids[row, width + 1 - len(first) :] = torch.tensor(first, dtype=torch.long)
            mask[row, width + 1 - max(1, len(first)) :] = 1  # attention over no token gives NaN
        return cls(ids, mask)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Prompts:
        return Prompts(self.ids[rows], self.mask[rows])

    def __add__(self, others: Prompts) -> Prompts:
        return Prompts(torch.cat([self.ids, others.ids]), torch.cat([self.mask, others.mask]))


@dataclass(frozen=True)
class Stream:
    """N users, and the update that each takes part in. Private, with N and the number of users of an update.

    Attributes:
        keys: (N,) the users' own keys, which decide the random numbers of their samples; equal ones sample alike.
        prompts: prompts of the users.
        updates: (N,) number of each user's update. It must be a function of the user's own key and of public values,
            as ``dptune.training.privacy_units.turns_of`` is: then no user who leaves moves another.
        present: (N,) whether the user takes part; one who does not adds nothing.

    Raises: ConfigError if the four differ in length.
    """

    keys: NDArray[np.int64] = field(repr=False)
    prompts: Prompts
    updates: NDArray[np.int64] = field(repr=False)
    present: torch.Tensor = field(repr=False)

    def __post_init__(self) -> None:
        counts = [len(self.keys), len(self.prompts), len(self.updates), len(self.present)]
        if len(set(counts)) != 1:
            problem = "{} users, {} prompts, {} updates and {} coins differ in number".format(*counts)
            raise ConfigError("users", problem, fix="give every user one of each")

    def of_update(self, number: int) -> NDArray[np.int64]:
        """Rows of the users of update ``number``. Private."""
        return np.flatnonzero(self.updates == number)


# Public reward of a text: how many of its words sound reassuring, and how many alarming, by two fixed lists.


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

    def scores(self, prompts: Sequence[str], continuations: Sequence[str]) -> torch.Tensor:
        """(users,) scores of continuations; prompts count nothing (``dptune.policy.language.reward.Reward``)."""
        return torch.tensor([self.score(text) for text in continuations])


#: The lexicon for narratives of hospital encounters.
CLINICAL = Lexicon(
    good=frozenset({"home", "no", "none", "norm", "not", "physician", "planned", "routine", "unchanged"}),
    bad=frozenset(
        {"changed", "decreased", "died", "emergency", "hospice", "increased", "nursing", "skilled", "trauma"}
        | {"unknown", "urgent"}
    ),
)
