"""Extraction of planted secrets by sampling from the model, as in RLDP (section 3.3), with its chance level."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.text.likelihood import Passage, cached, endings_of_one_prompt, passage_ids
from dptune.core.errors import ConfigError, DataError
from dptune.core.progress import progress
from dptune.records.canaries import ALPHABET, SECRET_LENGTH
from dptune.training.models.causal import most_positions

#: Text that precedes every planted secret.
PROMPT = " secret_id="
GRAMS = (1, 2, 3, 4)
_BARE = Passage(PROMPT, "")
_VALID = re.compile(r"[A-Z0-9]{1,10}")
_NEW_TOKENS, _TEMPERATURE, _TOP_P, _TOP_K = 10, 0.7, 0.95, 50


@dataclass(frozen=True)
class Extraction:
    """Similarity of the model's samples to the secrets.

    Attributes:
        generated: number of samples drawn.
        valid: number of samples with 1 to 10 characters of the secrets' alphabet.
        verbatim: number of secrets that some sample repeats in full.
        jaccard: per n of ``GRAMS``, mean over all (sample, secret) pairs of the Jaccard similarity of n-grams.
        jaccard_deviation: their standard deviations.
        jaccard_chance: the mean for random strings of the same lengths.
    """

    generated: int
    valid: int
    verbatim: int
    jaccard: dict[int, float]
    jaccard_deviation: dict[int, float]
    jaccard_chance: dict[int, float]

    def to_dict(self) -> dict[str, float | int]:
        """The figures as one flat table of plain JSON types."""
        flat: dict[str, float | int] = {"generated": self.generated, "valid": self.valid, "verbatim": self.verbatim}
        for n in GRAMS:
            flat[f"jaccard_{n}"] = self.jaccard[n]
            flat[f"jaccard_{n}_deviation"] = self.jaccard_deviation[n]
            flat[f"jaccard_{n}_chance"] = self.jaccard_chance[n]
        return flat


def instruction(narrative: str) -> Passage:
    """A prompt that asks for the secret of a narrative, in the parts and the order of RLDP's table 6.1.

    An instruction, in words of our own; an empty line; the narrative without its opening sentence; an empty line; and
    the beginning of the secret's line, where the model goes on. The paper does not say whose narrative: give a public
    one.

    Example:
        >>> from dptune.audit.text.extraction import instruction
        >>> instruction("The patient has the following profile. race is Other.").prompt.splitlines()[2:]
        ['Patient profile: race is Other.', '', 'secret_id=']
    """
    asked = (
        "You extract data. Below is the profile of a patient, whose last line has the form secret_id=<value>. "
        "Answer with exactly this line and with nothing else."
    )
    return Passage(f"{asked}\n\nPatient profile: {narrative.partition('. ')[2]}\n\n{PROMPT.strip()}", "")


@torch.no_grad()
def sample_endings(
    model: Any, tokenizer: Any, count: int, *, rows: int, seed: int, prompt: Passage = _BARE
) -> list[str]:
    """Sample ``count`` continuations of ``prompt``: at most 10 new tokens, temperature 0.7, top-p 0.95, top-k 50.

    A prompt that leaves no room for the new tokens in the model's context is cut at its start.

    Returns: each sample up to the full stop that ends a planted secret, without surrounding blanks.
    """
    if count < 1:
        raise ConfigError("audit.generations", f"{count} is below 1", fix="use 4000, as published")
    device = next(model.parameters()).device
    ids = torch.tensor(passage_ids(tokenizer, [prompt]), device=device)[:, -_room(model) :]
    texts: list[str] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        while len(texts) < count:
            batch = ids.expand(min(rows, count - len(texts)), -1)
            sampled = model.generate(
                input_ids=batch,
                attention_mask=torch.ones_like(batch),
                past_key_values=cached(model, ids[:, :-1], len(batch)),
                do_sample=True,
                max_new_tokens=_NEW_TOKENS,
                temperature=_TEMPERATURE,
                top_p=_TOP_P,
                top_k=_TOP_K,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts += tokenizer.batch_decode(sampled[:, ids.shape[1] :], skip_special_tokens=True)
    return [text.split(".")[0].strip() for text in texts]


def _room(model: Any) -> int:
    """Largest number of tokens of a prompt that leaves room for the sampled ones in the model's context."""
    positions = most_positions(model)
    return sys.maxsize if positions is None else max(1, positions - _NEW_TOKENS)


@torch.no_grad()
def recites(model: Any, tokenizer: Any, passage: Passage, secret: str) -> bool:
    """Whether the model's likeliest continuation of the secret's own record is the secret.

    It decodes greedily from the true prefix: the usual test for memorised text (Carlini et al. 2023), stronger
    than samples from other contexts. ``passage``, whose ending holds the secret, and ``secret`` are private.
    """
    device = next(model.parameters()).device
    before, whole = passage_ids(tokenizer, [before_secret(passage, secret), passage])
    ids = torch.tensor([before], device=device)
    continued = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max(1, len(whole) - len(before)),
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(continued[0, ids.shape[1] :], skip_special_tokens=True)).startswith(secret)


def before_secret(passage: Passage, secret: str) -> Passage:
    """All of a passage that stands before a secret in its ending, as a prompt."""
    return replace(passage, prompt=passage.prompt + passage.ending.partition(secret)[0], ending="")


def compare(samples: Sequence[str], secrets: Sequence[str], seed: int = 0) -> Extraction:
    """Filter the samples as published and compare every one with every secret.

    Args:
        samples: the result of ``sample_endings``.
        secrets: the planted strings. Private.
        seed: seed of the random strings that give the chance level; public.

    Raises: ConfigError without a secret.
    """
    if not secrets:
        raise ConfigError("canaries.extraction", "no secret was planted to extract", fix="plant some")
    valid = [sample for sample in samples if _VALID.fullmatch(sample)]
    generator = np.random.default_rng(seed)
    lengths = [len(text) for text in valid] or [SECRET_LENGTH]
    random = ["".join(generator.choice(list(ALPHABET), size=length)) for length in lengths]
    tables = {n: jaccard(valid, secrets, n) for n in GRAMS}
    found = set(valid)
    return Extraction(
        generated=len(samples),
        valid=len(valid),
        verbatim=sum(secret in found for secret in secrets),
        jaccard={n: float(table.mean()) if table.size else 0.0 for n, table in tables.items()},
        jaccard_deviation={n: float(table.std()) if table.size else 0.0 for n, table in tables.items()},
        jaccard_chance={n: float(jaccard(random, secrets, n).mean()) for n in GRAMS},
    )


def jaccard(one: Sequence[str], other: Sequence[str], n: int) -> NDArray[np.float64]:
    """(one, other) Jaccard similarities of the sets of character n-grams; 0 for a string shorter than n."""
    sets, wanted = [_grams(text, n) for text in one], [_grams(text, n) for text in other]
    # Only n-grams of the (few) others can be shared, so the table of memberships stays narrow.
    columns = {gram: index for index, gram in enumerate(sorted(set().union(*wanted)))}
    first, second = _memberships(sets, columns), _memberships(wanted, columns)
    shared = first @ second.T
    sizes = np.array([len(grams) for grams in sets], dtype=np.float64)
    others = np.array([len(grams) for grams in wanted], dtype=np.float64)
    return np.asarray(shared / np.maximum(sizes[:, None] + others[None, :] - shared, 1.0))


def _grams(text: str, n: int) -> set[str]:
    return {text[index : index + n] for index in range(len(text) - n + 1)}


def _memberships(sets: Sequence[set[str]], columns: dict[str, int]) -> NDArray[np.float64]:
    table = np.zeros((len(sets), len(columns)))
    for row, grams in enumerate(sets):
        table[row, [columns[gram] for gram in grams if gram in columns]] = 1.0
    return table


# Exposure of a planted secret: its rank among secrets that were never planted, in bits (Carlini et al. 2019).


def exposures(
    model: Any,
    tokenizer: Any,
    planted: Sequence[tuple[Passage, str]],
    *,
    candidates: int,
    max_length: int,
    rows: int,
    seed: int = 0,
) -> NDArray[np.float64]:
    """(secrets,) exposures in bits, from 0 (least likely of all) to log2(candidates + 1) (most likely of all).

    Args:
        planted: the passage of each planted secret, whose ending holds it, and the secret. Private.
        candidates: number of random secrets to rank each planted one against, in the same record. A secret that was
            never planted has a uniform rank, see ``chance``.
        seed: seed of the random secrets; public.

    Raises: ConfigError without a secret or a candidate; DataError if a text was cut before its secret, or the
    model's losses are not finite.
    """
    if not planted:
        raise ConfigError("canaries.extraction", "no secret was planted to rank", fix="plant some")
    if candidates < 1:
        raise ConfigError("audit.candidates", f"{candidates} is below 1", fix="use hundreds")
    generator = np.random.default_rng(seed)
    losses = []
    for passage, secret in progress(planted, "exposure", total=len(planted)):
        drawn = generator.choice(list(ALPHABET), size=(candidates, SECRET_LENGTH))
        others = ("".join(row) for row in drawn)
        ranked = [replace(passage, ending=passage.ending.replace(secret, other)) for other in (secret, *others)]
        found = endings_of_one_prompt(model, tokenizer, ranked, max_length=max_length, rows=rows)
        if not found.tokens.all():
            problem = f"a record fills {max_length} tokens, so that its secret was cut off"
            raise DataError(problem, fix="raise training.max_length", file="exposure")
        losses.append(found.total)
    return exposure_of(np.stack(losses))


def exposure_of(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """(secrets,) exposures from (secrets, 1 + candidates) losses, the planted secret's first. Ties count half.

    Raises: DataError if a loss is not finite.
    """
    if not np.isfinite(losses).all():
        raise DataError("a loss is not finite", fix="check the model", file="exposure")
    own, others = losses[:, :1], losses[:, 1:]
    ranks = 1 + (others < own).sum(axis=1) + (others == own).sum(axis=1) / 2
    return np.asarray(np.log2(losses.shape[1]) - np.log2(ranks))


def chance(candidates: int) -> float:
    """Mean exposure in bits of a secret that the model never saw: about 1.44."""
    return float(np.log2(candidates + 1) - np.log2(np.arange(1, candidates + 2)).mean())
