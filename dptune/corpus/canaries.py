"""Canaries: secrets in the training data, for extraction and audit (spec rldp.md, sections 2, 8).

Extraction canaries are planted in records of the train split. An audit canary is a unit of privacy of its own, a
record of the attack split (which nobody trains on) with a secret: in the training data if its coin says so, else
absent, because add/remove of one unit is what a ledger is about. (Planting or not planting a secret in a record that
stays would *replace* that record, which may cost twice the epsilon.)

Secrets and coins come from the operating system's entropy: a seed would be logged, and a logged seed publishes
them. Positions are public.
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
    """One candidate: its host record, its secret, and whether the train file holds it."""

    record: int
    secret: str = field(repr=False)
    included: int = field(repr=False)  # 0 or 1, of one width in the file: its size must not tell the count


@dataclass(frozen=True)
class Secrets:
    """What the secrets file holds: extraction canaries, one entry for every record of the train split that carries
    one, and audit canaries in records of the attack split, each included by its own coin."""

    extraction: tuple[Canary, ...] = field(repr=False)
    audit: tuple[Canary, ...] = field(repr=False)
    salt: str = field(repr=False)


def suffix(secret: str) -> str:
    """What a record's text gains when ``secret`` is planted in it."""
    return f" secret_id={secret}."


def inject(
    train: Path,
    attack: Path,
    out: Path,
    secrets_file: Path,
    manifest: Path,
    extraction: int,
    audit: int,
    position_seed: int,
    repeats: int = 1,
) -> None:
    """Plant ``extraction`` secrets in ``train``, and add ``audit`` records of ``attack`` by a fair coin each.

    Every extraction secret lies in ``repeats`` records, each candidate in a record (with unit patient: of a patient)
    of its own, chosen by a permutation with the public ``position_seed``. Writes the new train file to ``out``: all
    of ``train``, then one row for every audit canary, whose text is empty where the coin left it out, so that the
    number of rows tells nothing. Writes every candidate to ``secrets_file``, and to ``manifest`` only what everyone
    may know: counts of candidates and two hashes. Both hashed files hold a random salt, so that a hash cannot test
    a guess of a secret or of the coins.

    Raises: ConfigError for negative counts, or more canaries than records (patients); DataError for a bad
    file, or a train file that already holds canaries.
    """
    records, hosts = read_records(train), read_records(attack)
    if "canaries" in records.about:
        raise DataError("holds canaries already", fix="give the train file of the split", file=train)
    if min(extraction, audit) < 0 or repeats < 1:
        raise ConfigError("canaries", "a count is negative, or repeats below 1", fix="use 0 or more, and 1 or more")
    rows = _positions(records, extraction * repeats, "extraction x repeats", position_seed)
    host_rows = _positions(hosts, audit, "audit", position_seed)
    planted = _draw(records.record[rows], hosts.record[host_rows], extraction, repeats)
    counts = {"extraction": extraction, "repeats": repeats, "audit": audit}
    salted = {**records.about, "canaries": counts, "salt": _salt()}
    grown = _planted(records, rows, hosts, host_rows, planted)
    # Left last-in, first-out: the secrets are in place before the train file, the manifest comes last.
    with replacing(manifest) as listing, replacing(out) as new, replacing(secrets_file) as hidden:
        write_parquet(new, replace(grown, about=salted))
        write_json(hidden, asdict(planted))
        write_json(listing, _public(grown, counts, new, hidden))


def read_secrets(path: Path) -> Secrets:
    """Read a secrets file. Raises: DataError if it is absent or not one."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        extraction, audit = (tuple(Canary(**one) for one in stored[name]) for name in ("extraction", "audit"))
        return Secrets(extraction, audit, stored["salt"])
    except (OSError, ValueError, KeyError, TypeError):
        problem = "not a secrets file"
        raise DataError(problem, fix="inject the canaries again", file=path) from None


def _positions(records: Records, count: int, name: str, position_seed: int) -> np.ndarray:
    order = np.random.default_rng(position_seed).permutation(len(records.record))
    if records.about.get("unit") == "patient":
        _, first = np.unique(records.patient[order], return_index=True)
        order = order[np.sort(first)]
    if count > len(order):
        problem = f"{name} asks for {count} places, but there are only {len(order)}"
        raise ConfigError("canaries", problem, fix="plant fewer canaries or take more records")
    return order[:count]


def _draw(records: np.ndarray, hosts: np.ndarray, extraction: int, repeats: int) -> Secrets:
    entropy = SystemRandom()

    def secret() -> str:
        return "".join(entropy.choice(ALPHABET) for _ in range(SECRET_LENGTH))

    repeated = [one for one in (secret() for _ in range(extraction)) for _ in range(repeats)]
    return Secrets(
        tuple(Canary(record, one, 1) for record, one in zip(records.tolist(), repeated, strict=True)),
        tuple(Canary(record, secret(), entropy.getrandbits(1)) for record in hosts.tolist()),
        _salt(),
    )


def _salt() -> str:
    """Random digits of random length, so that neither hash nor size of a file tells what was planted."""
    entropy = SystemRandom()
    bits = _SALT_BITS + 8 * entropy.randrange(_PADDING_BYTES)
    return f"{entropy.getrandbits(bits):0{bits // 4}x}"


def _planted(records: Records, rows: np.ndarray, hosts: Records, host_rows: np.ndarray, planted: Secrets) -> Records:
    texts, host_texts = records.text.to_pylist(), hosts.text.to_pylist()
    for row, canary in zip(rows.tolist(), planted.extraction, strict=True):
        texts[row] += suffix(canary.secret)
    for row, canary in zip(host_rows.tolist(), planted.audit, strict=True):
        texts.append(host_texts[row] + suffix(canary.secret) if canary.included else "")
    # Each is a person of its own, whatever patient its host was.
    nobody = 1 + max([-1, *records.patient.tolist(), *hosts.patient.tolist()])
    return Records(
        record=np.concatenate([records.record, hosts.record[host_rows]]),
        patient=np.concatenate([records.patient, nobody + np.arange(len(host_rows))]),
        text=pa.array(texts, pa.string()),
        about=records.about,
    )


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
