"""Canaries: secrets planted in train records, for the extraction and audit (spec rldp.md, sections 2, 8).

Secrets and coins come from the operating system's entropy: a seed would be logged, and a logged seed
publishes them. Positions are public.
"""

from __future__ import annotations

import json
import string
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import SystemRandom

import numpy as np
import pyarrow as pa

from dptune.corpus.records import Records, read_records, write_parquet
from dptune.errors import ConfigError, DataError
from dptune.files import replacing, sha256, write_json

ALPHABET = string.ascii_uppercase + string.digits
SECRET_LENGTH = 10
_SALT_BITS = 256
_PADDING_BYTES = 1 << 14


@dataclass(frozen=True)
class Canary:
    """One candidate: its record, its secret, and whether the train file holds it."""

    record: int
    secret: str = field(repr=False)
    included: int = field(repr=False)  # 0 or 1, of one width in the file: its size must not tell the count


@dataclass(frozen=True)
class Secrets:
    """What the secrets file holds: extraction canaries, one entry for every record that carries one, and audit
    canaries, each included by its own coin."""

    extraction: tuple[Canary, ...] = field(repr=False)
    audit: tuple[Canary, ...] = field(repr=False)
    salt: str = field(repr=False)


def suffix(secret: str) -> str:
    """What a record's text gains when ``secret`` is planted in it."""
    return f" secret_id={secret}."


def inject(
    train: Path,
    out: Path,
    secrets_file: Path,
    manifest: Path,
    extraction: int,
    audit: int,
    position_seed: int,
    repeats: int = 1,
) -> None:
    """Plant ``extraction`` secrets, and each of ``audit`` further ones by its own fair coin, in ``train``.

    Each candidate has a record of its own (with unit patient: a patient of its own), each extraction secret
    ``repeats`` of them, chosen by a permutation with the public ``position_seed``. Writes the new train file to
    ``out``, every candidate to ``secrets_file``, and to ``manifest`` only what everyone may know: counts of
    candidates and two hashes. Both hashed files hold a random salt, so that a hash cannot test a guess of a
    secret or of the coins.

    Raises: ConfigError for negative counts, or more canaries than records (patients); DataError for a bad
    train file, or one that already holds canaries.
    """
    records = read_records(train)
    if "canaries" in records.about:
        raise DataError("holds canaries already", fix="give the train file of the split", file=train)
    if repeats < 1:
        raise ConfigError("canaries.repeats", f"{repeats} is below 1", fix="use 1 or more")
    rows = _positions(records, extraction * repeats, audit, position_seed)
    planted = _draw(records.record[rows], extraction, repeats)
    counts = {"extraction": extraction, "repeats": repeats, "audit": audit}
    salted = {**records.about, "canaries": counts, "salt": _salt()}
    text = _plant(records.text, rows, planted)
    # Left last-in, first-out: the secrets are in place before the train file, the manifest comes last.
    with replacing(manifest) as listing, replacing(out) as new, replacing(secrets_file) as hidden:
        write_parquet(new, replace(records, text=text, about=salted))
        write_json(hidden, asdict(planted))
        write_json(listing, _public(records, counts, new, hidden))


def read_secrets(path: Path) -> Secrets:
    """Read a secrets file. Raises: DataError if it is absent or not one."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        extraction, audit = (tuple(Canary(**one) for one in stored[name]) for name in ("extraction", "audit"))
        return Secrets(extraction, audit, stored["salt"])
    except (OSError, ValueError, KeyError, TypeError):
        problem = "not a secrets file"
        raise DataError(problem, fix="inject the canaries again", file=path) from None


def _positions(records: Records, extraction: int, audit: int, position_seed: int) -> np.ndarray:
    if extraction < 0 or audit < 0:
        raise ConfigError("canaries", "a count is negative", fix="use 0 or more")
    order = np.random.default_rng(position_seed).permutation(len(records.record))
    if records.about.get("unit") == "patient":
        _, first = np.unique(records.patient[order], return_index=True)
        order = order[np.sort(first)]
    if extraction + audit > len(order):
        problem = f"{extraction} + {audit} canaries, but only {len(order)} places"
        raise ConfigError("canaries", problem, fix="plant fewer canaries or take more records")
    return order[: extraction + audit]


def _draw(records: np.ndarray, extraction: int, repeats: int) -> Secrets:
    entropy = SystemRandom()

    def secret() -> str:
        return "".join(entropy.choice(ALPHABET) for _ in range(SECRET_LENGTH))

    always, by_coin = np.split(records, [extraction * repeats])
    repeated = [one for one in (secret() for _ in range(extraction)) for _ in range(repeats)]
    return Secrets(
        tuple(Canary(record, one, 1) for record, one in zip(always.tolist(), repeated, strict=True)),
        tuple(Canary(record, secret(), entropy.getrandbits(1)) for record in by_coin.tolist()),
        _salt(),
    )


def _salt() -> str:
    """Random digits of random length, so that neither hash nor size of a file tells what was planted."""
    entropy = SystemRandom()
    bits = _SALT_BITS + 8 * entropy.randrange(_PADDING_BYTES)
    return f"{entropy.getrandbits(bits):0{bits // 4}x}"


def _plant(text: pa.Array, rows: np.ndarray, planted: Secrets) -> pa.Array:
    texts = text.to_pylist()
    for row, canary in zip(rows.tolist(), planted.extraction + planted.audit, strict=True):
        if canary.included:
            texts[row] += suffix(canary.secret)
    return pa.array(texts, pa.string())


def _public(records: Records, counts: dict[str, int], new: Path, hidden: Path) -> dict[str, object]:
    return {
        "records": len(records.record),
        "extraction": counts["extraction"],
        "repeats": counts["repeats"],
        "audit_candidates": counts["audit"],
        "unit": records.about.get("unit", "encounter"),
        "train_sha256": sha256(new),
        "secrets_sha256": sha256(hidden),
    }
