"""The section `pretrain`: the public model, and the public texts it is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from dptune.core.bounds import Rows, Seed, Share
from dptune.core.errors import ConfigError
from dptune.training.models.public_model import Pretraining


@dataclass(frozen=True, kw_only=True)
class Pretrain(Pretraining):
    """Shape and schedule of the public model, with its texts.

    Attributes:
        source: "narratives" (synthetic), "wikitext": articles of WikiText-2, cleaned of its marks, or "both", which is
            validated on narratives.
        path: archive of WikiText-2, or the folder of its files.
        half: articles of WikiText-2: "public", which no profile protects, or "all".
        encounters, validation_encounters: number of narratives to train on, and to keep for validation.
        data_seed: seed of the narratives; public.
        codes: share of the narratives that end in a random code.
    """

    source: Literal["narratives", "wikitext", "both"] = "narratives"
    path: str | None = None
    half: Literal["public", "all"] = "public"
    encounters: Annotated[Rows, Ge(50)]
    validation_encounters: Annotated[Rows, Ge(10)]
    data_seed: Seed
    codes: Share

    def __post_init__(self) -> None:
        """Raises: ConfigError for a source without its path, and for free text with merges over sentences."""
        super().__post_init__()
        if self.source != "narratives" and not self.path:
            raise ConfigError("path", "is missing", fix="give wikitext-2-v1.zip, or the folder of its files")
        if self.source != "narratives" and self.merges != "words":
            raise ConfigError("merges", "over sentences are for narratives", fix="use words")
        if self.shape == "roberta" and self.merges != "words":
            raise ConfigError("merges", "over sentences are for shape gpt2", fix="use words")
