"""The sections `training`, the schedule that all cells share, and `pretrain`, the public model and its texts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from annotated_types import Ge

from dptune.core.bounds import Count, Rows, Seed, Share
from dptune.core.declarations import NAMES_NOTHING
from dptune.core.errors import ConfigError
from dptune.core.settings import ScheduleSettings, TrainedWeights, UpdateRule
from dptune.training.models.public_model import Pretraining

#: Settings of the update rule.
RULE = tuple(item.name for item in fields(UpdateRule))
#: Settings of what trains.
TRAINED = tuple(item.name for item in fields(TrainedWeights))
#: Entries that params.yaml must have.
REQUIRED = (
    *("expected_batch_size", "epochs", "max_length", "records_per_unit", "learning_rate", "warmup_steps"),
    *("physical_batch_size", "checkpoint_every", "evaluate_every", "evaluate_records"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ScheduleSettings):
    """The schedule that all cells share; ``tasks.experiment.preparation.plan_of`` makes a run's plan of it.

    A mechanism's entry may name its own learning rate and update rule.

    Attributes:
        evaluate_every: steps between points of the learning curves.
        evaluate_records: records behind each point; the first and last figures use all, or final_records.
        final_records: most records behind the first and last figures, evenly spread; left out, all of them.
    """

    evaluate_every: Count = field(metadata=NAMES_NOTHING)  # it decides only where curves have points
    # These two are part of a cell's name, for they move figures by which pages compare cells.
    evaluate_records: Count
    final_records: Count | None = None


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
    path: str | None = field(default=None, metadata=NAMES_NOTHING)  # the texts themselves count, wherever they lie
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
