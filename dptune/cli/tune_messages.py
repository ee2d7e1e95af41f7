"""Messages of the library in the words of ``dptune tune``, and its logs."""

from __future__ import annotations

import re
import shlex
from functools import partial
from logging import LogRecord
from pathlib import Path

from dptune.cli.console import show_progress
from dptune.core.declarations import declared
from dptune.job.settings import RENAMED, TuneSettings

#: Options whose name is not the setting's.
_FLAGS = {"options": "--set", "words": "--word", "init_lora_weights": "--init"}


def flag(name: str) -> str:
    """The option of a setting."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


_SETTINGS = {name: flag(name) for name in (*declared(TuneSettings), *RENAMED)}
#: The option of this command for each name that messages of the library use.
_OPTIONS = {
    # A name without an underscore is an English word too, and replaced only at the beginning of a message.
    **{name: option for name, option in _SETTINGS.items() if "_" in name},
    **{f"{section}.{name}": option for name, option in _SETTINGS.items() for section in ("training", "lora", "task")},
    "data.text": "--text",
    "data.prompt": "--prompt",
    "data.completion": "--completion",
    "data.messages": "--messages",
    "data.template": "--template",
    "data.label": "--label",
    "data.format": "--format",
    "data.records_are": "--records-are",
    "data.unit": "--unit",
    "data.public": "--public",
    "data.split": "--eval-share",
    "data.revision": "datasets saved to a folder",
    "model.source": "--model",
    "model.revision": "--revision",
    "model.load_in_4bit": "--load-in-4bit",
    "model.dtype": "--dtype",
    "options.": "--set ",
    "canaries.crafted": "--audit-canaries",
    "search.again": "--again",
    "search.candidates": "--candidates",
    "search.shape": "--shape",
    "source.": "--source-set ",
    "data.options": "--source-set",
    "decoding.max_new_tokens": "--max-new-tokens",
    "decoding.no_repeat_ngram": "--no-repeat-ngram",
    "decoding.length_penalty": "--length-penalty",
    "decoding.top_p": "--top-p",
    "decoding.": "--",
    "max_new_tokens": "--max-new-tokens",
    "no_guarantee": "--no-guarantee",
    "mauve_model": "--mauve-model",
}
#: Names that are English words too: they are replaced only at the beginning of a message.
_WORDS = {name: option for name, option in _SETTINGS.items() if "_" not in name} | {
    name: f"--{name}"
    for name in ("data", "model", "source", "public", "out", "records", "prompts", "metrics", "outputs", "block")
}
_NAMES = re.compile("|".join(rf"(?<![\w./-]){re.escape(name)}\b" for name in sorted(_OPTIONS, key=len, reverse=True)))


def check_command(adapter: Path) -> str:
    """The sentence that says how to check an adapter, with a command for the shell."""
    return f"Check it: dptune verify {shlex.quote(str(adapter))}"


def by_option(message: str) -> str:
    """A message of the library, with names of fields replaced by this command's options."""
    field, colon, rest = message.partition(": ")
    if field.startswith("search.space"):  # names within the file of the space
        return message
    named = f"{_WORDS[field]}: {rest}" if colon and rest and field in _WORDS else message
    return _NAMES.sub(lambda found: _OPTIONS[found[0]], named)


#: Warnings that would mislead a user of this command, by the logger that gives them.
_MISLEADING = {
    "transformers.modeling_utils": (
        "passing in an `attention_mask`",  # its own `generate` passes none where nothing is to be hidden
        "ForTokenClassification LOAD REPORT",
        "ForSequenceClassification LOAD REPORT",  # a missing head is the adapter's; any other gap is refused
    ),
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),  # of a layout that dptune does not use
}


def set_up_logs() -> None:
    """Show progress, and hide warnings that are meant for developers of other libraries."""
    import logging
    import warnings

    for name, parts in _MISLEADING.items():
        logging.getLogger(name).addFilter(partial(_is_for_users, parts))
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # PEFT's, of transformers
    show_progress()


def _is_for_users(misleading: tuple[str, ...], record: LogRecord) -> bool:
    return not any(part in record.getMessage() for part in misleading)
