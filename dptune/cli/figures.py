"""Figures of a mechanism, a protocol or a ledger that commands print, by name."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.controllers.rldp_published import RldpPublished
from dptune.mechanisms.planning import check_candidate, planned
from dptune.policy import method
from dptune.prediction.protocols import PUBLISHED_ACCOUNTANT, priced_answers
from dptune.privacy.accountants import leaks_of, repriced_epsilon, smallest_epsilon
from dptune.privacy.accounting.claimed import CLAIMED_BY, renyi_claim
from dptune.privacy.accounting.mixture_figures import mixture_figures
from dptune.privacy.accounting.strategy import column_norm, relative_error
from dptune.privacy.run_header import composition_of
from dptune.privacy.samplers.sampler import POISSON, SAMPLERS
from dptune.privacy.samplers.sampler_bounds import least_epsilon
from dptune.privacy.selection import price_selection

if TYPE_CHECKING:
    from dptune.mechanisms.mechanism import Mechanism
    from dptune.mechanisms.planning import Schedule
    from dptune.prediction.protocols import Protocol
    from dptune.privacy.accountants import Epsilons
    from dptune.privacy.certificate import SearchCertificate
    from dptune.privacy.ledger_file import LedgerContents
    from dptune.privacy.release import Composition, Release
    from dptune.privacy.selection import Bound
    from dptune.privacy.selection_law import SelectionLaw


def of_prices(prices: Epsilons, accountant: str, releases: Composition, delta: float) -> dict[str, Any]:
    """The three epsilons, whose claim the first one is, and why the certified one is infinite where it is.

    Of plain DP-SGD it also gives what Renyi DP proves (Mironov 2017): its users publish that, and reports show it.

    Args:
        accountant: the key of ``CLAIMED_BY`` that counted ``epsilon_published``.
        releases: those that ``prices.certified`` counts, inherited ones too.
        delta: of all these epsilons.
    """
    claim: dict[str, Any] = {"epsilon_published": prices.published}
    if math.isfinite(prices.published):
        claim["epsilon_published_by"] = CLAIMED_BY[accountant]
        if (renyi := renyi_claim(prices, accountant, releases, delta)) is not None:
            claim["epsilon_published_by_renyi_dp"] = renyi
    return {**claim, **prices.to_dict(), "leaks": list(prices.leaks)}


def of_schedule(mechanism: Mechanism, schedule: Schedule) -> dict[str, Any]:
    """The facts of a run that decide its price."""
    knobs = mechanism.knobs()
    return {
        "mechanism": mechanism.name,
        "noise_multiplier": knobs.noise_multiplier,
        "effective_noise_multiplier": mechanism.effective_noise_multiplier(knobs) if mechanism.private else 0.0,
        "sample_rate": schedule.sample_rate,
        "steps": schedule.steps,
        "delta": schedule.delta,
        **_of_bands(mechanism.coefficients, schedule.sample_rate, schedule.steps),
    }


def _of_bands(strategy: tuple[float, ...], sample_rate: float, steps: int) -> dict[str, Any]:
    """The bands of correlated noise, and what they leave of the noise of independent noise of the same multiplier."""
    if not strategy:
        return {}
    bands = len(strategy)
    return {
        "bands": bands,
        "group_sample_rate": bands * sample_rate,
        "visits": -(-steps // bands),
        "column_norm": column_norm(strategy),
        **{f"noise_in_{name}_at_one_multiplier": left for name, left in _left_in_sums(strategy, steps).items()},
    }


def of_bands_at_one_budget(banded: Mechanism, independent: Mechanism, steps: int) -> dict[str, Any]:
    """What bands leave of the noise of independent noise that keeps the same budget, in sums of gradients."""
    alone = independent.knobs().noise_multiplier
    ratio = banded.knobs().noise_multiplier / alone
    return {
        "bands": banded.bands,
        "independent_noise_multiplier": alone,
        **{
            f"noise_in_{name}_over_independent": ratio * left
            for name, left in _left_in_sums(banded.coefficients, steps).items()
        },
    }


def _left_in_sums(strategy: tuple[float, ...], steps: int) -> dict[str, float]:
    """What a strategy leaves of independent noise: in recent steps, in the sum of all, and in the mean of all sums."""
    return {
        "recent_sum": relative_error(strategy, steps, "recent"),
        "last_sum": relative_error(strategy, steps, "last"),
        "mean_sum": relative_error(strategy, steps, "mean"),
    }


def of_run(mechanism: Mechanism, schedule: Schedule, prices: Epsilons) -> dict[str, Any]:
    """A planned run, its epsilons, and diagnostics of its family of mechanisms, which are no guarantees."""
    releases = planned(mechanism, schedule)
    return {
        **of_schedule(mechanism, schedule),
        **of_prices(prices, mechanism.published_accountant, releases, schedule.delta),
        **_repriced_diagnostic(mechanism, schedule),
        **mixture_figures(releases, schedule.delta),
    }


def of_sampler(mechanism: Mechanism, schedule: Schedule, name: str | None) -> dict[str, Any]:
    """The sampler by its name, whom it takes for neighbours, and what it costs at least and if it were Poisson.

    Empty if no sampler was named.
    """
    if name is None:
        return {}
    found: dict[str, Any] = {"sampler": name, "neighbours": SAMPLERS[name].neighbours}
    if not schedule.sampler.claimed:
        found["epsilon_published"] = "not defined: the paper gives none for this sampler"
    if schedule.sampler.like_poisson:
        return found
    releases = planned(mechanism, schedule)
    # A controller may release statistics that it plans only when a run starts; no data of the proof show their share.
    plain = type(mechanism.controller).statistics is Constant.statistics and not leaks_of(releases)
    least = least_epsilon(releases, schedule.delta) if plain else None
    as_poisson = planned(mechanism, replace(schedule, sampler=POISSON))
    left_out = schedule.sampler.left_out(schedule.sample_rate)
    return {
        **found,
        **({"left_out_of_an_epoch": left_out} if left_out else {}),
        **{key: value for key, value in schedule.sampler.to_dict().items() if key != "name"},
        **({} if least is None else {"epsilon_at_least": least}),
        "epsilon_if_it_were_poisson": smallest_epsilon(as_poisson, schedule.delta),
    }


def _repriced_diagnostic(mechanism: Mechanism, schedule: Schedule) -> dict[str, Any]:
    """RLDP's own diagnostic: its Algorithm 1 prices all past steps at the current noise. Empty for other mechanisms."""
    if not isinstance(mechanism.controller, RldpPublished):
        return {}
    last = mechanism.release(mechanism.knobs(), schedule.sample_rate)
    return {"epsilon_repriced_diagnostic": repriced_epsilon(last, schedule.steps, schedule.delta)}


def of_search(
    mechanism: Mechanism, schedule: Schedule, law: SelectionLaw, delta: float, bound: Bound
) -> dict[str, Any]:
    """What the best of a random number of such runs costs, and what other ways to count would say.

    ``epsilon_certified`` is then the search's: the guarantee of its winner, which a run's own no longer is.

    Raises: ConfigError for a mechanism that cannot be a candidate.
    """
    check_candidate(mechanism)
    prices = price_selection(planned(mechanism, schedule), law, delta, bound)
    if not math.isfinite(prices.certified):
        problem = "the loss distribution of one candidate reaches beyond the accountant's tables"
        raise ConfigError("--candidates", problem, fix="raise the noise, or lower the steps")
    return {
        "candidates": law.uncapped_mean,
        "shape": law.to_dict()["shape"],
        "most_candidates": law.most,
        "chance_to_try_one_of_the_best_tenth": law.hit(0.1),
        "search_bound": bound,
        "epsilon_certified": prices.certified,
        "search_epsilon_one_shift": prices.one_shift,
        "search_epsilon_renyi_published": prices.renyi,
        "epsilon_of_as_many_runs_composed": prices.composed,
        "epsilon_of_one_candidate_no_guarantee": prices.one_candidate,
    }


def of_certificate(certificate: SearchCertificate) -> dict[str, Any]:
    """A search's figures, computed from its certificate alone."""
    law, winner = certificate.law, certificate.winner
    return {
        "search": certificate.id,
        "candidates": law.uncapped_mean,
        "shape": law.to_dict()["shape"],
        "most_candidates": law.most,
        "kinds": len(certificate.kinds),
        "search_bound": certificate.bound,
        "delta": certificate.delta,
        "epsilon_certified": certificate.certified,
        "epsilon_noise_only": certificate.epsilon_by(certificate.bound),
        "epsilon_published": math.inf,  # the mechanisms' papers count no search
        "leaks": list(certificate.all_leaks),
        "search_epsilon_one_shift": certificate.epsilon_by("one_shift"),
        "epsilon_of_one_candidate_no_guarantee": certificate.one_candidate,
        "budget_epsilon": certificate.epsilon,
        "scored_on": certificate.score.on,
        "score_noise_multiplier": certificate.score.noise_multiplier,
        "score_clip": certificate.score.clip,
        "winner": None if winner is None else dict(winner.options),
        "winners_score": None if winner is None else winner.score,
        "complete": certificate.complete,
        "data": certificate.data,
        "unit": certificate.unit,
        "units": certificate.units,
    }


def of_winner(contents: LedgerContents, certificate: SearchCertificate) -> dict[str, Any]:
    """Figures of a search's winner: its own run's facts, and the whole search's epsilons."""
    own = of_ledger(contents)
    alone = {"epsilon_published_of_one_candidate_no_guarantee": own["epsilon_published"]}
    own = {name: value for name, value in own.items() if not name.startswith("epsilon_published_by")}
    return own | of_certificate(certificate) | alone


def of_answers(protocol: Protocol) -> dict[str, Any]:
    """Figures of a protocol that answers within a budget."""
    return {
        "mechanism": protocol.name,
        **{key: value for key, value in asdict(protocol).items() if key not in ("name", "epsilon")},
        "rdp_budget": protocol.rdp_budget,
        "rdp_per_token": protocol.rdp_per_token,
        **protocol.figures,
        **of_prices(priced_answers(protocol), PUBLISHED_ACCOUNTANT, Counter(), protocol.delta),
    }


def of_policy_gradient(dppg: method.Dppg, delta: float) -> dict[str, Any]:
    """Figures of DP policy gradient, in which every user takes part once."""
    return {
        "mechanism": method.NAME,
        **asdict(dppg),
        "delta": delta,
        **of_prices(dppg.price(delta), method.PUBLISHED_ACCOUNTANT, Counter(), delta),
    }


def of_ledger(contents: LedgerContents) -> dict[str, Any]:
    """Figures of a run, computed from its ledger alone."""
    header = contents.header
    releases = sorted(contents.composition, key=lambda release: release.noise_multiplier)
    effective = sorted({release.effective_noise_multiplier for release in releases})
    strategy = next((release.coefficients for release in releases), ())
    # A row of correlated noise states the rate of a unit in the rows of its own group.
    rates = sorted({release.sample_rate / (len(release.coefficients) or 1) for release in releases})
    counted = contents.composition + composition_of(header.inherited)
    return {
        "mechanism": header.mechanism,
        "noise_multiplier": _one_or_range([release.noise_multiplier for release in releases]),
        "effective_noise_multiplier": _one_or_range(effective),
        "sample_rate": _one_or_range(rates),
        "steps": contents.releases,
        "delta": header.delta,
        **_of_bands(strategy, rates[0] if rates else 0.0, contents.releases),
        **of_prices(contents.epsilons, header.published_accountant, counted, header.delta),
        **_repriced_ledger(contents),
        **mixture_figures(contents.composition, header.delta),
        **_sampler_of_ledger(releases),
        "accounting": header.accounting,
        "budget_epsilon": header.epsilon,
        "complete": contents.complete,
        "inherited_releases": sum(count for _, count in header.inherited),
        "data": header.data,
        "run_id": header.run_id,
        "telemetry": header.telemetry,
        "unit": header.unit,
        **({"canaries": header.canaries} if header.canaries else {}),
        **({"plugins": list(header.plugins)} if header.plugins else {}),
    }


def _sampler_of_ledger(releases: list[Release]) -> dict[str, Any]:
    """The sampler and whom its price takes for neighbours; empty if all is Poisson sampling."""
    names = sorted({release.sampler.name for release in releases})
    if all(release.sampler == POISSON for release in releases):
        return {}
    return {
        "sampler": ", ".join(names),
        "neighbours": "; ".join(dict.fromkeys(SAMPLERS[name].neighbours for name in names)),
    }


def _repriced_ledger(contents: LedgerContents) -> dict[str, Any]:
    if contents.last is None or not contents.last.adaptive:
        return {}
    return {"epsilon_repriced_diagnostic": repriced_epsilon(contents.last, contents.releases, contents.header.delta)}


def _one_or_range(values: list[float]) -> float | list[float] | None:
    if not values:
        return None
    return values[0] if values[0] == values[-1] else [values[0], values[-1]]
