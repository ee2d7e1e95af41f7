"""Shuffled batches: what a run costs at least, by data that show it.

**Statement.** A run makes E epochs. In each, all n units are put in random order and cut into T batches, and every
batch's sum of gradients of norm at most 1 gets noise N(0, z^2). At this delta no epsilon below
``least_shuffled_epsilon`` holds for it under zero-out of one unit. (Source: Chua et al. 2024, How Private are DP-SGD
Implementations?, who give the pair and the event for one epoch. The composition over epochs is ours.)

**Proof.** Let the gradient of every other unit be -1 along one direction, whatever the weights, and that of the unit be
+1, which zero-out makes 0. Add the batch's public size to each released sum. Of the others nothing is left; the batch J
that holds the unit has mean 2 (or, zeroed, 1: of its size all but one are -1), every other batch mean 0. So the
released vector of an epoch is x = 2 e_J + z N(0, I), or e_J + z N(0, I) zeroed. Its largest entry is below c with
probability Phi((c - 2) / z) Phi(c / z)^(T - 1), or with 1 in place of 2, whatever the law of J: batches need not be of
one size, nor J uniform. By the definition of differential privacy every event gives delta >= P(event) - e^epsilon
Q(event); "the largest entry is at least c" is one, and its complement another, from the other side. Over epochs the
noise is fresh, and no J changes that law, so the largest entries are independent however units are ordered. Any
function of them is a post-processing: here each is rounded to a cell, and the cells' losses log(p / q) add up. E_P of
(1 - e^(epsilon - sum))_+ is a lower bound of delta, and falls where a loss is rounded down. QED

**A last batch that is dropped.** If each epoch uses only its first T full batches, a share r of the units, r < 1, is
left out of it at random. The statement holds with (1 - r) Phi((c - 2) / z) Phi(c / z)^(T - 1) + r Phi(c / z)^T as the
probability that the largest entry is below c, or with 1 in place of 2. *Proof.* The order does not hang on the data, so
the unit is left out with chance r in either world, anew in every epoch. Then each sum is -B of others and nothing of
the unit, so every entry has mean 0: the largest of T is below c with probability Phi(c / z)^T. If it is not left out,
all is as above. The rest of the proof only uses the law of the largest entry. QED

Everything is rounded to the side of too small an epsilon. All of this is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.fft import irfft, rfft
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr

from dptune.privacy.accounting.sampled_gaussian import Array, _power, _sums_above

#: Cells of the largest entry of an epoch, and cells of the sums of losses.
_CELLS, _SUMS = 20_000, 1 << 20
#: Largest number of epochs that leaves most of the cells to the sums. A run shows no less than its first epochs do.
_MOST_EPOCHS = _SUMS // 8
#: Minus log of the tilted chance of a sum outside the window, and relative rounding of the cells' probabilities.
_OUTSIDE, _ROUNDING = 60.0, 1e-9
#: Relative rounding of one probability.
_EXACT = 1e-12


@lru_cache(maxsize=1024)
def least_shuffled_epsilon(
    noise_multiplier: float, batches: int, epochs: int, delta: float, left_out: float = 0.0
) -> float:
    """An epsilon that every bound for shuffled batches must reach.

    For one epoch it is at most 1e-6 of itself below the lemma's. For several, a grid takes more from it, the more the
    more epochs: less than 0.2 % up to 200 epochs, a fifth or more beyond 10,000. Epochs above ``_MOST_EPOCHS``
    do not count.

    Args:
        noise_multiplier: effective noise multiplier, above 0.
        batches: number T of batches in an epoch.
        epochs: number E of whole epochs; with 0 the answer is 0.
        delta: a number in (0, 1).
        left_out: share r of the units, in [0, 1), that every epoch leaves out at random.

    Example:
        >>> from dptune.privacy.samplers.shuffled_batches import least_shuffled_epsilon
        >>> round(least_shuffled_epsilon(1.3521, batches=65, epochs=1, delta=7.424e-6), 5)
        2.35463
        >>> round(least_shuffled_epsilon(1.3521, batches=64, epochs=1, delta=7.424e-6, left_out=477 / 66013), 5)
        2.35712
    """
    if not epochs:
        return 0.0
    law = _Largest(noise_multiplier, batches, left_out)
    one, counted = _one_epoch(law, delta), min(epochs, _MOST_EPOCHS)
    return max(one, _several_epochs(law, counted, delta)) if epochs > 1 else one


@dataclass(frozen=True)
class _Largest:
    """The law of the largest entry of an epoch.

    Attributes:
        noise: standard deviation of an entry.
        batches: number T of entries.
        left_out: chance r that no entry holds the unit.
    """

    noise: float
    batches: int
    left_out: float

    def sides(self, at: Array | float, mean: float) -> tuple[Array, Array]:
        """Probabilities that the largest entry is below ``at``, and above, if the unit's batch has this mean.

        Each is a sum of positive terms, for a small one must keep its digits.
        """
        at, kept = np.asarray(at, dtype=np.float64), 1 - self.left_out
        other = log_ndtr(at / self.noise)
        mine, none = log_ndtr((at - mean) / self.noise) + (self.batches - 1) * other, self.batches * other
        below = kept * np.exp(mine) + self.left_out * np.exp(none)
        return below, kept * -np.expm1(mine) + self.left_out * -np.expm1(none)


def _one_epoch(law: _Largest, delta: float) -> float:
    """The largest epsilon that one event refutes, by bisection from below."""

    def shown(epsilon: float) -> float:
        def gap(at: Array | float) -> Array:
            (below, above), (below_zeroed, above_zeroed) = law.sides(at, 2.0), law.sides(at, 1.0)
            # Each probability is rounded to the side of less.
            more = math.exp(epsilon) * (1 + _EXACT)
            rises, falls = above * (1 - _EXACT) - more * above_zeroed, below_zeroed * (1 - _EXACT) - more * below
            return np.maximum(rises, falls)

        # The event's best bound lies where both are likely: from the bulk of the zeroed entries up to far above.
        noise, shares = law.noise, np.linspace(0, 1, 4001)
        at = np.linspace(1 - 40 * noise, 2 + 40 * noise, 4001) + noise * noise * epsilon * shares
        place = int(np.argmax(gap(at)))
        ends = float(at[max(place - 1, 0)]), float(at[min(place + 1, len(at) - 1)])
        found = minimize_scalar(lambda c: -float(gap(c)), bounds=ends, method="bounded", options={"xatol": 1e-9})
        return max(-float(found.fun), float(gap(at)[place]))

    low, high = 0.0, 1.0
    if shown(low) < delta:
        return 0.0
    while high < 700 and shown(high) >= delta:
        low, high = high, 2 * high
    high = min(high, 700.0)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if shown(middle) >= delta else (low, middle)
    return low


def _several_epochs(law: _Largest, epochs: int, delta: float) -> float:
    """The epsilon that the sum of all epochs' losses refutes, with the unit over zeroed, the side that costs more.

    The cells' probabilities are tilted by exp(tilt loss), so that the FFT's round-off is relative to delta.
    """
    mine, other = _cells(law)
    kept = (mine > 1e-290) & (other > 1e-290)  # what is dropped only takes from delta
    losses = np.log(mine[kept]) - np.log(other[kept]) - _ROUNDING
    logs = np.log(mine[kept] * (1 - _ROUNDING))

    def log_moment(tilt: float) -> float:
        exponents = logs + tilt * losses
        most = float(exponents.max())
        return most + math.log(float(np.exp(exponents - most).sum()))

    def chernoff(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (epochs * log_moment(tilt) - math.log(delta)) / tilt

    tilt = 0.8 * math.exp(minimize_scalar(chernoff, bounds=(-7.0, 11.0), method="bounded").x)
    total = log_moment(tilt)
    mass = np.exp(logs + tilt * losses - total)

    # A window of sums, each end passed with a tilted chance of at most exp(-_OUTSIDE) (Chernoff's bound).
    mean = float(mass @ losses)
    deviation = math.sqrt(float(mass @ (losses - mean) ** 2) * epochs) + 1e-9
    steps = [factor * math.sqrt(2 * _OUTSIDE) / deviation for factor in (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 1.5)]
    high = min((epochs * (log_moment(tilt + step) - total) + _OUTSIDE) / step for step in steps)
    low = max((epochs * (total - log_moment(tilt - step)) - _OUTSIDE) / step for step in steps)

    width = (high - low) / (_SUMS - 2 * epochs - 4)  # a sum is at most ``epochs`` cells below its place
    cells = np.floor(losses / width).astype(np.int64)
    # The tilt is taken of the rounded losses: only so does the sum's place say by how much its probability was tilted.
    losses = cells.astype(np.float64) * width
    total = log_moment(tilt)
    mass = np.exp(logs + tilt * losses - total)
    mean = float(mass @ losses)
    first = math.floor(low / width) - epochs - 1
    spectrum = rfft(np.bincount(cells % _SUMS, mass, _SUMS))
    sums = np.roll(irfft(_power(spectrum, epochs), _SUMS), -(first % _SUMS))
    # The round-off of an FFT of numbers that add up to 1 at most, and of its power (see ``composed_losses``).
    sums = np.maximum(sums - 16 * epochs * math.log2(_SUMS) * float(np.finfo(np.float64).eps), 0.0)
    places = width * (first + np.arange(_SUMS))
    away = places - epochs * mean
    with np.errstate(over="ignore"):
        weights = sums * np.exp(np.minimum(-tilt * away, 600.0))
        above = _sums_above(weights) - np.exp(np.minimum(away, 600.0)) * _sums_above(
            sums * np.exp(np.minimum(-(tilt + 1) * away, 600.0))
        )
    # Sums outside the window come round to the other end, and would count there. Rounding raised a tilted probability
    # by at most exp(tilt width) in each epoch.
    outside = 4 * math.exp(min(epochs * tilt * width, 600.0) - _OUTSIDE)
    above -= outside * np.exp(np.minimum(-tilt * away, 600.0))
    with np.errstate(divide="ignore"):
        shown = np.log(np.maximum(above, 0.0)) + epochs * (total - tilt * mean)
    fits = shown >= math.log(delta) + epochs * 1e-8 + _ROUNDING
    reached = np.flatnonzero(fits & (places >= 0) & (np.abs(tilt * away) + np.abs(away) < 500))
    return float(places[reached[-1]]) if len(reached) else 0.0


def _cells(law: _Largest) -> tuple[Array, Array]:
    """Probabilities of the cells of the largest entry, with the unit and zeroed; narrow where both are likely."""
    # The largest of T entries without the unit is below this with probability 1e-18 or so, and rarely above the top.
    ends = np.linspace(1 - 12 * law.noise, 2 + 12 * law.noise, _CELLS)
    found = []
    for mean in (2.0, 1.0):
        below, above = law.sides(ends, mean)
        # Differences of tails: of what is above where that is small, of what is below elsewhere.
        inner = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
        found.append(np.concatenate([[below[0]], inner, [above[-1]]]))
    return found[0], found[1]
