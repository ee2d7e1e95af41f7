"""The section `search`: a space of settings, of which the best of a random number of candidates is released."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from dptune.core.declarations import Epsilon, NotNegative, Rows, Seed
from dptune.core.errors import ConfigError
from dptune.job.search.settings import SearchSettings
from dptune.privacy.selection import Bound
from dptune.privacy.selection_law import DEFAULT_SHAPE
from tasks.settings.strict import Name, StrictModel, text_of

Table = dict[str, Any]
#: What candidates are compared by, in one word, or a table with ``on``, ``clip`` and ``noise_multiplier``.
Score = Literal["noisy", "public", "rehearsal"] | Table
Candidates = Annotated[float, Ge(1.001), Le(10_000)]
Shape = NotNegative | Literal["inf"]
#: Entries of the pipeline alone; the others are those of the library's own file of a search.
_OWN = ("name", "model", "epsilon", "rehearse_on", "twin_seed", "check_ranking")


class Search(StrictModel):
    """A search whose winner is released with one guarantee: `make search`. What it searches beside ``space`` are the
    values of ``training`` and ``lora``, but for warm-up and checkpoints, which follow each candidate's number of steps.
    Delta and telemetry are the experiment's, and candidates have no canaries.

    Attributes:
        name: name of the search, of its folder data/search/NAME and of its run in MLflow.
        model: a model of ``experiment.models``; empty takes the only one.
        epsilon: budget of the whole search.
        space: settings with the values to try: mechanism (names of `dptune mechanisms`), learning_rate, warmup_steps,
            expected_batch_size, epochs, those of the update rule (optimizer, momentum, ...) and options.NAME; a list of
            values, or of numbers that decide no release (learning_rate, momentum, options.max_grad_norm, ...) a range
            such as {log_uniform: [0.001, 0.02]}. Several tables in a list have a ``weight``. Public: it must not be
            chosen by looking at these records.
        candidates: average number of candidates; the actual number is secret.
        shape: distribution of their number: 0 logarithmic, 1 geometric, inf Poisson.
        most: the most candidates there can be; empty leaves out a thousandth of the law.
        score: score by which candidates are compared: "noisy" (losses of held-out units, with noise within the
            guarantee), "public" records, or a table; "rehearsal" searches only on public records.
        rehearse_on: records of a rehearsal: "public" are the public records of data/validation; "twin" is a cohort that
            the public generator makes, with as many units as the private records have (synthetic and uci).
        twin_seed: seed of that cohort; public.
        check_ranking: after a rehearsal, run every setting that it tried on the private records too, and show how well
            its ranking carries over. Each of those runs costs ``epsilon`` again, and telemetry must be research.
        bound: bound by which the search is priced.
        together: candidates that are trained in the same forward passes; changes speed only.
        keep_losers: keep the secret working folder, for the owner.
        again: accept that these records were searched before; the costs add up.
    """

    name: Name
    model: Name | None = None
    epsilon: Epsilon
    space: Table | Annotated[list[Table], Field(min_length=1)]
    candidates: Candidates
    shape: Shape = DEFAULT_SHAPE
    most: int | None = None
    score: Score = "noisy"
    rehearse_on: Literal["public", "twin"] = "public"
    twin_seed: Seed = 20
    check_ranking: bool = False
    bound: Bound = SearchSettings.bound
    together: Rows = SearchSettings.together
    keep_losers: bool = SearchSettings.keep_losers
    again: bool = SearchSettings.again

    @cached_property
    def asked(self) -> SearchSettings:
        """The search as the library takes it."""
        return SearchSettings.of(self.model_dump(exclude=set(_OWN)))

    @property
    def rehearses(self) -> bool:
        """Whether public records alone decide."""
        return self.asked.score.on == "rehearsal"

    @model_validator(mode="after")
    def _is_a_search(self) -> Search:
        try:
            _ = self.asked
        except ConfigError as error:
            raise _located(error, self) from None
        if self.rehearse_on == "twin" and not self.rehearses:
            raise ValueError("rehearse_on: is twin, and score rehearses nothing: use score: rehearsal, or public here")
        if self.check_ranking and not self.rehearses:
            raise ValueError("check_ranking: is true, and score rehearses nothing: use score: rehearsal, or false here")
        return self


def _located(error: ConfigError, section: Search) -> ValidationError:
    """The library's refusal as pydantic's, about the entry that it names; the space's own entries have dots."""
    name, _, entry = error.field.removeprefix("search.").partition(".")
    inside = getattr(section, name, None)
    known = bool(entry) and isinstance(inside, dict)
    said = text_of(error) if known or not entry else f"{entry}: {text_of(error)}"
    details = InitErrorDetails(
        type="value_error",
        loc=(name, entry) if known else (name,),
        input=inside,
        ctx={"error": ValueError(said)},
    )
    return ValidationError.from_exception_data("Search", [details])
