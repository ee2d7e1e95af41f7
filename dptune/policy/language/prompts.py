"""Prompts of one width, and the stream of users who bring them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dptune.errors import ConfigError


@dataclass(frozen=True)
class Prompts:
    """Private, unless simulated. (N, width) ids and mask, padded on the left; a row has a token at least."""

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, texts: list[str], tokenizer: Any, width: int) -> Prompts:
        """The first ``width`` tokens of every text.

        The first of width + 1 columns is padding always: a batch in which none is may take another kernel on an
        accelerator, and then one user's prompt would move the others' numbers.
        """
        encoded = (
            tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] if texts else []
        )
        ids = torch.full((len(texts), width + 1), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            kept = tokens[:width]
            ids[row, width + 1 - len(kept) :] = torch.tensor(kept, dtype=torch.long)
            mask[row, width + 1 - max(1, len(kept)) :] = 1  # a row without any token would have nothing to attend to
        return cls(ids, mask)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Prompts:
        return Prompts(self.ids[rows], self.mask[rows])


@dataclass(frozen=True)
class Stream:
    """Users in the order in which they arrive, K an update. Private, except the number of slots.

    Attributes:
        ids: numbers of the users; no number may occur twice.
        prompts: prompts of the users.
        present: (N,) whether there is a user in the slot; an empty slot adds nothing.
    """

    ids: tuple[int, ...] = field(repr=False)
    prompts: Prompts
    present: torch.Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.prompts) == len(self.present):
            problem = f"{len(self.ids)} users, {len(self.prompts)} prompts and {len(self.present)} coins do not match"
            raise ConfigError("users", problem, fix="give every slot one of each")
