"""Public texts that carry secrets: synthetic narratives, which depend on no record of anyone.

A secret in a record of the data would make that canary depend on the record, and the choice of records on their number.
With public carriers no canary depends on private data, so what an attack on canaries finds is a function of the
released model, of public text and of the auditor's own secrets.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from dptune.records.diabetes.narratives import PLAIN, verbalise
from dptune.records.diabetes.sources import acquire_synthetic
from dptune.records.diabetes.table import read_table
from dptune.records.reading.formats import FORMATS

#: What texts are for. Each purpose has seeds of its own, and none has the seed of the pre-training texts.
Purpose = Literal["canaries", "contexts", "words"]
_SENTENCES = 3  # length of a carrier beside records of one's own, which may be far shorter than narratives


def public_texts(count: int, seed: int, purpose: Purpose, source: str, template: str = PLAIN) -> list[str]:
    """``count`` public narratives; equal for equal arguments.

    Args:
        seed: public.
        source: name of the source of the train records. Beside narratives of the diabetes table the texts are whole.
            Beside a user's own files they are short, because ``training.max_length`` cuts a text's end, where the
            secret is.
        template: wording of the narratives, one of ``dptune.records.diabetes.narratives.TEMPLATES``.
    """
    if count == 0:
        return []
    own_seed = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest(), "little")
    with TemporaryDirectory(prefix="dptune-") as folder:
        made = acquire_synthetic(Path(folder), count, own_seed, kind="public")
        whole = verbalise(read_table(made.table, made.ids_mapping), template)
    return [_first_sentences(text) for text in whole] if source in FORMATS else whole


def _first_sentences(text: str) -> str:
    return ". ".join(text.split(". ")[:_SENTENCES]).removesuffix(".") + "."
