"""Checks that a deliverable's card says what its ledger says, about the weights beside it. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dptune.digits import at_most
from dptune.errors import ConfigError, DptuneError
from dptune.files import sha256
from dptune.privacy.certificate import FILE, SCORE_LEDGER, SearchCertificate, exceeds, read_certificate
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.tuning.card import DELTA, END, NOISE, SCORE, START, noise_text, privacy_section, score_text, table
from dptune.tuning.search.space import Space

WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"
#: Names of a classifier's labels, in the order of its outputs; only a classifier's folder has it.
LABELS = "labels.json"
#: Each label's word, and the template of the texts; only the folder of a classifier by label words has it.
WORDS = "words.json"
#: The form of the records, the most tokens of one, and how texts were made of rows: sampling and scoring keep to it.
RECORDS = "records.json"
#: Files of a tokenizer, as transformers names them.
_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
#: What scoring and sampling read, in the order of the card's rows.
_READ = (WEIGHTS, CONFIG, LABELS, WORDS, RECORDS, *_TOKENIZER)
_DIGEST = re.compile(r"^\| (\S+) \| SHA-256 (\S+) \|$", re.MULTILINE)
#: Relative difference of floating-point numbers that are computed again, on another machine.
_ROUNDING = 1e-9
#: Length of a commitment in hexadecimal digits.
_COMMITMENT = 64


class CardError(DptuneError):
    """A card that contradicts the ledger or the files beside it."""


def check_deliverable(path: Path) -> LedgerContents:
    """Check a deliverable's card against its ledger and files, and return the ledger's content.

    Raises: LedgerError for a ledger that is torn or edited; CardError for a card that contradicts the ledger, or whose
        adapter or tokenizer was replaced; DptuneError for a folder that lacks one of them.
    """
    card = path / CARD
    contents = read_ledger(RunFolder(path).ledger)
    for needed in (card, path / WEIGHTS, path / CONFIG):
        if not needed.is_file():
            raise DptuneError(f"{needed}: is missing. Fix: take the whole folder that the run delivered.")
    certificate = certificate_of(path)
    said, right = _written_section(card), _section(path, contents, certificate)
    earlier = _rows_of_earlier(contents, certificate)
    for line, expected in zip(said.split("\n"), right.split("\n"), strict=False):
        if line != expected and line != earlier.get(_name(expected)):
            problem = f"says {line.strip()!r} where ledger and files say {expected.strip()!r}"
            raise CardError(f"{card}: {problem}. Fix: do not trust it; take the card that the run delivered.")
    if said.count("\n") != right.count("\n"):
        raise CardError(f"{card}: lacks lines of its guarantee. Fix: take the card that the run delivered.")
    return contents


def adapter_within(path: Path) -> Path:
    """The folder of a delivered adapter: ``path``, or the adapter's in it if ``path`` is a run's.

    Raises: ConfigError for a folder without an adapter.
    """
    for folder in (path, RunFolder(path).adapter):
        if (folder / CONFIG).is_file():
            return folder
    fix = "give the folder of an adapter that dptune tune delivered, or that of its run"
    raise ConfigError("adapter", f"{path} holds no {CONFIG}", fix=fix)


def is_classifier(path: Path, label: str | None = None) -> bool:
    """Whether a delivered adapter's folder holds a classifier; its files are not checked.

    Raises: ConfigError for a column of labels beside an adapter that writes.
    """
    classifies = (path / LABELS).is_file()
    if label is not None and not classifies:
        problem = "is about a classifier, and this adapter is none: it is scored by what it writes"
        raise ConfigError("data.label", problem, fix="leave it out")
    return classifies


def check_files(path: Path) -> tuple[str, ...]:
    """Check that what is read of a deliverable has the digests on its card, without its ledger; see ``_READ``.

    Returns: a note where there is no card of dptune's to compare with.

    Raises: CardError for a file that was replaced, added or taken away, or a card with several sections.
    """
    card = path / CARD
    if not card.is_file() or START not in card.read_text(encoding="utf-8", errors="replace"):
        return (f"{path} has no card of dptune's, so that nobody knows whether its files are those of the run",)
    stated, found = dict(_DIGEST.findall(_written_section(card))), _digests(path, _READ)
    for name in _READ:
        if stated.get(name) != found.get(name):
            problem = "is missing" if name not in found else "is not the file that the run delivered"
            fix = f"take the whole folder that the run delivered; {CARD} has each file's SHA-256"
            raise CardError(f"{path / name}: {problem}. Fix: {fix}.")
    return ()


def certificate_of(path: Path) -> SearchCertificate | None:
    """The certificate of the search whose winner lies in ``path``, checked against ledger and weights; None of a run.

    Raises: LedgerError, CardError for a certificate of another winner, or whose space or kinds do not hold this one.
    """
    file = path / FILE
    contents = read_ledger(RunFolder(path).ledger)
    if not file.is_file():
        return None
    found, header = consistent_certificate(file), contents.header
    if found.winner is None:
        raise CardError(f"{file}: names no winner. Fix: take the whole folder that the search delivered.")
    same = (found.id, found.delta, found.unit, found.units, found.data, found.telemetry)
    own = (header.search, header.delta, header.unit, header.units, header.data, header.telemetry)
    if same != own or not {*header.plugins} <= {*found.plugins}:
        raise CardError(f"{file}: is of another search than the ledger. Fix: do not trust it.")
    if found.winner.ledger_chain != contents.chain:
        raise CardError(f"{file}: names another ledger than the one beside it. Fix: do not trust it.")
    if found.winner.adapter_sha256 != sha256(path / WEIGHTS):
        raise CardError(f"{file}: names other weights than those beside it. Fix: do not trust it.")
    _check_score(path, found)
    number = Space.of(found.space).kind_of(found.winner.options)
    if number is None:
        raise CardError(f"{file}: its winner is no point of its space. Fix: do not trust it.")
    if exceeds(contents.composition, found.kinds[number][1]):
        raise CardError(f"{file}: the winner released more than candidates of its kind may. Fix: do not trust it.")
    return found


def consistent_certificate(file: Path) -> SearchCertificate:
    """Read a certificate, and check that it does not contradict itself.

    Raises: LedgerError as ``read_certificate``; CardError for kinds that are not those of its space, for a search that
        costs more than its budget, and for one that fixed no draws.
    """
    found = read_certificate(file)
    try:
        weights = [weight for weight, _ in Space.of(found.space).kinds()]
    except (ConfigError, ArithmeticError, TypeError, ValueError) as error:
        raise CardError(f"{file}: its space is none ({error}). Fix: do not trust it.") from None
    stated = [weight for weight, _ in found.kinds]
    if len(weights) != len(stated) or not all(map(_alike, weights, stated)):
        raise CardError(f"{file}: its kinds are not those of its space, or as likely. Fix: do not trust it.")
    if not found.certified <= found.epsilon * (1 + _ROUNDING):
        problem = f"costs {at_most(found.certified, 6)}, and was to keep within {found.epsilon:g}"
        raise CardError(f"{file}: {problem}. Fix: do not trust it.")
    if len(found.commitment) != _COMMITMENT or not set(found.commitment) <= set("0123456789abcdef"):
        raise CardError(f"{file}: has no commitment to the secret draws. Fix: do not trust it.")
    return found


def _alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


def _check_score(path: Path, found: SearchCertificate) -> None:
    """Raise LedgerError or CardError unless the winner's score was charged as the certificate prices it."""
    file, release = path / SCORE_LEDGER, found.score.release
    if release is None:
        if file.exists():
            raise CardError(f"{file}: charges a score, which the certificate calls public. Fix: do not trust it.")
        return
    contents = read_ledger(file)
    header = contents.header
    stated = (header.search, header.units, header.unit, header.delta, contents.composition, contents.complete)
    if stated != (found.id, found.score.units, found.unit, found.delta, Counter([release]), True):
        raise CardError(f"{file}: does not charge the score that the certificate prices. Fix: do not trust it.")


def section_of(path: Path) -> str:
    """The section "Privacy" that the card should have, made from ledger, adapter and tokenizer."""
    return _section(path, read_ledger(RunFolder(path).ledger), certificate_of(path))


def _section(path: Path, contents: LedgerContents, certificate: SearchCertificate | None) -> str:
    digests = _digests(path, (RunFolder(path).ledger.name, FILE, SCORE_LEDGER, *_READ))
    return privacy_section(contents, digests, classifies=LABELS in digests, certificate=certificate)


def _digests(path: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of those of these files that there are, by name."""
    return {name: sha256(path / name) for name in names if (path / name).is_file()}


def _rows_of_earlier(contents: LedgerContents, certificate: SearchCertificate | None) -> dict[str, str]:
    """The rows with what earlier versions rounded to the nearest, by name, as they wrote them."""
    figures = {DELTA: f"{contents.header.delta:g}", NOISE: noise_text(contents, nearest=True)}
    if certificate is not None:
        figures[SCORE] = score_text(certificate, nearest=True)
    return dict(zip(figures, table(figures)[2:], strict=True))


def _name(line: str) -> str:
    """The name of a table's row; empty for any other line."""
    return line.split("|")[1].strip() if line.startswith("|") else ""


def _written_section(card: Path) -> str:
    """The section "Privacy" that the card does have. Raises: CardError unless there is exactly one."""
    text = card.read_text(encoding="utf-8", errors="replace")
    if text.count(START) != 1 or text.count(END) != 1 or text.index(END) < text.index(START):
        raise CardError(f"{card}: has no single section that dptune wrote. Fix: take the card that the run delivered.")
    return text[text.index(START) : text.index(END) + len(END)]
