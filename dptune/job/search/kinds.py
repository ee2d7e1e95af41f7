"""The kinds of candidates of a search: each with the noise that keeps the whole search within the budget."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.job.base_model import Base
from dptune.job.preparation import check_mechanism, check_public
from dptune.job.run_spec import TuneSchedule, schedule_of
from dptune.job.search.settings import SearchSettings
from dptune.job.search.space import OPTION, Configuration
from dptune.job.settings import RENAMED, TuneSettings
from dptune.mechanisms.agents.rl import idle_agent
from dptune.mechanisms.interfaces import RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import calibrated_candidate, fitted, noise_options, planned
from dptune.mechanisms.registry import build, of_model
from dptune.mechanisms.versions import versions_of
from dptune.privacy.accounting.loss_profile import average, gaussian_profile, profile_of
from dptune.privacy.calibration import calibrate
from dptune.privacy.certificate import ScoreTerms
from dptune.privacy.release import Composition, Release
from dptune.privacy.selection import selection_epsilon
from dptune.training.optimizers import check_rule

_log = logging.getLogger(__name__)
#: Growth of all noise where the average of kinds would cost a little more than each alone.
_MORE, _TRIES = 1.0005, 200


@dataclass(frozen=True)
class CandidateKind:
    """Candidates that make the same releases. Public.

    Attributes:
        weight: the chance of the kind.
        configuration: its settings; ranges at their lower ends.
        noise: options with which the registry builds its noise.
        releases: releases of its training.
        plugins: code outside dptune that its candidates use.
    """

    weight: float
    configuration: Configuration
    noise: dict[str, Any]
    releases: Composition
    plugins: tuple[str, ...] = ()


def settings_of(settings: TuneSettings, configuration: Mapping[str, Any]) -> TuneSettings:
    """The settings of a candidate."""
    options = {name.removeprefix(OPTION): value for name, value in configuration.items() if name.startswith(OPTION)}
    own = {RENAMED.get(name, name): value for name, value in configuration.items() if not name.startswith(OPTION)}
    return replace(settings, options={**settings.options, **options}, **own)


def versions_of_kinds(search: SearchSettings, settings: TuneSettings) -> dict[str, int]:
    """The versions of the parts that any candidate may use, by name."""
    every = [settings_of(settings, configuration) for _, configuration in search.space.kinds()]
    return {part: one for own in every for part, one in versions_of(own.mechanism, own.options, own.rule).items()}


def candidate_schedule(settings: TuneSettings, base: Base, units: int) -> TuneSchedule:
    """What is priced of a candidate on ``units`` training units: its schedule, before the number of bands is known."""
    return schedule_of(settings, units, base.parameters, base.positions)


def build_mechanism(settings: TuneSettings, base: Base, schedule: TuneSchedule, noise: Mapping[str, Any]) -> Mechanism:
    """A new mechanism with this noise, for one candidate: controllers learn, so none is used twice."""
    options = of_model(settings.mechanism, schedule.options, base.pairs, base.dimension)
    return build(settings.mechanism, options | dict(noise))


def score_terms(search: SearchSettings, epsilon: float, delta: float, units: int) -> ScoreTerms:
    """The noise of the score. Raises: ConfigError for less noise than the budget needs."""
    score = search.score
    if score.on == "public":
        return ScoreTerms("public", 0.0, 0.0, units)
    if score.on == "train":
        assert score.chosen_noise is not None
        return ScoreTerms("train", score.clip, score.chosen_noise, units)

    def spent(noise: float) -> float:
        return selection_epsilon(gaussian_profile(1 / noise), search.law, delta, search.bound)

    least = calibrate(spent, epsilon)
    if score.noise_multiplier is not None and score.noise_multiplier < least:
        problem = f"{score.noise_multiplier:g} is below the {at_most(least, 4)} that epsilon {epsilon:g} needs"
        raise ConfigError("search.score.noise_multiplier", problem, fix="leave it out, or raise epsilon")
    return ScoreTerms("held_out", score.clip, score.noise_multiplier or least, units)


def price_kinds(
    search: SearchSettings,
    settings: TuneSettings,
    base: Base,
    units: int,
    score: Release | None,
    *,
    public: bool = True,
) -> tuple[CandidateKind, ...]:
    """Every kind of the space, with the least noise for which the search meets ``settings.epsilon``.

    Args:
        units: number of training units.
        score: the release of a score over the training units, if that is what scores.
        public: whether there are public records.

    Raises: ConfigError for a point of the space that cannot be a candidate, and for a budget that no noise meets. All
        is built and priced here, so that no candidate can fail by its settings later.
    """
    check_kinds(search, settings, base, units, public=public)
    known: dict[Any, Mechanism] = {}
    found = []
    for weight, configuration in search.space.kinds():
        own = settings_of(settings, configuration)
        schedule = candidate_schedule(own, base, units)
        priced = schedule.priced

        def with_noise(noise: float, own: TuneSettings = own, schedule: TuneSchedule = schedule) -> Mechanism:
            return build_mechanism(own, base, schedule, {"noise_multiplier": noise})

        probe = with_noise(1.0)
        key = None if probe.noise.correlated else frozenset(planned(probe, priced).items())
        if key is None or key not in known:
            beside = Counter([score] if score else [])
            chosen, _ = calibrated_candidate(with_noise, settings.epsilon, priced, search.law, search.bound, beside)
            known[key] = chosen
        noise = noise_options(known[key])
        releases = planned(build_mechanism(own, base, schedule, noise), priced)
        found.append(CandidateKind(weight, configuration, noise, releases, probe.plugins))
    priced_kinds = _fit_average(tuple(found), search, settings, base, units, score)
    _check_starts(priced_kinds, search, settings, base, units)
    return priced_kinds


def check_kinds(search: SearchSettings, settings: TuneSettings, base: Base, units: int, *, public: bool = True) -> None:
    """Check all that can be before any noise is calibrated, which takes seconds a kind; warn of idle agents.

    Raises: ConfigError for a point of the space that no run can have, and for a range that decides releases.
    """
    started: set[str] = set()
    warnings: dict[str, None] = {}
    for ends in search.space.ends():
        releases = []
        for point in ends:
            own = settings_of(settings, point)
            check_mechanism(own, base)
            schedule = candidate_schedule(own, base, units)
            probe = build_mechanism(own, base, schedule, {"noise_multiplier": 1.0})
            check_public(probe, public=public)
            if (noise := probe.noise.correlated) is not None:
                probe = fitted(probe, schedule.priced, noise.bands_to_try(schedule.sample_rate, schedule.steps)[0])
            releases.append(planned(probe, schedule.priced))
            if warning := idle_agent(probe, schedule.steps):
                warnings[warning] = None
            if (key := _start_of(own, schedule)) not in started:
                started.add(key)
                probe.controller.start(_facts(own, base, schedule))
        check_rule(own.rule, probe, schedule.steps)
        if releases[0] != releases[-1]:
            ranges = [name for name, value in ends[0].items() if ends[-1][name] != value]
            problem = f"{' and '.join(ranges)} decide what this mechanism releases"
            raise ConfigError("search.space", problem, fix="give lists of values in place of ranges")
    for warning in warnings:
        _log.warning("search.space: %s", warning)


def _check_starts(
    kinds: tuple[CandidateKind, ...], search: SearchSettings, settings: TuneSettings, base: Base, units: int
) -> None:
    """Start a mechanism of each distinct setting with its final noise, as every candidate's will be.

    Raises: ConfigError for one that refuses to start. After the plan is drawn that would be a candidate that failed.
    """
    started: set[str] = set()
    for kind, ends in zip(kinds, search.space.ends(), strict=True):
        for point in ends:
            own = settings_of(settings, point)
            schedule = candidate_schedule(own, base, units)
            if (key := _start_of(own, schedule)) not in started:
                started.add(key)
                build_mechanism(own, base, schedule, kind.noise).start(_facts(own, base, schedule))


def _facts(settings: TuneSettings, base: Base, schedule: TuneSchedule) -> RunFacts:
    """What a run tells its mechanism before the first step; here nothing is left on the run's device."""
    return RunFacts(
        pair_sizes=base.pair_sizes,
        device=torch.device("cpu"),
        expected_batch_size=schedule.expected_batch_size,
        sample_rate=schedule.sample_rate,
        steps=schedule.steps,
        epsilon=settings.epsilon,
        delta=schedule.delta,
    )


def _start_of(settings: TuneSettings, schedule: TuneSchedule) -> str:
    """The settings that a mechanism's start depends on, for it is slow for some; noise follows from them."""
    decisive = [
        settings.mechanism,
        schedule.options,
        schedule.expected_batch_size,
        schedule.sample_rate,
        schedule.steps,
    ]
    return json.dumps(decisive, sort_keys=True)


def _fit_average(
    kinds: tuple[CandidateKind, ...],
    search: SearchSettings,
    settings: TuneSettings,
    base: Base,
    units: int,
    score: Release | None,
) -> tuple[CandidateKind, ...]:
    """The kinds with a little more noise, if the mixture of all of them costs more than each alone."""
    beside = Counter([score] if score else [])
    for _ in range(_TRIES):
        profile = average([(kind.weight, profile_of(kind.releases + beside)) for kind in kinds])
        own = candidate_schedule(settings_of(settings, kinds[0].configuration), base, units)
        if selection_epsilon(profile, search.law, own.delta, search.bound) <= settings.epsilon:
            return kinds
        kinds = tuple(_noisier(kind, settings, base, units) for kind in kinds)
    raise ConfigError("search.space", "has kinds whose mixture no noise brings within the budget", fix="split it")


def _noisier(kind: CandidateKind, settings: TuneSettings, base: Base, units: int) -> CandidateKind:
    own = settings_of(settings, kind.configuration)
    schedule = candidate_schedule(own, base, units)
    noise = kind.noise | {"noise_multiplier": kind.noise["noise_multiplier"] * _MORE}
    priced = schedule.priced
    releases = planned(build_mechanism(own, base, schedule, noise), priced)
    return replace(kind, noise=noise, releases=releases)
