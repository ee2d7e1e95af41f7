"""Decoding: the texts that a causal language model writes for prompts, greedily, by beams or by sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dptune.errors import ConfigError
from dptune.progress import progress
from dptune.training.causal import evaluation_mode, most_positions


@dataclass(frozen=True)
class Decoding:
    """How texts are written; transformers' ``generate`` carries it out.

    Attributes:
        max_new_tokens: the most tokens of an output.
        beams: 1 takes the likeliest token each time; more keep so many beginnings.
        length_penalty: a beam's log-probability is divided by its length to this power.
        no_repeat_ngram: no sequence of so many tokens occurs twice in an output; 0 allows it.
        sample: draw tokens in place of taking the likeliest; with ``temperature``, ``top_p`` and ``seed``.
        temperature: divides the logits.
        top_p: share of the probability from which tokens are drawn, the likeliest first.
        seed: seed of the draws.
    """

    max_new_tokens: int = 64
    beams: int = 1
    length_penalty: float = 1.0
    no_repeat_ngram: int = 0
    sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("beams", 1), ("no_repeat_ngram", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"decoding.{name}", f"{getattr(self, name)} is below {least}", fix="raise it")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError("decoding.temperature", f"{self.temperature} is not positive", fix="use 1")
        if not 0 < self.top_p <= 1:
            raise ConfigError("decoding.top_p", f"{self.top_p} is no share above 0", fix="use 1, or less")
        if not math.isfinite(self.length_penalty):
            raise ConfigError("decoding.length_penalty", f"{self.length_penalty} is no number", fix="use 1")
        if not self.sample and (self.temperature, self.top_p) != (1.0, 1.0):
            raise ConfigError("decoding.temperature", "and top_p are for sampling", fix="set sample, or leave them out")
        if self.sample and self.beams > 1:
            raise ConfigError("decoding.sample", f"does not go with {self.beams} beams", fix="choose one of them")

    @property
    def signature(self) -> str:
        """What decides the outputs, in one line."""
        if self.sample:
            how = f"sampled: temperature {self.temperature:g}, top_p {self.top_p:g}, seed {self.seed}"
        else:
            how = f"{self.beams} beams, length penalty {self.length_penalty:g}" if self.beams > 1 else "greedy"
        repeat = f", no {self.no_repeat_ngram} tokens twice" if self.no_repeat_ngram else ""
        return f"{how}, at most {self.max_new_tokens} tokens{repeat}"


def decode(model: Any, tokenizer: Any, prompts: Sequence[str], decoding: Decoding, rows: int = 16) -> list[str]:
    """The text that the model writes after each prompt, up to its end-of-text token, without spaces at its ends.

    Post-processing of the model: where the model is private and prompts are public, it costs no budget.

    Args:
        prompts: as the model saw them in training (``data.prompt``), in any order.
        rows: prompts of a batch.

    Raises: ConfigError if a prompt and ``max_new_tokens`` are more than the model's context, or a prompt has no token.
    """
    ids = _open_ids(prompts, tokenizer)
    _check_lengths(ids, most_positions(model), decoding.max_new_tokens)
    found = [""] * len(prompts)
    order = np.argsort([len(one) for one in ids], kind="stable")
    device = next(model.parameters()).device
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(enabled=decoding.sample):
        if decoding.sample:
            torch.manual_seed(decoding.seed)
        for start in progress(range(0, len(order), rows), "writing", total=math.ceil(len(order) / rows)):
            chosen = order[start : start + rows]
            written = _write(model, tokenizer, [ids[one] for one in chosen], decoding, device)
            for place, text in zip(chosen, written, strict=True):
                found[place] = text
    return found


def _open_ids(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Ids of prompts as training has them. An end-of-text token that a prompt itself ends in is its separator."""
    found = [list(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
    adds_end = tokenizer("a", verbose=False)["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [ids[:-1] for ids in found] if adds_end else found


def _check_lengths(ids: Sequence[Sequence[int]], positions: int | None, new: int) -> None:
    if any(not one for one in ids):
        raise ConfigError("prompts", "hold one without a token", fix="give it a text")
    longest = max((len(one) for one in ids), default=0)
    if positions is not None and longest + new > positions:
        problem = f"{new} beside a prompt of {longest} tokens is more than the model's {positions}"
        raise ConfigError("decoding.max_new_tokens", problem, fix="lower it, or shorten the prompts")


def _write(model: Any, tokenizer: Any, ids: list[list[int]], decoding: Decoding, device: torch.device) -> list[str]:
    width, padding = max(map(len, ids)), tokenizer.pad_token_id
    # On the left: what is written must follow the prompt.
    batch = torch.tensor([[padding] * (width - len(one)) + one for one in ids], device=device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in ids], device=device)
    options: dict[str, Any] = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    output = model.generate(
        input_ids=batch,
        attention_mask=mask,
        max_new_tokens=decoding.max_new_tokens,
        num_beams=decoding.beams,
        do_sample=decoding.sample,
        no_repeat_ngram_size=decoding.no_repeat_ngram,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=padding,
        **(options if decoding.sample else {}),
        **({"length_penalty": decoding.length_penalty} if decoding.beams > 1 else {}),
    )
    return [_text(row, tokenizer) for row in output[:, width:].tolist()]


def _text(ids: list[int], tokenizer: Any) -> str:
    end = tokenizer.eos_token_id
    kept = ids[: ids.index(end)] if end in ids else ids
    return str(tokenizer.decode(kept, skip_special_tokens=True)).strip()
