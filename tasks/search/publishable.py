"""The price of choosing: what a search's winner costs by several ways to count, from its public certificate alone.

Each way is told twice: the epsilon that it counts for the candidates as they were run, of the dearer of training and
held-out units as the certificate has it, and the noise multiplier that their training would need for the search's
budget. A single run has no scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dptune.core.errors import ConfigError
from dptune.job.preparation import PreparedRun
from dptune.job.result import HELD_OUT, PUBLIC, SIDES, RunResult
from dptune.job.run import Tuned, figures_of
from dptune.job.search.space import Space
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.accounting.loss_profile import profile_of
from dptune.privacy.accounting.parts import dearest
from dptune.privacy.calibration import calibrate
from dptune.privacy.certificate import SearchCertificate, composition_of
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.selection import renyi_selection_epsilon, selection_epsilon
from dptune.privacy.selection_law import SelectionLaw
from tasks.search.request import model_of
from tasks.settings.params import Settings

#: Ways to count, by their key: a run that nothing was chosen from; this search; the same by the older and by the
#: published bound; as many runs as are expected, all shown; and as many as the cap allows.
SINGLE, SEARCH, ONE_SHIFT, RENYI, COMPOSED, CAPPED = "single", "search", "one_shift", "renyi", "composed", "capped"
#: Expected numbers of candidates of the chart, beside the search's own.
_COUNTS = (3.0, 10.0, 30.0)
Price = Callable[[Composition], float]


@dataclass(frozen=True)
class Counting:
    """The cost of a search by one way of counting, such as composition. Public.

    Attributes:
        way: its key.
        runs: number of runs that it composes; 0 for others.
        epsilon: what it says of the candidates as they were run.
        noise_multiplier: the noise that it asks for at the search's budget; None if no noise reaches it.
    """

    way: str
    runs: int
    epsilon: float
    noise_multiplier: float | None


@dataclass(frozen=True)
class ChoicePrices:
    """The price of choosing, and how it grows with the number of candidates. Public.

    Attributes:
        noise_multiplier: effective noise multiplier of the winner's kind.
        countings: all ways, this search's first.
        curve: (way, expected candidates, noise multiplier) at the search's budget.
    """

    noise_multiplier: float
    countings: tuple[Counting, ...]
    curve: tuple[tuple[str, float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; infinities as texts."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "countings": [vars(one) | {"epsilon": str(one.epsilon)} for one in self.countings],
            "curve": [list(point) for point in self.curve],
        }


def choice_prices(certificate: SearchCertificate) -> ChoicePrices:
    """The prices of a finished search, for candidates of its winner's kind. Takes some seconds.

    Raises: ConfigError for a certificate without a winner.
    """
    run, law, delta, budget = _of_winner(certificate), certificate.law, certificate.delta, certificate.epsilon
    expected, noise = math.ceil(law.uncapped_mean - 1e-9), noise_of(run)

    def single(releases: Composition) -> float:
        return dearest(releases, lambda part: smallest_epsilon(part, delta))

    def least(price: Price, roughly: Price | None = None) -> float | None:
        return _least_noise(run, price, budget, roughly)

    def composed(runs: int) -> Price:
        return lambda releases: single(Counter({release: count * runs for release, count in releases.items()}))

    def by_renyi(law: SelectionLaw) -> Price:
        return lambda releases: renyi_selection_epsilon(releases, law, delta)

    def by_shift(releases: Composition) -> float:
        return selection_epsilon(profile_of(releases), law, delta, "one_shift")

    def counted(way: str, price: Price, runs: int = 0) -> Counting:
        return Counting(way, runs, max(map(price, sides)), least(price))

    sides = (run, *_of_scores(certificate))
    countings = (
        Counting(SEARCH, 0, certificate.certified, noise),
        Counting(SINGLE, 0, single(run), least(single)),
        Counting(ONE_SHIFT, 0, certificate.epsilon_by("one_shift"), least(by_shift)),
        counted(RENYI, by_renyi(law)),
        counted(COMPOSED, composed(expected), expected),
        counted(CAPPED, composed(law.most), law.most),
    )
    found = {one.way: one.noise_multiplier for one in countings}
    curve: list[tuple[str, float, float | None]] = [(way, 1.0, found[SINGLE]) for way in (SEARCH, RENYI, COMPOSED)]
    for count in sorted({*_COUNTS, round(law.uncapped_mean, 6)}):
        other = SelectionLaw.of(count, law.shape)
        if math.isclose(count, law.uncapped_mean, rel_tol=1e-5):
            curve += [(way, count, found[way]) for way in (SEARCH, RENYI, COMPOSED)]
            continue
        ratio = _search_price(run, other, certificate) / single(run)
        curve.append(
            (
                SEARCH,
                count,
                least(
                    lambda releases, other=other: _search_price(releases, other, certificate),  # type: ignore[misc]
                    lambda releases, ratio=ratio: single(releases) * ratio,  # type: ignore[misc]
                ),
            )
        )
        curve += [(RENYI, count, least(by_renyi(other))), (COMPOSED, count, least(composed(math.ceil(count))))]
    return ChoicePrices(noise, countings, tuple((way, count, z) for way, count, z in curve if z is not None))


def noise_of(run: Composition) -> float:
    """The least effective noise multiplier of a run's releases."""
    return min(release.effective_noise_multiplier for release in run)


def _of_winner(certificate: SearchCertificate) -> Composition:
    """The releases of a candidate of the winner's kind."""
    winner = certificate.winner
    number = None if winner is None else Space.of(certificate.space).kind_of(winner.options)
    if number is None:
        raise ConfigError("certificate", "names no winner of its space", fix="search again, or restore it")
    own = certificate.score.release if certificate.score.on == "train" else None
    return composition_of(certificate.kinds[number][1]) + Counter([own] if own else [])


def _of_scores(certificate: SearchCertificate) -> list[Composition]:
    """What a candidate releases of held-out units: its score, if they score. Whoever counts their side must pay it."""
    release = certificate.score.release
    return [Counter([release])] if certificate.score.on == "held_out" and release is not None else []


def _search_price(releases: Composition, law: SelectionLaw, certificate: SearchCertificate) -> float:
    return selection_epsilon(profile_of(releases), law, certificate.delta, certificate.bound)


def _least_noise(run: Composition, price: Price, budget: float, roughly: Price | None) -> float | None:
    """The least effective noise multiplier at which ``price`` meets the budget; None if none does."""
    now = noise_of(run)

    def at(counted: Price) -> Callable[[float], float]:
        return lambda noise: counted(_scaled(run, noise / now))

    try:
        return calibrate(at(price), budget, roughly=at(roughly) if roughly else None)
    except ConfigError:
        return None


def _scaled(run: Composition, factor: float) -> Composition:
    """The same releases with ``factor`` times the noise."""
    total: Composition = Counter()
    for release, count in run.items():
        total[_noisier(release, factor)] += count
    return total


def _noisier(release: Release, factor: float) -> Release:
    law = None if release.law is None else release.law.scaled(1 / factor)
    return replace(release, noise_multiplier=factor * release.noise_multiplier, law=law)


# What may be told of an ended search, for its page and MLflow: the winner, its figures, and the price of choosing.


#: Short names of the records that figures are about.
_KEYS = {HELD_OUT: "held_out", PUBLIC: "public"}


def told_of(settings: Settings, prepared: PreparedRun, tuned: Tuned, about: dict[str, Any]) -> dict[str, Any]:
    """What may be told of a finished search, for page and MLflow: the winner, its figures, and the price of choosing.

    Under research telemetry that includes the winner's figures on held-out private records, as of every cell; no
    epsilon covers those.
    """
    result = RunResult.read(RunFolder(tuned.folder).result)
    measured = {
        "perplexity": {_KEYS[records]: pair for records, pair in tuned.perplexity.items()},
        "scores": {_KEYS[records]: scores for records, scores in tuned.scores.items()},
    }
    if settings.experiment.telemetry == "research" and tuned.certificate is not None:
        measured = _with_held_out(measured, prepared, tuned)
    return _asked(settings, prepared, about) | {
        "released": True,
        "epsilon_certified": str(tuned.epsilons.certified),
        "settings": result.settings,
        "score": score_of(tuned.certificate),
        **measured,
        "prices": None if tuned.certificate is None else choice_prices(tuned.certificate).to_json(),
    }


def told_of_nothing(
    settings: Settings, prepared: PreparedRun, about: dict[str, Any], certified: float, score: dict[str, Any]
) -> dict[str, Any]:
    """What may be told of a search without a result: that, and what it costs.

    Args:
        certified: epsilon of all that was planned, as the register counts it.
    """
    return _asked(settings, prepared, about) | {
        "released": False,
        "epsilon_certified": str(certified),
        "settings": {},
        "score": score,
        "perplexity": {},
        "scores": {},
        "prices": None,
    }


def _asked(settings: Settings, prepared: PreparedRun, about: dict[str, Any]) -> dict[str, Any]:
    """What was searched, on which records: the same whatever was found."""
    name, _ = model_of(settings)
    return {
        "name": settings.search.name,
        "model": name,
        "rehearsed": settings.search.rehearses,
        "data": str(about["label"]),
        "synthetic": bool(about["synthetic"]),
        "unit": prepared.units.kind,
        "units": len(prepared.units),
        "telemetry": settings.experiment.telemetry,
        "epsilon": settings.search.epsilon,
        "delta": prepared.schedule.delta,
        "expected": settings.search.candidates,
        "space": settings.search.asked.space.to_json(),
    }


def score_of(certificate: SearchCertificate | None) -> dict[str, Any]:
    """What candidates were compared by, and the winner's score with the standard deviation of its noise."""
    if certificate is None or certificate.winner is None:
        return {"on": "rehearsal"}
    terms = certificate.score
    deviation = terms.noise_multiplier * terms.clip / terms.units
    return {
        "on": terms.on,
        "units": terms.units,
        "clip": terms.clip,
        "value": certificate.winner.score,
        "deviation": deviation,
    }


def _with_held_out(measured: dict[str, Any], prepared: PreparedRun, tuned: Tuned) -> dict[str, Any]:
    """The figures with those of held-out records: before and after of a causal model, after alone of a classifier."""
    alone, side = replace(prepared, public=None), f"{SIDES[HELD_OUT]}_"
    if not (after := figures_of(alone, tuned.model)):
        return measured
    if prepared.settings.task == "classify":
        scores = {name.removeprefix(side): (value, value) for name, value in after.items()}
        return measured | {"scores": measured["scores"] | {"held_out": scores}}
    before, (name,) = figures_of(alone, prepared.base.load()), after
    return measured | {"perplexity": measured["perplexity"] | {"held_out": (before[name], after[name])}}
