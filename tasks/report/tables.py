"""Tables of a report: for each mechanism and budget its four epsilons and its warnings, and the scores of its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from dptune.core.metric import Metric
from tasks.audit.registry import parts
from tasks.charts.looks import line_colours
from tasks.charts.seed_groups import CERTIFIED, NO_BUDGET, PUBLISHED, SAME_EPSILON, Result, SeedGroup, budget_of
from tasks.metrics import shown_in
from tasks.report.answer import Ranking
from tasks.report.claims import own_conditions, refutable_epsilon, shown_epsilon
from tasks.report.numbers import ruler_end

Audit = dict[str, Any]


@dataclass(frozen=True)
class Remark:
    """A warning beside a row: a word, and the number of the note that explains it."""

    word: str
    note: int


@dataclass(frozen=True)
class ResultRow:
    """A mechanism at one budget.

    Attributes:
        audited: the largest epsilon that an attack on one of its runs shows; None without audit.
        refutable: the largest certified epsilon that one could have refuted, 0 if none; None where no audit says it.
        share: the part of the non-private gain that it keeps; None where that has no meaning.
        best: whether no other mechanism of this certified epsilon is known to be better.
    """

    group: SeedGroup
    audited: float | None
    refutable: float | None
    share: float | None
    best: bool
    warnings: tuple[Remark, ...]

    @property
    def epsilons(self) -> dict[str, float | None]:
        """The four epsilons by their ticks on the ruler: of several seeds those of the first, and the most shown."""
        first = self.group.first
        prices = zip(("claimed", "noise", "proved"), (PUBLISHED, "epsilon_noise_only", CERTIFIED), strict=True)
        return {**{tick: float(first[name]) for tick, name in prices}, "shown": self.audited}


@dataclass(frozen=True)
class ResultSection:
    """The rows of one model and budget: those with a certified epsilon first, then by perplexity, lowest first."""

    title: str
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True)
class ResultTable:
    """The rows, and the notes that their warnings point to, from 1 on."""

    sections: tuple[ResultSection, ...]
    notes: tuple[str, ...]

    @property
    def end(self) -> float:
        """Epsilon at the end of all rulers: on scales of their own, an epsilon of 1 would stand beyond one of 2."""
        return ruler_end([row.epsilons for section in self.sections for row in section.rows])


def result_table(groups: Sequence[SeedGroup], audits: Sequence[Audit], rankings: Sequence[Ranking]) -> ResultTable:
    """Rows by model and budget, those without a budget last.

    Args:
        groups: best mean first.
        audits: of some or all cells.
        rankings: of all models and epsilons.
    """
    notes: list[str] = []
    keys = sorted({_section(group) for group in groups}, key=lambda key: (key[0], key[1] is None, key[1] or 0.0))
    made = {audit["label"]: audit for audit in audits}
    sections, several = [], len({model for model, _ in keys}) > 1
    for model, budget in keys:
        mine = sorted((group for group in groups if _section(group) == (model, budget)), key=_unproved)
        rows = tuple(_row(group, made, rankings, notes) for group in mine)
        title = f"budget ε = {budget:g}" if budget is not None else "no budget"
        sections.append(ResultSection(f"{model}: {title}" if several else title, rows))
    return ResultTable(tuple(sections), tuple(notes))


def _unproved(group: SeedGroup) -> bool:
    """Whether a group has no certified epsilon: such rows come last."""
    return math.isinf(group.certified)


def _section(group: SeedGroup) -> tuple[str, float | None]:
    return str(group.first["model"]), group.first["budget_epsilon"]


def _row(group: SeedGroup, audits: dict[str, Audit], rankings: Sequence[Ranking], notes: list[str]) -> ResultRow:
    mine = [audits[result["label"]] for result in group.results if result["label"] in audits]
    mine_in = [ranking for ranking in rankings if group in ranking.candidates]
    related = [ranking for ranking in rankings if ranking.model == group.first["model"]]
    share = related[0].share(group) if related and math.isfinite(group.mean) and not group.nonprivate else None
    return ResultRow(
        group=group,
        audited=max((one for one in map(shown_epsilon, mine) if one is not None), default=None),
        refutable=None
        if group.nonprivate  # it claims nothing
        else max((one for one in map(refutable_epsilon, mine) if one is not None), default=None),
        share=share,
        best=any(group in ranking.tied and len(ranking.candidates) > 1 and ranking.seeds > 1 for ranking in mine_in),
        warnings=tuple(_numbered(word, text, notes) for word, text in _warnings(group, mine)),
    )


def _numbered(word: str, text: str, notes: list[str]) -> Remark:
    if text not in notes:
        notes.append(text)
    return Remark(word, notes.index(text) + 1)


def _warnings(group: SeedGroup, audits: Sequence[Audit]) -> list[tuple[str, str]]:
    """A word and a sentence for each thing that a reader of the row must know."""
    found = [("BUG", f"BUG: {sentence}.") for audit in audits for sentence in audit.get("violations", [])]
    first = group.first
    found += [("no guarantee" if _unproved(group) else "conditions", text) for text in _conditions(group)]
    if not math.isfinite(group.mean):
        found.append(("diverged", "A run diverged: its perplexity is not finite."))
    found += [("no update", text) for text in _idle(group)]
    budget, held = first["budget_epsilon"], str(first["accounting"]).replace("_", " ")
    if budget is not None and budget * (1 + SAME_EPSILON) < group.certified < math.inf:
        found.append(("over budget", f"The budget holds for ε {held}; what is proved is more."))
    if first.get("crafted"):
        gradients = f"{first['crafted']} gradients of an auditor's own took part in these runs; they cost utility."
        found.append(("for auditing", f"For auditing. {gradients}"))
    return list(dict.fromkeys(found))


def _idle(group: SeedGroup) -> list[str]:
    """The sentence about runs whose agent was to learn and made no update; none where each did, or had no agent."""
    idle = [one for one in group.results if (own := one.get("learning")) and not own["updates"]]
    if not idle:
        return []
    acted = max(one["learning"].get("actions", 0) for one in idle)
    return [
        f"The agent of {group.mechanism} made no update in {len(idle)} of {len(group.results)} runs: at most "
        f"{acted} action{'' if acted == 1 else 's'} and 0 rounds in {idle[0]['releases']} releases. It learns from its "
        "second action on: train longer, or lower warmup or interval."
    ]


def _conditions(group: SeedGroup) -> list[str]:
    """Why there is no guarantee or, where there is one, what it says beyond the sentence that all runs share."""
    if group.first["leaks"]:
        return [f"No guarantee: {'; '.join(group.first['leaks'])}."]
    return list(filter(None, dict.fromkeys(map(own_conditions, group.results))))


@dataclass(frozen=True)
class Power:
    """What one kind of attack could have refuted.

    Attributes:
        said: sentences, each with the names of the cells that it is about.
    """

    attack: str
    said: tuple[tuple[str, tuple[str, ...]], ...]


def powers(audits: Sequence[Audit], names: Mapping[str, str]) -> list[Power]:
    """The power of every kind of attack that was made, each sentence once."""
    found = []
    for part in (part for part in parts() if part.power):
        said: dict[str, list[str]] = {}
        for audit in (audit for audit in audits if part.key in audit):
            said.setdefault(str(audit[part.key]["power"]), []).append(names[audit["label"]])
        if said:
            found.append(Power(part.title, tuple((text, tuple(cells)) for text, cells in said.items())))
    return found


def drawn_lines(results: Sequence[Result], *, by_budget: bool = False) -> dict[str, dict[str, str]]:
    """A name and a colour for each cell's line in the charts of DVC, whose templates know no palette, by its label.

    Args:
        by_budget: whether budgets are lines of their own.
    """
    models = {str(one["model"]) for one in results}
    budgets = {budget_of(one) for one in results} - {NO_BUDGET}
    lines = {}
    for one in results:
        model = str(one["model"]) if len(models) > 1 else ""
        own = by_budget and len(budgets) > 1 and budget_of(one) != NO_BUDGET
        lines[str(one["label"])] = (str(one["mechanism"]), model, f"ε {budget_of(one)}" if own else "")
    colours = line_colours((name, f"{model} {budget}") for name, model, budget in lines.values())
    return {
        label: {
            "mechanism": " ".join(filter(None, (model, name, budget))),
            "colour": colours[name, f"{model} {budget}"],
        }
        for label, (name, model, budget) in lines.items()
    }


_CONSTANT = "eval_largest_class"


@dataclass(frozen=True)
class ScoreRow:
    """A mechanism at one budget: each score's mean over seeds, and its sample standard deviation (None of one seed)."""

    group: SeedGroup
    values: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class ScoreTable:
    """Rows, and what is said of the scores.

    Attributes:
        names: the columns.
        explained: what each column is, for those that need a word; by name.
        notes: sentences on implementations, and on what needs no training.
    """

    names: tuple[str, ...]
    explained: Mapping[str, str]
    rows: tuple[ScoreRow, ...]
    notes: tuple[str, ...]


def score_table(groups: Sequence[SeedGroup]) -> ScoreTable | None:
    """The scores that all cells have; None without any."""
    results = [result for group in groups for result in group.results]
    found = [scores_of(result) for result in results]
    names = tuple(name for name in (found[0] if found else {}) if all(name in one for one in found))
    if not names:
        return None
    rows = tuple(ScoreRow(group, tuple(_over_seeds(group.results, name) for name in names)) for group in groups)
    explained = {one.title: _explained(one) for one in shown_in("scores") if one.title in names}
    return ScoreTable(names, explained, rows, tuple(_notes(results[0])))


def _explained(metric: Metric) -> str:
    better = f"{metric.better} is better" if metric.better else ""
    return "; ".join(filter(None, (metric.explanation, better)))


def scores_of(result: Result) -> dict[str, float]:
    """The scores of a cell by the names of the page."""
    of_labels = {
        one.title: float(result["after"][one.name]) for one in shown_in("scores") if one.name in result["after"]
    }
    written: Mapping[str, Any] = result.get("scores", {})
    return of_labels | {name: float(value) for name, value in written.items()}


def _over_seeds(results: Sequence[Result], name: str) -> tuple[float, float | None]:
    values = [scores_of(result)[name] for result in results]
    return fmean(values), stdev(values) if len(values) > 1 else None


def _notes(result: Result) -> list[str]:
    notes = [f"{name}: {signature}." for name, signature in result.get("signatures", {}).items()]
    if "decoding" in result:
        notes.append(f"{result['inputs']} inputs; decoding: {result['decoding']}.")
    if _CONSTANT in result["after"]:
        share = float(result["after"][_CONSTANT])
        notes.append(
            f"A constant answer has an accuracy of {share:.4f}. Perplexity here is exp of the labels' mean loss."
        )
    return notes
