"""Rows of the benchmarks that papers report on: E2E NLG, DART, SST-2 and WikiText-2, from files that you have.

None of these data sets comes with dptune. Each function reads a folder or an archive as its authors published it,
checks the SHA-256 of every file that is known to have one content only, and yields rows; a column names the unit that
a paper does not protect (a restaurant, a set of triples, an article), so that ``data.unit`` can.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from dptune.corpus.glue import glue
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


def e2e(path: str, part: str = "train", template: str = "plain", separator: str = END_OF_TEXT) -> Iterator[Row]:
    """Rows of E2E NLG (Novikova et al. 2017): columns prompt, completion and mr, the meaning representation.

    The papers protect a row, which is one crowd worker's sentence. Up to 46 rows share an mr; with ``unit: mr`` all of
    them are protected together.

    Args:
        path: e2e-dataset.zip, or a folder with its CSV files.
        part: train, dev or test; no mr is in two of them.
        template: "plain" puts ``separator`` right after the prompt; "published" has the spaces of Li et al.'s files.
    """
    if template not in ("plain", "published"):
        raise ConfigError("data.options", f"template {template!r} is unknown", fix="use plain or published")
    content = read_published(path, file_of("e2e", _E2E, part))
    for row in csv.DictReader(io.StringIO(content, newline="")):
        mr, target = row["mr"], " ".join(row["ref"].split())
        prompt = meaning_prompt(mr)
        if template == "published":
            prompt = f" {prompt.replace('£', '£ ').replace('-', ' - ')} "
            target = f"{target} "
        yield {"prompt": f"{prompt}{separator}", "completion": f" {target}", "mr": mr}


def meaning_prompt(mr: str) -> str:
    """A meaning representation as the papers' prompt: "name : Ada | Type : pub"."""
    return " | ".join(f"{_SPELT.get(key, key)} : {value}" for key, value in _SLOT.findall(mr))


def dart(path: str, part: str = "train", separator: str = END_OF_TEXT) -> Iterator[Row]:
    """Rows of DART v1.1.1 (Nan et al. 2021): columns prompt, completion and entry, which is its set of triples.

    Of its texts a part are E2E's and WebNLG's: what was tuned on one is no public model for the other.

    Args:
        path: the folder with dart-v1.1.1-full-train.json and its like.
        part: train, dev or test.
    """
    names = {name: f"dart-v1.1.1-full-{name}.json" for name in ("train", "dev", "test")}
    file = file_of("dart", names, part)
    try:
        entries = json.loads(read_published(path, file))
    except ValueError as error:
        raise DataError(f"is no JSON ({error})", fix="take the file as it was published", file=file) from None
    for entry in entries:
        prompt = " | ".join(f"{subject} : {what.lower()} : {thing}" for subject, what, thing in entry["tripleset"])
        for annotation in entry["annotations"]:
            target = " ".join(annotation["text"].split())
            yield {
                "prompt": f"{prompt}{separator}",
                "completion": f" {target}",
                "entry": json.dumps(sorted(entry["tripleset"])),
            }


BENCHMARKS: Mapping[str, Callable[..., Iterable[Row]]] = {"e2e": e2e, "dart": dart, "glue": glue, "wikitext": wikitext}
