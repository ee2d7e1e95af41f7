"""Canaries: secrets in the training data, for extraction (RLDP's sections 2.1 and 3.3) and audit.

Every canary is a unit of privacy of its own, in a row of its own after all records: a public text (``carriers``) that
ends in a secret; beside prompts with targets or chats, a public prompt that a secret answers. An audit canary may say
random public words instead, or a text that a public model wrote (``KINDS``): its gradient is its own, where carriers'
gradients are much alike. No row of a canary depends on a record, and no record on a canary. Extraction canaries are
always included. An audit canary is included if its coin says so; else its row is empty, because the ledger's epsilon is
about adding or removing one unit.
(Planting a secret or not in a record that stays would *replace* that record, which may cost twice the epsilon.)

RLDP's paper appends its secrets to records, which one permutation chooses (``CARRIERS``). A record that leaves moves
them to other records then, so that no epsilon is about one record: runs on such a file leak and have no guarantee.

Secrets and coins come from the operating system's entropy: a seed would be logged, and a logged seed publishes
them. Carriers are public, and so is the pool of samples; which of them are candidates is secret like the coins.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import SystemRandom
from typing import Any

import numpy as np
import pyarrow as pa

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import read_json, replacing, sha256, write_json
from dptune.core.settings import RECORD
from dptune.records.diabetes.narratives import PLAIN, public_texts
from dptune.records.parquet_file import Records, encode_content, form_at, read_records, write_parquet
from dptune.records.reading.record import Chat, Content, PromptTarget, Text

ALPHABET = string.ascii_uppercase + string.digits
SECRET_LENGTH = 10
#: What an audit canary says: a code after a public text; words of public texts, drawn at random, a sentence each; a
#: text that a public model sampled at a high temperature; or such a text that was chosen by its gradient.
KINDS = ("code", "words", "samples", "maximisers")
#: Kinds that say a text of a public model.
WRITTEN = ("samples", "maximisers")
#: What carries the secrets of extraction: a public text in a row of its own, or records that a permutation chooses.
CARRIERS = ("public", "records")
#: Why no run on records that carry secrets has a guarantee.
SECRETS_IN_RECORDS = "secrets stand in records that a permutation chose: one that leaves moves them to others"
#: Number of samples of the public model that the pipeline keeps, of which the canaries of a data set are drawn.
POOL = 1024
_WORDS, _TEXTS = 8, 400
_SALT_BITS = 256
_PADDING_BYTES = 1 << 14


@dataclass(frozen=True)
class Canary:
    """A canary, whether it was planted or not. Private, except ``record`` and a public ``carrier``.

    Attributes:
        record: number of its row: negative, or that of the record that carries it.
        carrier: text before the secret: public, or the record's own.
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


def is_suffix(text: str) -> bool:
    """Whether ``suffix`` made the text, of any secret."""
    return re.fullmatch(rf" secret_id=[A-Z0-9]{{{SECRET_LENGTH}}}\.", text) is not None


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


@dataclass(frozen=True)
class CanaryPlan:
    """How many canaries a train file gets, and what they say. Public.

    Attributes:
        extraction: number of secrets that all are planted.
        audit: number of audit canaries, each planted by its own fair coin.
        carrier_seed: seed of the public texts that secrets stand in.
        repeats: number of rows of each extraction secret.
        audit_kind: what audit canaries say, one of ``KINDS``.
        samples: distinct texts of a public model, of which ``audit`` are drawn for the kinds ``WRITTEN``.
        carrier: one of ``CARRIERS``. "records" appends the secrets of extraction to records, which one permutation by
            ``carrier_seed`` chooses, as RLDP's paper does (section 2.1), and adds no row for them.
    """

    extraction: int
    audit: int
    carrier_seed: int
    repeats: int = 1
    audit_kind: str = "code"
    samples: Sequence[str] = ()
    carrier: str = "public"

    @property
    def counts(self) -> dict[str, Any]:
        """What a train file's description states of its canaries."""
        counts = {"extraction": self.extraction, "repeats": self.repeats, "audit": self.audit}
        return counts if self.carrier == "public" else counts | {"carrier": self.carrier}

    @property
    def rows(self) -> int:
        """Number of canaries: a row for each, or a record that carries it."""
        return self.extraction * self.repeats + self.audit

    def check(self, records: int, form: str) -> None:
        """Refuse what cannot be planted in so many records of a form.

        Raises: ConfigError for negative counts, an unknown kind or carrier, records that are no texts to append to, or
            more canaries than records or samples.
        """
        if min(self.extraction, self.audit) < 0 or self.repeats < 1:
            raise ConfigError("canaries", "a count is negative, or repeats below 1", fix="use 0 or more, and 1 or more")
        if self.audit_kind not in KINDS:
            raise ConfigError("canaries.audit_kind", f"{self.audit_kind!r} is unknown", fix=f"use {', '.join(KINDS)}")
        if self.audit_kind in WRITTEN and self.audit > len(self.samples):
            problem = f"{self.audit} canaries are to say samples of a public model, and there are {len(self.samples)}"
            raise ConfigError("canaries.audit", problem, fix="use fewer, or canaries.audit_kind: words")
        if self.carrier not in CARRIERS:
            raise ConfigError("canaries.carrier", f"{self.carrier!r} is unknown", fix=f"use {', '.join(CARRIERS)}")
        if self.carrier == "records" and form != "text":
            raise ConfigError("canaries.carrier", "records appends to texts, and these are none", fix="use public")
        if self.rows > records:
            problem = f"extraction x repeats + audit asks for {self.rows} rows beside {records} records"
            raise ConfigError("canaries", problem, fix="plant fewer canaries or take more records")


def inject(train: Path, out: Path, secrets_file: Path, manifest: Path, plan: CanaryPlan) -> None:
    """Add the rows of ``plan``'s canaries to a train file.

    Writes the new train file to ``out``: all of ``train`` as it is, then one row for every canary. Its text is a public
    carrier, drawn by the public ``carrier_seed``, with the secret at its end; it is empty where a coin left the canary
    out, so that the number of rows does not depend on the coins. Canaries' records and units are -1, -2, ...: each is a
    unit of its own. Writes every candidate to ``secrets_file``, and to ``manifest`` only what everyone may know: counts
    of candidates and two hashes. Both hashed files hold a random salt, so that a hash cannot test a guess of a secret
    or of the coins.

    With no canaries ``out`` holds the records of ``train`` and nothing else.

    Raises: ConfigError for a plan that these records do not allow; DataError for a bad file, or a train file that
        already holds canaries.
    """
    records = read_records(train)
    form = form_at(records.about)
    if "canaries" in records.about:
        raise DataError("holds canaries already", fix="give the train file of the split", file=train)
    plan.check(len(records.record), form)
    chosen = _chosen(records, plan)
    planted = _in_records(_draw(_carriers(plan, records, chosen), plan.extraction, plan.repeats), records, chosen)
    if plan.audit_kind == "words":
        words = _random_words(plan.audit, plan.carrier_seed)
        planted = replace(planted, audit=_saying(words, planted.audit, form, "words"))
    elif plan.audit_kind in WRITTEN:
        drawn = SystemRandom().sample(plan.samples, plan.audit)
        planted = replace(planted, audit=_saying(drawn, planted.audit, form, plan.audit_kind))
    salted = {**records.about, "canaries": plan.counts, "salt": _salt()}
    grown = _with_canaries(records, planted, form)
    # The three files appear in reverse order: first the secrets, then the train file, last the manifest.
    with replacing(manifest) as listing, replacing(out) as new, replacing(secrets_file) as hidden:
        write_parquet(new, replace(grown, about=salted))
        write_json(hidden, asdict(planted))
        write_json(listing, _public(grown, plan.counts, new, hidden))


def are_planted(train: Path, out: Path, secrets_file: Path, plan: CanaryPlan) -> bool:
    """Whether ``out`` and ``secrets_file`` hold what ``inject`` may have written for this very plan.

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
    about = {**records.about, "canaries": plan.counts, "salt": found.about.get("salt")}
    if not replace(_with_canaries(records, planted, form), about=about).equals(found):
        return False
    chosen = _chosen(records, plan)
    carriers = _carriers(plan, records, chosen)
    if plan.audit_kind != "code" and form == "text":
        carriers[plan.rows - plan.audit :] = [""] * plan.audit
    return (
        [one.carrier for one in (*planted.extraction, *planted.audit)] == carriers
        and _in_records(planted, records, chosen) == planted
        and {one.kind for one in planted.audit} <= {plan.audit_kind}
        and (plan.audit_kind not in WRITTEN or {one.secret for one in planted.audit} <= {*plan.samples})
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


def _chosen(records: Records, plan: CanaryPlan) -> list[int]:
    """The places of the records that carry secrets; none where public texts do."""
    if plan.carrier == "public":
        return []
    shuffled = np.random.default_rng(plan.carrier_seed).permutation(len(records.record))
    return shuffled[: plan.extraction * plan.repeats].tolist()


def _carriers(plan: CanaryPlan, records: Records, chosen: Sequence[int]) -> list[str]:
    """What stands before each secret: the chosen records' own texts, then public texts."""
    given = str(records.about.get("source")), str(records.about.get("template", PLAIN))
    own = [records.text[place].as_py() for place in chosen]
    return own + public_texts(plan.rows - len(own), plan.carrier_seed, "canaries", *given)


def _in_records(planted: Secrets, records: Records, chosen: Sequence[int]) -> Secrets:
    """The same secrets, those of extraction in the chosen records; unchanged without any."""
    if not chosen:
        return planted
    places = zip(planted.extraction, chosen, strict=True)
    return replace(planted, extraction=tuple(replace(one, record=int(records.record[at])) for one, at in places))


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
    texts = {
        one.record: encode_content(content_with(one.carrier, one.secret, form, one.kind)) if one.included else ""
        for one in every
    }
    numbers = np.array([one.record for one in every if one.record < 0], dtype=np.int64)
    record = np.concatenate([records.record, numbers])
    own = [*records.text.to_pylist(), *[""] * len(numbers)]
    return Records(
        record=record,
        unit=np.concatenate([records.unit, numbers]),
        text=pa.array(list(map(texts.get, record.tolist(), own)), pa.string()),
        about=records.about,
    )


def _public(records: Records, counts: dict[str, Any], new: Path, secrets_file: Path) -> dict[str, object]:
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
