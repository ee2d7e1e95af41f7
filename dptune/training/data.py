"""Records as token ids, grouped into units of privacy, and the batches drawn from them.

Draws say which units enter a batch, where the sampler is not Poisson. One process draws for all ranks of a run.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.privacy.entropy import Entropy, poisson_sample, uniform
from dptune.privacy.release import Release
from dptune.training.losses import CONTEXT, COUNTED, PADDING
from dptune.training.privacy_units import PrivacyUnits


@dataclass(frozen=True)
class Tokens:
    """Token ids of every record: one record is one example, truncated and never chunked. Private.

    Attributes:
        rows: one int32 array for each record, with the end-of-text token if it fits; a list, or rows of a file
            (``token_file.MappedRows``). Never changed in place. A token that is read but has no loss, such as a
            prompt's, is stored as ``~id``, which is negative (``with_context``): ids and loss mask cannot get
            separated, and code that takes rows for plain ids fails instead of training on prompts.
        padding: token id that fills the right-hand side of a batch.
        width: width of the widest batch in tokens, longer than any record, whatever records it holds.
        truncated: number of records that were longer than the limit.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from dptune.training.data import Tokens
        >>> tokens = Tokens([np.array([5, 6, 2], np.int32), np.array([7, 2], np.int32)], padding=0, width=5)
        >>> ids, _ = tokens.batch(np.array([0, 1]), torch.device("cpu"))
        >>> ids.tolist()
        [[5, 6, 2, 0, 0], [7, 2, 0, 0, 0]]
    """

    rows: Sequence[NDArray[np.int32]] = field(repr=False)
    padding: int
    width: int
    truncated: int = 0

    def batch(
        self,
        indices: NDArray[np.int64],
        device: torch.device,
        *,
        height: int | None = None,
        width: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask of these records, both (height, width), padded on the right.

        The mask holds ``losses.PADDING``, ``COUNTED`` or ``CONTEXT`` for every position.

        The shape follows from public settings and a unit's own length (``by_width``), and at least one position is
        always padding, because kernels round differently by shape and by whether there is padding: with a shape
        that followed the batch, one record would move the gradients of all others by up to half a percent in
        bfloat16, beyond what clipping bounds.

        Args:
            height: rows in all, at least as many as indices; None takes their number. Rows beyond them hold one
                token and have no loss.
            width: tokens, more than any of these records has; None takes ``self.width``.
        """
        chosen = [self.rows[index] for index in indices]
        height = len(chosen) if height is None else height
        width = self.width if width is None else width
        ids = np.full((height, width), self.padding, dtype=np.int64)
        mask = np.full((height, width), PADDING, dtype=np.int64)
        mask[len(chosen) :, 0] = COUNTED
        for position, row in enumerate(chosen):
            ids[position, : len(row)] = plain_ids(row)
            mask[position, : len(row)] = np.where(row < 0, CONTEXT, COUNTED)
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def compact(self, indices: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``batch``, cut to the longest of these records: for evaluation and public data only."""
        ids, mask = self.batch(indices, device)
        longest = max(len(self.rows[index]) for index in indices)
        return ids[:, :longest], mask[:, :longest]

    @property
    def without_loss(self) -> int:
        """Number of records without a token in the loss, such as a prompt that fills the whole width. Private.

        Such records are drawn like all others; their gradient is zero. Reads every row.
        """
        return sum(not (row[1:] >= 0).any() for row in self.rows)


def with_context(ids: NDArray[np.int32], counts: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A row of ``Tokens`` from plain ids and, for each, whether it counts in the loss."""
    return np.where(counts, ids, ~ids)


def plain_ids(row: NDArray[np.int32]) -> NDArray[np.int32]:
    """The token ids of a row of ``Tokens``, whether they count in the loss or not."""
    return np.where(row < 0, ~row, row)


def tokenize(texts: list[str], tokenizer: Any, max_length: int) -> Tokens:
    """Encode every text, followed by the end-of-text token, at most ``max_length - 1`` tokens.

    The last position stays padding, see ``Tokens.batch``. A corpus that is too large for a list goes through
    ``token_file.open_or_tokenize``.

    Raises: ConfigError if ``max_length`` leaves nothing to predict.
    """
    rows, cut = encode(texts, tokenizer, max_length)
    return Tokens(rows=rows, padding=tokenizer.pad_token_id, width=max_length, truncated=int(cut.sum()))


def encode(texts: list[str], tokenizer: Any, max_length: int) -> tuple[list[NDArray[np.int32]], NDArray[np.bool_]]:
    """The rows of ``tokenize``, and (texts,) whether each was cut. Raises ConfigError as ``tokenize`` does."""
    if max_length < 3:
        raise ConfigError("training.max_length", f"{max_length} is below 3", fix="allow at least three tokens")
    end = tokenizer.eos_token_id
    encoded = open_ids(texts, tokenizer)
    rows = [np.asarray([*ids, end][: max_length - 1], dtype=np.int32) for ids in encoded]
    return rows, np.array([len(ids) + 1 > max_length - 1 for ids in encoded], dtype=bool)


def open_ids(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of each text, with the beginning-of-text token where the tokenizer puts one, but without an end."""
    if not texts:
        return []
    end = tokenizer.eos_token_id
    found = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    return [list(ids[:-1] if len(ids) > 1 and ids[-1] == end else ids) for ids in found]


def by_width(
    batch: list[NDArray[np.int64]], tokens: Tokens, widths: Sequence[int]
) -> Iterator[tuple[int, list[NDArray[np.int64]]]]:
    """The units of a drawn batch by the width that their longest record needs, widest first.

    A unit's width follows from its own drawn records and public widths alone, so that no unit changes the shape in
    which another's gradient is computed.

    Args:
        widths: descending; the first is more than any record has.
    """
    longest = [max(len(tokens.rows[record]) for record in unit) for unit in batch]
    needed = [min(width for width in widths if width > length) for length in longest]
    for width in widths:
        if units := [unit for unit, own in zip(batch, needed, strict=True) if own == width]:
            yield width, units


_WORDS = 4  # of 64 bits: the length of a secret
_CHECK = 8  # hexadecimal digits that tell a damaged secret
_HASH = 8  # bytes


def truncated_sample(entropy: Entropy, units: int, sample_rate: float, max_batch: int) -> NDArray[np.int64]:
    """Sorted numbers of a Poisson sample of ``units``; of more than ``max_batch``, so many are kept at random.

    Example:
        >>> from dptune.privacy.entropy import OsEntropy
        >>> from dptune.training.data import truncated_sample
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
        >>> from dptune.training.data import Bins
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
