"""A frozen language model with adapters of each row's own: probabilities, and continuations drawn from them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import DynamicCache

from dptune.errors import ConfigError
from dptune.policy.language.adapters import Factors, flat_adapters, write_adapters
from dptune.policy.language.prompts import Prompts
from dptune.training.model import Lora, attach_lora


class LanguagePolicy:
    """A frozen causal language model with adapters that are given at every call, one for each row of a batch."""

    def __init__(self, base: Any, tokenizer: Any, lora: Lora, seed: int) -> None:
        """Take a base whose every weight is frozen. Raises: ConfigError for adapters with dropout."""
        if lora.dropout:
            raise ConfigError("lora.dropout", f"{lora.dropout} would make a ratio of 1 differ from 1", fix="use 0")
        self.model, self.tokenizer, self.lora, self._seed = base.eval(), tokenizer, lora, seed
        peft = attach_lora(deepcopy(base), lora, seed)
        self.factors, self.start = Factors.of(peft), flat_adapters(peft)

    @property
    def device(self) -> torch.device:
        """The device of the base model."""
        return next(self.model.parameters()).device

    def peft(self, vector: torch.Tensor) -> Any:
        """A PEFT model of its own with these adapters, in evaluation mode."""
        peft = attach_lora(deepcopy(self.model), self.lora, self._seed)
        write_adapters(peft, vector)
        return peft.eval()

    def logits(self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        """(rows, keep, vocabulary) float32 of the last ``keep`` positions.

        Args:
            vectors: (rows, size), each row's own; (1, size) for all rows; None for the base.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

        def run() -> torch.Tensor:
            found = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
            return found.logits.float()

        if vectors is None:
            return run()
        with self._adapted(vectors, len(ids)):
            return run()

    def log_probabilities(
        self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, count: int
    ) -> torch.Tensor:
        """(rows, count) of the last ``count`` tokens, each given all before it; ``vectors`` as for ``logits``."""
        logits = self.logits(vectors, ids, mask, count + 1)[:, :-1]
        return logits.log_softmax(dim=-1).gather(-1, ids[:, -count:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, vector: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(ids, mask, counted) of ``Rollouts``, at temperature 1.

        Row j is a function of its own prompt and of ``uniforms[j]``, (rows, new) on [0, 1). Every row takes all steps,
        whatever it says: work and shapes are public.
        """
        mask, cache = prompts.mask.to(self.device), DynamicCache(config=self.model.config)
        ids, inputs = [prompts.ids.to(self.device)], prompts.ids.to(self.device)
        going = torch.ones(len(mask), dtype=torch.bool, device=self.device)
        counted = []
        with self._adapted(vector[None], len(mask)):
            for step in range(uniforms.shape[1]):
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
                logits = self.model(
                    input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache,
                    use_cache=True, logits_to_keep=1,
                ).logits[:, -1]  # fmt: skip
                inputs = _drawn(logits, uniforms[:, step].to(self.device))[:, None]
                inputs = torch.where(going[:, None], inputs, self.tokenizer.pad_token_id)
                ids.append(inputs)
                counted.append(going)
                mask = torch.cat([mask, going[:, None].long()], dim=1)
                going = going & (inputs[:, 0] != self.tokenizer.eos_token_id)
        return torch.cat(ids, dim=1), mask, torch.stack(counted, dim=1)

    def _adapted(self, vectors: torch.Tensor, rows: int) -> Any:
        own = torch.arange(rows) if len(vectors) == rows else torch.zeros(rows, dtype=torch.long)
        return self.factors.stacked(vectors.to(self.device)).apply(self.model, own.to(self.device))


def _drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(rows,) tokens by the inverse distribution function, in float64."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, (uniforms.double() * cumulative[:, -1])[:, None].contiguous(), right=True)
    return drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1)
