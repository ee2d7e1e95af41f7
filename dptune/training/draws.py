"""Draws: which units enter a batch, where the sampler is not Poisson. One process draws for all ranks of a run.

**Truncated Poisson.** A Poisson sample of all units; of one with more than ``max_batch``, so many are kept by a
uniformly random choice. Whether a unit is cut hangs on how many others were drawn, as it must; its price counts that
(see ``privacy.samplers.sampler_bounds``).

**Balls in bins.** Row r of a run is batch r mod T of epoch r div T, and each unit enters one batch of every epoch. Its
bin there is a keyed hash of three things: the epoch, the unit's own key, and its number among units of equal keys. So:

- For anyone without the secret all bins are independent and uniform, those of equal records too: distinguishing them
  from that means breaking keyed BLAKE2b. (A bin's probability is off by at most T / 2^64 of itself.) That is the law
  that is priced.
- A unit that joins or leaves moves nobody else, except among units of the very same key, which are interchangeable.
- A process that goes on after a kill has the same bins, since the run's checkpoint keeps the secret. Other bins in the
  middle of an epoch would let a unit enter twice where one entry was charged, so a run without its secret is refused.

The secret is as private as the records, and goes with the last checkpoint: nothing is drawn after the last row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.privacy.entropy import Entropy, poisson_sample, uniform
from dptune.privacy.release import Release
from dptune.training.privacy_units import PrivacyUnits

_WORDS = 4  # of 64 bits: the length of a secret
_CHECK = 8  # hexadecimal digits that tell a damaged secret
_HASH = 8  # bytes


def truncated_sample(entropy: Entropy, units: int, sample_rate: float, max_batch: int) -> NDArray[np.int64]:
    """Sorted numbers of a Poisson sample of ``units``; of more than ``max_batch``, so many are kept at random.

    Example:
        >>> from dptune.privacy.entropy import OsEntropy
        >>> from dptune.training.draws import truncated_sample
        >>> len(truncated_sample(OsEntropy(), units=100, sample_rate=1.0, max_batch=7))
        7
    """
    drawn = poisson_sample(entropy, units, sample_rate)
    if len(drawn) <= max_batch:
        return drawn
    return np.sort(drawn[np.argsort(uniform(entropy, len(drawn)))[:max_batch]])


@dataclass
class Bins:
    """The bins of all units of a run, in every epoch. Private.

    Attributes:
        count: number T of bins in an epoch.
        keys: (units,) own key of each unit.
        secret: 32 bytes of the run's own.

    Example:
        >>> import numpy as np
        >>> from dptune.privacy.entropy import OsEntropy
        >>> from dptune.training.draws import Bins
        >>> bins = Bins.toss(count=3, keys=np.arange(10), entropy=OsEntropy())
        >>> sorted(np.concatenate([bins.batch(row) for row in (3, 4, 5)]).tolist())  # the second epoch
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    count: int
    keys: NDArray[np.int64] = field(repr=False)
    secret: bytes = field(repr=False)
    _epoch: int = field(default=-1, init=False, repr=False)
    _sorted: NDArray[np.int64] = field(init=False, repr=False)
    _starts: NDArray[np.int64] = field(init=False, repr=False)

    @classmethod
    def toss(cls, count: int, keys: NDArray[np.int64], entropy: Entropy) -> Self:
        """Bins by a new secret."""
        return cls(count, keys, entropy.words(_WORDS).tobytes())

    @classmethod
    def restored(cls, count: int, keys: NDArray[np.int64], kept: str) -> Self:
        """Bins by the secret that a checkpoint kept. Raises: ValueError for a text that is none."""
        check_kept(kept)
        return cls(count, keys, bytes.fromhex(kept[:-_CHECK]))

    @property
    def kept(self) -> str:
        """The secret as a checkpoint keeps it: hexadecimal digits, the last of which tell damage."""
        return self.secret.hex() + _check_of(self.secret)

    def batch(self, row: int) -> NDArray[np.int64]:
        """Sorted numbers of the units in the batch of a row of the ledger, from 0."""
        epoch, number = divmod(row, self.count)
        if epoch != self._epoch:
            chosen = self.of_epoch(epoch)
            self._sorted = np.argsort(chosen, kind="stable")
            self._starts = np.searchsorted(chosen[self._sorted], np.arange(self.count + 1))
            self._epoch = epoch
        return self._sorted[self._starts[number] : self._starts[number + 1]]

    def of_epoch(self, epoch: int) -> NDArray[np.int64]:
        """(units,) the bin of each unit, from 0."""
        start = epoch.to_bytes(8, "little")
        hashes = (hashlib.blake2b(start + one, key=self.secret, digest_size=_HASH).digest() for one in self._own)
        found = np.frombuffer(b"".join(hashes), dtype="<u8")
        return (found % np.uint64(self.count)).astype(np.int64)

    @cached_property
    def _own(self) -> list[bytes]:
        """For each unit its key, and its number among units of equal keys."""
        order = np.argsort(self.keys, kind="stable")
        ordered = self.keys[order]
        first = np.searchsorted(ordered, ordered)  # where the run of equal keys begins
        alike = np.zeros(len(order), dtype=np.int64)
        alike[order] = np.arange(len(order)) - first
        whole = np.stack([self.keys.astype("<i8"), alike.astype("<i8")], axis=1).tobytes()
        return [whole[at : at + 16] for at in range(0, len(whole), 16)]


def drawn_units(
    release: Release, row: int, units: int, bins: Bins | None, entropy: Entropy
) -> NDArray[np.int64] | None:
    """Numbers of the units in the batch of a charged row; None where each rank draws its own, as for Poisson.

    Args:
        row: number of the release in the ledger, from 0.
        bins: those of a run by balls_in_bins, which needs them.
    """
    if release.sampler.name == "balls_in_bins":
        assert bins is not None  # ``run_start`` made them
        return bins.batch(row)
    if release.sampler.name == "truncated_poisson":
        return truncated_sample(entropy, units, release.sample_rate, release.sampler.max_batch)
    return None


def keys_of(units: PrivacyUnits) -> NDArray[np.int64]:
    """(units,) the keys by which units choose bins, an auditor's slots last.

    Raises: ConfigError for units without keys of their own.
    """
    keys = units.own_keys(np.arange(len(units), dtype=np.int64))
    if keys is None:
        problem = "have no keys of their own, by which balls_in_bins gives each unit its batches"
        raise ConfigError("units", problem, fix="make them with PrivacyUnits.of, and give it the keys")
    return keys


def check_kept(kept: str) -> None:
    """Raise ValueError unless a text is a secret as ``Bins.kept`` writes it."""
    secret = bytes.fromhex(kept[:-_CHECK])
    if len(secret) != 8 * _WORDS or kept[-_CHECK:] != _check_of(secret):
        raise ValueError("its secret of the bins is damaged")


def _check_of(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()[:_CHECK]
