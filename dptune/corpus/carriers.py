"""Public texts that carry secrets: synthetic narratives, which depend on no record of anyone.

A secret in a record of the data would make a canary depend on that record, and which records carry secrets on how many
there are. With public carriers the private data end where the canaries begin, and what an attack on canaries finds is a
function of the released model, of public text and of the auditor's own secrets.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from dptune.corpus.narratives import verbalise
from dptune.corpus.sources import acquire_synthetic
from dptune.corpus.table import read_table
from dptune.corpus.text import OWN_FILES

#: What texts are for: those of one purpose are never drawn with the seed of another, nor with that of pre-training.
Purpose = Literal["canaries", "contexts"]
_SENTENCES = 8  # of a carrier among paragraphs of any kind, which may be far shorter than narratives


def public_texts(count: int, seed: int, purpose: Purpose, source: str) -> list[str]:
    """``count`` public narratives; equal for equal arguments.

    Args:
        seed: public.
        source: of the data that they come beside. Beside the diabetes table's narratives they are whole; beside
            records of one's own files they are short, because ``training.max_length`` cuts what is long, and the secret
            is at the end.
    """
    if count == 0:
        return []
    own_seed = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest(), "little")
    with TemporaryDirectory(prefix="dptune-") as folder:
        made = acquire_synthetic(Path(folder), count, own_seed, kind="public")
        whole = verbalise(read_table(made.table, made.ids_mapping))
    return [_first_sentences(text) for text in whole] if source in OWN_FILES else whole


def _first_sentences(text: str) -> str:
    return ". ".join(text.split(". ")[:_SENTENCES]).removesuffix(".") + "."
