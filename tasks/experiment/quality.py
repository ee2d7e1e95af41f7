"""Measures of a cell's model on records, and scores of what it writes for held-out prompts.

Scores are aggregates of held-out records, and are computed only under research telemetry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import write_text
from dptune.generation.decoding import Decoding, check_lengths, decode, start_ids
from dptune.generation.text_metrics import score
from dptune.records.parquet_file import decode_content, form_at, read_records
from dptune.records.reading.record import PromptTarget
from dptune.training.data import Tokens
from dptune.training.evaluation import perplexity
from dptune.training.models.causal import most_positions
from tasks.experiment.cells import Cell
from tasks.experiment.preparation import PreparedCell
from tasks.paths import EVAL
from tasks.settings.experiment import Task

#: Functions from model, tokens, rows of a batch and autocast dtype to a figure, by the ``measure`` of metrics.
MEASURES: dict[str, Callable[..., float]] = {"perplexity": perplexity}
#: What a model wrote for held-out prompts, in a cell's folder; mode 0600.
OUTPUTS = "outputs.jsonl"


def check_prompts(prepared: PreparedCell) -> None:
    """Check that a cell's model can write after each held-out prompt, before it trains.

    Raises: DataError for records without prompts; ConfigError for prompts beyond the context.
    """
    task, model = prepared.cell.task, prepared.spec.model
    if not _writes(prepared.cell):
        return
    starts = start_ids([*references_of(task.inputs)], prepared.tokenizer)
    try:
        check_lengths(starts, most_positions(model), task.max_new_tokens)
    except ConfigError as error:
        fix = error.fix if "max_new_tokens" in error.field else f"{error.fix}, or use task.inputs: 0"
        raise ConfigError(error.field.replace("decoding.", "task."), error.problem, fix=fix) from None


def text_scores(prepared: PreparedCell, directory: Path) -> dict[str, Any]:
    """What a result keeps of the texts that a cell's model writes; empty where the task asks for none.

    Held-out records with one prompt are one input with several references. The texts are kept in ``OUTPUTS``.

    Raises: as ``check_prompts``; ConfigError for an unknown metric.
    """
    task = prepared.cell.task
    if not _writes(prepared.cell):
        return {}
    references = references_of(task.inputs)
    decoding = decoding_of(task)
    outputs = decode(prepared.spec.model, prepared.tokenizer, list(references), decoding)
    lines = [json.dumps({"prompt": one, "output": text}) for one, text in zip(references, outputs, strict=True)]
    write_text(directory / OUTPUTS, "\n".join(lines) + "\n")
    found = score(outputs, list(references.values()), task.metrics)
    return {
        "scores": {name: one.value for name, one in found.items()},
        "signatures": {name: one.signature for name, one in found.items()},
        "decoding": decoding.signature,
        "inputs": len(outputs),
    }


def _writes(cell: Cell) -> bool:
    return bool(cell.task.inputs) and cell.telemetry == "research"


def references_of(most: int) -> dict[str, list[str]]:
    """The targets of the held-out records by their prompts, of the first ``most`` prompts."""
    records = read_records(EVAL)
    form, label = form_at(records.about), str(records.about["label"])
    if form != "pair":
        fix = "use task.inputs: 0, or records with prompt and completion"
        raise DataError("has no prompts for which a model could write", fix=fix, file=label)
    found: dict[str, list[str]] = {}
    for text in records.text.to_pylist():
        content = decode_content(str(text), form)
        assert isinstance(content, PromptTarget)
        if content.prompt in found or len(found) < most:
            found.setdefault(content.prompt, []).append(content.target.strip())
    return found


def decoding_of(task: Task) -> Decoding:
    """How a model writes."""
    return Decoding(
        max_new_tokens=task.max_new_tokens,
        beams=task.beams,
        length_penalty=task.length_penalty,
        no_repeat_ngram=task.no_repeat_ngram,
    )


def first(tokens: Tokens, most: int | None) -> Tokens:
    """The first records, at most so many."""
    return replace(tokens, rows=tokens.rows[:most])


def spread(tokens: Tokens, most: int | None) -> Tokens:
    """Sample of at most so many records, evenly spread: neighbours in a file share an article or an input."""
    every = max(1, math.ceil(len(tokens.rows) / most)) if most else 1
    return replace(tokens, rows=tokens.rows[::every])
