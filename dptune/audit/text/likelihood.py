"""Losses of a model on the end of a text given its beginning, on which all attacks by text are based.

Below them: scores of single tokens, and samples of a public model whose losses are a little high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from dptune.core.errors import ConfigError
from dptune.core.progress import Meter
from dptune.records.canaries import content_with, suffix
from dptune.records.reading.record import Chat, Content, PromptTarget
from dptune.training.losses import COUNTED, token_losses
from dptune.training.models.causal import evaluation_mode
from dptune.training.tokens.chat_template import render_chat


@dataclass(frozen=True)
class Passage:
    """A text, split into a prompt and the ending that an attacker wants to know. Private.

    Attributes:
        rendered: whether a chat template made the text, which then holds all special tokens; before any other text
            stands what the tokenizer puts before texts.
    """

    prompt: str = field(repr=False)
    ending: str = field(repr=False)
    rendered: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return self.prompt + self.ending


@dataclass(frozen=True)
class EndingLosses:
    """Losses of each passage's ending given its prompt. Private.

    Attributes:
        total: (passages,) negative log-likelihood, nats.
        tokens: (passages,) number of tokens of the ending that the model saw; 0 if the text was cut before them.
    """

    total: NDArray[np.float64] = field(repr=False)
    tokens: NDArray[np.int64] = field(repr=False)

    @property
    def mean(self) -> NDArray[np.float64]:
        """(passages,) mean loss in nats a token; 0 if no token was seen."""
        return self.total / np.maximum(self.tokens, 1)


@torch.no_grad()
def ending_losses(
    model: Any, tokenizer: Any, passages: Sequence[Passage], *, max_length: int, rows: int, label: str = ""
) -> EndingLosses:
    """Score endings as in training: one passage a row, cut on the right at ``max_length - 1`` tokens.

    Args:
        model: causal language model in evaluation mode, on its device.
        tokenizer: a fast tokenizer, which gives each token's offsets in the text.
        rows: physical batch size.
        label: label of the progress bar; no bar without one.

    Raises: ConfigError for a tokenizer without offsets.
    """
    total, counts = np.zeros(len(passages)), np.zeros(len(passages), dtype=np.int64)
    for places, logits, ids, counted in ending_batches(model, tokenizer, passages, max_length, rows, label):
        total[places], counts[places] = _sums(logits, ids, counted)
    return EndingLosses(total, counts)


def ending_batches(
    model: Any, tokenizer: Any, passages: Sequence[Passage], max_length: int, rows: int, label: str = ""
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run passages through the model, the shortest first; arguments as in ``ending_losses``.

    Yields: (rows,) places of passages, (rows, tokens, vocabulary) logits, (rows, tokens) ids, and (rows, tokens - 1)
        whether the token after each position is one of the ending.
    """
    ids, belongs = _encoded(tokenizer, passages, max_length)
    order = np.argsort([len(row) for row in ids], kind="stable")
    with Meter(label, total=len(ids), unit="texts") as meter:
        for first in range(0, len(order), rows):
            chosen = order[first : first + rows]
            yield chosen, *_batch(model, [ids[i] for i in chosen], [belongs[i] for i in chosen], tokenizer.pad_token_id)
            meter.update(first + len(chosen))


@torch.no_grad()
def endings_of_one_prompt(
    model: Any, tokenizer: Any, passages: Sequence[Passage], *, max_length: int, rows: int
) -> EndingLosses:
    """Score passages with one prompt as ``ending_losses`` does; the tokens that all share run through once."""
    ids, belongs = _encoded(tokenizer, passages, max_length)
    columns = list(zip(*ids, strict=False))[:-1]  # every row keeps at least one token
    shared = next((index for index, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    if shared < 1:
        return ending_losses(model, tokenizer, passages, max_length=max_length, rows=rows)
    device = next(model.parameters()).device
    prefix = torch.tensor([ids[0][:shared]], device=device)
    logits = model(input_ids=prefix, attention_mask=torch.ones_like(prefix), use_cache=False).logits
    before, valid = token_losses(logits, prefix, torch.ones_like(prefix))
    counted = valid & torch.tensor([belongs[0][1:shared]], device=device)
    total = np.full(len(ids), float(before.double().where(counted, 0.0).sum()))
    counts = np.full(len(ids), int(counted.sum()))
    for first in range(0, len(ids), rows):
        chosen = slice(first, first + rows)
        part = [row[shared - 1 :] for row in ids[chosen]]
        mine = [row[shared - 1 :] for row in belongs[chosen]]
        losses, seen = _sums(*_batch(model, part, mine, tokenizer.pad_token_id, prefix[:, :-1]))
        total[chosen] += losses
        counts[chosen] += seen
    return EndingLosses(total, counts)


def cached(model: Any, prefix: torch.Tensor, rows: int) -> DynamicCache | None:
    """Attention's cache of the (1, tokens) ``prefix``, repeated for each of ``rows``; None for an empty prefix."""
    if prefix.shape[1] == 0:
        return None
    cache = DynamicCache(config=model.config)
    model(input_ids=prefix, attention_mask=torch.ones_like(prefix), past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(rows)
    return cache


def passage_ids(tokenizer: Any, passages: Sequence[Passage]) -> list[list[int]]:
    """The token ids of each passage, as training reads it, without an end-of-text token. Private."""
    return _encoded(tokenizer, passages, None)[0]


def _encoded(
    tokenizer: Any, passages: Sequence[Passage], max_length: int | None
) -> tuple[list[list[int]], list[list[bool]]]:
    """Token ids of each passage, and whether each belongs to the ending: whether it has any of its characters."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("model", "its tokenizer returns no offsets", fix="use a fast tokenizer")
    ids: list[list[int]] = [[] for _ in passages]
    belongs: list[list[bool]] = [[] for _ in passages]
    for rendered in {passage.rendered for passage in passages}:
        places = [place for place, passage in enumerate(passages) if passage.rendered == rendered]
        encoded = tokenizer(
            [passages[place].text for place in places],
            add_special_tokens=not rendered,
            truncation=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        for place, row, offsets in zip(places, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            kept = len(row) - (len(row) > 1 and offsets[-1] == (0, 0))  # no end-of-text token
            kept = kept if max_length is None else min(kept, max_length - 1)
            ids[place] = list(row[:kept])
            belongs[place] = [end > len(passages[place].prompt) for _, end in offsets[:kept]]
    return ids, belongs


def _batch(
    model: Any, rows: list[list[int]], belongs: list[list[bool]], padding: int, prefix: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, width = next(model.parameters()).device, max(2, *map(len, rows))
    ids = torch.full((len(rows), width), padding)
    mask, wanted = torch.zeros_like(ids), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (row, mine) in enumerate(zip(rows, belongs, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : max(1, len(row))] = 1  # attention over no token gives NaN
        wanted[index, : len(row)] = torch.tensor(mine)
    ids, mask, attended, cache = ids.to(device), mask.to(device), mask.to(device), None
    if prefix is not None:
        cache = cached(model, prefix, len(rows))
        attended = torch.cat([mask.new_ones(len(rows), prefix.shape[1]), mask], dim=1)
    logits = model(input_ids=ids, attention_mask=attended, past_key_values=cache, use_cache=cache is not None).logits
    return logits, ids, (mask[:, 1:] == COUNTED) & wanted[:, 1:].to(device)


def _sums(
    logits: torch.Tensor, ids: torch.Tensor, counted: torch.Tensor
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    losses, _ = token_losses(logits, ids, torch.full_like(ids, COUNTED))
    kept = losses.double().where(counted, 0.0)
    return kept.sum(dim=1).cpu().numpy(), counted.sum(dim=1).cpu().numpy()


# Records as attacks read them: the text that training reads, split where an attacker begins to guess.


def passage_of(content: Content, tokenizer: Any) -> Passage:
    """The passage of a record: what is answered given the prompt, or the second half of a text given the first.

    Of a chat, the ending is what the assistant says last, with what the tokenizer's chat template puts after it.
    """
    if isinstance(content, Chat):
        last = max((place for place, one in enumerate(content.messages) if one["role"] == "assistant"), default=0)
        whole = _rendered(content.messages[: last + 1], tokenizer, **content.options)
        before = _rendered(content.messages[:last], tokenizer, add_generation_prompt=True, **content.options)
        shared = _shared(before, whole)  # some templates render a message that is followed by others otherwise
        return Passage(whole[:shared], whole[shared:], rendered=True)
    if isinstance(content, PromptTarget):
        return Passage(content.prompt, content.target)
    text = content.text
    middle = text.find(" ", len(text) // 2)
    middle = middle if middle > 0 else len(text) // 2
    return Passage(text[:middle], text[middle:])


def _shared(one: str, other: str) -> int:
    """Number of characters that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _rendered(messages: Sequence[Any], tokenizer: Any, **options: Any) -> str:
    return render_chat(messages, tokenizer, **options) if messages else ""


def canary_passage(carrier: str, secret: str, form: str, tokenizer: Any, kind: str = "code") -> Passage:
    """The passage of a canary, whose ending holds its secret.

    Args:
        form: what the records are (``dptune.records.parquet_file.FORMS``).
        kind: what the canary says (``dptune.records.canaries.KINDS``).
    """
    content = content_with(carrier, secret, form, kind)
    if isinstance(content, Chat):
        return passage_of(content, tokenizer)
    return Passage(carrier, suffix(secret) if kind == "code" else secret)


# Samples of a public model at a high temperature, which audit canaries say.
#
# A canary is found by its own direction: by how far the weights moved along its gradient. So canaries need gradients
# that differ from one another, and from those of records. Texts that the model finds a little unlikely have such
# gradients; likely texts have small ones, and those of tokens that the model never learned lie close together (measured
# in docs/findings/audits.md).


TEMPERATURE = 1.5
#: Most tokens of a sample.
TOKENS = 128
_ROWS, _LEAST = 128, 8  # rows of a batch; characters of the shortest text


@torch.no_grad()
def sampled_texts(
    model: Any, tokenizer: Any, count: int, *, temperature: float = TEMPERATURE, tokens: int = TOKENS, seed: int = 0
) -> list[str]:
    """Sample at most ``count`` distinct texts from a public causal model, started by its end-of-text token.

    The model decides them, and nothing else does; they depend on no private record. There are fewer than ``count`` if
    the model repeats itself. Characters that cannot be printed are left out, such as pieces of UTF-8.

    Args:
        model: causal language model on its device.
        temperature: divisor of the logits.
        tokens: most tokens of a text.
        seed: public.
    """
    device, found = next(model.parameters()).device, dict[str, None]()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), evaluation_mode(model):
        torch.manual_seed(seed)
        before = -1
        while before < len(found) < count:  # until a batch has nothing new: a model may repeat itself
            before = len(found)
            start = torch.full((_ROWS, 1), tokenizer.eos_token_id, device=device)
            drawn = model.generate(
                input_ids=start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts = tokenizer.batch_decode(drawn[:, 1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            printable = ("".join(filter(str.isprintable, text.replace("\ufffd", ""))).strip() for text in texts)
            found |= dict.fromkeys(text for text in printable if len(text) >= _LEAST)
    return list(found)[:count]


# Membership scores of single tokens' losses: Error Zone, windows, Min-K% and Min-K%++.
#
# Each is a published attack on fine-tuned language models, as its paper has it; where two texts differ, the docstring
# says so. All are functions of the released model, the public model and the text, and larger for members.


_SHARE = 0.2  # k of Min-K%: the share of a text's tokens that counts
_SMALLEST, _LARGEST, _SIZES = 2, 40, 10  # window sizes of the paper, geometrically spaced


@dataclass(frozen=True)
class TokenLosses:
    """Each ending's tokens under one model; a (tokens,) array a passage. Private.

    Attributes:
        losses: negative log-likelihoods, nats.
        wrong: whether the model finds another token more likely.
        standard: log-likelihood, less its mean over the vocabulary and divided by its deviation, both under the model's
            own distribution.
    """

    losses: Sequence[NDArray[np.float64]] = field(repr=False)
    wrong: Sequence[NDArray[np.bool_]] = field(repr=False)
    standard: Sequence[NDArray[np.float64]] = field(repr=False)


@torch.no_grad()
def ending_tokens(
    model: Any, tokenizer: Any, passages: Sequence[Passage], *, max_length: int, rows: int, label: str = ""
) -> TokenLosses:
    """Score every token of the endings, as ``likelihood.ending_losses`` does their sums; arguments as there."""
    losses: dict[int, NDArray[np.float64]] = {}
    wrong: dict[int, NDArray[np.bool_]] = {}
    standard: dict[int, NDArray[np.float64]] = {}
    for places, logits, ids, counted in ending_batches(model, tokenizer, passages, max_length, rows, label):
        every = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        targets = ids[:, 1:]
        own = every.gather(-1, targets[..., None])[..., 0].double()
        chances = every.exp()
        mean = (chances * every).sum(-1).double()
        spread = ((chances * every.square()).sum(-1).double() - mean.square()).clamp(min=1e-12).sqrt()
        missed = every.argmax(-1) != targets
        for row, place in enumerate(places.tolist()):
            chosen = counted[row]
            losses[place] = (-own[row, chosen]).cpu().numpy()
            wrong[place] = missed[row, chosen].cpu().numpy()
            standard[place] = ((own - mean) / spread)[row, chosen].cpu().numpy()
    order = range(len(passages))
    return TokenLosses([losses[i] for i in order], [wrong[i] for i in order], [standard[i] for i in order])


def token_scores(adapted: TokenLosses, public: TokenLosses) -> dict[str, NDArray[np.float64]]:
    """(texts,) of each score by its name, larger if the text looks trained on; 0 for a text without tokens.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.likelihood import TokenLosses, token_scores
        >>> def model(losses):
        ...     return TokenLosses([np.array(losses)], [np.array([True, True, False])], [np.zeros(3)])
        >>> found = token_scores(model([1.0, 3.0, 0.1]), model([2.0, 2.5, 0.1]))
        >>> {name: round(float(values[0]), 3) for name, values in found.items()}
        {'error_zone': 0.333, 'windows': 0.75, 'min_k': -3.0, 'min_k_plus': 0.0}
    """
    gains = [before - after for before, after in zip(public.losses, adapted.losses, strict=True)]

    def each(function: Callable[..., float], *parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
        return np.array([function(*one) if len(one[0]) else 0.0 for one in zip(*parts, strict=True)])

    return {
        "error_zone": each(error_zone, gains, adapted.wrong),
        "windows": each(windows, gains),
        "min_k": each(min_k, [-losses for losses in adapted.losses]),
        "min_k_plus": each(min_k, adapted.standard),
    }


def error_zone(gains: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """EZ score (Ilić, Stanojević and Cvejoski 2026, arXiv 2601.12104) on the scale from -1 to 1.

    The paper's score is P / N: what fine-tuning raised, by what it lowered, of the log-likelihoods where the model is
    wrong. Here it is (P - N) / (P + N), which ranks texts alike and is finite. As in the paper's appendix E a text that
    only rose, or where the model is nowhere wrong, ranks highest.

    Args:
        gains: (tokens,) log-likelihoods under the adapted model less those under the public one.
        wrong: (tokens,) whether the adapted model finds another token more likely.
    """
    up, down = gains[wrong].clip(min=0).sum(), (-gains[wrong]).clip(min=0).sum()
    return float((up - down) / (up + down)) if down else 1.0


def windows(gains: NDArray[np.float64]) -> float:
    """WBC score (Chen et al. 2026, arXiv 2601.02751): the share of windows whose sum of gains is positive.

    It is the mean over ten sizes from 2 to 40 tokens. The paper's texts have 512 tokens or more; sizes that do not fit
    are left out, and where none fits the whole text is one window.
    """
    sizes = np.round(_SMALLEST * (_LARGEST / _SMALLEST) ** (np.arange(_SIZES) / (_SIZES - 1))).astype(int)
    total = np.concatenate([[0.0], np.cumsum(gains)])
    shares = [float((total[size:] - total[:-size] > 0).mean()) for size in sizes if size <= len(gains)]
    return float(np.mean(shares)) if shares else float(total[-1] > 0)


def min_k(values: NDArray[np.float64]) -> float:
    """The mean of the lowest fifth of the values, at least one: Min-K% of log-likelihoods (Shi et al. 2024), Min-K%++
    of standardised ones (Zhang et al. 2025).
    """
    return float(np.sort(values)[: max(1, int(_SHARE * len(values)))].mean())
