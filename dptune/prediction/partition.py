"""Which shard a record belongs to: by a keyed hash of itself, so that no other record ever moves."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.errors import ConfigError

#: What shares a shard: equal texts, or all records of a patient.
KEYS = ("record", "patient")


def shard_of(text: str, patient: int, key: str, models: int, salt: bytes) -> int:
    """The shard of one record, from 0. It depends on nothing but that record and public or secret constants.

    Args:
        key: "record" hashes the text, "patient" the patient's number.
        salt: secret; without it, guesses of a record could be tested against shards.
    """
    name = text if key == "record" else str(patient)
    digest = hmac.digest(salt, f"{key}:{name}".encode(), "sha256")
    return int.from_bytes(digest, "big") % models


def partition(
    texts: Sequence[str], patients: NDArray[Any], key: str, models: int, salt: bytes
) -> list[NDArray[np.int64]]:
    """For each shard the indices of its records, in their order; empty texts (records left out) belong to none.

    Adding or removing one record changes one shard; with key "patient", so does all that one patient has. Sizes follow
    the records and are private.

    Raises: ConfigError for an unknown key, or no shard.
    """
    if key not in KEYS:
        raise ConfigError("prediction.partition", f"unknown key {key!r}", fix=f"use {' or '.join(KEYS)}")
    if models < 1:
        raise ConfigError("prediction.models", f"{models} is not positive", fix="use 1 or more")
    shards: list[list[int]] = [[] for _ in range(models)]
    for index, (text, patient) in enumerate(zip(texts, patients, strict=True)):
        if text:
            shards[shard_of(text, int(patient), key, models, salt)].append(index)
    return [np.array(shard, dtype=np.int64) for shard in shards]
