"""Result of a finished cell: the content of result.json, field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from dptune.core.digits import at_most
from dptune.core.errors import DataError
from dptune.core.files import jsonable, read_json
from dptune.job.delivery.card import covered, has_guarantee, why_not
from dptune.privacy.accountants import Epsilons
from dptune.privacy.run_folder import RunFolder

# What a cell's certified epsilon covers, in words.


#: What a cell's certified epsilon covers, by its telemetry.
GUARANTEE = {telemetry: covered(telemetry, "the adapter") for telemetry in ("research", "private")}


def shared_guarantees(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sentences that open the page of these cells; of none where no cell has a certified epsilon."""
    if not any(has_guarantee(float(one["epsilon_certified"])) for one in results):
        return ["No guarantee: no cell has a certified epsilon."]
    return sorted({GUARANTEE[str(one["telemetry"])] for one in results})


def guarantee(
    telemetry: str,
    prices: Epsilons,
    inherited: bool = False,
    together: tuple[float, float] | None = None,
    plugins: tuple[str, ...] = (),
) -> str:
    """A few sentences on what a run's certified epsilon covers.

    Args:
        inherited: whether the run started from another run's hyper-policy.
        together: epsilon and delta of this run together with those of its cell that were set aside; None without any.
        plugins: the plug-ins that hold code of the mechanism.
    """
    if not has_guarantee(prices.certified):
        return f"No guarantee: {why_not(prices.leaks)}."
    more = " It includes what the run of its hyper-policy spent." if inherited else ""
    if plugins:
        more += f" It holds if plug-ins do what they say: {', '.join(plugins)}."
    if together:
        more += (
            " Runs of this cell that were set aside released about the same records: with them, "
            f"epsilon is {at_most(together[0], 4)} and delta {at_most(together[1])} (basic composition)."
        )
    return GUARANTEE[telemetry] + more


_FILE = RunFolder(Path()).result
Figures = dict[str, float]
Row = dict[str, Any]
#: Fields that are left out of the file where a cell has none of them.
_LEFT_OUT = ("scores", "signatures", "decoding", "inputs", "restarts", "together", "adapter_sha256", "code")


@dataclass(frozen=True)
class CellResult:
    """What a finished cell says of itself.

    Fields with a default are missing in files of earlier versions, or do not apply to every cell. Keys of later
    versions are kept in ``further``.

    Attributes:
        label: name of the cell, such as "small.static.eps2.seed0".
        model: label of the base model.
        mechanism: label of the mechanism.
        budget_epsilon: epsilon that the cell may spend; None without a budget.
        seed: public seed of the start.
        unit: what the guarantee is about: "record", or the name of a column.
        units: number of units in training.
        delta: delta of every epsilon here.
        telemetry: "research" or "private".
        guarantee: what the certified epsilon covers, in sentences.
        data: label of the private records.
        synthetic: whether no real person is behind the records.
        noise_multiplier: noise of a release over its sensitivity.
        sample_rate: probability of a unit to be in a batch.
        releases: number of releases that were charged.
        planned_releases: number of planned steps.
        epsilon_published, epsilon_noise_only, epsilon_certified: the ledger's epsilons; infinite without a guarantee.
        leaks: what keeps the certified epsilon from being finite.
        before, after: metrics of the base model and of the result, by name (``tasks.metrics``).
        history: points of the learning curves: step, releases, metrics and epsilons.
        accounting: the epsilon that was held to the budget.
        agent: whether an agent moved the knobs.
        learning: what that agent did (``idle_agent.learning_of``); empty without one that learns.
        task: "generate" or "classify".
        set_aside: earlier runs of the cell that were set aside: epsilon_certified and folder.
        public_data: label of the public records.
        pairs: names of the parameter groups, in the order of the knobs' numbers.
        crafted: number of gradients that an auditor planted.
        knobs: values of the mechanism's knobs, by releases.
        seconds: time that the run took; None where telemetry tells no times.
        device: torch's name of the device.
        together: number of cells that trained side by side.
        scores, signatures: metrics of the texts that the model writes, and the implementation of each.
        decoding: how it wrote them.
        inputs: number of prompts.
        restarts: how often correlated noise began anew.
        adapter_sha256: digest of the adapter's weights.
        code: digest of the code that finished the run, as information only.
        further: other keys of the file.
    """

    label: str
    model: str
    mechanism: str
    budget_epsilon: float | None
    seed: int
    unit: str
    units: int
    delta: float
    telemetry: str
    guarantee: str
    data: str
    synthetic: bool
    noise_multiplier: float
    sample_rate: float
    releases: int
    planned_releases: int
    epsilon_published: float
    epsilon_noise_only: float
    epsilon_certified: float
    leaks: list[str]
    before: Figures
    after: Figures
    history: list[Row] = field(repr=False)
    accounting: str = "certified"
    agent: bool = False
    learning: dict[str, int] = field(default_factory=dict)
    task: str = "generate"
    set_aside: list[Row] = field(default_factory=list)
    public_data: str = ""
    pairs: list[str] = field(default_factory=list)
    crafted: int = 0
    knobs: list[Row] = field(default_factory=list, repr=False)
    seconds: float | None = None
    device: str = ""
    together: int | None = None
    scores: Figures | None = None
    signatures: dict[str, str] | None = None
    decoding: str | None = None
    inputs: int | None = None
    restarts: int | None = None
    adapter_sha256: str | None = None
    code: str | None = None
    further: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any], file: Path = _FILE) -> CellResult:
        """The result that a file holds. Raises: DataError naming the field that is missing."""
        known = {one.name: one for one in fields(cls) if one.name != "further"}
        for one in known.values():
            if one.default is one.default_factory is MISSING and one.name not in content:
                raise DataError(f"has no {one.name}", fix="restore it, or run the cell's study again", file=file)
        given: dict[str, Any] = {name: value for name, value in content.items() if name in known}
        for name in ("epsilon_published", "epsilon_noise_only", "epsilon_certified"):
            given[name] = float(given[name])
        for name in ("before", "after"):
            given[name] = {metric: float(value) for metric, value in given[name].items()}
        given["guarantee"] = given["guarantee"].replace("Prefect's database, logs", "databases, logs")  # once worded so
        return cls(**given, further={name: value for name, value in content.items() if name not in known})

    @classmethod
    def read(cls, file: Path) -> CellResult:
        """The result in a file. Raises: OSError, ValueError for one that cannot be read; DataError for no result."""
        return cls.of(read_json(file), file)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, in plain JSON types: infinities are text."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "further"}
        found |= jsonable({name: value for name, value in found.items() if name.startswith("epsilon_")})
        found |= {"before": jsonable(self.before), "after": jsonable(self.after)}
        return {
            name: value for name, value in found.items() if value is not None or name not in _LEFT_OUT
        } | self.further
