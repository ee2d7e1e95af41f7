"""Records as token ids, grouped into units of privacy, and the Poisson batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
        truncated: how many records were longer than the limit.
    """

    rows: list[NDArray[np.int32]]
    padding: int
    truncated: int

    def __repr__(self) -> str:
        return f"Tokens({len(self.rows)} records)"

    def batch(self, indices: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, tokens) ids and mask of these records, padded on the right to the longest."""
        chosen = [self.rows[index] for index in indices]
        length = max(len(row) for row in chosen)
        ids = np.full((len(chosen), length), self.padding, dtype=np.int64)
        mask = np.zeros((len(chosen), length), dtype=np.int64)
        for position, row in enumerate(chosen):
            ids[position, : len(row)] = row
            mask[position, : len(row)] = 1
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def tokenize(texts: list[str], tokenizer: Any, max_length: int) -> Tokens:
    """Encode every text, followed by the end-of-text token, at most ``max_length`` tokens.

    Raises: ConfigError if ``max_length`` leaves nothing to predict.
    """
    if max_length < 2:
        raise ConfigError("training.max_length", f"{max_length} is below 2", fix="allow at least two tokens")
    end = tokenizer.eos_token_id
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    rows = [np.asarray([*ids, end][:max_length], dtype=np.int32) for ids in encoded]
    truncated = sum(len(ids) + 1 > max_length for ids in encoded)
    return Tokens(rows=rows, padding=tokenizer.pad_token_id, truncated=truncated)


@dataclass(frozen=True)
class PrivacyUnits:
    """Which records belong to which unit of privacy.

    Attributes:
        kind: "encounter" (each record its own unit) or "patient".
        members: for each unit the indices of its records.
        most: m, the most records one unit puts into a batch.
    """

    kind: str
    members: list[NDArray[np.int64]]
    most: int

    @classmethod
    def of(cls, kind: str, patients: NDArray[np.int64], most: int) -> PrivacyUnits:
        """Group records into units. Raises ConfigError for an unknown kind or ``most`` below 1."""
        if kind not in UNITS:
            raise ConfigError("data.unit", f"unknown unit {kind!r}", fix=f"use {' or '.join(UNITS)}")
        if most < 1:
            raise ConfigError("training.encounters_per_patient", f"{most} is below 1", fix="use 1 or more")
        if kind == "encounter":
            return cls(kind, list(np.arange(len(patients))[:, None]), 1)
        order = np.argsort(patients, kind="stable")
        starts = np.flatnonzero(np.diff(patients[order])) + 1
        return cls(kind, np.split(order, starts), most)

    def __len__(self) -> int:
        return len(self.members)

    def draw(self, sample_rate: float, entropy: Entropy) -> list[NDArray[np.int64]]:
        """A Poisson batch of units: for each drawn unit, the records (at most ``most``) it brings. May be empty."""
        return [self._choose(unit, entropy) for unit in poisson_sample(entropy, len(self), sample_rate)]

    def _choose(self, unit: np.int64, entropy: Entropy) -> NDArray[np.int64]:
        records = self.members[unit]
        if len(records) <= self.most:
            return records
        return records[np.argsort(uniform(entropy, len(records)))[: self.most]]


@dataclass(frozen=True)
class MicroBatch:
    """Whole units that fit the device together.

    Attributes:
        records: indices of the rows.
        owners: for each row, its unit's position within this micro-batch.
        units: number of units.
    """

    records: NDArray[np.int64]
    owners: NDArray[np.int64]
    units: int


def micro_batches(batch: list[NDArray[np.int64]], rows: int) -> Iterator[MicroBatch]:
    """Split a drawn batch into micro-batches of at most ``rows`` rows; a unit is never split.

    A unit with more rows than that is a micro-batch of its own.
    """
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
