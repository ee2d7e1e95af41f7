"""``dptune.sample``: a synthetic corpus, written by a finished adapter, that costs no more privacy than the adapter."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import fsync_directory, replacing, sha256, write_text
from dptune.generation.decoding import Continuation, Decoding, check_lengths, continuations, located, open_ids, seeded
from dptune.job.delivery.adapter_loading import check_base, check_vocabulary, load_adapter
from dptune.job.delivery.finished_adapter import PROMPTED, FinishedAdapter, open_adapter
from dptune.job.delivery.synthetic_card import synthetic_card
from dptune.job.path_checks import card_beside, check_model, check_new_file
from dptune.records.reading.read import read
from dptune.records.reading.record import Chat, Content, Record, Text
from dptune.records.reading.source import Data, RecordSource
from dptune.training.models.causal import beginning_of, most_positions
from dptune.training.models.model import (
    ModelSource,
    check_device,
    load_base,
    load_config,
    load_tokenizer,
    without_weights,
)
from dptune.training.models.model_names import name_of
from dptune.training.tokens.encoding import chat_ids
from dptune.training.tokens.waiting_chats import ends_of_answers, unanswered

_log = logging.getLogger(__name__)

#: How often a text that says nothing is drawn again.
_ROUNDS = 20
#: Column of prompts where none is named.
PROMPT = "prompt"


@dataclass(frozen=True)
class Sampled:
    """SYNTHETIC texts: sampled from a model, none of them a record. Public, if the adapter and the prompts are.

    Attributes:
        rows: the texts in columns that ``tune`` reads: ``text``, ``prompt`` and ``completion``, or ``messages``. The
            last column ends in what the model wrote.
        figures: summary of the texts, see ``summary_of``.
        settings: how they were drawn, for the card.
        adapter: the adapter, whose guarantee is the texts' too.
        prompts: name of the prompts; empty where there were none.
        notes: what the reader of the texts should know.
    """

    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    figures: Mapping[str, float]
    settings: Mapping[str, Any]
    adapter: FinishedAdapter
    prompts: str = ""
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> list[str]:
        """What the model wrote in each row."""
        last = [list(row.values())[-1] for row in self.rows]
        return [one if isinstance(one, str) else one[-1]["content"] for one in last]

    def save(self, out: str | Path) -> Path:
        """Write the texts as JSON, one object a line, and beside them a card with the guarantee; both whole or not.

        Raises: ConfigError if one of them exists, or ``out`` does not end in ".jsonl".
        """
        target = Path(out)
        check_new_file(target)
        try:
            with replacing(target) as partial:
                partial.write_text("".join(map(_line, self.rows)), encoding="utf-8")
                fsync_directory(partial)  # a card that is left alone is known by it, see ``check_new_file``
                write_text(card_beside(target), self.card(target.name, sha256(partial)))
        except BaseException:
            if not target.exists():  # a card of no texts would be in the way of the next try
                card_beside(target).unlink(missing_ok=True)
            raise
        return target

    def card(self, name: str, digest: str) -> str:
        """The card of the texts, written to a file of this name and SHA-256."""
        return synthetic_card(
            self.adapter,
            name,
            digest,
            settings=self.settings,
            figures=self.figures,
            prompts=self.prompts,
            notes=self.notes,
        )


def sample(
    adapter: str | Path | FinishedAdapter,
    model: str | Path,
    records: int | None = None,
    *,
    prompts: Data | None = None,
    prompt: str | None = None,
    revision: str | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    rows: int = 16,
    device: str | None = None,
    dtype: str | None = None,
    load_in_4bit: bool = False,
    no_guarantee: bool = False,
    warn: Callable[[str], None] = _log.warning,
) -> Sampled:
    """Sample a synthetic corpus from an adapter that ``tune`` delivered.

    Guarantee: the adapter's own epsilon and delta, however many texts are made, for sampling is post-processing: it
    reads the adapter and no record. Public: prompts, settings and the seed, which need not be secret; private prompts
    would be outside the guarantee, and the result shows them. A later run on the same units pays on top.

    Args:
        adapter: the delivered folder, or what ``open_adapter`` returned; it is checked as ``dptune verify`` does, again
            where it was opened before.
        model: the model that it was tuned on: a folder, or a hub id with ``revision``.
        records: number of texts; None writes one for each prompt.
        prompts: public prompts, for an adapter that was tuned on prompts and completions, or chats that wait for an
            answer, for one that was tuned on chats; used in turn.
        prompt: the column of the prompts; None is "prompt", and of chats what ``tune`` finds.
        temperature: divides the logits; 1 draws from the model that was tuned.
        top_p: share of the probability from which tokens are drawn, the likeliest first.
        max_new_tokens: of a text; None takes the length that records had in training.
        seed: of the draws. The same seed, ``rows`` and machine give the same texts.
        rows: number of texts of a batch.
        dtype: of the frozen weights; None is bfloat16 on a GPU, else float32.
        load_in_4bit: hold the frozen weights in 4 bits, if the adapter was tuned so.
        no_guarantee: also take an adapter without a certified epsilon, and say so on the card.
        warn: called with each of the result's notes before anything is drawn.

    Raises: ConfigError and DataError for an adapter, prompts or options that do not fit; LedgerError and CardError for
        an adapter that does not verify.
    """
    path = adapter.path if isinstance(adapter, FinishedAdapter) else Path(adapter)
    checked = open_adapter(path, no_guarantee=True)
    if not isinstance(adapter, FinishedAdapter):
        adapter = checked
    elif (adapter.contents, adapter.certificate) != (checked.contents, checked.certificate):
        # The card would tell the epsilon of other weights than those that lie there now.
        problem = f"{path} changed after it was opened"
        raise ConfigError("adapter", problem, fix="open it again, and read what it costs now")
    if not no_guarantee:  # asked of each call, also where the adapter was opened without
        adapter.check_guarantee()
    check_form(adapter, prompted=prompts is not None, records=records)
    for name, number in (("records", records), ("rows", rows), ("max_new_tokens", max_new_tokens)):
        if number is not None and number < 1:
            raise ConfigError(name, f"{number} is below 1", fix="raise it")
    decoding = Decoding(max_new_tokens or 1, sample=True, temperature=temperature, top_p=top_p, seed=seed)
    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    base = ModelSource(check_model(str(model), revision), revision, dtype, load_in_4bit)
    tokenizer = load_tokenizer(ModelSource(str(adapter.path)))
    positions = _positions(adapter, base, tokenizer)
    starts, asked, ends, notes = _starts(adapter, tokenizer, records, prompts, prompt)
    if max_new_tokens is None:
        decoding = replace(decoding, max_new_tokens=_length(adapter, starts, asked, positions, learned=not notes))
    check_lengths(starts, positions, decoding.max_new_tokens, asked)
    notes = (*notes, *check_base(adapter.path, base))
    for note in notes:
        warn(note)
    loaded = load_adapter(adapter.path, base, load_base(base, where))
    found, again = _draw(loaded, tokenizer, starts, decoding, rows, ends)
    texts = [_row(given.content if given else None, one.text) for given, one in zip(asked, found, strict=True)]
    return Sampled(
        texts,
        summary_of(texts, found, again),
        _settings(base, decoding, where, rows),
        adapter,
        (Path(prompts).name if isinstance(prompts, str | Path) else "given from Python") if prompts is not None else "",
        notes,
    )


def check_form(adapter: FinishedAdapter, *, prompted: bool, records: int | None) -> None:
    """Check that an adapter can be sampled as it is asked for.

    Raises: ConfigError for prompts that are missing or that nothing was tuned on, and for no number.
    """
    if adapter.form in PROMPTED and not prompted:
        learned, asked = PROMPTED[adapter.form]
        raise ConfigError("prompts", f"are missing: the adapter was tuned on {learned}", fix=f"give {asked}")
    if adapter.form == "text" and prompted:
        raise ConfigError("prompts", "are given, and the adapter was tuned on whole texts", fix="leave them out")
    if records is None and not prompted:
        raise ConfigError("records", "is missing", fix="give the number of texts to write")


def _starts(
    adapter: FinishedAdapter, tokenizer: Any, records: int | None, prompts: Data | None, column: str | None
) -> tuple[list[list[int]], Sequence[Record | None], list[int] | None, tuple[str, ...]]:
    """Token ids that each text begins after, records of the prompts, what ends an answer (of chats), and notes."""
    if prompts is not None:
        given, ids, ends = _prompts(adapter, tokenizer, prompts, column)
        turns = [place % len(given) for place in range(records or len(given))]
        return [ids[place] for place in turns], [given[place] for place in turns], ends, ()
    assert records is not None  # check_form
    if begins := beginning_of(tokenizer):
        return [begins] * records, [None] * records, None, ()
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        fix = "tune with one, and with add_bos_token"
        raise ConfigError("adapter", "its tokenizer has no token that a text could begin after", fix=fix)
    problem = (
        "nothing taught the adapter how texts begin: its tokenizer puts no token before them, so first words are "
        "the base model's guess; add_bos_token of dptune tune teaches it"
    )
    return [[first]] * records, [None] * records, None, (problem,)


def _prompts(
    adapter: FinishedAdapter, tokenizer: Any, prompts: Data, column: str | None
) -> tuple[Sequence[Record], list[list[int]], list[int] | None]:
    """Public prompts, or chats that wait for an answer, their token ids, and what ends an answer."""
    if adapter.form != "messages":
        records = read(RecordSource(prompts, text=column or PROMPT), public=True)
        texts = [record.content.text for record in records if isinstance(record.content, Text)]
        return records, open_ids(texts, tokenizer), None
    records = read(RecordSource(prompts, messages=column), public=True)
    if not isinstance(records[0].content, Chat):
        fix = 'write it as {"messages": [{"role": "user", "content": "..."}]}, or name the column of messages'
        first = records[0]
        raise DataError("is no chat, and the adapter was tuned on chats", fix=fix, file=first.file, row=first.row)
    chats = unanswered(records, tokenizer)
    ids = [chat_ids(chat.prompt, tokenizer) for chat in chats]
    return records, ids, ends_of_answers(chats, tokenizer)


def _row(prompt: Content | None, text: str) -> dict[str, Any]:
    """The row of a text that was written after a prompt, or after nothing."""
    if isinstance(prompt, Chat):
        return {**prompt.inputs, "messages": [*prompt.messages, {"role": "assistant", "content": text.strip()}]}
    return {"prompt": prompt.text, "completion": text} if isinstance(prompt, Text) else {"text": text}


def _positions(adapter: FinishedAdapter, base: ModelSource, tokenizer: Any) -> int | None:
    """The most tokens that the model reads, without its weights. Raises: ConfigError for one of fewer tokens."""
    empty = without_weights(base, load_config(base))
    check_vocabulary(adapter.path, base, empty, tokenizer)
    return most_positions(empty)


def _settings(base: ModelSource, decoding: Decoding, device: torch.device, rows: int) -> dict[str, Any]:
    """How the texts were drawn, for the card. No path of this machine is in it."""
    return {
        "base model": name_of(base.source),
        "revision": base.revision or "none",
        "base weights": "4 bits" if base.load_in_4bit else base.dtype,
        "decoding": decoding.signature,
        "texts of a batch": rows,
        "device": device.type,
    }


def _length(
    adapter: FinishedAdapter,
    starts: list[list[int]],
    asked: Sequence[Record | None],
    positions: int | None,
    *,
    learned: bool,
) -> int:
    """Tokens that a record had left in training after such a start, which counted there if it was ``learned``."""
    if adapter.tokens is None:
        problem = "is missing, and an adapter of an earlier dptune does not say how long its records were"
        raise ConfigError("max_new_tokens", problem, fix="give a number of tokens")
    check_lengths(starts, positions, 1, asked)
    longest = max(map(len, starts))
    left = adapter.tokens - (longest if learned else 0)
    found = left if positions is None else min(left, positions - longest)
    if found < 1:
        where = located(asked, starts.index(max(starts, key=len)))
        problem = f"has a prompt of {longest} tokens{where}, and records had at most {adapter.tokens} with what follows"
        raise ConfigError("prompts", problem, fix="shorten it, or give max_new_tokens")
    return found


def _draw(
    model: Any, tokenizer: Any, starts: list[list[int]], decoding: Decoding, rows: int, ends: list[int] | None
) -> tuple[list[Continuation], int]:
    """A text after each start, and how often one was drawn again because it said nothing that ``read`` takes.

    Raises: ConfigError if some still say nothing after many draws.
    """
    found: dict[int, Continuation] = {}
    again = 0
    with seeded(decoding):
        for _ in range(_ROUNDS):
            waiting = [place for place in range(len(starts)) if place not in found]
            drawn = continuations(model, tokenizer, [starts[place] for place in waiting], decoding, rows, ends)
            found |= {place: one for place, one in zip(waiting, drawn, strict=True) if _says_something(one.text)}
            if len(found) == len(starts):
                return [found[place] for place in range(len(starts))], again
            again += len(starts) - len(found)
    problem = f"{len(starts) - len(found)} of {len(starts)} texts are empty in each of {_ROUNDS} draws"
    raise ConfigError("records", problem, fix="raise temperature or top_p, give other prompts, or train longer")


def _line(row: Mapping[str, Any]) -> str:
    """A row as the file has it. A time in a chat's messages is text there, as in the records that ``tune`` keeps."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def _says_something(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text


def summary_of(rows: Sequence[Mapping[str, Any]], found: Sequence[Continuation], again: int = 0) -> dict[str, float]:
    """Figures of sampled texts, which read no record and cost nothing.

    Returns: ``texts``; ``mean_tokens`` and ``mean_characters`` of what was written; ``share_duplicates``, the share of
        rows that equal an earlier row to the last character; ``share_ended``, the share that the model ended itself,
        before it was cut; and ``drawn_again``, empty draws that others stand for.
    """
    distinct = {_line(row) for row in rows}
    count = len(rows)
    return {
        "texts": count,
        "mean_tokens": sum(one.tokens for one in found) / count,
        "mean_characters": sum(len(one.text) for one in found) / count,
        "share_duplicates": (count - len(distinct)) / count,
        "share_ended": sum(one.ended for one in found) / count,
        "drawn_again": again,
    }
