"""Randomness: the operating system's entropy for everything that privacy rests on.

Two things must stay secret for the guarantee: the noise, and the coins of Poisson sampling (an adversary who
knows which records entered a batch gets no amplification by sampling). Both come from here. A fixed seed is
for tests; it marks the run as not private.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: Version of the samplers: ``poisson_sample`` here, ``PrivacyUnits.draw`` and ``training.data``. Raise it when a
#: change moves what they draw from the same words: tests/golden says when.
VERSION = 1
_SMALL = np.uint64(2**47)
_ONE = np.float64(1.0).view(np.uint64)
_FEW_BYTES = 1024
#: Largest -log(2 tail) that ``signed_tail`` can give: 63 bits of a word and 53 of the next.
LARGEST_LOG_TAIL = 116 * math.log(2)
FIXED_SEED_LEAK = "fixed seed for noise and sampling: not private"


class Entropy(Protocol):
    """A stream of independent uniform 64-bit words."""

    @property
    def leaks(self) -> tuple[str, ...]:
        """Why a run with this source is not private; empty when it is."""
        ...

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw ``count`` fresh words."""
        ...


@dataclass(frozen=True)
class OsEntropy:
    """The kernel's cryptographic generator, with AES for long draws. The only source that supports a guarantee.

    A long draw is the keystream of AES-256 in counter mode, under a key and a counter that the kernel draws for each
    call and that nobody keeps. To tell it from independent words is to break AES. It takes a twentieth of the kernel's
    time. Without the ``cryptography`` package the kernel draws all words.

    Example:
        >>> from dptune.privacy.entropy import FixedSeed, OsEntropy
        >>> OsEntropy().words(2).dtype, OsEntropy().leaks
        (dtype('uint64'), ())
        >>> FixedSeed(1).leaks
        ('fixed seed for noise and sampling: not private',)
    """

    leaks: tuple[str, ...] = ()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw ``count`` fresh words."""
        size = 8 * count
        keystream = _aes_keystream(size) if size > _FEW_BYTES else None
        return np.frombuffer(keystream or os.urandom(size), dtype=np.uint64)


@dataclass(frozen=True)
class FixedSeed:
    """A reproducible stream for tests and debugging. Whoever knows the seed can subtract the noise."""

    seed: int
    leaks: tuple[str, ...] = field(default=(FIXED_SEED_LEAK,), init=False)
    _generator: np.random.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_generator", np.random.default_rng(self.seed))

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words of the stream."""
        return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)


def _aes_keystream(size: int) -> bytes | None:
    """``size`` bytes of keystream under a fresh key; None without the ``cryptography`` package."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return None
    return Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor().update(bytes(size))


def uniform(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """Draw ``count`` uniforms on the open interval (0, 1), 52 bits each: never 0 or 1, so logs are finite."""
    return ((entropy.words(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def signed_tail(entropy: Entropy, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw ``count`` fair signs (+1 or -1), and uniforms on (0, 1/2) with at least 47 significant bits at any size.

    They serve distributions that are symmetric about 0: the quantile of the small uniform reaches into the tail
    without the gaps that a 53-bit uniform on (0, 1) has there. (The uniform may round to 1/2 itself.) A gap wider than
    the public grid of the output would tell which sum the noise was added to. Heavy tails stretch gaps most, so one
    word in 2^16 is continued by another.
    """
    words = entropy.words(count)
    signs = ((words << np.uint64(63)) | _ONE).view(np.float64)  # the lowest bit as the sign of 1.0
    whole = words >> np.uint64(1)
    tail = whole.astype(np.float64)
    tail += 0.5
    tail *= 2.0**-64
    small, tails = continued(words, entropy)
    tail[small] = tails
    return signs, tail


def continued(words: NDArray[np.uint64], entropy: Entropy) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The places of the words of ``signed_tail`` that another word continues, and their uniforms on (0, 1/2)."""
    small = np.flatnonzero(words < 2 * _SMALL)
    if not len(small):
        return small, np.zeros(0)
    return small, ((words[small] >> np.uint64(1)).astype(np.float64) + uniform(entropy, len(small))) * 2.0**-64


def poisson_sample(entropy: Entropy, units: int, sample_rate: float) -> NDArray[np.int64]:
    """Sorted indices of a Poisson sample: each of ``units`` enters with probability ``sample_rate``, independently.

    It draws the geometric gaps between successes, so that the work grows with the sample and not with ``units``. With
    52-bit uniforms each gap's probability is off by at most 2^-52: a rate of 1e-9 by less than a millionth of itself.
    """
    if sample_rate >= 1.0:
        return np.arange(units, dtype=np.int64)
    expected = sample_rate * units
    block = int(expected + 6 * expected**0.5) + 16
    position, chosen = -1, []
    while position < units:
        with np.errstate(over="ignore"):  # an infinite gap is as good as any beyond the last unit
            gaps = np.floor(np.log(uniform(entropy, block)) / np.log1p(-sample_rate))
        # A gap may overflow int64 at a tiny rate; it is cut at the last unit, beyond which nothing is drawn.
        positions = position + np.cumsum(np.minimum(gaps, units).astype(np.int64) + 1)
        chosen.append(positions)
        position = int(positions[-1])
    sample = np.concatenate(chosen)
    return sample[sample < units]
