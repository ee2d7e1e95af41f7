"""Files of every benchmark's layout, with rows made up here, where the profiles look for the published ones."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tiny_tokenizers import tokenizer

from dptune.records import published_files, wikitext

_ARTICLES = "".join(f" \n = Cat {number} = \n \n Cats are {number} . \n" for number in range(9))
_ARCHIVES = {
    "e2e/e2e-dataset.zip": dict.fromkeys(
        ("trainset.csv", "devset.csv", "testset_w_refs.csv"), "mr,ref\nname[Bo],Bo.\n"
    ),
    "wikitext2/wikitext-2-v1.zip": {f"wiki.{part}.tokens": _ARTICLES for part in ("train", "valid", "test")},
}
_ENTRIES = '[{"tripleset": [["Bo", "IS", "red"]], "annotations": [{"source": "a", "text": "Bo is red."}]}]'
_FILES = {
    **{
        f"billion_words/{name}": "Cats are red .\nCats sleep .\n"
        for name in (
            "training-monolingual.tokenized.shuffled/news.en-00001-of-00100",
            "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
            "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",
        )
    },
    **{f"sst2/glue/{part}.tsv": "sentence\tlabel\na cat\t1\n" for part in ("train", "dev")},
    **{f"sst2/sentences/stsa.binary.{part}": "1 a cat\n" for part in ("train", "dev", "test")},
    **{f"dart/dart-v1.1.1-full-{part}.json": _ENTRIES for part in ("train", "dev", "test")},
    **{f"glue/qnli/{part}.tsv": "question\tsentence\tlabel\nA?\tB.\tc\n" for part in ("train", "dev")},
    **{f"glue/mnli/{part}.tsv": "sentence1\tsentence2\tgold_label\nA.\tB.\tc\n" for part in ("train", "dev_matched")},
    **{f"glue/qqp/{part}.tsv": "question1\tquestion2\tis_duplicate\nA?\tB?\t1\n" for part in ("train", "dev")},
}


def write_benchmarks(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Write the files, and let profiles find them; one of letters is the tokenizer of the hub. Returns: the folder."""
    patch.setattr(published_files, "KNOWN", {})
    patch.setattr(wikitext, "load_fast_tokenizer", lambda name, revision: tokenizer())
    patch.setenv(published_files.FOLDER, str(folder))
    for name in (*_FILES, *_ARCHIVES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        (folder / name).write_text(text)
    for name, files in _ARCHIVES.items():
        with zipfile.ZipFile(folder / name, "w") as archive:
            for inside, text in files.items():
                archive.writestr(inside, text)
    return folder
