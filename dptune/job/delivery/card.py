"""The model card of a deliverable: title, section "Privacy", figures, settings, and how to load the weights.

Beside that section no line follows from private records: figures of held-out ones stay in the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from dptune.core.metric import CHANGES
from dptune.job.delivery.card_code import cell, rule_of_words, use_of
from dptune.job.delivery.privacy_section import NO_GUARANTEE, has_guarantee
from dptune.job.delivery.weights import LORA, form_of
from dptune.job.result import PUBLIC, RunResult

#: What a card says of weights with a certified epsilon, and of no others: a tag of its metadata, and a sentence.
TAG, SENTENCE = "differential-privacy", "Fine-tuned with differential privacy by dptune."


def card_text(section: str, result: RunResult, epsilon: float, train: str = "lora") -> str:
    """The card below its metadata.

    Args:
        section: the result of ``privacy_section``.
        result: the run's; of its figures, the card shows only those of ``PUBLIC`` records.
        epsilon: the certified one.
        train: what trained, as the header of the ledger names it.
    """
    classifies = result.task == "classify"
    by_words = classifies and bool(result.words)
    private = has_guarantee(epsilon)
    lines = [
        f"# {'' if private else f'{NO_GUARANTEE}: '}{_title(result, train)}",
        "",
        SENTENCE if private else "Nothing bounds what these weights show about a record: treat them like the records.",
        "",
        section,
        "",
        "## Accuracy" if classifies else "## Perplexity",
        "",
        *_measured(result),
        "",
        "## Training",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name} | {_plain(value)} |" for name, value in result.settings.items()),
        "",
        "## Use",
        "",
        *([rule_of_words(result), ""] if by_words else []),
        "```python",
        *use_of(result, form_of(train)),
        "```",
        "",
        "`dptune verify` with this folder computes each epsilon again, and compares the section Privacy with it.",
        "",
        "### Framework versions",
        "",
        *(f"- {name} {version(name)}" for name in _frameworks(train)),
        "",
    ]
    return "\n".join(lines)


def _title(result: RunResult, train: str) -> str:
    """What the folder holds, and for which model."""
    classifies, by_words = result.task == "classify", result.task == "classify" and bool(result.words)
    words = ", a classifier by label words" if by_words else ""
    if (form := form_of(train)) is LORA:
        head = "and classification head " if classifies and not by_words else ""
        return f"LoRA adapter {head}for {result.base}{words}"
    kind = ", a classifier" if classifies and not by_words else words
    noun = "Weights of" if form.noun == "checkpoint" else "Changed weights for"
    return f"{noun} {result.base}{kind} ({cell(train)} trained)"


def _frameworks(train: str) -> tuple[str, ...]:
    names = ("dptune", "peft", "torch", "transformers")
    return names if form_of(train) is LORA else tuple(name for name in names if name != "peft")


def _measured(result: RunResult) -> list[str]:
    if not (shown := result.by_records().get(PUBLIC)):
        return ["Not shown: figures come only from public records, and none were given."]
    return [f"- {PUBLIC}: {_scores(shown) if result.task == 'classify' else _perplexity(shown['perplexity'])}"]


def _perplexity(pair: tuple[float, float]) -> str:
    before, after = pair
    return f"{before:.4g} before, {after:.4g} after"


def _scores(scores: Mapping[str, tuple[float, float]]) -> str:
    parts = [f"{metric.title} {_perplexity(scores[metric.name])}" for metric in CHANGES if metric.name in scores]
    explained = "; ".join(metric.explanation for metric in CHANGES if metric.explanation)
    return f"{'; '.join(parts)}; a constant answer has accuracy {scores['largest_class'][1]:.4g}\n\n{explained}."


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else cell(str(value))
