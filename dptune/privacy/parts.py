"""Parallel composition: releases about disjoint parts of the units cost what the dearest part costs.

A run may have as many parts as releases, and all of them different. ``dearest`` then prices groups of parts by an
envelope, which costs at least what each of them does, and splits the dearest group until it is a single part.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from dptune.privacy.laplace_mixtures import InverseScale
from dptune.privacy.release import Composition, Release

#: Kinds of release that are priced before the bound so far is taken; a price counts no more than this, which it merges.
WORK, _MOST = 1000, 256
_FEW = 16  # parts that are priced one by one

#: Releases that an envelope may match with each other, from the least noisy to the most, and how many of each.
_Families = dict[tuple[object, ...], list[tuple[Release, int]]]


def disjoint(composition: Composition) -> list[Composition]:
    """What one unit of each part can be touched by, without the parts' numbers and each kind once.

    Guarantee (parallel composition): a unit is in one part at most, so the largest epsilon over the list is that of
    the whole.
    """
    everybody, parts = _split(composition)
    return [everybody + part for part in parts] or [everybody]


def dearest(composition: Composition, price: Callable[[Composition], float], work: int = WORK) -> float:
    """The largest price over ``disjoint(composition)``, or more where that takes too long to find.

    Guarantee: never below the largest, if ``price`` does not fall when a release is added, gets less noise or a higher
    rate. Exact for up to 16 kinds of part and for as many as ``work`` allows; more than it by as little as parts differ
    that are alike. The same composition has always the same price.

    Args:
        composition: releases, of which some name parts.
        price: of releases that all add up.
        work: kinds of release to price, at most, before the bound found so far is taken.
    """
    everybody, parts = _split(composition)
    if len(parts) <= _FEW or sum(len(everybody) + len(part) for part in parts) <= work:
        return max(price(everybody + part) for part in parts or [Counter()])

    def group(members: Sequence[_Families]) -> _Group:
        whole = everybody + _flat(reduce(_envelope, members))
        return _Group(-price(whole), next(tickets), members, min(_MOST, len(whole)))

    tickets = iter(range(2 * len(parts)))  # no two groups are compared by their members
    queue = [group([_families(part) for part in sorted(parts, key=_rough_cost)])]
    while len(queue[0].members) > 1 and (work := work - 2 * queue[0].work) > 0:
        members = heapq.heappop(queue).members
        for half in (members[: len(members) // 2], members[len(members) // 2 :]):
            heapq.heappush(queue, group(half))
    return -queue[0].minus_price


class _Group(NamedTuple):
    """Parts that are priced together; sorts before groups that are cheaper."""

    minus_price: float
    ticket: int
    members: Sequence[_Families]
    work: int


def _split(composition: Composition) -> tuple[Composition, list[Composition]]:
    """What is about all units, and what is about each part, without the parts' numbers and each kind once."""
    everybody: Composition = Counter()
    parts: dict[int, Composition] = {}
    for release, count in composition.items():
        if release.part is None:
            everybody[release] += count
        else:
            parts.setdefault(release.part, Counter())[replace(release, part=None)] += count
    return everybody, list({frozenset(part.items()): part for part in parts.values()}.values())


def _rough_cost(part: Composition) -> float:
    """By which parts are sorted, so that those in a group are alike; nothing relies on it."""
    return sum(
        count * release.sample_rate**2 * math.exp(min(release.effective_noise_multiplier**-2, 100.0))
        for release, count in part.items()
        if release.effective_noise_multiplier > 1e-3
    )


def _families(part: Composition) -> _Families:
    families: _Families = {}
    for one, count in sorted(part.items(), key=lambda item: item[0].effective_noise_multiplier):
        family = (one.noise, one.norm, one.statistics, one.raw_inputs, one.adaptive, one.claims)
        families.setdefault(family, []).append((one, count))
    return families


def _flat(families: _Families) -> Composition:
    total: Composition = Counter()
    for releases in families.values():
        for release, count in releases:
            total[release] += count
    return total


def _envelope(first: _Families, second: _Families) -> _Families:
    """Releases that cost at least what those of either part do: the i-th of each, matched, and those left over."""
    return {family: _matched(first.get(family, []), second.get(family, [])) for family in {**first, **second}}


def _matched(first: list[tuple[Release, int]], second: list[tuple[Release, int]]) -> list[tuple[Release, int]]:
    matched: list[tuple[Release, int]] = []
    rest = first[::-1], second[::-1]
    while all(rest):
        (one, many), (other, more) = rest[0].pop(), rest[1].pop()
        both, joined = min(many, more), _joined(one, other)
        if matched and matched[-1][0] == joined:
            matched[-1] = joined, matched[-1][1] + both
        else:
            matched.append((joined, both))
        if many > both:
            rest[0].append((one, many - both))
        if more > both:
            rest[1].append((other, more - both))
    return matched + rest[0][::-1] + rest[1][::-1]


def _joined(one: Release, other: Release) -> Release:
    """A release that costs at least what each of two does, all else being equal."""
    if one == other:
        return one
    rate, sensitivity = max(one.sample_rate, other.sample_rate), max(one.sensitivity, other.sensitivity)
    if one.renyi and other.renyi:  # a divergence bounds those of lower order
        order, epsilon = min(one.renyi[0], other.renyi[0]), max(one.renyi[1], other.renyi[1])
        return Release.of_token(order, epsilon, one.claims)
    if one.law and other.law:
        law = _larger(one.law, other.law)
        return replace(one, sample_rate=rate, noise_multiplier=1 / law.score_bound, sensitivity=sensitivity, law=law)
    noise = min(one.noise_multiplier, other.noise_multiplier)
    return replace(one, sample_rate=rate, noise_multiplier=noise, sensitivity=sensitivity)


def _larger(one: InverseScale, other: InverseScale) -> InverseScale:
    """A law under which u is at least as large as under both, stochastically, and so is its score bound."""
    law = InverseScale(
        constant=max(one.constant, other.constant),
        gamma=(max(one.gamma[0], other.gamma[0]), max(one.gamma[1], other.gamma[1])),
        exponential=max(one.exponential, other.exponential),
        uniform=(max(one.uniform[0], other.uniform[0]), max(one.uniform[1], other.uniform[1])),
    )
    return law.scaled(max(1.0, max(one.score_bound, other.score_bound) / law.score_bound))
