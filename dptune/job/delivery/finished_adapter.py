"""A finished adapter whose guarantee was checked, for whatever is made of its weights. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import read_json
from dptune.job.delivery.privacy_section import certified_epsilon, has_guarantee, why_not
from dptune.job.delivery.verification import LABELS, RECORDS, adapter_within, certificate_of, check_deliverable
from dptune.job.delivery.weights import base_of
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.run_folder import RunFolder
from dptune.records.parquet_file import FORMS

#: What an adapter was tuned on that is sampled after prompts, by form, and which prompts those are.
PROMPTED: dict[str | None, tuple[str, str]] = {
    "pair": ("prompts and completions", "public prompts"),
    "messages": ("chats", "public chats that wait for an answer"),
}


@dataclass(frozen=True)
class FinishedAdapter:
    """A delivered adapter whose card, ledger and files agree, and whose run has ended. Public.

    Attributes:
        path: its folder.
        contents: content of its ledger.
        certificate: certificate of the search whose winner it is; None for a run of its own.
        base, revision: the model that it was tuned on, as its configuration names it.
        form: form of the records that it was tuned on, one of ``parquet_file.FORMS``; None where an earlier version
            of dptune delivered it, which did not say.
        tokens: the most tokens of such a record; None likewise.
    """

    path: Path
    contents: LedgerContents
    certificate: SearchCertificate | None = field(repr=False)
    base: str
    revision: str | None
    form: str | None
    tokens: int | None

    @property
    def epsilon(self) -> float:
        """The certified epsilon, at ``contents.header.delta``."""
        return certified_epsilon(self.contents, self.certificate)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Why no epsilon is certified; empty where one is."""
        return self.contents.epsilons.leaks if self.certificate is None else self.certificate.all_leaks

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plug-ins that the guarantee rests on. For a search they include the losers' plug-ins."""
        return self.contents.header.plugins if self.certificate is None else self.certificate.plugins

    def check_guarantee(self) -> None:
        """Raise ConfigError where no epsilon is certified."""
        if not has_guarantee(self.epsilon):
            problem = f"{self.path} has no certified epsilon ({why_not(self.leaks)})"
            fix = "take another adapter, or allow texts without any guarantee (no_guarantee)"
            raise ConfigError("adapter", problem, fix=fix)


def open_adapter(path: Path, *, no_guarantee: bool = False) -> FinishedAdapter:
    """Check a delivered adapter as ``dptune verify`` does.

    Args:
        path: its folder, or that of its run.
        no_guarantee: also take an adapter whose certified epsilon is infinite.

    Raises: ConfigError for a folder that ``tune`` did not deliver, a classifier, or no certified epsilon; LedgerError
        and CardError as ``check_deliverable``.
    """
    path = adapter_within(path)
    fix = "give the folder of an adapter that dptune tune delivered"
    if (path / LABELS).is_file():
        raise ConfigError("adapter", f"{path} is a classifier, which writes no texts", fix="take one of task generate")
    if not (ledger := RunFolder(path).ledger).is_file():
        raise ConfigError("adapter", f"{path} holds no {ledger.name}, which records what it cost", fix=fix)
    contents, certificate = check_deliverable(path), certificate_of(path)
    form, tokens = _records_of(path / RECORDS)
    base, revision = base_of(path)
    found = FinishedAdapter(path, contents, certificate, base, revision, form, tokens)
    if not no_guarantee:
        found.check_guarantee()
    return found


def _records_of(file: Path) -> tuple[str | None, int | None]:
    """Form and length of the records. Raises: DptuneError for a file that does not say them."""
    if not file.is_file():
        return None, None
    try:
        said = read_json(file)
        form, tokens = said["form"], said["tokens"]
    except (ValueError, TypeError, KeyError):
        form, tokens = None, None
    if form not in FORMS or not isinstance(tokens, int):
        raise DptuneError(f"{file}: says no form and tokens of records. Fix: take the whole folder that was delivered.")
    return form, tokens
