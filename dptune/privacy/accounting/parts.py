"""Parallel composition: releases about disjoint parts of the units cost as much as the dearest part.

A run may have as many parts as releases, all different. ``dearest`` then prices groups of parts by an envelope, which
costs at least as much as each of them, and splits the dearest group until it is a single part.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.release import Composition, Release

#: Number of kinds of release to price before the bound found so far is returned; and the most kinds that one price
#: counts for, since accountants merge more.
WORK, _MOST = 1000, 256
_FEW = 16  # largest number of parts that are always priced one by one

#: Releases and their counts, from the least noise to the most, by the fields that an envelope must not mix.
_Families = dict[tuple[object, ...], list[tuple[Release, int]]]


def disjoint(composition: Composition) -> list[Composition]:
    """The releases that one unit of each part can be touched by, without the parts' numbers; equal ones once.

    Guarantee (parallel composition): a unit is in at most one part, so the largest epsilon over the list is that of
    the whole.
    """
    everybody, parts = _split(composition)
    return [everybody + part for part in parts] or [everybody]


def dearest(composition: Composition, price: Callable[[Composition], float], work: int = WORK) -> float:
    """The largest price over ``disjoint(composition)``, or a bound on it if that takes too long to find.

    Guarantee: never below the largest, if ``price`` does not fall when a release is added, gets less noise or a higher
    rate. Exact for up to 16 kinds of part, and for as many as ``work`` allows; beyond, too large by as little as
    similar parts differ. The same composition always has the same price.

    Args:
        composition: releases, some of which name parts.
        price: the price of releases that all add up.
        work: largest number of kinds of release to price before the bound found so far is returned.
    """
    everybody, parts = _split(composition)
    if len(parts) <= _FEW or sum(len(everybody) + len(part) for part in parts) <= work:
        return max(price(everybody + part) for part in parts or [Counter()])

    def group(members: Sequence[_Families]) -> _Group:
        whole = everybody + _flat(reduce(_envelope, members))
        return _Group(-price(whole), next(tickets), members, min(_MOST, len(whole)))

    tickets = iter(range(2 * len(parts)))  # breaks ties in the heap, which cannot compare members
    queue = [group([_families(part) for part in sorted(parts, key=_rough_cost)])]
    while len(queue[0].members) > 1 and (work := work - 2 * queue[0].work) > 0:
        members = heapq.heappop(queue).members
        for half in (members[: len(members) // 2], members[len(members) // 2 :]):
            heapq.heappush(queue, group(half))
    return -queue[0].minus_price


class _Group(NamedTuple):
    """Parts that are priced together; a group sorts before cheaper groups."""

    minus_price: float
    ticket: int
    members: Sequence[_Families]
    work: int


def _split(composition: Composition) -> tuple[Composition, list[Composition]]:
    """The releases about all units, and those about each part, without the parts' numbers; equal parts once."""
    everybody: Composition = Counter()
    parts: dict[int, Composition] = {}
    for release, count in composition.items():
        if release.part is None:
            everybody[release] += count
        else:
            # The strategy is priced by then: its rate, its sensitivity and its parts say all that a bound reads.
            parts.setdefault(release.part, Counter())[replace(release, part=None, coefficients=(), dealt_by="key")] += (
                count
            )
    return everybody, list({frozenset(part.items()): part for part in parts.values()}.values())


def _rough_cost(part: Composition) -> float:
    """An approximate cost to sort parts by, so that those in a group are similar; no bound depends on it."""
    return sum(
        count * release.sample_rate**2 * math.exp(min(release.effective_noise_multiplier**-2, 100.0))
        for release, count in part.items()
        if release.effective_noise_multiplier > 1e-3
    )


def _families(part: Composition) -> _Families:
    families: _Families = {}
    for one, count in sorted(part.items(), key=lambda item: item[0].effective_noise_multiplier):
        family = (one.noise, one.norm, one.statistics, one.raw_inputs, one.adaptive, one.claims, one.sampler)
        families.setdefault(family, []).append((one, count))
    return families


def _flat(families: _Families) -> Composition:
    total: Composition = Counter()
    for releases in families.values():
        for release, count in releases:
            total[release] += count
    return total


def _envelope(first: _Families, second: _Families) -> _Families:
    """Releases that cost at least as much as those of either part: the i-th of each joined, and those left over."""
    return {family: _match(first.get(family, []), second.get(family, [])) for family in {**first, **second}}


def _match(first: list[tuple[Release, int]], second: list[tuple[Release, int]]) -> list[tuple[Release, int]]:
    matched: list[tuple[Release, int]] = []
    rest = first[::-1], second[::-1]
    while all(rest):
        (one, many), (other, more) = rest[0].pop(), rest[1].pop()
        both, joined = min(many, more), _join(one, other)
        if matched and matched[-1][0] == joined:
            matched[-1] = joined, matched[-1][1] + both
        else:
            matched.append((joined, both))
        if many > both:
            rest[0].append((one, many - both))
        if more > both:
            rest[1].append((other, more - both))
    return matched + rest[0][::-1] + rest[1][::-1]


def _join(one: Release, other: Release) -> Release:
    """A release that costs at least as much as each of two of the same family."""
    if one == other:
        return one
    rate, sensitivity = max(one.sample_rate, other.sample_rate), max(one.sensitivity, other.sensitivity)
    if one.renyi and other.renyi:  # a bound at one order holds at all lower ones
        order, epsilon = min(one.renyi[0], other.renyi[0]), max(one.renyi[1], other.renyi[1])
        return Release.of_token(order, epsilon, one.claims)
    if one.law and other.law:
        law = _larger(one.law, other.law)
        return replace(one, sample_rate=rate, noise_multiplier=1 / law.score_bound, sensitivity=sensitivity, law=law)
    noise = min(one.noise_multiplier, other.noise_multiplier)
    return replace(one, sample_rate=rate, noise_multiplier=noise, sensitivity=sensitivity)


def _larger(one: InverseScale, other: InverseScale) -> InverseScale:
    """A law under which u is stochastically at least as large as under both, as is the score bound."""
    law = InverseScale(
        constant=max(one.constant, other.constant),
        gamma=(max(one.gamma[0], other.gamma[0]), max(one.gamma[1], other.gamma[1])),
        exponential=max(one.exponential, other.exponential),
        uniform=(max(one.uniform[0], other.uniform[0]), max(one.uniform[1], other.uniform[1])),
    )
    return law.scaled(max(1.0, max(one.score_bound, other.score_bound) / law.score_bound))
