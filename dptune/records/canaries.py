"""Canaries: secrets in the training data, for extraction and audit (spec rldp.md, sections 2, 8).

Every canary is a unit of privacy of its own, in a row of its own after all records: a public text (``carriers``) that
ends in a secret; beside prompts with targets or chats, a public prompt that a secret answers. An audit canary may say
random public words instead, or a text that a public model wrote (``KINDS``): its gradient is its own, where carriers'
gradients are much alike. No row of a canary depends on a record, and no record on a canary. Extraction canaries are
always included. An audit canary is included if its coin says so; else its row is empty, because the ledger's epsilon is
about adding or removing one unit.
(Planting a secret or not in a record that stays would *replace* that record, which may cost twice the epsilon.)

Secrets and coins come from the operating system's entropy: a seed would be logged, and a logged seed publishes
them. Carriers are public, and so is the pool of samples; which of them are candidates is secret like the coins.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import SystemRandom

import numpy as np
import pyarrow as pa

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import read_json, replacing, sha256, write_json
from dptune.core.units import RECORD
from dptune.records.parquet_file import Records, encode_content, form_at, read_records, write_parquet
from dptune.records.public_texts import public_texts
from dptune.records.reading.record import Chat, Content, PromptTarget, Text

ALPHABET = string.ascii_uppercase + string.digits
SECRET_LENGTH = 10
#: What an audit canary says: a code after a public text; words of public texts, drawn at random, a sentence each; a
#: text that a public model sampled at a high temperature; or such a text that was chosen by its gradient.
KINDS = ("code", "words", "samples", "maximisers")
#: Kinds that say a text of a public model.
WRITTEN = ("samples", "maximisers")
#: Number of samples of the public model that the pipeline keeps, of which the canaries of a data set are drawn.
POOL = 1024
_WORDS, _TEXTS = 8, 400
_SALT_BITS = 256
_PADDING_BYTES = 1 << 14


@dataclass(frozen=True)
class Canary:
    """A canary, whether it was planted or not. Private, except ``record`` and ``carrier``.

    Attributes:
        record: number of its row; negative.
        carrier: public text before the secret.
        secret: the secret.
        included: 1 if the train file holds it, else 0.
        kind: one of ``KINDS``.
    """

    record: int
    carrier: str = field(repr=False)
    secret: str = field(repr=False)
    included: int = field(repr=False)  # a digit and no bool: the file's size must not depend on how many are included
    kind: str = "code"


@dataclass(frozen=True)
class Secrets:
    """The content of the secrets file. Private.

    Attributes:
        extraction: an entry for every row of an extraction canary; all are included.
        audit: an entry for every audit canary, which its own fair coin included or not.
        salt: random digits, so that the file's published hash cannot test a guess of a secret or of the coins.
    """

    extraction: tuple[Canary, ...] = field(repr=False)
    audit: tuple[Canary, ...] = field(repr=False)
    salt: str = field(repr=False)


def suffix(secret: str) -> str:
    """The end of a carrier's text that holds ``secret``."""
    return f" secret_id={secret}."


def content_with(carrier: str, secret: str, form: str, kind: str = "code") -> Content:
    """A record of the given form that holds a secret where the model learns: at a text's end, or as what is answered.

    Args:
        carrier: the public text; a prompt, or what a user says, in the other forms. Empty before words in a text.
        form: one of ``dptune.records.parquet_file.FORMS``.
        kind: one of ``KINDS``.
    """
    ending = suffix(secret) if kind == "code" else secret
    if form == "pair":
        return PromptTarget(carrier, ending)
    if form == "messages":
        return Chat(({"role": "user", "content": carrier}, {"role": "assistant", "content": ending.strip()}))
    return Text(carrier + ending)


def inject(
    train: Path,
    out: Path,
    secrets_file: Path,
    manifest: Path,
    extraction: int,
    audit: int,
    carrier_seed: int,
    repeats: int = 1,
    audit_kind: str = "code",
    samples: Sequence[str] = (),
) -> None:
    """Add rows with ``extraction`` secrets, ``repeats`` rows each, and ``audit`` more, each by a fair coin.

    Writes the new train file to ``out``: all of ``train`` as it is, then one row for every canary. Its text is a public
    carrier, drawn by the public ``carrier_seed``, with the secret at its end; it is empty where a coin left the canary
    out, so that the number of rows does not depend on the coins. Canaries' records and units are -1, -2, ...: each is a
    unit of its own. Writes every candidate to ``secrets_file``, and to ``manifest`` only what everyone may know: counts
    of candidates and two hashes. Both hashed files hold a random salt, so that a hash cannot test a guess of a secret
    or of the coins.

    With no canaries ``out`` holds the records of ``train`` and nothing else.

    Args:
        audit_kind: what audit canaries say, one of ``KINDS``.
        samples: distinct texts of a public model, of which ``audit`` are drawn for the kinds ``WRITTEN``; public.

    Raises: ConfigError for negative counts, an unknown kind, or more canaries than records or samples; DataError for a
    bad file, or a train file that already holds canaries.
    """
    records = read_records(train)
    form = form_at(records.about)
    if "canaries" in records.about:
        raise DataError("holds canaries already", fix="give the train file of the split", file=train)
    if min(extraction, audit) < 0 or repeats < 1:
        raise ConfigError("canaries", "a count is negative, or repeats below 1", fix="use 0 or more, and 1 or more")
    if audit_kind not in KINDS:
        raise ConfigError("canaries.audit_kind", f"{audit_kind!r} is unknown", fix=f"use {', '.join(KINDS)}")
    if audit_kind in WRITTEN and audit > len(samples):
        problem = f"{audit} canaries are to say samples of a public model, and there are {len(samples)}"
        raise ConfigError("canaries.audit", problem, fix="use fewer, or canaries.audit_kind: words")
    rows = extraction * repeats + audit
    if rows > len(records.record):
        problem = f"extraction x repeats + audit asks for {rows} rows beside {len(records.record)} records"
        raise ConfigError("canaries", problem, fix="plant fewer canaries or take more records")
    planted = _draw(_carriers(rows, carrier_seed, records), extraction, repeats)
    if audit_kind == "words":
        planted = replace(planted, audit=_saying(_random_words(audit, carrier_seed), planted.audit, form, "words"))
    elif audit_kind in WRITTEN:
        drawn = SystemRandom().sample(samples, audit)
        planted = replace(planted, audit=_saying(drawn, planted.audit, form, audit_kind))
    counts = {"extraction": extraction, "repeats": repeats, "audit": audit}
    salted = {**records.about, "canaries": counts, "salt": _salt()}
    grown = _with_canaries(records, planted, form)
    # The three files appear in reverse order: first the secrets, then the train file, last the manifest.
    with replacing(manifest) as listing, replacing(out) as new, replacing(secrets_file) as hidden:
        write_parquet(new, replace(grown, about=salted))
        write_json(hidden, asdict(planted))
        write_json(listing, _public(grown, counts, new, hidden))


def are_planted(
    train: Path,
    out: Path,
    secrets_file: Path,
    extraction: int,
    audit: int,
    carrier_seed: int,
    repeats: int = 1,
    audit_kind: str = "code",
    samples: Sequence[str] = (),
) -> bool:
    """Whether ``out`` and ``secrets_file`` hold what ``inject`` may have written for these very arguments.

    Secrets and coins may be any. All else must be as ``inject`` makes it: the records, the numbers of canaries, what
    they say, and the carriers. ``samples`` count only for the kinds ``WRITTEN``. Other secrets would rename every
    finished run on ``out``, which would then train, and pay, again.

    Raises: DataError for a bad ``train``.
    """
    records = read_records(train)
    form = form_at(records.about)
    try:
        found, planted = read_records(out), read_secrets(secrets_file)
    except DataError:
        return False
    counts = {"extraction": extraction, "repeats": repeats, "audit": audit}
    about = {**records.about, "canaries": counts, "salt": found.about.get("salt")}
    if not replace(_with_canaries(records, planted, form), about=about).equals(found):
        return False
    carriers = _carriers(extraction * repeats + audit, carrier_seed, records)
    if audit_kind != "code" and form == "text":
        carriers[extraction * repeats :] = [""] * audit
    return (
        [one.carrier for one in (*planted.extraction, *planted.audit)] == carriers
        and {one.kind for one in planted.audit} <= {audit_kind}
        and (audit_kind not in WRITTEN or {one.secret for one in planted.audit} <= {*samples})
    )


def read_secrets(path: Path) -> Secrets:
    """Read a secrets file. Raises: DataError if it is absent or not one."""
    try:
        stored = read_json(path)
        extraction, audit = (tuple(Canary(**one) for one in stored[name]) for name in ("extraction", "audit"))
        return Secrets(extraction, audit, stored["salt"])
    except (OSError, ValueError, KeyError, TypeError):
        problem = "not a secrets file"
        raise DataError(problem, fix="inject the canaries again", file=path) from None


def _carriers(count: int, seed: int, records: Records) -> list[str]:
    return public_texts(count, seed, "canaries", str(records.about.get("source")))


def _draw(carriers: list[str], extraction: int, repeats: int) -> Secrets:
    """A canary for every carrier: first those of extraction (a secret's rows are adjacent), then those of audit."""
    entropy = SystemRandom()

    def secret() -> str:
        return "".join(entropy.choice(ALPHABET) for _ in range(SECRET_LENGTH))

    repeated = [one for one in (secret() for _ in range(extraction)) for _ in range(repeats)]
    places = list(enumerate(carriers))
    return Secrets(
        tuple(
            Canary(-1 - place, carrier, one, 1)
            for (place, carrier), one in zip(places[: len(repeated)], repeated, strict=True)
        ),
        tuple(
            Canary(-1 - place, carrier, secret(), entropy.getrandbits(1)) for place, carrier in places[len(repeated) :]
        ),
        _salt(),
    )


def _random_words(count: int, carrier_seed: int) -> list[str]:
    """``count`` texts of words of public texts, drawn from secret entropy, a sentence each."""
    entropy, texts = SystemRandom(), public_texts(_TEXTS, carrier_seed, "words", "")
    known = sorted({word for text in texts for word in text.replace(".", " ").split()})
    return [" ".join(f"{entropy.choice(known)}." for _ in range(_WORDS)) for _ in range(count)]


def _saying(said: Sequence[str], canaries: tuple[Canary, ...], form: str, kind: str) -> tuple[Canary, ...]:
    """These canaries with texts in the place of codes; as whole texts where the records are texts."""
    return tuple(
        replace(one, carrier="" if form == "text" else one.carrier, secret=text, kind=kind)
        for one, text in zip(canaries, said, strict=True)
    )


def _salt() -> str:
    """Random digits of random length, so that neither the hash nor the size of a file reveals what was planted."""
    entropy = SystemRandom()
    bits = _SALT_BITS + 8 * entropy.randrange(_PADDING_BYTES)
    return f"{entropy.getrandbits(bits):0{bits // 4}x}"


def _with_canaries(records: Records, planted: Secrets, form: str) -> Records:
    every = (*planted.extraction, *planted.audit)
    texts = [
        encode_content(content_with(one.carrier, one.secret, form, one.kind)) if one.included else "" for one in every
    ]
    numbers = np.array([one.record for one in every], dtype=np.int64)
    return Records(
        record=np.concatenate([records.record, numbers]),
        unit=np.concatenate([records.unit, numbers]),
        text=pa.array([*records.text.to_pylist(), *texts], pa.string()),
        about=records.about,
    )


def _public(records: Records, counts: dict[str, int], new: Path, secrets_file: Path) -> dict[str, object]:
    return {
        "records": len(records.record),
        "extraction": counts["extraction"],
        "repeats": counts["repeats"],
        "audit_candidates": counts["audit"],
        "unit": records.about.get("unit", RECORD),
        "train_sha256": sha256(new),
        "secrets_sha256": sha256(secrets_file),
    }


# Random codes in public text, so that a base model pre-trained on it has seen every character of a secret.


def with_codes(texts: list[str], share: float, seed: int) -> list[str]:
    """``texts``, of which a ``share`` end in a sentence with a random code of the secrets' alphabet and length.

    Args:
        texts: public.
        share: a number in [0, 1]; rounded to whole texts.
        seed: decides which texts get a code, and which code; public.
    """
    generator = np.random.default_rng(seed)
    told = list(texts)
    for row in generator.permutation(len(texts))[: round(share * len(texts))]:
        told[row] += f" reference code is {''.join(generator.choice(list(ALPHABET), SECRET_LENGTH))}."
    return told
