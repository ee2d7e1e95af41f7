"""Checks of a step's noise in every coordinate: missing, too little, shared or repeated noise is a fault by itself.

An attack sees noise only along the gradient of the unit that it attacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import chdtr, ndtri
from scipy.stats import binom

from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.entropy import Entropy

Array = NDArray[np.float64]

#: Chance that ``noise_fault`` accuses noise that is as charged.
NOISE_ALARMS = 1e-6
#: Steps whose noise is looked at. Of two coordinates with 0.8 times the charged deviation, 98 in 100 are then found.
_NOISE_STEPS = 300
#: Squares of noise, in charged deviations, that count as almost none: 8 in 1,000 entries have less.
_ALMOST_NONE = 1e-4
#: Coordinates that are compared with one another, two by two; where there are more, each block has the same share.
_COMPARED = 4096
#: Rounding of a sum in float32 is a small share of noise that is no smaller than this share of the sum.
_LEAST_SHARE = 1e-3


def noise_fault(
    mechanism: Mechanism,
    knobs: Knobs,
    batches: Sequence[Sequence[Gradients]],
    zeros: list[torch.Tensor],
    entropy: Entropy,
    names: Sequence[str] = (),
) -> str | None:
    """A sentence on the block whose noise is less than charged, repeats, or is another's too; None if none was seen.

    Guarantee: if the noise of each block has the charged law, independently by coordinate and step, then the chance of
    a sentence is ``NOISE_ALARMS`` at most: the exact chances of all comparisons add up to that. Exact but for the
    rounding of releases, which is 1e-6 of a deviation. A block with more noise than charged is not accused.

    Noise of a step is what the step releases without its exact sums. A mechanism without a law of its noise, or one
    that reads raw statistics, is not looked at: nothing is certified of it.

    Args:
        mechanism: a started copy, which the draws may change.
        batches: batches that take turns; those whose sums are so large that rounding is no small part of the noise are
            left out.
        names: of the blocks.
    """
    if mechanism.noise.family not in ("gaussian", "laplace_mixture") or mechanism.controller.raw_inputs:
        return None
    noise = _noise_of_steps(mechanism, knobs, [[], *batches], zeros, entropy)
    if isinstance(noise, str):
        return noise
    blocks = len(noise) - (mechanism.statistics(knobs) is not None)
    numbered = [f"block {number} of {blocks}" for number in range(1, blocks + 1)]
    names = [*(names if len(names) == blocks else numbered), "the block of statistics"]
    found = _missing(noise, names) or _repeated(noise, names) or _shared(noise, names)
    return f"{found} ({_NOISE_STEPS} steps; the chance of a false alarm is below {NOISE_ALARMS:g})" if found else None


def _noise_of_steps(
    mechanism: Mechanism,
    knobs: Knobs,
    batches: Sequence[Sequence[Gradients]],
    zeros: list[torch.Tensor],
    entropy: Entropy,
) -> list[Array] | str:
    """(steps, coordinates) of each block: standard normal if as charged. A sentence if gradients lack the noise."""
    gaussian, strategy = mechanism.noise.family == "gaussian", mechanism.coefficients or (1.0,)
    units = [scale * (knobs.noise_multiplier if gaussian else 1.0) for scale in mechanism.scales(knobs)]
    exact = [mechanism.exact_sums(batch, zeros, knobs) for batch in batches]
    small = [
        number
        for number, sums in enumerate(exact)
        if all(
            not total.numel() or _LEAST_SHARE * total.abs().max() <= unit
            for total, unit in zip(sums, units, strict=True)
        )
    ]
    rows: list[list[Array]] = []
    for step in range(_NOISE_STEPS):
        number = small[step % len(small)]
        row: dict[str, Any] = {"row": step} if mechanism.coefficients else {}  # as an audit of one step calls it
        released = mechanism.privatise(batches[number], zeros, knobs, 1.0, entropy, **row)
        restored = mechanism.clipper.restore([one + 0.0 for one in released.blocks], zeros, knobs, 1.0)
        if not all(map(torch.equal, released.gradient, restored)):
            return "the gradient that a step gives to the optimiser is not made of its noisy blocks alone"
        parts = [*released.blocks, *([] if released.statistics is None else [released.statistics])]
        rows.append(
            [
                (part.double() - total).numpy() / unit
                for part, total, unit in zip(parts, exact[number], units, strict=True)
            ]
        )
    noise = [np.stack(block) for block in zip(*rows, strict=True)]
    # Multiplied by the strategy matrix, rows of correlated noise are independent again.
    earlier = [[np.pad(one, ((k, 0), (0, 0)))[: len(one)] for k in range(len(strategy))] for one in noise]
    noise = [np.tensordot(np.array(strategy), np.stack(rows_of), axes=1) for rows_of in earlier]
    law = mechanism.noise.law(knobs.noise_multiplier)
    return noise if law is None else [_as_normal(law, one) for one in noise]


def _as_normal(law: InverseScale, noise: Array) -> Array:
    """Standard normals in the order of noise of this law, by way of its tails, which keep their digits."""
    return np.asarray(-np.sign(noise) * ndtri(np.exp(law.log_tail(np.abs(noise))) / 2))


def _missing(noise: Sequence[Array], names: Sequence[str]) -> str | None:
    """A sentence on the block whose noise, in one coordinate, in one step or in all, is surely less than is charged.

    Noise that steps or coordinates lack in turn may have the charged size on average: so steps count each by
    themselves, and so does the number of entries that are almost 0.
    """
    squares, of_steps = ([np.square(one).sum(axis=axis) for one in noise] for axis in (0, 1))
    alarm = NOISE_ALARMS / 3 / (2 * len(noise) + sum(map(len, squares)) + sum(map(len, of_steps)))
    for name, block, of, steps in zip(names, noise, squares, of_steps, strict=False):
        low = chdtr(len(block), of) < alarm
        if low.any() or chdtr(block.size, of.sum()) < alarm:
            chosen = low if low.any() else np.ones_like(low)
            times = round(math.sqrt(of[chosen].mean() / len(block)), 4)
            where = "" if chosen.all() else f" in {chosen.sum()} of its {len(of)} coordinates"
            return f"{name} comes back with {times:.2g} times the noise that it is charged for{where}"
        quiet = chdtr(block.shape[1], steps) < alarm
        if quiet.any():
            return f"{name} comes back with too little noise in {quiet.sum()} steps"
        almost_none = int((np.square(block) < _ALMOST_NONE).sum())
        if binom.sf(almost_none - 1, block.size, chdtr(1, _ALMOST_NONE)) < alarm:
            return f"{name} comes back with almost no noise in {almost_none} of {block.size} entries of all steps"
    return None


def _repeated(noise: Sequence[Array], names: Sequence[str]) -> str | None:
    """Compare each block's noise with its noise at earlier steps. Returns a sentence if one repeats, otherwise None."""
    lags = np.arange(1, _NOISE_STEPS // 2)
    for name, block in zip(names, noise, strict=False):
        waves = np.fft.rfft(np.where(block > 0, 1.0, -1.0), 2 * _NOISE_STEPS, axis=0)
        agree = np.round(np.fft.irfft(np.square(np.abs(waves)).sum(axis=1)))[lags]
        alarms = _chance(agree, block.shape[1] * (_NOISE_STEPS - lags))
        if alarms.min() * len(lags) * len(noise) < NOISE_ALARMS / 3:
            return f"{name} has noise of {lags[alarms.argmin()]} steps before again: it must be fresh"
    return None


def _shared(noise: Sequence[Array], names: Sequence[str]) -> str | None:
    """Compare the noise of coordinates by sign. Returns a sentence on two that share noise, or None."""
    share = max(2, _COMPARED // len(noise))
    held = [one[:, :share] if sum(len(each.T) for each in noise) > _COMPARED else one for one in noise]
    owners = np.repeat(np.arange(len(held)), [len(one.T) for one in held])
    signs = torch.from_numpy(np.where(np.concatenate(held, axis=1) > 0, np.float32(1), np.float32(-1)))
    agree = (signs.T @ signs).triu_(1).abs_()
    one, other = divmod(int(agree.argmax()), len(owners))
    pairs = max(1, len(owners) * (len(owners) - 1) // 2)
    if _chance(agree[one, other].numpy(), np.array(_NOISE_STEPS)) * pairs >= NOISE_ALARMS / 3:
        return None
    first, second = (names[owners[place]] for place in (one, other))
    return f"{first} has noise of {'its own other coordinates' if first == second else second} again: it must be fresh"


def _chance(excess: Array, count: NDArray[np.int64]) -> Array:
    """Chance that ``count`` fair coins show ``excess`` more heads than tails, or as many more tails than heads."""
    return np.asarray(2 * binom.sf((np.abs(excess) + count) / 2 - 1, count, 0.5))
