"""Shape and schedule of a small public base model. No torch, so that settings can be checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from dptune.core.declarations import LearningRate, Rows, Seed, TokenCount
from dptune.core.errors import ConfigError


@dataclass(frozen=True)
class Pretraining:
    """Shape and schedule of the public model.

    Attributes:
        shape: "gpt2", a causal model, or "roberta", an encoder that is trained to fill in masked tokens.
        merges: what a token of the byte-level BPE may span: "sentences", for narratives that are lists of stock
            sentences, or "words", for free text. Free text is also cut into rows of ``max_length`` tokens.
        vocabulary: number of tokens of the byte-level BPE.
        layers, width, heads: size of the transformer.
        max_length: longest sequence, in tokens.
        epochs, batch_size, learning_rate: AdamW with warm-up and cosine decay.
        seed: seed of initialisation and data order; public.
        dtype: dtype of the saved weights; with "bfloat16" the forward passes on a GPU run in it too.
    """

    shape: Literal["gpt2", "roberta"] = "gpt2"
    merges: Literal["sentences", "words"] = "sentences"
    vocabulary: Annotated[int, Ge(300), Le(10**6)] = 1024
    layers: Annotated[int, Ge(1), Le(256)] = 2
    width: Annotated[int, Ge(1), Le(32768)] = 64
    heads: Annotated[int, Ge(1), Le(1024)] = 2
    max_length: Annotated[TokenCount, Ge(2)] = 192
    epochs: Rows = 3
    batch_size: Rows = 32
    learning_rate: LearningRate = 3e-3
    seed: Seed = 0
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("heads", f"{self.heads} do not divide the width of {self.width}", fix="use a divisor")
