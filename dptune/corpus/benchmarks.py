"""Rows of the benchmarks that papers report on: E2E NLG, DART, SST-2 and WikiText-2, from files that you have.

None of these data sets comes with dptune. Each function reads a folder or an archive as its authors published it,
checks the SHA-256 of every file that is known to have one content only, and yields rows; a column names the unit that
a paper does not protect (a restaurant, a set of triples, an article), so that ``data.unit`` can.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dptune.errors import ConfigError, DataError

Row = Mapping[str, Any]
Part = Literal["train", "dev", "test"]
END_OF_TEXT = "<|endoftext|>"

_E2E = {"train": "trainset.csv", "dev": "devset.csv", "test": "testset_w_refs.csv"}
_WIKITEXT = {"train": "wiki.train.tokens", "dev": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_SST2 = {"train": "train.tsv", "dev": "dev.tsv"}
_SENTENCES = {"train": "stsa.binary.train", "dev": "stsa.binary.dev", "test": "stsa.binary.test"}
#: SHA-256 of files of which one version exists.
KNOWN = {
    "trainset.csv": "f27d48df45815288ab15619d47a79028c300fbb7f42e373668aba0b98c1d57c6",
    "devset.csv": "fc26b78cdb849c80545f513b223d1e051138b43882eeb79e3eb153e689c864f9",
    "testset_w_refs.csv": "edc8db685e39bb9824d5bd70c18b1c9b0412d14b527aa960e2d1c8251ee15ccd",
    "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
#: Keys of a meaning representation as the papers' prompts spell them.
_SPELT = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
_SLOT = re.compile(r"\s*([^,\[\]]+)\[([^\]]*)\]")
_HEADING = re.compile(r" = [^=](.*[^=])? = ")


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
    content = _read(path, _file_of("e2e", _E2E, part))
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
    file = _file_of("dart", names, part)
    try:
        entries = json.loads(_read(path, file))
    except ValueError as error:
        raise DataError(f"is no JSON ({error})", fix="take the file as it was published", file=file) from None
    for entry in entries:
        prompt = " | ".join(f"{subject} : {what.lower()} : {thing}" for subject, what, thing in entry["tripleset"])
        for annotation in entry["annotations"]:
            target = " ".join(annotation["text"].split())
            yield {
                "prompt": f"{prompt}{separator}",
                "completion": f" {target}",
                "entry": json.dumps(entry["tripleset"]),
            }


def glue(path: str, task: str = "sst2", part: str = "train") -> Iterator[Row]:
    """Rows of SST-2 (Socher et al. 2013): columns text and label (0 negative, 1 positive).

    GLUE's training rows are phrases of sentences, up to 53 of one; the papers protect a phrase. Phrases that two
    sentences share belong to no one of them, so GLUE's rows cannot be grouped: ``sst2-sentences`` reads the 6,920 whole
    sentences, each of which is a unit.

    Args:
        path: the folder of the TSV files, or of stsa.binary.train and its like.
        task: "sst2" or "sst2-sentences".
        part: train, dev, or test (of sentences; never tune on it).
    """
    if task == "sst2-sentences":
        for line in _read(path, _file_of("glue", _SENTENCES, part)).splitlines():
            label, _, sentence = line.partition(" ")
            yield {"text": _written(sentence), "label": label}
        return
    if task != "sst2":
        raise ConfigError("data.options", f"task {task!r} is unknown", fix="use sst2 or sst2-sentences")
    file = _file_of("glue", _SST2, part)
    lines = [line.rstrip("\r").split("\t") for line in _read(path, file).split("\n") if line.strip()]
    header = lines[0]  # copies differ in its order and names
    place = header.index("label") if "label" in header else -1
    if len(header) != 2 or place < 0:
        raise DataError(f"has the columns {', '.join(header)}", fix="give label and sentence", file=file, row=1)
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != 2:
            raise DataError(f"{len(cells)} fields instead of 2", fix="take the published file", file=file, row=number)
        yield {"text": cells[1 - place].strip(), "label": cells[place].strip()}


def _written(sentence: str) -> str:
    return sentence.replace("-lrb-", "(").replace("-rrb-", ")").replace("\\/", "/").strip()


def wikitext(path: str, part: str = "train", half: str = "all") -> Iterator[Row]:
    """Paragraphs of WikiText-2 (Merity et al. 2016): columns text and article, a hash of the whole article.

    Args:
        path: wikitext-2-v1.zip, or the folder of its files.
        part: train, dev or test.
        half: "public" or "private": the articles whose hash begins with an even or an odd byte; or "all".
    """
    if half not in ("all", "public", "private"):
        raise ConfigError("data.options", f"half {half!r} is unknown", fix="use all, public or private")
    for article in articles(_read(path, _file_of("wikitext", _WIKITEXT, part))):
        digest = hashlib.sha256("".join(article).encode()).digest()
        if half != "all" and (digest[0] % 2 == 0) != (half == "public"):
            continue
        for line in article:
            if line.strip():
                yield {"text": line.strip(), "article": digest.hex()[:16]}


def articles(content: str) -> list[list[str]]:
    """The lines of each article: it begins at a level-1 heading that stands between blank lines."""
    lines = content.split("\n")
    blank = [not line.strip() for line in lines]
    starts = [
        number
        for number, line in enumerate(lines)
        if _HEADING.fullmatch(line)
        and (number == 0 or blank[number - 1])
        and (number + 1 == len(lines) or blank[number + 1])
    ]
    ends = [*starts[1:], len(lines)]
    return [[f"{line}\n" for line in lines[start:end]] for start, end in zip(starts, ends, strict=True)]


def _file_of(source: str, files: Mapping[str, str], part: str) -> str:
    if part not in files:
        raise ConfigError("data.options", f"{source} has no part {part!r} here", fix=f"use {', '.join(files)}")
    return files[part]


def _read(path: str, name: str) -> str:
    """The content of a file of a folder or an archive.

    Raises: DataError if it is absent, or has another SHA-256 than the published one.
    """
    place = Path(path)
    try:
        if place.is_dir():
            found = next(iter(sorted(place.rglob(name))), None)
            content = None if found is None else found.read_bytes()
        else:
            with zipfile.ZipFile(place) as archive:
                inside = next((one for one in archive.namelist() if one.rpartition("/")[2] == name), None)
                content = None if inside is None else archive.read(inside)
    except (OSError, zipfile.BadZipFile) as error:
        problem = f"cannot be read ({type(error).__name__})"
        raise DataError(problem, fix="give the published archive, or its unpacked folder", file=place) from None
    if content is None:
        raise DataError(f"holds no {name}", fix="give the published archive, or its unpacked folder", file=place)
    digest = hashlib.sha256(content).hexdigest()
    if KNOWN.get(name, digest) != digest:
        problem = f"{name} has SHA-256 {digest}, and the published file {KNOWN[name]}"
        raise DataError(problem, fix="take the published file", file=place)
    return content.decode("utf-8")


BENCHMARKS: Mapping[str, Callable[..., Iterable[Row]]] = {"e2e": e2e, "dart": dart, "glue": glue, "wikitext": wikitext}
