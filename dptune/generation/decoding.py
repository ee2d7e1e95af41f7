"""Decoding: the texts that a causal language model writes for prompts, greedily, by beams or by sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from dptune.core.errors import ConfigError
from dptune.core.progress import Meter
from dptune.records.reading.record import Record
from dptune.training.models.causal import evaluation_mode, most_positions
from dptune.training.tokens.encoding import chat_ids

#: Seeds as ``dptune.core.declarations.Seed`` has them.
_LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Decoding:
    """How texts are written; transformers' ``generate`` carries it out.

    Attributes:
        max_new_tokens: the most tokens of an output.
        beams: 1 takes the likeliest token each time; more keep so many beginnings.
        length_penalty: a beam's log-probability is divided by its length to this power; of several beams alone.
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
            raise ConfigError(
                "decoding.top_p", f"{self.top_p} is not a share above 0 and at most 1", fix="use 1, or less"
            )
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigError("decoding.seed", f"{self.seed} is not in [0, {_LARGEST_SEED}]", fix="use 0")
        if not math.isfinite(self.length_penalty):
            raise ConfigError("decoding.length_penalty", f"{self.length_penalty} is not a number", fix="use 1")
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """Raise ConfigError for an option that would change nothing, or that another one excludes."""
        for name, usual in (("temperature", 1.0), ("top_p", 1.0), ("seed", 0)):
            if not self.sample and getattr(self, name) != usual:
                raise ConfigError(f"decoding.{name}", "is for sampling", fix="set sample, or leave it out")
        if self.beams == 1 and self.length_penalty != 1.0:
            raise ConfigError("decoding.length_penalty", "is for beams", fix="set beams above 1, or leave it out")
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


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt.

    Attributes:
        text: its text without special tokens, white space as it was written.
        tokens: number of tokens, the one that ended it left out.
        ended: whether the model ended it, by the end-of-text token or another end; else it was cut.
    """

    text: str
    tokens: int
    ended: bool


def decode(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    decoding: Decoding,
    rows: int = 16,
    ends: Sequence[int] | None = None,
) -> list[str]:
    """The text that the model writes after each prompt, up to its end-of-text token, without spaces at its ends.

    Post-processing of the model: where the model is private and prompts are public, it costs no budget.

    Args:
        prompts: as the model saw them in training (``data.prompt``), in any order.
        rows: prompts of a batch.
        ends: None for texts; for chats that wait for an answer, with their special tokens (``waiting_chats``), the
            tokens that end one. There the checkpoint's own ends count too.

    Raises: ConfigError if a prompt and ``max_new_tokens`` are more than the model's context, or a prompt has no token.
    """
    starts = start_ids(prompts, tokenizer, ends)
    check_lengths(starts, most_positions(model), decoding.max_new_tokens)
    with seeded(decoding):
        found = continuations(model, tokenizer, starts, decoding, rows, ends)
    return [one.text.strip() for one in found]


@contextmanager
def seeded(decoding: Decoding) -> Iterator[None]:
    """Context in which draws follow ``decoding.seed``, and after which torch's own go on as if there had been none."""
    with torch.random.fork_rng(enabled=decoding.sample):
        if decoding.sample:
            torch.manual_seed(decoding.seed)
        yield


def continuations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    rows: int = 16,
    ends: Sequence[int] | None = None,
) -> list[Continuation]:
    """What the model writes after each prompt, given as token ids. Draws go on from torch's state: see ``seeded``.

    Args:
        prompts: ids that ``check_lengths`` takes.
        ends: as ``decode`` takes them.
    """
    found: dict[int, Continuation] = {}
    order = np.argsort([len(one) for one in prompts], kind="stable").tolist()
    device, stops = next(model.parameters()).device, _stops(model, tokenizer, ends)
    with (
        evaluation_mode(model),
        torch.no_grad(),
        _no_defaults_of(model),
        Meter("writing", total=len(order), unit="texts") as meter,
    ):
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            some = [list(prompts[one]) for one in chosen]
            found |= zip(chosen, _write(model, tokenizer, some, decoding, device, stops), strict=True)
            meter.update(len(found))
    return [found[place] for place in range(len(prompts))]


def _stops(model: Any, tokenizer: Any, ends: Sequence[int] | None) -> list[int]:
    """Tokens that end an output."""
    found = [tokenizer.eos_token_id]
    if ends is not None:  # the checkpoint's own: GLM's answers end in the token before what a user says
        own = _owner(model).generation_config.eos_token_id
        found += [*ends, *(own if isinstance(own, list) else [own])]
    return [one for one in dict.fromkeys(found) if one is not None]


def _owner(model: Any) -> Any:
    """The model itself, without PEFT's around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def start_ids(prompts: Sequence[str], tokenizer: Any, ends: Sequence[int] | None = None) -> list[list[int]]:
    """Ids of what ``decode`` writes after, with its arguments."""
    return open_ids(prompts, tokenizer) if ends is None else [chat_ids(one, tokenizer) for one in prompts]


def open_ids(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Ids of prompts as training has them. An end-of-text token that a prompt itself ends in is its separator."""
    found = [list(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
    adds_end = tokenizer("a", verbose=False)["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [ids[:-1] for ids in found] if adds_end else found


def check_lengths(
    ids: Sequence[Sequence[int]], positions: int | None, new: int, records: Sequence[Record | None] = ()
) -> None:
    """Check that the model can read each prompt and write after it.

    Args:
        ids: token ids of each prompt.
        positions: the most tokens that the model reads; None for no limit.
        new: tokens to write after each.
        records: a public record of each prompt, which an error names; empty where none is known.

    Raises: ConfigError for a prompt without a token, for one that fills all positions, and if the longest leaves less
        than ``new`` of them.
    """
    lengths = [len(one) for one in ids]
    if 0 in lengths:
        problem = f"holds one without a token{located(records, lengths.index(0))}"
        raise ConfigError("data.prompt", problem, fix="give it a text")
    longest = max(lengths, default=0)
    if positions is not None and longest + new > positions:
        where = located(records, lengths.index(longest))
        if longest >= positions:
            problem = f"has one of {longest} tokens{where}, and the model reads {positions}"
            raise ConfigError("data.prompt", problem, fix="shorten it")
        problem = f"{new} beside a prompt of {longest} tokens{where} is more than the model's {positions}"
        raise ConfigError("decoding.max_new_tokens", problem, fix="lower it, or shorten the prompts")


def located(records: Sequence[Record | None], place: int) -> str:
    """Where the prompt at one place was read from, in brackets; empty if nobody knows.

    >>> from dptune.records.reading.record import Text
    >>> located([Record(Text("Hello"), unit=1, file="prompts.csv", row=2)], 0)
    ' (prompts.csv, row 2)'
    """
    record = records[place] if records else None
    return "" if record is None else f" ({record.file}, row {record.row})"


@contextmanager
def _no_defaults_of(model: Any) -> Iterator[None]:
    """Context in which a checkpoint's own defaults are left out, such as a penalty of repetition: what decides the
    outputs is in ``Decoding`` alone."""
    owner = _owner(model)
    before, owner.generation_config = owner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        owner.generation_config = before


def _write(
    model: Any, tokenizer: Any, ids: list[list[int]], decoding: Decoding, device: torch.device, ends: list[int]
) -> list[Continuation]:
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
        eos_token_id=ends or None,
        pad_token_id=padding,
        **(options if decoding.sample else {}),
        **({"length_penalty": decoding.length_penalty} if decoding.beams > 1 else {}),
    )
    return [_continuation(one, row, tokenizer, ends) for one, row in zip(ids, output[:, width:].tolist(), strict=True)]


def _continuation(prompt: list[int], ids: list[int], tokenizer: Any, ends: Sequence[int]) -> Continuation:
    kept = list(takewhile(lambda one: one not in ends, ids))
    ended = len(kept) < len(ids)
    # Decoded after its prompt, for alone a first token may lose the space before it.
    before, whole = (str(tokenizer.decode(some, skip_special_tokens=True)) for some in (prompt, prompt + kept))
    alone = str(tokenizer.decode(kept, skip_special_tokens=True))
    return Continuation(whole[len(before) :] if whole.startswith(before) else alone, len(kept), ended)
