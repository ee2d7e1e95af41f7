"""A finished adapter whose guarantee was checked, for whatever is made of its weights. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from dptune.corpus.records import FORMS
from dptune.errors import ConfigError, DptuneError
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.run_folder import RunFolder
from dptune.tuning.card import certified_epsilon
from dptune.tuning.verifying import CONFIG, LABELS, RECORDS, adapter_within, certificate_of, check_deliverable


@dataclass(frozen=True)
class FinishedAdapter:
    """A delivered adapter whose card, ledger and files agree, and whose run has ended. Public.

    Attributes:
        path: its folder.
        contents: content of its ledger.
        certificate: of the search whose winner it is; None of a run of its own.
        base, revision: the model that it was tuned on, as its configuration names it.
        form: form of the records that it was tuned on, one of ``corpus.records.FORMS``; None where an earlier version
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


def open_adapter(path: Path, *, no_guarantee: bool = False) -> FinishedAdapter:
    """Check a delivered adapter as ``dptune verify`` does.

    Args:
        path: its folder, or that of its run.
        no_guarantee: also take an adapter whose certified epsilon is infinite.

    Raises: ConfigError for a folder that ``tune`` did not deliver, a classifier, a run that has not ended, or no
        certified epsilon; LedgerError and CardError as ``check_deliverable``.
    """
    path = adapter_within(path)
    fix = "give the folder of an adapter that dptune tune delivered"
    if (path / LABELS).is_file():
        raise ConfigError("adapter", f"{path} is a classifier, which writes no texts", fix="take one of task generate")
    if not (ledger := RunFolder(path).ledger).is_file():
        raise ConfigError("adapter", f"{path} holds no {ledger.name}, which says what it cost", fix=fix)
    contents, certificate = check_deliverable(path), certificate_of(path)
    if not contents.complete:
        raise ConfigError("adapter", f"the ledger of {path} has no end, so more may have been released", fix=fix)
    config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    form, tokens = _records_of(path / RECORDS)
    revision = config.get("revision")
    base = str(config.get("base_model_name_or_path"))
    found = FinishedAdapter(path, contents, certificate, base, revision, form, tokens)
    if not no_guarantee and not math.isfinite(found.epsilon):
        why = "; ".join(contents.epsilons.leaks) or "its noise is too small"
        fix = "take another adapter, or allow texts without any guarantee (no_guarantee)"
        raise ConfigError("adapter", f"{path} has no certified epsilon ({why})", fix=fix)
    return found


def _records_of(file: Path) -> tuple[str | None, int | None]:
    """Form and length of the records. Raises: DptuneError for a file that does not say them."""
    if not file.is_file():
        return None, None
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        form, tokens = said["form"], said["tokens"]
    except (ValueError, TypeError, KeyError):
        form, tokens = None, None
    if form not in FORMS or not isinstance(tokens, int):
        raise DptuneError(f"{file}: says no form and tokens of records. Fix: take the whole folder that was delivered.")
    return form, tokens
