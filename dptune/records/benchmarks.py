"""Rows of the benchmarks that papers report on, from files that you have: E2E NLG, DART, GLUE, WikiText-2 ....

None of these data sets comes with dptune. Each function reads a folder or an archive as its authors published it,
checks the SHA-256 of every file that is known to have one content only, and yields rows; a column names the unit that
a paper does not protect (a restaurant, a set of triples, an article), so that ``data.unit`` can. With a ``revision``,
the commit, ``path`` is the name of a data set on the hub instead.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dptune.core.errors import ConfigError, DataError
from dptune.records.published_files import file_of, hub_rows, read_published
from dptune.records.wikitext import wikitext

# Rows of GLUE's classification tasks (Wang et al. 2018): SST-2, and pairs of sentences in QNLI, MNLI and QQP.


_SENTENCES = {"train": "stsa.binary.train", "dev": "stsa.binary.dev", "test": "stsa.binary.test"}
#: The columns that SST-2's copies give to sentences.
_SENTENCE = ("sentence", "content", "text")


@dataclass(frozen=True)
class _Task:
    """A task's files and columns.

    Attributes:
        files: file of each part.
        first, second: columns of the sentences; no second one where texts are single.
        label: column of labels.
        unit: what rows that share a sentence are called, and the column of that sentence; empty where there is none.
        torn: whether the published file has rows with fields missing, which everybody leaves out.
        hub: columns that the hub calls otherwise.
        named: whether its labels are names, which the hub has as numbers.
    """

    files: Mapping[str, str]
    first: str
    second: str
    label: str
    unit: tuple[str, str] = ("", "")
    torn: bool = False
    hub: Mapping[str, str] = field(default_factory=dict)
    named: bool = False


_DEV = {"train": "train.tsv", "dev": "dev.tsv"}
_TASKS = {
    "sst2": _Task(_DEV, "sentence", "", "label"),
    "qnli": _Task(_DEV, "question", "sentence", "label", ("passage", "sentence"), named=True),
    "mnli": _Task(
        {"train": "train.tsv", "dev": "dev_matched.tsv", "dev_mismatched": "dev_mismatched.tsv"},
        "sentence1",
        "sentence2",
        "gold_label",
        ("premise", "sentence1"),
        hub={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
        named=True,
    ),
    "qqp": _Task(_DEV, "question1", "question2", "is_duplicate", torn=True, hub={"is_duplicate": "label"}),
}


def glue(path: str, task: str = "sst2", part: str = "train", template: str = "", revision: str = "") -> Iterator[Row]:
    """Rows of a task: columns text and label, and the one of units that the task has.

    Labels are as published: SST-2 0 (negative) and 1; QNLI entailment, not_entailment; MNLI contradiction, entailment,
    neutral; QQP 0, 1 (the same question).

    The papers protect a row. GLUE's training rows of SST-2 are phrases of sentences, up to 53 of one; phrases that two
    sentences share belong to no one of them, so they cannot be grouped: ``sst2-sentences`` reads the 6,920 whole
    sentences, each of which is a unit. Rows of QNLI share a passage (``unit: passage``) and those of MNLI a premise
    (``unit: premise``). QQP's questions link rows into large clusters: a row alone is a unit there.

    Args:
        path: the folder of the TSV files, or of stsa.binary.train and its like; on the hub, nyu-mll/glue, say.
        task: "sst2", "sst2-sentences", "qnli", "mnli" or "qqp".
        part: train or dev; of MNLI also dev_mismatched; of sentences also test (never tune on it).
        template: text of a row, with ``{first}`` and, of pairs, ``{second}``; empty: the sentences, a space between.
            The pair of a RoBERTa is ``{first}</s></s>{second}``; label words stand after ``{first} It was``.
        revision: the commit of a data set on the hub, which ``path`` then names; it has no whole sentences of SST-2.
    """
    if task == "sst2-sentences":
        if revision:
            raise ConfigError("data.options", "the hub's GLUE has phrases, no sentences", fix="leave revision out")
        for line in read_published(path, file_of("glue", _SENTENCES, part)).splitlines():
            label, _, sentence = line.partition(" ")
            yield {"text": _filled(template or "{first}", _written(sentence), ""), "label": label}
        return
    if task not in _TASKS:
        fix = f"use {', '.join(_TASKS)} or sst2-sentences"
        raise ConfigError("data.options", f"task {task!r} is unknown", fix=fix)
    found = _TASKS[task]
    form = template or ("{first} {second}" if found.second else "{first}")
    for row in _of_hub(path, revision, task, found, part) if revision else _rows(path, found, part):
        second = row[found.second].strip() if found.second else ""
        unit, of = found.unit
        own = {unit: row[of]} if unit else {}
        yield {"text": _filled(form, row[found.first].strip(), second), "label": row[found.label].strip(), **own}


def _rows(path: str, task: _Task, part: str) -> Iterator[Mapping[str, str]]:
    """The rows by column. Copies differ in the order of columns, and SST-2's in the name of the sentence's."""
    file = file_of("glue", task.files, part)
    lines = [line.rstrip("\r").split("\t") for line in read_published(path, file).split("\n") if line.strip()]
    header = [task.first if not task.second and name in _SENTENCE else name for name in lines[0]]
    lacking = [name for name in (task.first, task.second, task.label) if name and header.count(name) != 1]
    if lacking:
        problem = f"has the columns {', '.join(lines[0])}"
        raise DataError(problem, fix=f"give the published file, which has {', '.join(lacking)}", file=file, row=1)
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))
        elif not task.torn:
            problem = f"{len(cells)} fields instead of {len(header)}"
            raise DataError(problem, fix="take the published file", file=file, row=number)


def _of_hub(name: str, revision: str, task: str, found: _Task, part: str) -> Iterator[Mapping[str, str]]:
    file_of("glue", found.files, part)  # raises for a part that there is not
    own = {column: found.hub.get(column, column) for column in (found.first, found.second, found.label) if column}
    split = "dev_matched" if task == "mnli" and part == "dev" else part
    label = own[found.label]
    for row in hub_rows(name, revision, split, tuple(own.values()), task, label if found.named else ""):
        yield {column: str(row[theirs]) for column, theirs in own.items()}


def _filled(template: str, first: str, second: str) -> str:
    if "{first}" not in template:
        fix = "write {first}, and {second} where rows are pairs"
        raise ConfigError("data.options", f"template {template!r} names no sentence", fix=fix)
    # Not str.format: what stands in a row is no part of the template.
    before, _, after = template.partition("{first}")
    return before + first + after.replace("{second}", second)


def _written(sentence: str) -> str:
    return sentence.replace("-lrb-", "(").replace("-rrb-", ")").replace("\\/", "/").strip()


Row = Mapping[str, Any]
Part = Literal["train", "dev", "test"]
END_OF_TEXT = "<|endoftext|>"

_E2E = {"train": "trainset.csv", "dev": "devset.csv", "test": "testset_w_refs.csv"}
#: Keys of a meaning representation as the papers' prompts spell them.
_SPELT = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
_SLOT = re.compile(r"\s*([^,\[\]]+)\[([^\]]*)\]")


def e2e(
    path: str, part: str = "train", template: str = "plain", separator: str = END_OF_TEXT, revision: str = ""
) -> Iterator[Row]:
    """Rows of E2E NLG (Novikova et al. 2017): columns prompt, completion and mr, the meaning representation.

    The papers protect a row, which is one crowd worker's sentence. Up to 46 rows share an mr; with ``unit: mr`` all of
    them are protected together.

    Args:
        path: e2e-dataset.zip, or a folder with its CSV files; on the hub, tuetschek/e2e_nlg, say.
        part: train, dev or test; no mr is in two of them.
        template: "plain" puts ``separator`` right after the prompt; "published" has the spaces of Li et al.'s files.
    """
    if template not in ("plain", "published"):
        raise ConfigError("data.options", f"template {template!r} is unknown", fix="use plain or published")
    file = file_of("e2e", _E2E, part)
    for mr, ref in _e2e_of_hub(path, revision, part) if revision else _e2e_of_file(read_published(path, file)):
        target = " ".join(ref.split())
        prompt = meaning_prompt(mr)
        if template == "published":
            prompt = f" {prompt.replace('£', '£ ').replace('-', ' - ')} "
            target = f"{target} "
        yield {"prompt": f"{prompt}{separator}", "completion": f" {target}", "mr": mr}


def _e2e_of_file(content: str) -> Iterator[tuple[str, str]]:
    for row in csv.DictReader(io.StringIO(content, newline="")):
        yield row["mr"], row["ref"]


def _e2e_of_hub(name: str, revision: str, part: str) -> Iterator[tuple[str, str]]:
    meaning, reference = "meaning_representation", "human_reference"
    for row in hub_rows(name, revision, part, (meaning, reference)):
        yield row[meaning], row[reference]


def meaning_prompt(mr: str) -> str:
    """A meaning representation as the papers' prompt: "name : Ada | Type : pub"."""
    return " | ".join(f"{_SPELT.get(key, key)} : {value}" for key, value in _SLOT.findall(mr))


def dart(path: str, part: str = "train", separator: str = END_OF_TEXT, revision: str = "") -> Iterator[Row]:
    """Rows of DART v1.1.1 (Nan et al. 2021): columns prompt, completion and entry, which is its set of triples.

    Of its texts a part are E2E's and WebNLG's: what was tuned on one is no public model for the other.

    Args:
        path: the folder with dart-v1.1.1-full-train.json and its like; on the hub, Yale-LILY/dart, say.
        part: train, dev or test.
    """
    names = {name: f"dart-v1.1.1-full-{name}.json" for name in ("train", "dev", "test")}
    file = file_of("dart", names, part)
    entries = hub_rows(path, revision, part, ("tripleset", "annotations")) if revision else _dart_of_file(path, file)
    for entry in entries:
        prompt = " | ".join(f"{subject} : {what.lower()} : {thing}" for subject, what, thing in entry["tripleset"])
        written = entry["annotations"]  # the library turns a list of mappings into a mapping of lists
        for text in written["text"] if isinstance(written, Mapping) else [one["text"] for one in written]:
            target = " ".join(text.split())
            yield {
                "prompt": f"{prompt}{separator}",
                "completion": f" {target}",
                "entry": json.dumps(sorted(entry["tripleset"])),
            }


def _dart_of_file(path: str, file: str) -> Iterable[Row]:
    try:
        entries: list[Row] = json.loads(read_published(path, file))
    except ValueError as error:
        raise DataError(f"is not valid JSON ({error})", fix="take the file as it was published", file=file) from None
    return entries


_TRAIN, _HELD_OUT = "news.en-{:05d}-of-00100", "news.en.heldout-{:05d}-of-00050"
_MOST_FILES = {"train": 99, "dev": 49, "test": 1}


def billion_words(path: str, part: str = "train", files: int = 1, block: int = 0) -> Iterator[Mapping[str, Any]]:
    """Texts of the benchmark as published: words and marks with a space between, sentences in a shuffled order.

    No sentence belongs to a person or a document here, so that a record is the only unit: a sentence, or a block. A
    sentence that is left out of the files moves the borders of all later blocks.

    Args:
        path: the unpacked folder, with training-monolingual.tokenized.shuffled and heldout-monolingual... in it.
        part: train (news.en-00001 and on), test (held-out file 0), or dev (held-out file 1 and on).
        files: number of files to read: train has 99, dev 49, test 1.
        block: 0 yields sentences; else runs of whole sentences with at most so many words, one sentence at least.

    Raises: ConfigError for arguments that do not fit; DataError for files that cannot be read.
    """
    most = _MOST_FILES.get(part)
    if most is None:
        fix = f"use {', '.join(_MOST_FILES)}"
        raise ConfigError("data.options", f"billion_words has no part {part!r} here", fix=fix)
    for name, number, least in (("files", files, 1), ("block", block, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError("data.options", f"{name} {number!r} is not a number from {least}", fix=f"use {least}")
    if files > most:
        raise ConfigError("data.options", f"files {files}: part {part} has {most}", fix=f"use at most {most}")
    first = 0 if part == "test" else 1
    form = _TRAIN if part == "train" else _HELD_OUT
    names = [form.format(number) for number in range(first, first + files)]
    sentences = (line.strip() for name in names for line in read_published(path, name).split("\n") if line.strip())
    for text in _blocks(sentences, block) if block else sentences:
        yield {"text": text}


def _blocks(sentences: Iterator[str], size: int) -> Iterator[str]:
    held: list[str] = []
    words = 0
    for sentence in sentences:
        length = len(sentence.split())
        if held and words + length > size:
            yield " ".join(held)
            held, words = [], 0
        held.append(sentence)
        words += length
    if held:
        yield " ".join(held)


BENCHMARKS: Mapping[str, Callable[..., Iterable[Row]]] = {
    "e2e": e2e,
    "dart": dart,
    "glue": glue,
    "wikitext": wikitext,
    "billion_words": billion_words,
}
