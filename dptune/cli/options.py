"""Options that several commands share, and functions that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dptune.cli.console import notice
from dptune.cli.mechanisms import completions
from dptune.core.errors import ConfigError
from dptune.core.overrides import assignments

if TYPE_CHECKING:
    from dptune.privacy.selection_law import SelectionLaw

Mechanism = Annotated[
    str, typer.Argument(help="Name of the mechanism; `dptune mechanisms` lists them.", autocompletion=completions)
]
SampleRate = Annotated[
    float | None, typer.Option(help="Probability that each unit independently enters a batch (Poisson sampling).")
]
Steps = Annotated[int | None, typer.Option(help="Number of steps.", min=1, max=10**12)]
Records = Annotated[int | None, typer.Option(help="Number of units in the training data.", max=10**15)]
Batch = Annotated[float | None, typer.Option(help="Expected number of units in a batch.")]
Epochs = Annotated[float | None, typer.Option(help="Number of passes over the data.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Options = Annotated[
    list[str] | None, typer.Option("--set", help="Sets an option of the mechanism, as KEY=VALUE; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Candidates = Annotated[
    float | None, typer.Option(help="Average number of candidates to try; only the best is released.")
]
Shape = Annotated[
    float | None,
    typer.Option(
        help="Shape of the distribution of that number: 0 logarithmic, 1 geometric, inf Poisson (default: 2)."
    ),
]
SelectionBound = Annotated[
    Literal["hull", "one_shift"] | None,
    typer.Option(
        "--bound", help="Bound on the cost of a search: hull (default), or one_shift, which is older and looser."
    ),
]
Accounting = Literal["certified", "noise_only", "published"]


def read_options(texts: list[str] | None) -> dict[str, Any]:
    """The mechanism's options by name, values as texts. Raises: ConfigError for one without ``=``, or given twice."""
    return dict(assignments(texts or []))


def law_of(
    candidates: float | None, shape: float | None, bound: Literal["hull", "one_shift"] | None
) -> SelectionLaw | None:
    """The law of the number of candidates; None where none are asked for. Raises: ConfigError naming the option."""
    from dptune.privacy.selection_law import DEFAULT_SHAPE, SelectionLaw

    if candidates is None:
        for option, value in (("--shape", shape), ("--bound", bound)):
            if value is not None:
                raise ConfigError(
                    option, "is about a search among candidates", fix="give --candidates, or leave it out"
                )
        return None
    try:
        return SelectionLaw.of(candidates, DEFAULT_SHAPE if shape is None else shape)
    except ConfigError as error:
        raise ConfigError(f"--{error.field}", error.problem, fix=error.fix) from None


def refuse_selection(name: str, law: SelectionLaw | None) -> None:
    """Raise ConfigError if a search is asked of ``name``, whose loss distribution is not known."""
    if law is not None:
        problem = f"{name} has no loss distribution, by which a search is priced"
        raise ConfigError("--candidates", problem, fix="leave it out, or take a mechanism of fine-tuning")


def warn_of_delta(delta: float, units: int | None = None) -> None:
    """Warn of a delta that is too large to mean anything."""
    from dptune.privacy.calibration import delta_warning

    if warning := delta_warning(delta, units):
        notice("warning", warning)


def without_noise(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options``. Raises: ConfigError if they set the noise multiplier, which ``calibrate`` finds."""
    if "noise_multiplier" in options:
        raise ConfigError("--set noise_multiplier", "is what calibrate finds", fix="leave it out, or use account")
    return options


def rate_and_steps(sample_rate: float | None, steps: int | None) -> tuple[float, int]:
    """Return both values. Raises: ConfigError naming the option that is missing."""
    if sample_rate is None:
        raise ConfigError("--sample-rate", "is missing", fix="give --sample-rate")
    if steps is None:
        raise ConfigError("--steps", "is missing", fix="give --steps")
    return sample_rate, steps


def sampling_of(
    sample_rate: float | None,
    steps: int | None,
    records: int | None,
    batch: float | None,
    epochs: float | None,
) -> tuple[float, int]:
    """Sample rate and steps: given, or computed from records, batch and epochs. Raises: ConfigError for a mixture."""
    from dptune.privacy.calibration import sampling

    if sample_rate is not None and steps is not None and records is batch is epochs is None:
        return sample_rate, steps
    if records is not None and batch is not None and epochs is not None and sample_rate is steps is None:
        return sampling(records, batch, epochs)
    raise ConfigError(
        "--sample-rate --steps",
        "give these two, or all of --records --batch --epochs",
        fix="choose one of the sets",
    )


def refuse_sampling(name: str, *given: float | None) -> None:
    """Refuse options about batches of records for ``name``, which takes none. Raises: ConfigError if any is given."""
    if any(value is not None for value in given):
        problem = f"{name} takes no batches of records"
        raise ConfigError("--sample-rate --steps --records --batch --epochs", problem, fix="use only --set options")
