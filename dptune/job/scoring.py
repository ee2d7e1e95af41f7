"""Scores of a finished adapter: metrics of what it writes, its perplexity of texts, or a classifier's accuracy."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import read_json, write_text
from dptune.generation.decoding import Decoding, check_lengths, decode, start_ids
from dptune.generation.mauve import Judge, check_number
from dptune.generation.text_metrics import check_names, score
from dptune.job.delivery.adapter_loading import check_base, check_vocabulary, load_adapter
from dptune.job.delivery.verification import LABELS, RECORDS, WORDS, adapter_within, check_files, is_classifier
from dptune.job.delivery.weights import LORA, form_within
from dptune.job.preparation import DEFAULT_LABEL
from dptune.job.settings import check_labels
from dptune.records.reading.fields import WAYS
from dptune.records.reading.read import read_and_say
from dptune.records.reading.record import Chat, PromptTarget, Record, Text, form_of
from dptune.records.reading.source import RecordSource, make_same_texts
from dptune.training.data import Tokens
from dptune.training.evaluation import BlockScores, beginning, in_blocks, score_blocks, score_classifier
from dptune.training.models.causal import most_positions
from dptune.training.models.classifier import (
    cut_at_beginning,
    empty_classifier,
    head_names,
    load_classifier,
    load_classifier_config,
    load_verbalizer,
    load_verbalizer_config,
)
from dptune.training.models.model import (
    ModelSource,
    check_device,
    load_base,
    load_config,
    load_tokenizer,
    without_weights,
)
from dptune.training.tokens.encoding import labelled_tokens, tokens_of
from dptune.training.tokens.waiting_chats import ends_of_answers, without_answers

_log = logging.getLogger(__name__)

OF_CLASSIFIER = "is about what an adapter writes, and this one is a classifier, scored by its labels"
#: Tokens that a classifier reads at most, and a block has where nobody says how many.
_WIDEST = 512
#: Longer than any record, which is then not cut.
_UNCUT = 2**31 - 1


@dataclass(frozen=True)
class Scored:
    """Scores of an adapter. Aggregates of the records: private if they are.

    Attributes:
        inputs: number of distinct prompts, or of texts, or of records of a classifier.
        references: number of references; 0 where nothing is written.
        figures: value by metric.
        signatures: by metric, its implementation; and ``decoding``. Empty for a classifier.
        outputs: what was written, by prompt. Private if the prompts are.
    """

    inputs: int
    references: int
    figures: dict[str, float]
    signatures: dict[str, str]
    outputs: dict[str, str] = field(default_factory=dict, repr=False)


def score_adapter(
    adapter: Path,
    base: ModelSource,
    source: RecordSource,
    *,
    decoding: Decoding | None = None,
    metrics: Sequence[str] | None = None,
    mauve_model: ModelSource | None = None,
    block: int | None = None,
    device: str | None = None,
    rows: int = 16,
    warn: Callable[[str], None] = _log.warning,
    keep: Callable[[dict[str, str]], None] | None = None,
) -> Scored:
    """Score an adapter that ``tune`` delivered on ``source.data``: by what it writes, by its labels, or by perplexity.

    Rows with one prompt are one input with several references. A chat is what stands before its last answer, as the
    tokenizer's template renders it, with that answer. Texts without a target are read in blocks of tokens
    (``training.blocks``), each as ``tune`` reads it, followed by the end-of-text token; the model without the adapter
    is scored beside.

    Args:
        adapter: the delivered folder, with its tokenizer, or that of its run.
        base: the model that it was trained on.
        decoding: how texts are written; None is greedy.
        metrics: names in ``generation.metrics``: of ``METRICS``, or ``MAUVE``; None takes ``USUAL``.
        mauve_model: a public causal model that reads the texts for MAUVE; for no other metric.
        block: tokens of a block, for texts; None takes the most tokens that a record had in training.
        warn: called with what the reader of the scores should know, before anything is scored.
        keep: called with outputs by prompt as soon as they are written, before they are scored.

    Raises: ConfigError and DataError for a folder, records or options that do not fit; CardError for a folder whose
        files are not those that its card names.
    """
    adapter, chosen = adapter_within(adapter), decoding or Decoding()
    if rows < 1:
        raise ConfigError("rows", f"{rows} is not a number of rows", fix="use 16, or 1 where memory is short")
    given = {"metrics": metrics, "mauve_model": mauve_model, **_changed(decoding)}
    if is_classifier(adapter, source.label):
        check_left_out(given, OF_CLASSIFIER)
        check_left_out({"block": block}, "is about texts, and this adapter is a classifier, scored by its labels")
    notes = check_files(adapter)
    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer = load_tokenizer(ModelSource(str(adapter)))
    if is_classifier(adapter, source.label):
        return _score_labels(adapter, base, source, tokenizer, where, rows, notes, warn)
    judge = None if mauve_model is None else Judge(mauve_model, where)
    check_names(metrics, judge)
    records, maker = read_and_say(source, public=True)
    texts = [record.content.text for record in records if isinstance(record.content, Text)]
    are_texts = len(texts) == len(records)
    if are_texts:
        check_left_out(given, "is about what an adapter writes, and these records are texts, scored by perplexity")
    else:
        asked, ends = _asked(records, tokenizer)
        references = references_of(asked)
        if judge is not None:
            check_number(len(references))
        check_left_out({"block": block}, "is about texts, and these records are prompts with targets or chats")
    notes = (*notes, *check_base(adapter, base), *other_way(adapter, maker.way, source, form_of(records)))
    empty = without_weights(base, load_config(base))
    check_vocabulary(adapter, base, empty, tokenizer)
    positions = most_positions(empty)
    if are_texts:
        tokens = tokens_of(records, tokenizer, _UNCUT)
        blocks = in_blocks(tokens, _block(block, adapter, positions))
    else:
        starts = start_ids([*references], tokenizer, ends)
        check_lengths(starts, positions, chosen.max_new_tokens, _first_of_each(asked))
    loaded = load_base(base, where)
    if are_texts:
        begins = beginning(tokens, tokenizer)
        check_base(adapter, base, loaded)
        # Before the trained weights go into it.
        untuned = score_blocks(loaded, blocks, texts, rows, begins=begins, label="scoring the model without it")
    model = load_adapter(adapter, base, loaded)
    for note in notes:
        warn(note)
    if are_texts:
        tuned = score_blocks(model, blocks, texts, rows, begins=begins, label="scoring the adapter")
        return _scored_texts(tuned, untuned, texts, blocks)
    outputs = decode(model, tokenizer, [*references], chosen, rows, ends)
    return _scored_outputs(outputs, references, len(asked), chosen, metrics, judge, keep)


def check_left_out(given: Mapping[str, Any], problem: str) -> None:
    """Raise ConfigError naming the first of these options that is given, where it would have no effect."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(name, problem, fix="leave it out")


def _changed(decoding: Decoding | None) -> dict[str, Any]:
    """The settings of decoding that are not the usual ones, by option."""
    usual, given = vars(Decoding()), vars(decoding or Decoding())
    return {f"decoding.{name}": value for name, value in given.items() if value != usual[name]}


def _block(given: int | None, adapter: Path, positions: int | None) -> int:
    """The tokens of a block: as given, or as many as a record of the adapter's training had at most.

    Raises: ConfigError for more than the model can read.
    """
    most = positions or _UNCUT
    if given is not None and given > most:
        raise ConfigError("block", f"{given} is above {most}, the most tokens that the model reads", fix="give fewer")
    said = read_json(adapter / RECORDS) if (adapter / RECORDS).is_file() else {}
    return min(said.get("tokens", _WIDEST), most) if given is None else given


def _scored_texts(tuned: BlockScores, untuned: BlockScores, texts: Sequence[str], blocks: Tokens) -> Scored:
    """Perplexities of texts, with the trained weights and without."""
    how = f"{len(blocks.rows)} blocks of at most {blocks.width - 1} tokens of one text, each read on its own"
    signature = f"{how}; all but a block's first are predicted, end-of-text tokens among them"
    figures = asdict(tuned) | {f"untuned_{name}": value for name, value in asdict(untuned).items()}
    return Scored(len(texts), 0, figures, {"perplexity": signature})


def _scored_outputs(
    outputs: Sequence[str],
    references: Mapping[str, list[str]],
    asked: int,
    decoding: Decoding,
    metrics: Sequence[str] | None,
    judge: Judge | None,
    keep: Callable[[dict[str, str]], None] | None,
) -> Scored:
    """Metrics of what a model wrote for each prompt of ``asked`` records, whose targets are ``references``."""
    by_prompt = dict(zip(references, outputs, strict=True))
    if keep is not None:
        keep(by_prompt)
    found = score(outputs, list(references.values()), metrics, judge)
    return Scored(
        inputs=len(references),
        references=asked,
        figures={name: one.value for name, one in found.items()},
        signatures={"decoding": decoding.signature, **{name: one.signature for name, one in found.items()}},
        outputs=by_prompt,
    )


def _asked(records: Sequence[Record], tokenizer: Any) -> tuple[Sequence[Record], list[int] | None]:
    """Chats as prompts with their last answers as targets, and the tokens that end an answer; None for other records.

    Raises: DataError for a chat that does not end in an answer; ConfigError for a tokenizer without a template.
    """
    if not isinstance(records[0].content, Chat):
        return records, None
    chats = without_answers(records, tokenizer)
    pairs = zip(records, chats, strict=True)
    found = [replace(record, content=PromptTarget(chat.prompt, chat.answer)) for record, chat in pairs]
    return found, ends_of_answers(chats, tokenizer)


def references_of(records: Sequence[Record]) -> dict[str, list[str]]:
    """The targets of each distinct prompt, in order of first appearance, white space collapsed.

    Raises: DataError for a record that is no prompt with a target.
    """
    found: dict[str, list[str]] = {}
    for record in records:
        if not isinstance(record.content, PromptTarget):
            what = "a chat" if isinstance(record.content, Chat) else "a text, as not all records are"
            problem = f"is {what}, and scores of what an adapter writes need prompts with targets"
            fix = "name the columns of prompts and completions, or give only texts, for their perplexity"
            raise DataError(problem, fix=fix, file=record.file, row=record.row)
        found.setdefault(record.content.prompt, []).append(" ".join(record.content.target.split()))
    return found


def _first_of_each(asked: Sequence[Record]) -> list[Record]:
    """The first record of each distinct prompt, in the order of ``references_of``."""
    found: dict[str, Record] = {}
    for record in asked:
        if isinstance(record.content, PromptTarget):
            found.setdefault(record.content.prompt, record)
    return [*found.values()]


def other_way(adapter: Path, way: str, source: RecordSource, form: str) -> tuple[str, ...]:
    """A note if texts are made of rows in another way than those that the adapter was tuned on, or by another template.

    Chats are chats, whether a column holds them whole or two hold prompts and completions. An adapter of an earlier
    version of dptune does not say how its texts were made.

    Raises: ConfigError if all columns were written out, which nobody asked for, and were not in training.
    """
    said = read_json(adapter / RECORDS) if (adapter / RECORDS).is_file() else {}
    tuned = said.get("way", way)
    chats = [one == "messages" for one in (said.get("form", form), form)]
    if all(chats):
        return ()
    if tuned == way and not any(chats):
        return _otherwise_made(adapter, said, source)
    if way == "columns":
        problem = f"is missing: the adapter was tuned on {WAYS[tuned]}, and these rows would be {WAYS[way]}"
        fix = f"name the columns or the template that make {WAYS[tuned]}"
        if template := said.get("template"):
            raise ConfigError("data.template", problem, fix=f"{fix}; the one of the training is {template!r}")
        raise ConfigError("data.text", problem, fix=fix)
    kinds = ["chats" if chat else WAYS[one] for chat, one in zip(chats, (tuned, way), strict=True)]
    return (f"the adapter was tuned on {kinds[0]}, and these records are {kinds[1]}: other texts, maybe",)


def _otherwise_made(adapter: Path, said: Mapping[str, Any], source: RecordSource) -> tuple[str, ...]:
    """A note on a template, or an option of the same benchmark, that writes other texts than in training.

    Args:
        said: the content of the adapter's ``RECORDS``.
    """
    words = read_json(adapter / WORDS) if (adapter / WORDS).is_file() else said
    pairs, made_by = [], said.get("made_by", {})
    if (template := words.get("template")) and source.template and not make_same_texts(template, source.template):
        pairs.append(("data.template", template, source.template))
    if made_by.get("source") == source.made_by.get("source"):
        pairs += [(f"source.{key}", made_by[key], value) for key, value in source.made_by.items() if key in made_by]
    return tuple(
        f"the adapter was tuned with {name} {_quoted(tuned)}, and these texts have {_quoted(given)}: other texts, maybe"
        for name, tuned, given in pairs
        if tuned != given
    )


def _reads_mean(adapter: Path) -> bool:
    """Whether a delivered head reads the mean of the tokens' states."""
    form = form_within(adapter) or LORA
    said = read_json(adapter / form.config)
    if form is LORA:
        return bool(said.get("task_type") == "TOKEN_CLS")
    return any(str(name).endswith("ForTokenClassification") for name in said["architectures"])


def _quoted(value: str) -> str:
    return repr(value) if value else "the default"


def write_outputs(path: Path, outputs: Mapping[str, str]) -> None:
    """Write prompts and outputs as JSON, one object a line; whole or not at all, mode 0600."""
    lines = [json.dumps({"prompt": prompt, "output": output}, ensure_ascii=False) for prompt, output in outputs.items()]
    write_text(path, "\n".join([*lines, ""]))


def _score_labels(
    adapter: Path,
    base: ModelSource,
    source: RecordSource,
    tokenizer: Any,
    device: torch.device,
    rows: int,
    notes: tuple[str, ...],
    warn: Callable[[str], None],
) -> Scored:
    labels: list[str] = read_json(adapter / LABELS, list, kind=list)
    source, words = replace(source, label=source.label or DEFAULT_LABEL), []
    if (adapter / WORDS).is_file():
        said = read_json(adapter / WORDS)
        words = [said["words"][label] for label in labels]
        source, tokenizer = replace(source, template=source.template or said["template"]), cut_at_beginning(tokenizer)
        config = load_verbalizer_config(base, labels, words, tokenizer)
    else:
        mean = _reads_mean(adapter)
        config = load_classifier_config(base, labels, tokenizer.pad_token_id, mean=mean)
    empty = empty_classifier(base, config)
    check_vocabulary(adapter, base, empty, tokenizer)
    records, maker = read_and_say(source, public=True)
    notes = (*notes, *check_base(adapter, base), *other_way(adapter, maker.way, source, form_of(records)))
    width = min(most_positions(empty) or _WIDEST, _WIDEST)
    check_labels(records, labels, source.label or DEFAULT_LABEL, "leave out records of labels that it never learned")
    tokens = labelled_tokens(records, tokenizer, width, labels)
    if words:
        loaded = load_verbalizer(base, labels, words, tokenizer, device)
    else:
        loaded = load_classifier(base, config, head_names(base, empty), device)
    model = load_adapter(adapter, base, loaded)
    for note in notes:
        warn(note)
    return Scored(len(records), 0, asdict(score_classifier(model, tokens, rows)), {})
