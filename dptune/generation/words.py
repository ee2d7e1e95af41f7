"""Words of outputs and references, as the metrics here count them: sacrebleu's 13a tokens in lower case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dptune.core.errors import ConfigError

Words = tuple[str, ...]
#: Tokens that coco-caption drops, as far as 13a makes them.
_PUNCTUATION = frozenset(("'", "''", "`", "``", ".", "?", "!", ",", ":", "-", "--", "...", ";", "(", ")", "[", "]"))


def sacrebleu() -> Any:
    """The library of that name. Raises: ConfigError if it is not installed."""
    try:
        import sacrebleu as found
    except ImportError:
        raise ConfigError("metrics", "need sacrebleu", fix="pip install 'dptune[metrics]'") from None
    return found


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    sacrebleu()
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()


def words(text: str, *, punctuation: bool = True) -> Words:
    """The 13a tokens of a text in lower case; without those that coco-caption drops, if ``punctuation`` is False."""
    found = _tokenizer()(text.strip().lower()).split()
    return tuple(word for word in found if punctuation or word not in _PUNCTUATION)


def ngrams(sentence: Words, longest: int) -> Counter[Words]:
    """How often each sequence of 1 to ``longest`` words occurs in a sentence."""
    return Counter(
        sentence[start : start + length]
        for length in range(1, longest + 1)
        for start in range(len(sentence) - length + 1)
    )


def version_of_13a() -> str:
    """What a signature says about these words."""
    return f"tok:13a|case:lc|sacrebleu:{sacrebleu().__version__}"


def check_references(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raises: ConfigError unless every output has a reference, and there is one output at least."""
    if not outputs or len(outputs) != len(references):
        problem = f"there are {len(outputs)} outputs and references for {len(references)}"
        raise ConfigError("references", problem, fix="give one list of references for each output")
    lacking = next((place for place, own in enumerate(references) if not own), None)
    if lacking is not None:
        raise ConfigError("references", f"output {lacking + 1} has none", fix="give it one, or leave the output out")
