"""Tokenizers of a token for every character or of learned pieces, chat templates, and records for them."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dptune.records.reading.record import Chat, Content, Record

LETTERS = "abcdefgh 123:\n"
CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
MARKED = (
    "{% for message in messages %}<s>{{ message['role'] }}:{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<e>{% endgeneration %}{% else %}{{ message['content'] }}<e>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def tokenizer(*, begins: bool = False, merges: tuple[str, ...] = (), template: str | None = None) -> Any:
    """A token for every character, and for ``merges``, which it prefers."""
    special = ["<end>", "<begin>", "<s>", "<e>"]
    pieces = [*special, *merges, *dict.fromkeys(LETTERS + "usertianym")]
    core = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<end>"))
    pattern = "|".join([*special, *merges, r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    if begins:
        core.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<end>", bos_token="<begin>", extra_special_tokens=["<s>"]
    )
    found.chat_template = template
    return found


def learned_pieces(spaced: bool) -> Any:
    """A byte-level tokenizer as GPT-2's, or one that marks spaces as Llama's, whose tokens join letters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace() if spaced else pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.Metaspace() if spaced else decoders.ByteLevel()
    some = ["ab cd ab cab dab", "abcd dcba ab: cd", "a b c d : 1 12 123"] * 20
    alphabet = list("abcd: 123\n") if spaced else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(some, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


def records(*contents: Content) -> list[Record]:
    return [Record(content, number, "a.jsonl", number + 1) for number, content in enumerate(contents)]


def chat(*said: str) -> Chat:
    """A user and an assistant in turn."""
    return Chat(tuple({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)))
