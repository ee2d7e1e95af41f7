"""Claim about a loader's sampler, and simulated batches of every sampler with the statistics that errors move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dptune.core.declarations import check
from dptune.core.errors import ConfigError
from dptune.privacy.samplers.sampler import SAMPLERS

Numbers = NDArray[np.int64]
_DENSE = 2 * 10**7  # multiplications up to which the pairs of all units are counted one by one
#: Names of the samplers that a loader can be tested against.
TESTED = tuple(name for name, law in SAMPLERS.items() if law.tested)
#: The statistics of ``Entries``, in words; "varies" stands before "too much" or "too little".
STATISTICS = {
    "entries": "the number of units in all batches is",
    "sizes": "the sizes of batches vary",
    "units": "how often each unit comes varies",
    "epoch": "how often a unit comes in one epoch varies",
    "place": "how often a unit comes at one place of its epochs varies",
    "neighbours": "the number of neighbouring ids in one batch is",
    "company": "how often two neighbouring ids come together varies",
    "together": "how often two units come together varies",
    "closest": "the number of batches that the closest two units share is",
    "repeats": "the number of units that stay for the next batch is",
    "most": "the count of the unit that comes most often is",
    "least": "the count of the unit that comes least often is",
}


@dataclass(frozen=True, kw_only=True)
class LoaderClaim:
    """The claim about a loader.

    Attributes:
        sampler: claimed sampler, one of ``TESTED``.
        sample_rate: expected share of the units in a batch.
        units: number of ids, which are 0, 1, ..., units - 1.
        max_batch: size at which truncated Poisson batches are cut.
        drop_last: whether a shuffle leaves the last, smaller batch of an epoch out.

    Example:
        >>> from dptune.audit.draws.loader_claim import LoaderClaim
        >>> LoaderClaim(sampler="shuffle", sample_rate=0.1, units=95).batches
        10
    """

    sampler: str
    sample_rate: Annotated[float, Gt(0), Lt(1)]
    units: Annotated[int, Ge(2), Le(10**7)]
    max_batch: Annotated[int, Ge(1), Le(10**7)] | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.sampler not in TESTED:
            problem = f"a loader cannot be tested against {self.sampler!r}"
            raise ConfigError("sampler", problem, fix=f"use one of {', '.join(TESTED)}")
        check(self)
        if self.drop_last and self.sampler != "shuffle":
            raise ConfigError("drop_last", f"does not go with sampler {self.sampler}", fix="leave it out")
        if (self.max_batch is None) == (self.sampler == "truncated_poisson"):
            problem = "is about truncated_poisson, which cannot be tested without it"
            raise ConfigError("max_batch", problem, fix="give it with that sampler, and with no other")
        if self.sampler not in ("poisson", "truncated_poisson") and self.size * self.bins == 0:
            problem = f"{self.sample_rate} of {self.units} units is less than one unit"
            raise ConfigError("sample_rate", problem, fix="use a larger rate, or more units")
        if self.sampler == "balls_in_bins" and abs(self.sample_rate * self.bins - 1) > 1e-3:
            problem = f"{self.sample_rate} is not 1 / (number of batches in an epoch)"
            raise ConfigError("sample_rate", problem, fix=f"use {1 / self.bins:.6g} for {self.bins} batches")

    @property
    def size(self) -> int:
        """Size of a batch, for samplers with batches of one size."""
        return round(self.sample_rate * self.units)

    @property
    def bins(self) -> int:
        """Number of batches in an epoch, if each unit comes once in it by its own coin."""
        return round(1 / self.sample_rate)

    @property
    def batches(self) -> int | None:
        """Number of batches that the sampler has in an epoch; None if any number is right."""
        if self.sampler == "shuffle":
            return self.units // self.size if self.drop_last else math.ceil(self.units / self.size)
        return self.bins if self.sampler == "balls_in_bins" else None


@dataclass(frozen=True)
class Entries:
    """Every unit of every batch.

    Attributes:
        slots: (entries,) number of the batch, over all epochs.
        ids: (entries,) number of the unit.
        shape: number of epochs, of batches in an epoch, and of units.
    """

    slots: Numbers
    ids: Numbers
    shape: tuple[int, int, int]

    def statistics(self) -> NDArray[np.float64]:
        """Numbers that sampling errors move, in the order of ``STATISTICS``."""
        epochs, batches, units = self.shape
        keys = np.sort(self.slots * (units + 1) + self.ids)  # units + 1: no id is the neighbour of the next batch's
        following = keys + (units + 1)
        found = np.searchsorted(keys, following)
        counts = np.bincount(self.ids, minlength=units)
        beside = keys[:-1][np.diff(keys) == 1] % (units + 1)
        places = [self.slots // batches * units + self.ids, self.slots % batches * units + self.ids]
        return np.array(
            [
                len(keys),
                _spread(self.slots, epochs * batches),
                _spread(self.ids, units),
                _spread(places[0], epochs * units),
                _spread(places[1], batches * units),
                len(beside),
                _spread(beside, units),
                *_pairs(self),
                (keys[np.minimum(found, len(keys) - 1)] == following).sum() if len(keys) else 0,
                counts.max(),
                counts.min(),
            ],
            dtype=float,
        )


def _spread(numbers: Numbers, size: int) -> float:
    """How much the counts of 0, ..., size - 1 vary: their sum of squares about their own mean."""
    counts = np.bincount(numbers, minlength=size).astype(float)
    return float(((counts - counts.mean()) ** 2).sum())


def _pairs(entries: Entries) -> tuple[float, float]:
    """How much the numbers of batches that two units share vary over all pairs, and the largest of these numbers.

    Their sum of squares is that of the sizes of intersections of two batches as well (squared Frobenius norm of X^T X
    and X X^T), so the cheaper of both is computed. The largest is left out, as 0, where units are too many.
    """
    epochs, batches, units = entries.shape
    slots = epochs * batches
    if slots * units * units <= _DENSE:  # by the shape alone, so that simulations do the same
        table: Any = np.zeros((slots, units), dtype=np.float32)
        table[entries.slots, entries.ids] = 1.0
        gram = table.T @ table
        closest = float(np.where(np.eye(units, dtype=bool), 0.0, gram).max())
    else:
        table = csr_array((np.ones(len(entries.ids)), (entries.slots, entries.ids)), shape=(slots, units))
        table.data[:] = 1.0
        sizes, counts = (np.bincount(one).astype(float) for one in (entries.slots, entries.ids))
        gram = (table.T @ table if (sizes**2).sum() < (counts**2).sum() else table @ table.T).data
        closest = 0.0
    sizes, counts = (np.asarray(table.sum(axis=axis, dtype=float)).ravel() for axis in (1, 0))
    squares = float(np.square(gram, dtype=float).sum() - (counts**2).sum())  # each unit with itself left out
    pairs, shared = units * (units - 1), float((sizes**2).sum() - sizes.sum())
    return squares - shared**2 / pairs, closest


def simulated(claim: LoaderClaim, epochs: int, batches: int, coins: np.random.Generator) -> Entries:
    """Batches of the claimed sampler: ``epochs`` epochs, each cut or continued to ``batches`` batches.

    poisson: each unit enters each batch with probability sample_rate, independently. truncated_poisson: the same, and
    of a larger batch a uniform subset of max_batch units stays. balls_in_bins: each unit enters one batch of every
    epoch, which it chooses uniformly. shuffle: a uniform permutation of the units in every epoch is cut into batches;
    the last may be smaller, or left out. fixed_size: each batch is a uniform subset of one size.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.draws.loader_claim import LoaderClaim, simulated
        >>> claim = LoaderClaim(sampler="shuffle", sample_rate=0.25, units=8)
        >>> sorted(simulated(claim, epochs=1, batches=4, coins=np.random.default_rng()).ids.tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    units, slots = claim.units, epochs * batches
    shape = (epochs, batches, units)
    if claim.sampler in ("poisson", "truncated_poisson"):
        hits = _hits(slots * units, claim.sample_rate, coins)
        of, ids = hits // units, hits % units
        if claim.max_batch is not None:
            order = np.lexsort((coins.random(len(of)), of))
            starts = np.searchsorted(of, np.arange(slots))
            kept = order[np.arange(len(of)) - starts[of] < claim.max_batch]  # of is sorted: ranks within a batch
            of, ids = of[kept], ids[kept]
        return Entries(of, ids, shape)
    if claim.sampler == "fixed_size":
        drawn = np.stack([coins.choice(units, claim.size, replace=False, shuffle=False) for _ in range(slots)])
        return Entries(np.repeat(np.arange(slots), claim.size), drawn.ravel(), shape)
    ids = np.tile(np.arange(units), (epochs, 1))
    if claim.sampler == "balls_in_bins":
        place = coins.integers(claim.bins, size=(epochs, units))
    else:
        ids, place = coins.permuted(ids, axis=1), np.broadcast_to(np.arange(units) // claim.size, (epochs, units))
    taken = place < batches
    return Entries((np.arange(epochs)[:, None] * batches + place)[taken], ids[taken], shape)


def _hits(trials: int, rate: float, coins: np.random.Generator) -> Numbers:
    """Numbers of the trials that succeed, each with probability ``rate``, by the gaps between them."""
    found: list[Numbers] = [np.zeros(0, dtype=np.int64)]
    last = -1
    while last < trials:
        hits = last + np.cumsum(coins.geometric(rate, size=int(trials * rate * 1.1) + 10))
        found.append(hits)
        last = int(hits[-1])
    every = np.concatenate(found)
    return every[every < trials]
