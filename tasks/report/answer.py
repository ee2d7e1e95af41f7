"""The sentence that answers: which mechanism is best at a certified epsilon, and how sure one may be of it.

Nothing is called best that seeds do not show to be best. Two mechanisms are told apart by Welch's t-test over seeds at
5 %, so that of two that are equal one is called best in 1 of 20 reports; of more than two, more rarely. One seed tells
nothing apart. Where the runs keep it, the error over held-out records must allow the difference too. A mechanism
without a finite certified epsilon is no candidate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dptune.core.digits import at_most
from tasks.charts.looks import looks
from tasks.charts.seed_groups import (
    EPSILONS,
    SAME_EPSILON,
    Result,
    SeedGroup,
    budget_of,
    differ,
    distinct_epsilons,
    over_seeds,
    perplexity_metric,
    record_error,
    untuned,
)
from tasks.experiment.cell_list import is_plain
from tasks.metrics import measured_on, shown_in, title_of
from tasks.report.numbers import digits2, digits4, gap, listing, whole_percent

_MOST_NAMES = 4


@dataclass(frozen=True)
class Ranking:
    """The mechanisms of one model, unit of privacy and certified epsilon.

    Attributes:
        metric: the perplexity that they are compared by.
        candidates: those that have this certified epsilon and did not diverge, lowest mean first; none for no epsilon.
        tied: how many of the first candidates cannot be told apart from the first one.
        nonprivate: the best training without privacy; None if there was none.
        untuned: perplexity of the public model; None if it is not known.
    """

    model: str
    unit: str
    epsilon: float
    metric: str
    candidates: tuple[SeedGroup, ...]
    tied: tuple[SeedGroup, ...]
    nonprivate: SeedGroup | None
    untuned: float | None

    @property
    def best(self) -> SeedGroup:
        """The candidate of the lowest mean."""
        return self.candidates[0]

    @property
    def choice(self) -> SeedGroup:
        """The candidate to take: a winner that is told apart from all others; else plain DP-SGD, which is the simplest,
        if it is among the first; else the lowest mean.
        """
        return self.plain if self.plain is not None and self.plain in self.tied else self.best

    @property
    def plain(self) -> SeedGroup | None:
        """The candidate that is plain DP-SGD; None if there is none."""
        return next((one for one in self.candidates if is_plain(one.first)), None)

    @property
    def seeds(self) -> int:
        """The smallest number of seeds of a candidate."""
        return min((len(group.results) for group in self.candidates), default=0)

    def share(self, group: SeedGroup) -> float | None:
        """The part of the non-private gain over the public model that a mechanism keeps; None without such a gain."""
        if self.untuned is None or self.nonprivate is None or self.nonprivate.mean >= self.untuned:
            return None
        return (self.untuned - group.mean) / (self.untuned - self.nonprivate.mean)


def rankings(results: Sequence[Result]) -> list[Ranking]:
    """An answer for every model, unit and certified epsilon, in this order; none without a finite epsilon."""
    metric = perplexity_metric(results)
    groups = [group for group in over_seeds(results, metric) if math.isfinite(group.mean)]
    found = []
    for model, unit in dict.fromkeys((str(one["model"]), str(one["unit"])) for one in results):
        mine = [group for group in groups if (group.first["model"], group.first["unit"]) == (model, unit)]
        nonprivate = [group for group in groups if group.first["model"] == model and group.nonprivate]
        private = [group for group in mine if math.isfinite(group.certified)]
        for epsilon in distinct_epsilons([group.certified for group in private]):
            equal = tuple(one for one in private if epsilon <= one.certified <= epsilon * (1 + SAME_EPSILON))
            tied = tuple(one for one in equal if one is equal[0] or not differ(equal[0], one, metric))
            before = untuned(results, model, metric)
            best = nonprivate[0] if nonprivate else None
            found.append(Ranking(model, unit, epsilon, metric, equal, tied, best, before))
    return found


def headlines(found: Sequence[Ranking]) -> list[Ranking]:
    """The answer to open with for each model and unit: at the epsilon of most candidates, the smallest of those."""
    first: dict[tuple[str, str], Ranking] = {}
    for ranking in sorted(found, key=lambda one: (-len(one.candidates), one.epsilon)):
        first.setdefault((ranking.model, ranking.unit), ranking)
    return [ranking for ranking in found if ranking is first[ranking.model, ranking.unit]]


def sentence(ranking: Ranking, where: str = "", *, several_models: bool = False) -> str:
    """The answer in one sentence; names of mechanisms stand in backticks.

    Args:
        where: the records, such as "the synthetic cohort"; empty: not said.
        several_models: whether the model must be named.
    """
    place = "".join([f" on {where}" if where else "", f" with model `{ranking.model}`" if several_models else ""])
    said = f"{_verdict(ranking)}{_rivals(ranking)}{_kept(ranking)}{_take(ranking)}"
    return f"At certified ε = {at_most(ranking.epsilon)}{place}, {said}."


def _verdict(ranking: Ranking) -> str:
    best, name = ranking.best, title_of(ranking.metric)
    if len(ranking.candidates) == 1:
        return f"{_named(best)} reaches {name} of {digits4(best.mean)}"
    if len(ranking.tied) == 1:
        return f"{_named(best)} is best: {name} {digits4(best.mean)}"
    low, high = digits4(best.mean), digits4(max(group.mean for group in ranking.tied))
    between = low if low == high else f"{low} to {high}"
    seeds = " with one seed" if ranking.seeds < 2 else ""
    return f"{listed([group.mechanism for group in ranking.tied])} cannot be told apart{seeds}: {name} {between}"


def _take(ranking: Ranking) -> str:
    if len(ranking.tied) == 1 or ranking.plain not in ranking.tied:
        return ""
    # Where the best of them is worse too, that is said of all.
    lost = ranking.untuned is not None and ranking.choice.mean > ranking.untuned >= ranking.best.mean
    return f"; take {_named(ranking.choice)}, the simplest{', though here it is worse than the untuned model' * lost}"


def _named(group: SeedGroup) -> str:
    return f"plain DP-SGD (`{group.mechanism}`)" if is_plain(group.first) else f"`{group.mechanism}`"


def listed(labels: Sequence[str]) -> str:
    """Names in backticks, as a sentence lists them; of more than four, the first three."""
    names = [f"`{label}`" for label in labels]
    shown = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
    return listing(shown)


def _rivals(ranking: Ranking) -> str:
    """What it is compared with: plain DP-SGD or, if that is best, the next one; and training without privacy."""
    plain, ranked = ranking.plain, len(ranking.tied) == 1
    rivals = []
    if plain is not None and plain is not ranking.best and (ranked or plain not in ranking.tied):
        rivals.append(f"{digits4(plain.mean)} for plain DP-SGD (`{plain.mechanism}`)")
    elif plain is ranking.best and ranked and len(ranking.candidates) > 1:
        following = ranking.candidates[1]
        rivals.append(f"{digits4(following.mean)} for the next, `{following.mechanism}`,")
    if ranking.nonprivate is not None:
        rivals.append(f"{digits4(ranking.nonprivate.mean)} without privacy")
    if ranking.untuned is not None and (ranking.nonprivate is None or len(rivals) == 1):
        rivals.append(f"{digits4(ranking.untuned)} for the untuned model")
    return f", against {' and '.join(rivals)}".rstrip(",") if rivals else ""


def _kept(ranking: Ranking) -> str:
    tied = len(ranking.tied) > 1
    shares = [share for group in ranking.tied if (share := ranking.share(group)) is not None]
    if not tied:
        shares = shares[:1]
    # Without a gain to keep, too: a run that lost must not read like a result.
    if max(shares) < 0 if shares else ranking.untuned is not None and ranking.best.mean > ranking.untuned:
        return f"; {'they are' if tied else 'it is'} worse than the untuned model"
    if not shares:
        return ""
    keep = "they keep" if tied else "it keeps"
    if min(shares) >= 1:
        return f"; {keep} all of the gain: training without privacy is no better here"
    low, high = (whole_percent(min(max(0.0, share), 1.0)) for share in (min(shares), max(shares)))
    return f"; {keep} {low if low == high else f'{low} to {high}'} % of the gain"


def records_of(results: Sequence[Result]) -> str:
    """The records in a few words, such as "the synthetic cohort"."""
    labels = {str(result["data"]) for result in results}
    if all(result["synthetic"] for result in results):
        return "the synthetic cohort" if any("cohort" in label for label in labels) else "synthetic records"
    return " and ".join(sorted(re.split(r"[:;,(]", label)[0].strip() for label in labels))


NOTHING = "No mechanism here has a finite certified ε and a finite perplexity, so none can be recommended."


def answer_lines(results: Sequence[Result]) -> list[str]:
    """The opening sentence of each model and unit."""
    found = rankings(results)
    several = len({result["model"] for result in results}) > 1
    where = records_of(results)
    return [sentence(one, where, several_models=several) for one in headlines(found)] or [NOTHING]


def further_lines(results: Sequence[Result]) -> list[str]:
    """The sentences of all other epsilons: those with several candidates, and one for what each other one costs."""
    found = rankings(results)
    several, opened = len({result["model"] for result in results}) > 1, headlines(found)
    others = [one for one in found if one not in opened]
    # A mechanism that did worse than the untuned model has a sentence of its own: its share of the gain is negative.
    alone = [one for one in others if len(one.candidates) == 1]
    lone = [one for one in alone if (share := one.share(one.best)) is not None and share >= 0]
    compared = [sentence(one, several_models=several) for one in others if one not in lone]
    of_each: dict[tuple[str, str, str], list[Ranking]] = {}
    for one in lone:
        of_each.setdefault((one.model, one.unit, _named(one.best)), []).append(one)
    return [*compared, *(_price(costs, several_models=several) for costs in of_each.values())]


def _price(costs: Sequence[Ranking], *, several_models: bool) -> str:
    """What each epsilon costs a mechanism that is alone there."""
    place = f" with model `{costs[0].model}`" if several_models else ""
    epsilons = listing([at_most(one.epsilon) for one in costs])
    reached = listing([digits4(one.best.mean) for one in costs])
    shares = [one.share(one.best) or 0.0 for one in costs]
    kept = listing([str(whole_percent(min(share, 1.0))) for share in shares])
    what = f"{title_of(costs[0].metric)} of {reached}, and keeps {kept} % of the gain"
    no_better = " (100 %: training without privacy is no better)" if max(shares) >= 1 else ""
    return f"At certified ε = {epsilons}{place}, {_named(costs[0].best)} reaches {what}{no_better}."


def caveats(results: Sequence[Result]) -> list[str]:
    """What a reader must know to use the answer: seeds, learning rates, what was no candidate, what gain is."""
    opened = headlines(rankings(results))
    return [*_seeds(opened), *_rates(results), *_left_out(results), *_gain(opened)]


def _seeds(opened: Sequence[Ranking]) -> list[str]:
    several = [ranking for ranking in opened if len(ranking.candidates) > 1]
    if not several:
        return ["Nothing else has this certified ε, so nothing was compared."] if opened else []
    errors = [line for ranking in several for line in _record_error(ranking)]
    seeds = min(ranking.seeds for ranking in several)
    if seeds < 2:
        one = "One seed cannot rank mechanisms: noise alone moves each figure. Set `experiment.seeds: [0, 1, 2]`."
        return [one, *errors]
    both = " and the error over records allows it" if errors else ""
    return [f"{seeds} seeds each; called different where Welch's t-test over seeds says so at 5 %{both}.", *errors]


def _record_error(ranking: Ranking) -> list[str]:
    """How far the lowest mean is from plain DP-SGD, or from the next one, and the error of that over records."""
    best = ranking.best
    rival = ranking.plain if ranking.plain not in (None, best) else ranking.candidates[1]
    assert rival is not None
    found = record_error(best, rival, ranking.metric)
    if found is None:
        return []
    high, low = digits4(rival.mean), digits4(best.mean)
    return [
        f"On the same {measured_on(ranking.metric)}, `{rival.mechanism}` ({high}) is {gap(high, low)} above "
        f"`{best.mechanism}` ({low}), with a standard error over records of {digits2(found.error)}; training's own "
        "noise is not in it."
    ]


def _rates(results: Sequence[Result]) -> list[str]:
    rates = {str(one["mechanism"]): float(one["learning_rate"]) for one in results if "learning_rate" in one}
    if not rates:
        return ["These results do not say which learning rate each mechanism ran at."]
    if len(set(rates.values())) == 1:
        rate = next(iter(rates.values()))
        of_all = ", the same for all: part of any difference may be the rate's" if len(rates) > 1 else ""
        return [f"Learning rate {rate:g}{of_all}."]
    named = ", ".join(f"`{name}` {rates[name]:g}" for name in looks(rates))
    return [
        f"Learning rates, as the settings give them: {named}. Nothing here shows that each suits its mechanism best."
    ]


def _left_out(results: Sequence[Result]) -> list[str]:
    groups = over_seeds(results, perplexity_metric(results))
    leaky = [one for one in groups if math.isinf(one.certified) and not one.nonprivate]
    names = ", ".join(dict.fromkeys(f"`{group.mechanism}`" for group in leaky))
    diverged = ", ".join(dict.fromkeys(f"`{group.mechanism}`" for group in groups if not math.isfinite(group.mean)))
    said = [f"Left out, without a certified ε: {names}."] if names else []
    return [*said, *([f"Left out, because a run diverged: {diverged}."] if diverged else [])]


def _gain(opened: Sequence[Ranking]) -> list[str]:
    found = next((one for one in opened if one.share(one.best) is not None), None)
    if found is None or found.untuned is None or found.nonprivate is None:
        return []
    low, high = digits4(found.untuned), digits4(found.nonprivate.mean)
    model = f" (model `{found.model}`)" if len(opened) > 1 else ""
    once = " That is one run: in another one, all shares of the gain would be others."
    one_seed = len(found.nonprivate.results) == 1
    return [f"Gain: from {low}, the public model untuned, to {high}, tuned without privacy{model}.{once * one_seed}"]


# The report's answer as MLflow shows it, a sentence, a tag and figures of the parent run, and as DVC compares it.


@dataclass(frozen=True)
class Headline:
    """Figures of the mechanism to take at one certified epsilon, and what it is measured by.

    Attributes:
        sentence: the report's answer, which says how sure one may be of it.
        tags: what is no number, by name.
        metrics: figures by the names that a cell's have; those that nothing was measured for are left out.
    """

    sentence: str
    tags: dict[str, str]
    metrics: dict[str, float]


def headline(results: Sequence[Result]) -> Headline:
    """The headline of the first model that has an answer; only the sentence is about all of them."""
    sentence = " ".join(answer_lines(results))
    metric, opened = perplexity_metric(results), headlines(rankings(results))
    model = opened[0].model if opened else str(results[0]["model"])
    groups = [one for one in over_seeds(results, metric) if one.first["model"] == model and math.isfinite(one.mean)]
    figures = {
        "nonprivate_perplexity": next((one.mean for one in groups if one.nonprivate), None),
        "untuned_perplexity": untuned(results, model, metric),
    }
    if not opened:
        return Headline(sentence, {}, _finite(figures))
    best, plain = opened[0].choice, opened[0].plain
    figures |= {metric: best.mean, "dp_sgd_perplexity": plain.mean if plain else None}
    figures |= {key: _largest(best, key) for key in EPSILONS}
    return Headline(sentence, {"chosen_mechanism": best.mechanism, "answer": sentence}, _finite(figures))


def best_cell(results: Sequence[Result], audited: Mapping[str, float]) -> dict[str, Any]:
    """Mechanism, perplexity and the four epsilons of the candidate to take: what DVC compares experiments by.

    Args:
        audited: what attacks showed, by the labels of cells.

    Returns: perplexity alone, the lowest, if nothing has a certified epsilon.
    """
    opened, metric = headlines(rankings(results)), perplexity_metric(results)
    if not opened:
        lowest = over_seeds(results, metric)[0]
        return {"mechanism": lowest.mechanism} | _finite({metric: lowest.mean})
    best = opened[0].choice
    shown = [audited[label] for one in best.results if (label := str(one["label"])) in audited]
    figures = {metric: best.mean} | {key: _largest(best, key) for key in EPSILONS}
    more = [one.name for one in shown_in("comparison") if all(one.name in cell["after"] for cell in best.results)]
    figures |= {name: fmean(float(cell["after"][name]) for cell in best.results) for name in more}
    return {"mechanism": best.mechanism} | _finite(figures | {"epsilon_audited": max(shown, default=None)})


def perplexities_of(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Mean perplexity of each mechanism by budget, so that `dvc metrics diff` compares like with like."""
    found: dict[str, dict[str, float]] = {}
    several = len({str(result["model"]) for result in results}) > 1
    for group in over_seeds(results, perplexity_metric(results)):
        name = f"{group.first['model']} {group.mechanism}" if several else group.mechanism
        found.setdefault(name, {}).setdefault(budget_of(group.first), group.mean)
    return {name: kept for name, means in found.items() if (kept := _finite(means))}


def _largest(group: SeedGroup, key: str) -> float:
    return max(float(result[key]) for result in group.results)


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in figures.items() if value is not None and math.isfinite(value)}
