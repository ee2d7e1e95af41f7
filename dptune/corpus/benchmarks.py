"""Rows of the benchmarks that papers report on: E2E NLG, DART, SST-2 and WikiText-2, from files that you have.

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
from typing import Any, Literal

from dptune.corpus.glue import glue
from dptune.corpus.hub_benchmarks import hub_rows
from dptune.corpus.published_files import file_of, read_published
from dptune.corpus.wikitext import wikitext
from dptune.errors import ConfigError, DataError

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


BENCHMARKS: Mapping[str, Callable[..., Iterable[Row]]] = {"e2e": e2e, "dart": dart, "glue": glue, "wikitext": wikitext}
