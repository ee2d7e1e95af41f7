"""Frozen language model with adapters for each row of a batch: log-probabilities and sampled continuations."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.policy.language.prompts import Prompts
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.stacked_adapters import StackedAdapters
from dptune.training.models.model import attach_lora


class LanguagePolicy:
    """A frozen causal language model whose adapters are arguments of each call, one for each row of a batch."""

    def __init__(self, base: Any, tokenizer: Any, lora: Lora, seed: int) -> None:
        """Take a base model and its tokenizer.

        Args:
            base: causal language model, all of whose weights are frozen, on its device.
            seed: seed of the initial adapters; public.

        Raises: ConfigError for adapters with dropout.
        """
        if lora.dropout:
            raise ConfigError(
                "lora.dropout",
                f"{lora.dropout} makes the probability ratio of unchanged adapters differ from 1",
                fix="use 0",
            )
        self.model, self.tokenizer, self.lora, self._seed = base.eval(), tokenizer, lora, seed
        peft = attach_lora(deepcopy(base), lora, seed)
        self.factors, self.start = Factors.of(peft), flat_adapters(peft)

    @property
    def device(self) -> torch.device:
        """The device of the base model."""
        return next(self.model.parameters()).device

    def peft(self, vector: torch.Tensor) -> Any:
        """Make a PEFT model from a copy of the base and the adapters in ``vector``, (size,), in evaluation mode."""
        peft = attach_lora(deepcopy(self.model), self.lora, self._seed)
        write_adapters(peft, vector)
        return peft.eval()

    def logits(self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        """(rows, keep, vocabulary) float32 logits at the last ``keep`` positions.

        Args:
            vectors: (rows, size) adapters, one for each row, or (1, size) for all rows; None for the base model.
            ids, mask: (rows, tokens) token ids and attention mask, padded on the left.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

        def run() -> torch.Tensor:
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
            return output.logits.float()

        if vectors is None:
            return run()
        with self._with_adapters(vectors, len(ids)):
            return run()

    def log_probabilities(
        self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, count: int
    ) -> torch.Tensor:
        """(rows, count) log-probabilities of the last ``count`` tokens, each given all before it; see ``logits``."""
        logits = self.logits(vectors, ids, mask, count + 1)[:, :-1]
        return logits.log_softmax(dim=-1).gather(-1, ids[:, -count:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, vector: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sample a continuation of each prompt at temperature 1.

        A row depends on its own prompt and random numbers alone. All rows run for all steps, even after their end of
        text, so that neither time nor shapes depend on what they say.

        Args:
            vector: (size,) adapter for all rows.
            uniforms: (rows, new) random numbers in [0, 1).

        Returns: ``ids``, ``mask`` and ``continuation_mask`` as in ``Rollouts``.
        """
        mask, cache = prompts.mask.to(self.device), DynamicCache(config=self.model.config)
        ids, inputs = [prompts.ids.to(self.device)], prompts.ids.to(self.device)
        running = torch.ones(len(mask), dtype=torch.bool, device=self.device)
        columns = []
        with self._with_adapters(vector[None], len(mask)):
            for step in range(uniforms.shape[1]):
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
                logits = self.model(
                    input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache,
                    use_cache=True, logits_to_keep=1,
                ).logits[:, -1]  # fmt: skip
                inputs = _draw_tokens(logits, uniforms[:, step].to(self.device))[:, None]
                inputs = torch.where(running[:, None], inputs, self.tokenizer.pad_token_id)
                ids.append(inputs)
                columns.append(running)
                mask = torch.cat([mask, running[:, None].long()], dim=1)
                running = running & (inputs[:, 0] != self.tokenizer.eos_token_id)
        return torch.cat(ids, dim=1), mask, torch.stack(columns, dim=1)

    def _with_adapters(self, vectors: torch.Tensor, rows: int) -> Any:
        """Context in which the base model applies the adapters in ``vectors`` to a batch of ``rows``."""
        own = torch.arange(rows) if len(vectors) == rows else torch.zeros(rows, dtype=torch.long)
        return self.factors.stack(vectors.to(self.device)).apply(self.model, own.to(self.device))


def _draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw (rows,) tokens by the inverse of each row's cumulative distribution, in float64."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, (uniforms.double() * cumulative[:, -1])[:, None].contiguous(), right=True)
    return tokens.squeeze(-1).clamp(max=logits.shape[-1] - 1)


# LoRA adapters as one flat vector, the vector that is clipped, noised and released.


@dataclass(frozen=True)
class Factors:
    """Layout of adapters in a flat vector: A and then B of each layer in turn.

    Attributes:
        names: name of each layer in the base model.
        shapes: (rank, inputs, outputs) of each layer's adapter.
        scalings: factor that multiplies each layer's B A.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]
    scalings: tuple[float, ...]

    @classmethod
    def of(cls, peft: Any) -> Factors:
        """Read the layout of a PEFT model's adapters."""
        pairs = lora_pairs(peft)
        return cls(
            tuple(pair.name.removeprefix("base_model.model.") for pair in pairs),
            tuple((pair.down.out_features, pair.down.in_features, pair.up.out_features) for pair in pairs),
            tuple(pair.scaling for pair in pairs),
        )

    @property
    def size(self) -> int:
        """Number of trained parameters, d."""
        return sum(rank * (inputs + outputs) for rank, inputs, outputs in self.shapes)

    def stack(self, vectors: torch.Tensor) -> StackedAdapters:
        """Unpack (N, size) vectors into adapters, each for one row of a batch; differentiable."""
        down, up, start = {}, {}, 0
        for name, (rank, inputs, outputs), scaling in zip(self.names, self.shapes, self.scalings, strict=True):
            middle, end = start + rank * inputs, start + rank * (inputs + outputs)
            down[name] = vectors[:, start:middle].view(-1, rank, inputs)
            up[name] = vectors[:, middle:end].view(-1, outputs, rank) * scaling
            start = end
        return StackedAdapters(down, up)


def flat_adapters(peft: Any) -> torch.Tensor:
    """Copy a PEFT model's adapters into one (size,) float32 vector on the CPU, in the order of ``Factors``."""
    return torch.cat([part.detach().flatten() for pair in lora_pairs(peft) for part in pair.parameters]).float().cpu()


def write_adapters(peft: Any, vector: torch.Tensor) -> None:
    """Write a (size,) vector in the order of ``Factors`` into a PEFT model's adapters."""
    parts = [part for pair in lora_pairs(peft) for part in pair.parameters]
    with torch.no_grad():
        for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))
