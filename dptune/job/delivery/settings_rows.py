"""Rows of a run's settings, for its card and for the plan that is printed before it starts."""

from __future__ import annotations

from typing import Any

from dptune.job.delivery.card_code import said_words
from dptune.job.preparation import PreparedRun
from dptune.job.settings import rows_of
from dptune.training.models.classifier import described_head

#: Settings that the card has rows for whatever they are, or under names of its own.
_ROWS = (
    *("expected_batch_size", "max_batch", "epochs", "learning_rate", "max_length", "records_per_unit"),
    *("optimizer", "schedule", "average", "head_rate_ratio", "train", "train_layers"),
    *("rank", "alpha", "target_modules", "rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
)


def public_settings(prepared: PreparedRun) -> dict[str, Any]:
    """The run's settings for the card, by name. Of the records they reveal the number of units alone."""
    settings, schedule, words = prepared.settings, prepared.schedule, prepared.base.words
    further = {
        "LoRA scaling": "alpha / sqrt(rank)" if settings.rslora else None,
        "LoRA ranks of layers": ", ".join(f"{name}: {rank}" for name, rank in settings.rank_pattern.items()),
        "LoRA alphas of layers": ", ".join(f"{name}: {alpha}" for name, alpha in settings.alpha_pattern.items()),
        "beginning-of-text token": "added" if settings.add_bos_token else None,
        "LoRA start": None if settings.init_lora_weights is True else settings.init_lora_weights,
    }
    return {
        **({"task": "classify", "labels": ", ".join(settings.labels)} if settings.labels else {}),
        **({"words": said_words(words), "template": prepared.template or "none"} if words else {}),
        "mechanism": settings.mechanism,
        **schedule.options,
        **({"bands": bands} if (bands := prepared.mechanism.mechanism.bands) > 1 else {}),
        "expected batch": schedule.expected_batch_size,
        **({"largest batch": schedule.max_batch} if schedule.max_batch else {}),
        "epochs": schedule.epochs,
        "steps": schedule.steps,
        "learning rate": schedule.learning_rate,
        **({"learning rate of the head": schedule.head_rate} if prepared.base.head else {}),
        "optimizer": settings.optimizer,
        "learning rate schedule": settings.schedule,
        "average of the weights": settings.average,
        "tokens of a record": schedule.max_length,
        "records per unit": settings.records_per_unit if prepared.units.kind != "record" else 1,
        **_what_trains(prepared),
        **({"head": described_head(prepared.base.head, prepared.base.classifier)} if prepared.base.head else {}),
        **({"base weights": weights} if (weights := prepared.base.weights) else {}),
        **{name: value for name, value in further.items() if value},
        **rows_of(settings, besides=_ROWS),
        "canaries": prepared.canaries or "none",
    }


def _what_trains(prepared: PreparedRun) -> dict[str, Any]:
    """The adapters, or which of the model's own weights train, and how many."""
    settings = prepared.settings
    if settings.train != "lora":
        return {"train": settings.trained.said, "trained": prepared.base.adapted}
    targets = settings.target_modules or "PEFT's for the family"
    return {
        "LoRA rank": settings.rank,
        "LoRA alpha": settings.alpha,
        "LoRA modules": targets if isinstance(targets, str) else ", ".join(targets),
        "adapted": prepared.base.adapted,
    }
