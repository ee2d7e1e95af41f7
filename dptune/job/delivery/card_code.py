"""Code on a card: how to load the base model and the adapter, and how to ask them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dptune.job.delivery.weights import CHECKPOINT, LORA, DeliveredForm
from dptune.job.result import RunResult
from dptune.records.reading.source import template_columns
from dptune.training.models.model_names import GGUF, is_packaged

_OF_TOKENS = "AutoModelForTokenClassification"
_LABELS = 'labels, tokenizer = json.load(open("this folder/labels.json")), AutoTokenizer.from_pretrained("this folder")'
_WORDS = 'words = [tokenizer(said["words"][label], add_special_tokens=False)["input_ids"][0] for label in labels]'
_ASK = 'labels[int(model(**tokenizer(text, return_tensors="pt")).{answer}.argmax())]'


def use_of(result: RunResult, form: DeliveredForm) -> list[str]:
    """Lines of code that load delivered weights, and of a classifier ask it for a label."""
    if form is LORA:
        by_words = result.task == "classify" and bool(result.words)
        return (
            use_of_words(result)
            if by_words
            else use_of_classifier(result)
            if result.task == "classify"
            else use(result)
        )
    return _use_of_own_weights(result, form)


def use(result: RunResult) -> list[str]:
    return [
        *_imports(result),
        "from peft import PeftModel",
        f"from transformers import {result.loaded_by}",
        "",
        f"base = {result.loaded_by}.from_pretrained({_place(result)})",
        'model = PeftModel.from_pretrained(base, "this folder")',
    ]


def _use_of_own_weights(result: RunResult, form: DeliveredForm) -> list[str]:
    """Code that needs no PEFT: a checkpoint is loaded from its folder, and changed weights go into the base model."""
    classifies, whole = result.task == "classify", form is CHECKPOINT
    by_words = classifies and bool(result.words) and not whole  # a whole checkpoint has the words' rows as its head
    mean = result.loaded_by == _OF_TOKENS
    has_head = classifies and not by_words
    loader = "AutoModelForSequenceClassification" if has_head and not mean else result.loaded_by
    place, asked = '"this folder"' if whole else _place(result), ""
    if has_head and not whole:
        asked = ", num_labels=len(labels), pad_token_id=tokenizer.pad_token_id"
    lines = [
        *(["import json"] if classifies else []),
        *([] if whole else [*_imports(result), "from safetensors.torch import load_file"]),
        f"from transformers import {loader}{', AutoTokenizer' if classifies else ''}",
        "",
        *([_LABELS] if classifies else []),
        f"model = {loader}.from_pretrained({place}{asked}).eval()",
        *([] if whole else [f'model.load_state_dict(load_file("this folder/{form.weights}"), strict=False)']),
    ]
    if not classifies:
        return lines
    said = "words.json" if result.words else "records.json"
    lines += [f'said = json.load(open("this folder/{said}"))'] if by_words or result.template else []
    lines += [_WORDS] if by_words else []
    answer = "logits[0, -1, words]" if by_words else "logits[0].mean(0)" if mean else "logits"
    return [*lines, f"text = {_text_of(result)}", _ASK.format(answer=answer)]


def use_of_classifier(result: RunResult) -> list[str]:
    mean = result.loaded_by == _OF_TOKENS
    loader = _OF_TOKENS if mean else "AutoModelForSequenceClassification"
    answer = "logits[0].mean(0)" if mean else "logits"  # the head reads the mean of the tokens' states, and is linear
    return [
        "import json",
        *_imports(result),
        "from peft import PeftModel",
        f"from transformers import {loader}, AutoTokenizer",
        "",
        _LABELS,
        f"base = {loader}.from_pretrained(",
        f"    {_place(result)}, num_labels=len(labels), pad_token_id=tokenizer.pad_token_id",
        ")",
        'model = PeftModel.from_pretrained(base, "this folder").eval()',
        *(['said = json.load(open("this folder/records.json"))'] if result.template else []),
        f"text = {_text_of(result)}",
        _ASK.format(answer=answer),
    ]


def said_words(words: Mapping[str, str]) -> str:
    """Each label with its word, in quotes that show the space at its beginning."""
    return ", ".join(f'{label}: "{word}"' for label, word in words.items())


def rule_of_words(result: RunResult) -> str:
    """How a text becomes a label, as a sentence."""
    template = result.template
    put = "" if template is None else f'It is put into the template "{cell(template)}". '
    quoted = " or ".join(f'"{word}" ({cell(label)})' for label, word in result.words.items())
    return f"How a text becomes a label: {put}The word that the model finds likeliest next decides: {quoted}."


def use_of_words(result: RunResult) -> list[str]:
    return [
        "import json",
        *_imports(result),
        "from peft import PeftModel",
        f"from transformers import {result.loaded_by}, AutoTokenizer",
        "",
        'said, labels = json.load(open("this folder/words.json")), json.load(open("this folder/labels.json"))',
        'tokenizer = AutoTokenizer.from_pretrained("this folder", truncation_side="left")',
        f"base = {result.loaded_by}.from_pretrained({_place(result)})",
        'model = PeftModel.from_pretrained(base, "this folder").eval()',
        _WORDS,
        f"text = {_text_of(result)}",
        _ASK.format(answer="logits[0, -1, words]"),
    ]


def _text_of(result: RunResult) -> str:
    """Code that writes a text as in training: by the template, if there is one, which ``said`` holds."""
    if not (template := result.template):
        return '"a text"'
    values = dict.fromkeys(template_columns(template), "a text")
    return f'said["template"].format_map({json.dumps(values, ensure_ascii=False)})'


def _imports(result: RunResult) -> list[str]:
    """The line that a base model in a package or a GGUF file needs, which only dptune finds."""
    return ["from dptune import model_folder"] if "model_folder" in _place(result) else []


def _place(result: RunResult) -> str:
    """The arguments by which ``from_pretrained`` finds the base model."""
    base, revision = result.base, result.revision
    if is_packaged(base) or base.endswith(GGUF):
        return f'model_folder("{base}")'
    return f'"{base}"' + (f', revision="{revision}"' if revision else "")


def cell(text: str) -> str:
    """Text that stays within its table cell: labels and names of columns may hold any characters."""
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())
