"""Prompts as tensors of one fixed width, and the stream of users to whom they belong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dptune.errors import ConfigError


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


@dataclass(frozen=True)
class Stream:
    """Users in the order in which they arrive, K in each update. Private, except the number of slots.

    Attributes:
        ids: numbers of the users; no number may occur twice.
        prompts: prompts of the users.
        present: (N,) whether there is a user in the slot; an empty slot adds nothing.

    Raises: ConfigError if the three differ in length.
    """

    ids: tuple[int, ...] = field(repr=False)
    prompts: Prompts
    present: torch.Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.prompts) == len(self.present):
            problem = (
                f"{len(self.ids)} users, {len(self.prompts)} prompts and {len(self.present)} coins differ in number"
            )
            raise ConfigError("users", problem, fix="give every slot one of each")
