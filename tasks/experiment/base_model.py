"""The frozen model that a cell starts from: a causal language model, or a classifier of the task's labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dptune.training.classifier import empty_classifier, head_names, load_classifier, load_classifier_config
from dptune.training.model import load_base, load_tokenizer
from dptune.training.verbalizer import cut_at_beginning, load_verbalizer
from tasks.settings.experiment import Model
from tasks.settings.task import Task


@dataclass(frozen=True)
class StartingModel:
    """A frozen model on its device, and its tokenizer. Public.

    Attributes:
        head: modules of a classifier that train in full beside the adapters; none of other models.
    """

    model: Any
    tokenizer: Any
    head: tuple[str, ...] = ()


def base_model(model: Model, task: Task, device: torch.device) -> StartingModel:
    """Load the model of a task. Raises: ConfigError if the checkpoint cannot be had, or has no form for the task."""
    source = model.weights
    tokenizer = load_tokenizer(source)
    if not task.classifies:
        return StartingModel(load_base(source, device), tokenizer)
    if task.words:
        tokenizer = cut_at_beginning(tokenizer)
        return StartingModel(load_verbalizer(source, task.labels, task.words, tokenizer, device), tokenizer)
    config = load_classifier_config(source, task.labels, tokenizer.pad_token_id)
    head = head_names(source, empty_classifier(source, config))
    return StartingModel(load_classifier(source, config, head, device), tokenizer, head)
