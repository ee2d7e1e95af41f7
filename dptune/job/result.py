"""Result of a finished run: the content of result.json, field by field, for every door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptune.core.errors import DataError, DivergedError
from dptune.core.files import jsonable, read_json, write_json
from dptune.privacy.accountants import Epsilons
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.run_folder import RunFolder

if TYPE_CHECKING:  # torch takes seconds, and pages read results without it
    from dptune.mechanisms.mechanism import Mechanism
    from dptune.training.spec import TrainingPlan

Figures = dict[str, float]
Row = dict[str, Any]
#: The records that figures of a run are about. Figures of the first are private, and on no card.
HELD_OUT, PUBLIC = "held-out private records", "public records"
#: How the names of figures of these records begin, as in ``tasks.metrics``.
SIDES = {HELD_OUT: "eval", PUBLIC: "public"}
_FILE = RunFolder(Path()).result
_EPSILONS = ("epsilon_published", "epsilon_noise_only", "epsilon_certified")
#: Fields that a cell's file always has.
_OF_A_CELL = (
    *("label", "model", "mechanism", "budget_epsilon", "seed", "unit", "units", "delta", "telemetry", "guarantee"),
    *("data", "synthetic", "noise_multiplier", "sample_rate", "releases", "planned_releases", *_EPSILONS, "leaks"),
    *("before", "after", "history"),
)
#: Fields that are left out of a cell's file where the cell has none of them.
_LEFT_OUT = (
    *("loss_groups", "scores", "signatures", "decoding", "inputs", "sampler", "restarts", "together"),
    *("adapter_sha256", "code"),
    *("base", "revision", "loaded_by", "settings", "labels", "template", "words", "search", "model_about"),
)


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run: of ``tune``, of a search's winner, or of a cell of the grid.

    A field that a door or an earlier version has no figure for is absent from the file, and has its default here. Keys
    of later versions are kept in ``further``.

    Attributes:
        before, after: figures of the base model and of the result, by name: ``SIDES`` and a measure, such as
            "eval_perplexity". Those that begin with "eval" are of held-out private records, so no epsilon covers them.
        task: "generate" or "classify".
        mechanism: registered name of the mechanism.
        budget_epsilon: epsilon that the run may spend; None without a budget.
        accounting: the epsilon that was held to the budget.
        unit: what the guarantee is about: "record", or the name of a column.
        units: number of units in training.
        delta: delta of every epsilon here.
        telemetry: "research" or "private".
        data: label of the private records.
        noise_multiplier: noise of a release over its sensitivity.
        sample_rate: probability of a unit to be in a batch.
        sampler: how units got into batches.
        releases: number of releases that were charged.
        planned_releases: number of planned steps.
        epsilon_published, epsilon_noise_only, epsilon_certified: the run's epsilons, or the whole search's; infinite
            without a guarantee, and in files of earlier versions of ``tune``, which have none.
        leaks: what keeps the certified epsilon from being finite.
        restarts: how often correlated noise began anew.
        base: name of the base model; empty for a cell, whose settings name it.
        revision: its revision on the hub.
        loaded_by: transformers' automatic class that loads it.
        settings: rows of the card's table, by name.
        labels: names of a classifier's labels.
        template: the template that a classifier's texts are put into.
        words: the word that stands for each label; empty for a classifier with a head.
        search: score of a search's winner, and the records that it is about.
        label: name of the cell, such as "small.static.eps2.seed0"; empty for other runs.
        model: label of the cell's base model.
        model_about: that model's name, number of parameters, and what its weights are a rounding of.
        seed: public seed of the start.
        guarantee: what the certified epsilon covers, in sentences.
        synthetic: whether no real person is behind the records.
        history: points of the learning curves: step, releases, metrics and epsilons.
        agent: whether an agent moved the knobs.
        learning: what that agent did (``agents.rl.learning_of``); empty without one that learns.
        set_aside: earlier runs of the cell that were set aside: epsilon_certified and folder.
        public_data: label of the public records.
        pairs: names of the parameter groups, in the order of the knobs' numbers.
        crafted: number of gradients that an auditor planted.
        knobs: values of the mechanism's knobs, by releases.
        seconds: time that the run took; None where telemetry publishes no times.
        device: torch's name of the device.
        together: number of cells that trained side by side.
        scores, signatures: metrics of the texts that the model writes, and the implementation of each.
        decoding: how it wrote them.
        inputs: number of prompts.
        loss_groups: by the name of a perplexity of ``after``, total loss (nats) and number of tokens of groups of its
            records (``training.evaluation.perplexity_in_groups``); private if those are.
        adapter_sha256: digest of the adapter's weights.
        code: digest of the code that finished the run, as information only.
        further: other keys of the file.

    Example:
        >>> from dptune.job.result import RunResult
        >>> found = RunResult(before={"public_perplexity": 9.0}, after={"public_perplexity": 8.5}, base="tiny")
        >>> found.by_records()
        {'public records': {'perplexity': (9.0, 8.5)}}
        >>> RunResult.of(found.to_dict()) == found
        True
    """

    before: Figures
    after: Figures
    task: str = "generate"
    mechanism: str = ""
    budget_epsilon: float | None = None
    accounting: str = "certified"
    unit: str = ""
    units: int = 0
    delta: float = 0.0
    telemetry: str = ""
    data: str = ""
    noise_multiplier: float = 0.0
    sample_rate: float = 0.0
    sampler: str = "poisson"
    releases: int = 0
    planned_releases: int = 0
    epsilon_published: float = float("inf")
    epsilon_noise_only: float = float("inf")
    epsilon_certified: float = float("inf")
    leaks: list[str] = field(default_factory=list)
    restarts: int | None = None
    base: str = ""
    revision: str | None = None
    loaded_by: str = "AutoModelForCausalLM"
    settings: Row = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    template: str | None = None
    words: dict[str, str] = field(default_factory=dict)
    search: Row = field(default_factory=dict)
    label: str = ""
    model: str = ""
    model_about: str = ""
    seed: int = 0
    guarantee: str = ""
    synthetic: bool = False
    history: list[Row] = field(default_factory=list, repr=False)
    agent: bool = False
    learning: dict[str, int] = field(default_factory=dict)
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
    loss_groups: dict[str, list[list[float]]] = field(default_factory=dict, repr=False)
    adapter_sha256: str | None = None
    code: str | None = None
    further: Row = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any], file: Path = _FILE) -> RunResult:
        """The result that a file holds. Raises: DataError naming a field that is missing."""
        content = _of_former_tune(content)
        for name in ("before", "after", "base") if "base" in content else _OF_A_CELL:
            if name not in content:
                raise DataError(f"has no {name}", fix="restore it, or run the cell's study again", file=file)
        known = {one.name for one in fields(cls) if one.name != "further"}
        given: dict[str, Any] = {name: value for name, value in content.items() if name in known}
        given |= {name: float(given[name]) for name in _EPSILONS if name in given}
        for name in ("before", "after"):
            given[name] = {metric: float(value) for metric, value in given[name].items()}
        if "guarantee" in given:  # once worded so
            given["guarantee"] = given["guarantee"].replace("Prefect's database, logs", "databases, logs")
        return cls(**given, further={name: value for name, value in content.items() if name not in known})

    @classmethod
    def read(cls, file: Path) -> RunResult:
        """The result in a file. Raises: DamagedFileError for one that cannot be read; DataError for no result."""
        return read_json(file, lambda content: cls.of(content, file))

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, in plain JSON types: infinities are text."""
        left_out = _LEFT_OUT if self.label else [one.name for one in fields(self) if one.name not in _EPSILONS]
        found = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name != "further" and not (one.name in left_out and getattr(self, one.name) == _default(one))
        }
        found |= jsonable({name: found[name] for name in _EPSILONS})
        return found | {"before": jsonable(self.before), "after": jsonable(self.after)} | self.further

    def write(self, file: Path) -> None:
        """Write result.json; whole or not at all, mode 0600."""
        write_json(file, self.to_dict())

    def by_records(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Figures before and after, by the records that they are about, and by measure."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for records, side in SIDES.items():
            for name in self.after:
                if name.startswith(f"{side}_") and name in self.before:
                    measure = name.removeprefix(f"{side}_")
                    found.setdefault(records, {})[measure] = (self.before[name], self.after[name])
        return found


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _of_former_tune(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content as it is written now, of a file in which ``tune`` kept figures by the records that they are about."""
    if "perplexity" not in content:
        return content
    own = {name: {"perplexity": pair} for name, pair in content["perplexity"].items()} | content.get("scores", {})
    named = {f"{SIDES[name]}_{figure}": pair for name, pairs in own.items() for figure, pair in pairs.items()}
    kept = {name: value for name, value in content.items() if name not in ("perplexity", "scores")}
    task = {"task": "classify"} if "scores" in content else {}
    return kept | task | {when: {n: pair[k] for n, pair in named.items()} for k, when in enumerate(("before", "after"))}


def check_converged(figures: Mapping[str, float], label: str = "") -> None:
    """Check that a run did not diverge: its weights predict nothing, so they are neither delivered nor reported.

    Figures of held-out private records decide nothing: whether the run ends would tell of them, and no epsilon would
    cover that.

    Args:
        figures: those after training, as ``RunResult.after`` names them.
        label: name of the run at the beginning of the message.

    Raises: DivergedError naming the figure of public records that is not finite.
    """
    for name, value in figures.items():
        if name.startswith(side := f"{SIDES[PUBLIC]}_") and not math.isfinite(value):
            from dptune.training.models.model import DIVERGED  # torch takes seconds

            problem = f"the run diverged: {name.removeprefix(side)} on {PUBLIC} is {value} at its end"
            raise DivergedError(f"{label and f'{label}: '}{problem}. Fix: {DIVERGED}.")


def charged(
    contents: LedgerContents, mechanism: Mechanism, plan: TrainingPlan, prices: Epsilons | None = None
) -> dict[str, Any]:
    """Fields of a result that follow from the run's ledger, mechanism and plan.

    Args:
        prices: the whole search's, for its winner; None: the ledger's own.
    """
    header, prices = contents.header, prices or contents.epsilons
    return {
        "mechanism": header.mechanism,
        "budget_epsilon": header.epsilon,
        "accounting": header.accounting,
        "unit": header.unit,
        "units": header.units,
        "delta": header.delta,
        "telemetry": header.telemetry,
        "data": header.data,
        "noise_multiplier": mechanism.noise.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "sampler": plan.sampler,
        "planned_releases": plan.steps,
        "releases": contents.releases,
        **prices.to_dict(),
        "leaks": list(prices.leaks),
    }
