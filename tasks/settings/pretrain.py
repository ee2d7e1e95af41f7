"""The section `pretrain`: the public model, and the public narratives it is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dptune.bounds import Rows, Seed, Share
from dptune.training.public_model import Pretraining


@dataclass(frozen=True, kw_only=True)
class Pretrain(Pretraining):
    """Shape and schedule of the public model, with its narratives.

    Attributes:
        encounters, validation_encounters: number of narratives to train on, and to keep for validation.
        data_seed: seed of the narratives; public.
        codes: share of the narratives that end in a random code.
    """

    encounters: Annotated[Rows, Ge(50)]
    validation_encounters: Annotated[Rows, Ge(10)]
    data_seed: Seed
    codes: Share
