"""Private steps and loaders of somebody else's, sound ones and with the errors that are made most often.

Steps are written in NumPy as a user would write them: from gradients, one row a record, to the noisy mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CLIP, NOISE, BATCH = 1.0, 1.0, 16
Rows = NDArray[np.floating[Any]]
coins = np.random.default_rng()


def clipped(gradients: Rows, radius: float = CLIP) -> Rows:
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return np.asarray(gradients * np.minimum(1, radius / np.maximum(norms, 1e-12)))


def noise(like: Rows, scale: float = NOISE * CLIP) -> Rows:
    return coins.normal(scale=scale, size=like.shape)


def sound(gradients: Rows) -> Rows:
    total = clipped(gradients).sum(axis=0)
    return np.asarray((total + noise(total)) / BATCH)


def sound_sum(gradients: Rows) -> Rows:
    return sound(gradients) * BATCH


def sound_accumulation(micro_batches: list[Rows]) -> Rows:
    total = np.sum([clipped(one).sum(axis=0) for one in micro_batches], axis=0)
    return np.asarray((total + noise(total)) / BATCH)


def sound_units(gradients: Rows, units: NDArray[np.int64]) -> Rows:
    own = np.array([gradients[units == unit].sum(axis=0) for unit in np.unique(units)])
    return sound(own.reshape(-1, gradients.shape[1]))


def sound_units_accumulated(micro_batches: list[Rows], units: list[NDArray[np.int64]]) -> Rows:
    return sound_units(np.concatenate(micro_batches), np.concatenate(units))


def clipped_sum_alone(gradients: Rows) -> Rows:
    return clipped(gradients).sum(axis=0)


def noise_scaled_by_the_batch(gradients: Rows) -> Rows:
    total = clipped(gradients).sum(axis=0)
    return np.asarray((total + noise(total) / BATCH) / BATCH)


def clip_after_the_mean(gradients: Rows) -> Rows:
    mean = clipped(gradients.sum(axis=0, keepdims=True) / BATCH)[0]
    return np.asarray(mean + noise(mean) / BATCH)


def per_microbatch_clip(micro_batches: list[Rows]) -> Rows:
    total = clipped(np.stack([one.sum(axis=0) for one in micro_batches])).sum(axis=0)
    return np.asarray((total + noise(total)) / BATCH)


def no_noise_on_the_last_accumulation_step(micro_batches: list[Rows]) -> Rows:
    total, last = np.zeros(micro_batches[0].shape[1]), len(micro_batches) - 1
    for number, one in enumerate(micro_batches):
        total += clipped(one).sum(axis=0)
        if number < last:
            total += noise(total, NOISE * CLIP / len(micro_batches) ** 0.5)
    return total / BATCH


class NoiseReused:
    """Noise that is drawn once and kept for ten steps."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: Rows = np.zeros(0)

    def __call__(self, gradients: Rows) -> Rows:
        total = clipped(gradients).sum(axis=0)
        if self.calls % 10 == 0:
            self.kept = noise(total)
        self.calls += 1
        return np.asarray((total + self.kept) / BATCH)


noise_reused = NoiseReused()


def sqrt_groups_sensitivity(gradients: Rows) -> Rows:
    """Each of four layers is clipped to CLIP, and the noise is that of one."""
    layers = [clipped(one).sum(axis=0) for one in np.split(gradients, 4, axis=1)]
    total = np.concatenate(layers)
    return np.asarray((total + noise(total)) / BATCH)


def bf16_norm_underflow(gradients: Rows) -> Rows:
    """Squares are summed in bfloat16, one column after another: small ones vanish beside a large one."""
    norms = torch.zeros(len(gradients), dtype=torch.bfloat16)
    for squares in (torch.from_numpy(gradients).bfloat16() ** 2).T.contiguous().unbind():
        norms.add_(squares)
    factors = np.minimum(1, CLIP / np.maximum(norms.float().sqrt().numpy(), 1e-12))
    total = (gradients * factors[:, None]).sum(axis=0)
    return np.asarray((total + noise(total)) / BATCH)


def realised_batch_as_divisor(gradients: Rows) -> Rows:
    total = clipped(gradients).sum(axis=0)
    return np.asarray((total + noise(total)) / max(1, len(gradients)))


def a_tenth_too_little_noise(gradients: Rows) -> Rows:
    total = clipped(gradients).sum(axis=0)
    return np.asarray((total + noise(total, 0.9 * NOISE * CLIP)) / BATCH)


def a_layer_without_noise(gradients: Rows) -> Rows:
    total = clipped(gradients).sum(axis=0)
    drawn = noise(total)
    drawn[:8] = 0
    return np.asarray((total + drawn) / BATCH)


def clip_of_each_record(gradients: Rows, units: NDArray[np.int64]) -> Rows:
    """Sound about a record, and not about a unit of several."""
    return sound(gradients)


def clip_of_units_by_microbatch(micro_batches: list[Rows], units: list[NDArray[np.int64]]) -> Rows:
    """A unit's records are clipped together only where they are in one micro-batch."""
    rows = [own[mine == unit].sum(axis=0) for own, mine in zip(micro_batches, units, strict=True) for unit in set(mine)]
    return sound(np.array(rows).reshape(-1, micro_batches[0].shape[1]))


#: Options of the claim, beside the noise multiplier and the clip norm, that a step needs.
PARTS: dict[str, Any] = {"micro_batches": 2}
SOUND: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (sound, {}),
    (sound_sum, {}),
    (sound, {"absent": "zeroed"}),
    (realised_batch_as_divisor, {"absent": "zeroed"}),  # of batches of one size nothing is learned
    (sound_accumulation, PARTS),
    (sound_units, {"unit_records": 3}),
    (sound_units_accumulated, PARTS | {"unit_records": 3}),
]


def clip_of_outliers_alone(gradients: Rows) -> Rows:
    """Norms up to 100 times the clip norm stay as they are."""
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    total = np.where(norms > 100 * CLIP, clipped(gradients), gradients).sum(axis=0)
    return np.asarray((total + noise(total)) / BATCH)


PLANTED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "noise scaled by the batch": (noise_scaled_by_the_batch, {}),
    "clip after the mean": (clip_after_the_mean, {}),
    "clip of each micro-batch": (per_microbatch_clip, PARTS),
    "no noise on the last accumulation step": (no_noise_on_the_last_accumulation_step, PARTS),
    "noise reused": (noise_reused, {}),
    "sensitivity of sqrt(layers)": (sqrt_groups_sensitivity, {}),
    "norm summed in bfloat16": (bf16_norm_underflow, {}),
    "realised batch as divisor": (realised_batch_as_divisor, {}),
    "a layer without noise": (a_layer_without_noise, {}),
    "clip of outliers alone": (clip_of_outliers_alone, {}),
    "clip of each record, for a unit of three": (clip_of_each_record, {"unit_records": 3}),
    "clip of a unit in each micro-batch": (clip_of_units_by_microbatch, PARTS | {"unit_records": 3}),
}


# Loaders of 100 ids in batches of 10, on average. Each call is one epoch.

UNITS, SIZE, MOST = 100, 10, 11
BATCHES = UNITS // SIZE
Epoch = Iterable[NDArray[np.int64]]


def poisson() -> Epoch:
    for _ in range(BATCHES):
        yield np.flatnonzero(coins.random(UNITS) < SIZE / UNITS)


def truncated_poisson() -> Epoch:
    for batch in poisson():
        yield coins.permutation(batch)[:MOST]


def balls_in_bins() -> Epoch:
    places = coins.integers(BATCHES, size=UNITS)
    for number in range(BATCHES):
        yield np.flatnonzero(places == number)


def shuffle() -> Epoch:
    yield from np.split(coins.permutation(UNITS), BATCHES)


def fixed_size() -> Epoch:
    for _ in range(BATCHES):
        yield coins.permutation(UNITS)[:SIZE]


def dropped_last_batch() -> Epoch:
    yield from list(shuffle())[:-1]


kept = np.split(coins.permutation(UNITS), BATCHES)


def shuffled_once() -> Epoch:
    yield from kept


def shuffled_in_a_buffer() -> Epoch:
    """Ids come from a buffer of 20 that is filled in order, as streamed data sets are shuffled."""
    waiting, rest, order = list(range(20)), list(range(20, UNITS)), []
    while waiting:
        order.append(waiting.pop(int(coins.integers(len(waiting)))))
        waiting += [rest.pop(0)] if rest else []
    yield from np.split(np.array(order), BATCHES)


def batches_shuffled() -> Epoch:
    """The order of the batches is new in every epoch, and who is in them is not."""
    yield from coins.permutation(np.array(kept))


def truncated_by_number() -> Epoch:
    """A large batch loses its last ids, the same ones each time."""
    for batch in poisson():
        yield batch[:MOST]


def without_the_last() -> Epoch:
    for batch in poisson():
        yield batch[batch < UNITS - 1]


def at_twice_the_rate() -> Epoch:
    for _ in range(BATCHES):
        yield np.flatnonzero(coins.random(UNITS) < 2 * SIZE / UNITS)


def poisson_of_one_seed() -> Epoch:
    seeded = np.random.default_rng(0)
    for _ in range(BATCHES):
        yield np.flatnonzero(seeded.random(UNITS) < SIZE / UNITS)


SOUND_LOADERS: list[Callable[[], Epoch]] = [poisson, truncated_poisson, balls_in_bins, shuffle, fixed_size]


def shuffled_in_pairs() -> Epoch:
    """Ids 50 apart are always together."""
    return [np.concatenate([one, one + UNITS // 2]) for one in np.split(coins.permutation(UNITS // 2), BATCHES)]


def poisson_with_a_shared_coin() -> Epoch:
    drawn = [coins.random(UNITS) < 1 / BATCHES for _ in range(BATCHES)]
    return [np.flatnonzero(np.where(np.arange(UNITS) == 77, one[13], one)) for one in drawn]


#: The loader, and the sampler that is claimed of it.
PLANTED_LOADERS: dict[str, tuple[Callable[[], Epoch], str]] = {
    "Poisson replaced by shuffle": (shuffle, "poisson"),
    "Poisson replaced by balls in bins": (balls_in_bins, "poisson"),
    "Poisson replaced by fixed size": (fixed_size, "poisson"),
    "dropped last batch": (dropped_last_batch, "shuffle"),
    "shuffled once": (shuffled_once, "shuffle"),
    "only the batches shuffled": (batches_shuffled, "shuffle"),
    "shuffled in a buffer": (shuffled_in_a_buffer, "shuffle"),
    "truncated by number": (truncated_by_number, "truncated_poisson"),
    "a unit that never comes": (without_the_last, "poisson"),
    "twice the rate": (at_twice_the_rate, "poisson"),
    "the same coins in every epoch": (poisson_of_one_seed, "poisson"),
    "shuffle claimed as balls in bins": (shuffle, "balls_in_bins"),
    "fixed size claimed as shuffle": (fixed_size, "shuffle"),
    "pairs of ids always together": (shuffled_in_pairs, "shuffle"),
}
