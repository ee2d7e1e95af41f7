"""Assigns records to shards by a keyed hash of each record, so that one that joins or leaves moves no other."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.errors import ConfigError
from dptune.units import RECORD, check_unit


def shard_of(text: str, unit: int, key: str, models: int, salt: bytes) -> int:
    """The shard of one record, from 0. It depends on nothing but that record and public or secret constants.

    Args:
        unit: key of the record's unit.
        key: "record" hashes the text; the name of a column of units hashes ``unit``.
        salt: secret; without it, guesses of a record could be tested against shards.
    """
    name = text if key == RECORD else str(unit)
    digest = hmac.digest(salt, f"{key}:{name}".encode(), "sha256")
    return int.from_bytes(digest, "big") % models


def partition(texts: Sequence[str], units: NDArray[Any], key: str, models: int, salt: bytes) -> list[NDArray[np.int64]]:
    """The indices of each shard's records, in ascending order. Empty texts (canaries left out) are in no shard.

    Adding or removing one record changes one shard. If ``key`` is a column, so does one unit with all its records.
    Sizes of shards depend on the records and are private.

    Raises: ConfigError for an unknown key, or fewer than one model.

    Example:
        >>> import numpy as np
        >>> from dptune.prediction.partition import partition
        >>> texts = [f"Order {n} is late." for n in range(6)]
        >>> shards = partition(texts, np.arange(6), key="record", models=2, salt=b"a secret of 16 bytes")
        >>> sorted(np.concatenate(shards).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    check_unit(key, "prediction.partition")
    if models < 1:
        raise ConfigError("prediction.models", f"{models} is not positive", fix="use 1 or more")
    shards: list[list[int]] = [[] for _ in range(models)]
    for index, (text, unit) in enumerate(zip(texts, units, strict=True)):
        if text:
            shards[shard_of(text, int(unit), key, models, salt)].append(index)
    return [np.array(shard, dtype=np.int64) for shard in shards]
