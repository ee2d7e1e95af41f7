"""Records as token ids, grouped into units of privacy, and the Poisson batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.errors import ConfigError
from dptune.privacy.entropy import Entropy, poisson_sample, uniform

UNITS = ("encounter", "patient")


@dataclass(frozen=True)
class Tokens:
    """Token ids of every record: one record is one example, truncated and never chunked. Private.

    Attributes:
        rows: one int32 array a record, with the end-of-text token where it fits.
        padding: token id that fills the right-hand side of a batch.
        width: tokens of every batch, longer than any record, whatever records it holds.
        truncated: how many records were longer than the limit.
    """

    rows: list[NDArray[np.int32]] = field(repr=False)
    padding: int
    width: int
    truncated: int = 0

    def batch(
        self, indices: NDArray[np.int64], device: torch.device, *, height: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask of these records, both (height, width), padded on the right.

        The shape is public and at least one position is always padding, because kernels round differently
        by shape and by whether there is padding: with a shape that followed the records, one record would
        move the gradients of all others by up to half a percent in bfloat16, beyond what clipping bounds.

        Args:
            height: rows in all, at least as many as indices; None takes their number. Rows beyond them hold one
                token and have no loss.
        """
        chosen = [self.rows[index] for index in indices]
        height = len(chosen) if height is None else height
        ids = np.full((height, self.width), self.padding, dtype=np.int64)
        mask = np.zeros((height, self.width), dtype=np.int64)
        mask[len(chosen) :, 0] = 1
        for position, row in enumerate(chosen):
            ids[position, : len(row)] = row
            mask[position, : len(row)] = 1
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def compact(self, indices: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``batch``, cut to the longest of these records: for evaluation and public data only."""
        ids, mask = self.batch(indices, device)
        longest = max(len(self.rows[index]) for index in indices)
        return ids[:, :longest], mask[:, :longest]


def tokenize(texts: list[str], tokenizer: Any, max_length: int) -> Tokens:
    """Encode every text, followed by the end-of-text token, at most ``max_length - 1`` tokens.

    The last position stays padding, see ``Tokens.batch``.

    Raises: ConfigError if ``max_length`` leaves nothing to predict.
    """
    if max_length < 3:
        raise ConfigError("training.max_length", f"{max_length} is below 3", fix="allow at least three tokens")
    end = tokenizer.eos_token_id
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    rows = [np.asarray([*ids, end][: max_length - 1], dtype=np.int32) for ids in encoded]
    truncated = sum(len(ids) + 1 > max_length - 1 for ids in encoded)
    return Tokens(rows=rows, padding=tokenizer.pad_token_id, width=max_length, truncated=truncated)


@dataclass(frozen=True)
class PrivacyUnits:
    """Which records belong to which unit of privacy.

    Attributes:
        kind: "encounter" (each record its own unit), "patient", or "client" (many patients).
        members: for each unit the indices of its records.
        most: m, the most records one unit puts into a batch.
    """

    kind: str
    members: list[NDArray[np.int64]] = field(repr=False)
    most: int

    @classmethod
    def of(
        cls, kind: str, patients: NDArray[np.int64], most: int, absent: NDArray[np.bool_] | None = None
    ) -> PrivacyUnits:
        """Group records into units.

        Args:
            absent: (records,) units that are not in the data, as an auditor's coin left them out. They count, so
                that the number of units tells nothing, and bring no record.

        Raises: ConfigError for an unknown kind or ``most`` below 1.
        """
        if kind not in UNITS:
            raise ConfigError("data.unit", f"unknown unit {kind!r}", fix=f"use {' or '.join(UNITS)}")
        if most < 1:
            raise ConfigError("training.encounters_per_patient", f"{most} is below 1", fix="use 1 or more")
        if kind == "encounter":
            members = list(np.arange(len(patients))[:, None])
        else:
            order = np.argsort(patients, kind="stable")
            members = np.split(order, np.flatnonzero(np.diff(patients[order])) + 1)
        return cls(kind, _present(members, absent), 1 if kind == "encounter" else most)

    @classmethod
    def clients(cls, count: int, patients: NDArray[np.int64], absent: NDArray[np.bool_] | None = None) -> PrivacyUnits:
        """Deal whole patients out to simulated clients by a public hash of their number.

        Where a patient goes depends on that patient alone, so that a client can join or leave without any other
        client's records moving. A client may be empty.
        """
        # SplitMix64's finaliser: numbers in a row spread evenly.
        mixed = patients.astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        client = (mixed ^ (mixed >> np.uint64(31))) % np.uint64(count)
        members = _present([np.flatnonzero(client == one) for one in range(count)], absent)
        return cls("client", members, max(map(len, members)))

    def __len__(self) -> int:
        return len(self.members)

    def part(self, rank: int, world: int) -> PrivacyUnits:
        """The units that one of ``world`` processes draws: a range of them, by public numbers alone."""
        start, end = (len(self) * bound // world for bound in (rank, rank + 1))
        return replace(self, members=self.members[start:end])

    def draw(self, sample_rate: float, entropy: Entropy) -> list[NDArray[np.int64]]:
        """A Poisson batch of units: for each drawn unit, the records (at most ``most``) it brings. May be empty.

        A unit without a record is no part of a batch: not even counts see it.
        """
        drawn = poisson_sample(entropy, len(self), sample_rate)
        return [self._choose(unit, entropy) for unit in drawn if len(self.members[unit])]

    def _choose(self, unit: np.int64, entropy: Entropy) -> NDArray[np.int64]:
        records = self.members[unit]
        if len(records) <= self.most:
            return records
        return records[np.argsort(uniform(entropy, len(records)))[: self.most]]


def _present(members: list[NDArray[np.int64]], absent: NDArray[np.bool_] | None) -> list[NDArray[np.int64]]:
    return members if absent is None else [records[~absent[records]] for records in members]


@dataclass(frozen=True)
class MicroBatch:
    """Whole units that fit the device together.

    Attributes:
        records: indices of the rows.
        owners: for each row, its unit's position within this micro-batch.
        units: number of units.
    """

    records: NDArray[np.int64] = field(repr=False)
    owners: NDArray[np.int64] = field(repr=False)
    units: int

    def owners_of(self, height: int, device: torch.device) -> torch.Tensor | None:
        """(height,) the unit of each row, ``units`` for rows that fill up; None where row j is unit j."""
        if self.units == len(self.records):
            return None
        owners = np.full(height, self.units)
        owners[: len(self.owners)] = self.owners
        return torch.from_numpy(owners).to(device)


def micro_batches(batch: list[NDArray[np.int64]], rows: int) -> Iterator[MicroBatch]:
    """Split a drawn batch into micro-batches of at most ``rows`` rows; a unit is never split.

    Raises: ConfigError if a unit alone has more rows.
    """
    if any(len(unit) > rows for unit in batch):
        raise ConfigError(
            "training.physical_batch_size", f"{rows} is less than one unit's rows", fix="raise it to the most per unit"
        )
    group: list[NDArray[np.int64]] = []
    for unit in batch:
        if group and sum(map(len, group)) + len(unit) > rows:
            yield _as_micro_batch(group)
            group = []
        group.append(unit)
    if group:
        yield _as_micro_batch(group)


def _as_micro_batch(group: list[NDArray[np.int64]]) -> MicroBatch:
    owners = np.repeat(np.arange(len(group)), [len(unit) for unit in group])
    return MicroBatch(np.concatenate(group), owners, len(group))
