"""Checks that a deliverable's card says what its ledger says, about the weights beside it. Needs no torch."""

from __future__ import annotations

import math
import os
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import sha256, sha256_once, why_unreadable
from dptune.job.delivery.card import SENTENCE, TAG
from dptune.job.delivery.privacy_section import (
    DELTA,
    EARLIER,
    END,
    EVERYTHING,
    NOISE,
    SCORE,
    START,
    TRAINED,
    certified_epsilon,
    claim_of_earlier,
    has_guarantee,
    noise_text,
    privacy_section,
    rows_of_ranks,
    score_text,
    table,
    why_not,
)
from dptune.job.delivery.weights import BASE, FORMS, LORA, check_names, form_of, form_within, read_base, weights_file
from dptune.job.search.space import Space
from dptune.privacy.certificate import FILE, SCORE_LEDGER, SearchCertificate, exceeds, read_certificate
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.release import DEALT_BY_RANK
from dptune.privacy.run_folder import RunFolder

WEIGHTS, CONFIG, CARD = LORA.weights, LORA.config, "README.md"
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
#: Files of trained weights, in any form.
_TRAINED = tuple(name for form in FORMS for name in (form.weights, form.config))
#: What tells a delivered folder, also a damaged one, from the folder of a run.
_HANDED_ON = {*_TRAINED, CARD, LABELS, WORDS, RECORDS, BASE, *_TOKENIZER}
#: The order of the card's rows; further files of a tokenizer follow by name.
_ORDER = (RunFolder(Path()).ledger.name, FILE, SCORE_LEDGER, *_TRAINED, LABELS, WORDS, RECORDS, BASE, *_TOKENIZER)
#: Endings of files that libraries load weights from, or unpickle.
_OF_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".joblib", ".msgpack", ".npy", ".npz", ".onnx", ".ot", ".pickle"}
_OF_WEIGHTS |= {".pkl", ".pt", ".pth", ".safetensors"}
#: What the hub, Git and file managers put beside a delivered folder's files; no library reads it as part of a model.
_BESIDE = {".DS_Store", ".gitattributes", ".gitignore", "LICENSE", "LICENSE.md", "LICENSE.txt"}
_BESIDE |= {"Thumbs.db", "desktop.ini"}
_BESIDE_IN = (".git/", ".cache/huggingface/")
_DIGEST = re.compile(r"^\| (\S+) \| SHA-256 (\S+) \|$", re.MULTILINE)
#: Headings of Markdown, in its two ways and as HTML, also within a quotation or a list.
_HEADING = re.compile(
    r"^[\s>*+-]*#{1,6}(?P<marked>.+)$|^(?![-*+]\s)(?P<underlined>.+)\n[ >]*(?:=+|-+)[ ]*$|"
    r"<h[1-6]\b[^>]*>(?P<html>(?:.|\n)*?)</h[1-6]",
    re.MULTILINE | re.IGNORECASE,
)
_MARKUP = re.compile(r"<[^>]*>|\]\([^)]*\)")
#: Relative difference of floating-point numbers that are computed again, on another machine.
_ROUNDING = 1e-9
#: Length of a commitment in hexadecimal digits.
_COMMITMENT = 64


class CardError(DptuneError):
    """A card that contradicts the ledger or the files beside it."""


def check_deliverable(path: Path) -> LedgerContents:
    """Check a deliverable's card against its ledger and files, and return the ledger's content.

    Every file of the folder must be on the card with its digest, or be one of those in ``beside``. Of the card, the
    section "Privacy" is compared, and that tag and sentence speak of privacy only where the ledger certifies an
    epsilon.

    Raises: LedgerError for a ledger that is torn or edited; CardError for one without an end, for a card that
        contradicts the ledger, or a file that was replaced, added or taken away; DptuneError for a folder without
        weights, configuration or card.
    """
    card = path / CARD
    _check_no_cell(path)
    contents = read_ledger(RunFolder(path).ledger)
    form = form_of(contents.header.train)
    for needed in (card, path / form.weights, path / form.config):
        if what := why_unreadable(needed):
            raise DptuneError(f"{needed}: {what}. Fix: take the whole folder that the run delivered.")
    if not contents.complete:  # what it says is the price of its lines, and weights may follow from more
        problem = f"{RunFolder(path).ledger}: has no end, so that more may have been released"
        raise CardError(f"{problem}. Fix: take the whole folder that the run delivered.")
    certificate = certificate_of(path)
    check_files(path)
    check_names(path, contents.header.train)
    said, right = _written_section(card), _section(path, contents, certificate)
    leaks = contents.epsilons.leaks if certificate is None else certificate.all_leaks
    # Earlier versions certified what they dealt by rank. Such a card is read, and the command says what it is worth.
    of_earlier = set(leaks) == {DEALT_BY_RANK}
    if of_earlier and EVERYTHING not in said:
        right = "\n".join(line for line in right.split("\n") if not line.startswith(f"- {EVERYTHING}"))
    claims = {f"- {TAG}", SENTENCE} & {line.strip() for line in _text_of(card).split("\n")}
    if claims and not of_earlier and not has_guarantee(certified_epsilon(contents, certificate)):
        problem = f"says {min(claims)!r}, and its ledger certifies no epsilon ({why_not(leaks)})"
        raise CardError(f"{card}: {problem}. Fix: treat the weights as the records; dptune writes no such card now.")
    earlier = _rows_of_earlier(contents, certificate)
    for line, expected in zip(said.split("\n"), right.split("\n"), strict=False):
        if line not in (expected, earlier.get(_name(expected)), *EARLIER.get(expected, ())):
            problem = f"says {line.strip()!r} where ledger and files say {expected.strip()!r}"
            raise CardError(f"{card}: {problem}. Fix: do not trust it; take the card that the run delivered.")
    if said.count("\n") != right.count("\n"):
        raise CardError(f"{card}: lacks lines of its guarantee. Fix: take the card that the run delivered.")
    return contents


def _check_no_cell(path: Path) -> None:
    """Raise DptuneError for the folder of weights in the folder of a study's run, which holds their ledger."""
    run = RunFolder(path.parent if path.name == RunFolder(path).adapter.name else path.resolve().parent)
    if run.adapter.resolve() == path.resolve() and run.has_begun and deliverable_within(run.path) is None:
        problem = f"{path}: holds the weights of a study's run alone, whose ledger lies one folder up"
        raise DptuneError(f"{problem}. Fix: run `dptune verify {shlex.quote(str(run.path))}`.")


def adapter_within(path: Path) -> Path:
    """The folder of delivered weights: ``path``, or the one in it if ``path`` is a run's.

    Raises: ConfigError for a folder without an adapter.
    """
    for folder in (path, RunFolder(path).adapter):
        if form_within(folder) is not None:
            return folder
    fix = "give the folder of an adapter that dptune tune delivered, or the folder of its run"
    raise ConfigError("adapter", f"{path} holds no {CONFIG}", fix=fix)


def is_classifier(path: Path, label: str | None = None) -> bool:
    """Whether a delivered adapter's folder holds a classifier; its files are not checked.

    Raises: ConfigError for a column of labels beside an adapter that writes.
    """
    classifies = (path / LABELS).is_file()
    if label is not None and not classifies:
        problem = "is about a classifier, but this adapter is not one: it is scored by what it writes"
        raise ConfigError("data.label", problem, fix="leave it out")
    return classifies


def check_files(path: Path) -> tuple[str, ...]:
    """Check that each file of a deliverable has the digest on its card, and that nothing else lies there.

    Returns: a note where there is no card of dptune's to compare with.

    Raises: CardError for a file that was replaced, added or taken away, or a card with several sections.
    """
    if START not in _text_of(path / CARD):
        return (f"{path} has no card of dptune's, so it is unknown whether its files come from the run",)
    stated, found = dict(_DIGEST.findall(_written_section(path / CARD))), compared(path)
    whole, trained = "take the whole folder that the run delivered", weights_file(path).name
    for name in sorted({*stated, *found}, key=_place):
        if name not in stated:
            raise CardError(f"{path / name}: is not a file that the run delivered. Fix: remove it, or {whole}.")
        if stated[name] != found.get(name):
            problem = "is not the file that the run delivered" if name in found else "is missing"
            raise CardError(f"{path / name}: {problem}. Fix: {whole}; {CARD} has each file's SHA-256.")
        if name != trained and Path(name).suffix.lower() in _OF_WEIGHTS:  # the card was edited too
            raise CardError(f"{path / name}: may hold other weights, and dptune delivers none there. Fix: remove it.")
    return ()


def deliverable_within(path: Path) -> Path | None:
    """The delivered folder that ``path`` is, or that lies in it if it is that of a run of ``tune``; else None.

    A damaged one counts: what was taken away from it must not make it another kind of folder, of which less is checked.
    """
    run = RunFolder(path)
    checkpoints = {run.checkpoint.name, run.state.name}
    names = {one.name for one in path.iterdir() if not one.name.startswith(".")} - checkpoints
    if START not in _text_of(path / CARD):
        names.discard(CARD)  # somebody's notes beside a ledger
    if names & _HANDED_ON or any(Path(name).suffix.lower() in _OF_WEIGHTS for name in names):
        return path
    if not run.adapter.is_dir():
        return None
    try:
        tuned = {"kind", "run_id", "search"} & {*run.settings}  # a study's cell hands its adapter on elsewhere
    except ValueError:
        tuned = {"kind"}
    held = any(os.path.lexists(run.adapter / name) for name in (run.ledger.name, FILE))
    return run.adapter if tuned or held or START in _text_of(run.adapter / CARD) else None


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
        raise CardError(f"{file}: belongs to another search than the ledger. Fix: do not trust it.")
    if problem := _beyond(contents):
        raise CardError(f"{file}: does not price the winner's ledger, which {problem}. Fix: do not trust it.")
    if found.winner.ledger_chain != contents.chain:
        raise CardError(f"{file}: names another ledger than the one beside it. Fix: do not trust it.")
    if found.winner.adapter_sha256 != sha256(weights_file(path)):
        raise CardError(f"{file}: names other weights than those beside it. Fix: do not trust it.")
    _check_score(path, found)
    number = Space.of(found.space).kind_of(found.winner.options)
    if number is None:
        raise CardError(f"{file}: its winner is not a point of its space. Fix: do not trust it.")
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
        raise CardError(f"{file}: its space is not valid ({error}). Fix: do not trust it.") from None
    stated = [weight for weight, _ in found.kinds]
    if len(weights) != len(stated) or not all(map(_alike, weights, stated)):
        raise CardError(f"{file}: its kinds, or their chances, differ from those of its space. Fix: do not trust it.")
    # By the weaker promise, where groups were dealt by rank: what the search was started for.
    cost = found.epsilon_by(found.bound) if found.all_leaks == (DEALT_BY_RANK,) else found.certified
    if not cost <= found.epsilon * (1 + _ROUNDING):
        problem = f"costs {at_most(cost, 6)}, and was to keep within {found.epsilon:g}"
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
    stated = (header.search, header.units, header.unit, header.delta, header.data, contents.composition)
    if stated != (found.id, found.score.units, found.unit, found.delta, found.data, Counter([release])):
        raise CardError(f"{file}: does not charge the score that the certificate prices. Fix: do not trust it.")
    if problem := _beyond(contents):
        raise CardError(f"{file}: is not what the certificate prices: it {problem}. Fix: do not trust it.")


def _beyond(contents: LedgerContents) -> str:
    """What stands in a search's ledger and is not priced by its certificate; empty if all is."""
    header = contents.header
    if header.leaks:
        return f"names a leak ({header.leaks[0]})"
    if header.inherited:
        return "builds on another run's releases"
    return "" if contents.complete else "has no end, so that more may have been released"


def section_of(path: Path) -> tuple[str, float]:
    """The section "Privacy" that the card should have, and the certified epsilon; from ledger, adapter, tokenizer."""
    contents, certificate = read_ledger(RunFolder(path).ledger), certificate_of(path)
    return _section(path, contents, certificate), certified_epsilon(contents, certificate)


def _section(path: Path, contents: LedgerContents, certificate: SearchCertificate | None) -> str:
    digests, base = compared(path), read_base(path)
    return privacy_section(contents, digests, classifies=LABELS in digests, certificate=certificate, base=base)


def compared(path: Path) -> dict[str, str]:
    """SHA-256 by name of all files of a deliverable but its card and those in ``beside``, in the order of the card.

    Of what is no file, such as a link to nothing, a word takes the digest's place.
    """
    names = (name for name in _within(path) if name != CARD and not _is_beside(name))
    return {name: sha256_once(path / name) if (path / name).is_file() else "none" for name in sorted(names, key=_place)}


def beside(path: Path) -> list[str]:
    """Names of what lies beside a deliverable's files, is not compared, and is read by nothing: "LICENSE", ".git"."""
    names = {name for name in _within(path) if _is_beside(name)}
    return sorted({next((kept.rstrip("/") for kept in _BESIDE_IN if name.startswith(kept)), name) for name in names})


def linked(path: Path) -> list[str]:
    """Names of those of a deliverable's files that are links."""
    return sorted(name for name in _within(path) if (path / name).is_symlink())


def _within(path: Path) -> Iterator[str]:
    """Relative names of all that lies in a folder and its folders; of a link to a folder the link alone."""
    for folder, folders, files in os.walk(path, onerror=_unreadable):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(path).as_posix()


def _unreadable(error: OSError) -> None:
    problem = f"{error.filename}: cannot be read ({error.strerror}), so its content is unknown"
    raise DptuneError(f"{problem}. Fix: remove it, or make it readable.") from None


def _is_beside(name: str) -> bool:
    holds_weights = Path(name).suffix.lower() in _OF_WEIGHTS
    return name in _BESIDE or (name.startswith(_BESIDE_IN) and not holds_weights)


def _place(name: str) -> tuple[int, str]:
    """Where the row of a file stands on the card."""
    return (_ORDER.index(name), "") if name in _ORDER else (len(_ORDER), name)


def _rows_of_earlier(contents: LedgerContents, certificate: SearchCertificate | None) -> dict[str, str]:
    """The rows that earlier versions wrote otherwise, by name, as they wrote them.

    They rounded some figures to the nearest, certified runs whose groups they dealt by rank, and showed a claim
    without its accountant, and for Poisson batches beside other samplers.
    """
    figures = {DELTA: f"{contents.header.delta:g}", NOISE: noise_text(contents, nearest=True)}
    figures[TRAINED] = contents.header.train
    figures |= rows_of_ranks(contents, certificate)
    figures |= claim_of_earlier(contents) if certificate is None else {SCORE: score_text(certificate, nearest=True)}
    return dict(zip(figures, table(figures)[2:], strict=True))


def _name(line: str) -> str:
    """The name of a table's row; empty for any other line."""
    return line.split("|")[1].strip() if line.startswith("|") else ""


def _written_section(card: Path) -> str:
    """The section "Privacy" that the card does have. Raises: CardError unless there is one, by marks and by name."""
    text = _text_of(card)
    if text.count(START) != 1 or text.count(END) != 1 or text.index(END) < text.index(START):
        raise CardError(f"{card}: has no single section that dptune wrote. Fix: take the card that the run delivered.")
    start, end = text.index(START), text.index(END) + len(END)
    # A reader takes any section of the name for what the command compared.
    if others := [one for one, name in headings(text[:start] + "\n\n" + text[end:]) if name == "privacy"]:
        problem = f"has another heading named Privacy ({others[0]!r}) than the section that is compared"
        raise CardError(f"{card}: {problem}. Fix: rename it, or take the card that the run delivered.")
    return text[start:end]


def headings(text: str) -> list[tuple[str, str]]:
    """Each heading of a Markdown text, and its letters as a reader takes them: without case, signs or markup."""
    found = []
    for one in _HEADING.finditer(text):
        plain = unicodedata.normalize("NFKC", unescape(_MARKUP.sub("", next(filter(None, one.groups()), ""))))
        found.append((one[0].strip(), "".join(filter(str.isalpha, plain)).casefold()))
    return found


def _text_of(card: Path) -> str:
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
