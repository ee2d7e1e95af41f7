"""The folder that is handed on: adapter, tokenizer, ledger and a card that says what the ledger says.

It holds no statistic of private records that the certified epsilon does not cover, and its files bear no time. It is
there whole or not at all: it is made beside its place under a hidden name, all of it durable, then renamed.

Section "Audit" of a card: what ``dptune audit-run`` showed of a delivered adapter, written after the run.

Nothing in a delivered folder proves it, so ``verify`` does not compare it and says so. It stands after everything else
on the card, outside the marks of the section "Privacy", and a later audit takes its place.

It tells no more of the records than the releases do: it follows from the auditor's coins, which hang on no record, and
from scores of the noisy releases, which the certified epsilon covers (post-processing).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError
from dptune.core.files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    discard_partial,
    forget_times,
    naming,
    put_folder,
    read_json,
    write_json,
    write_text,
)
from dptune.job.delivery.card import TAG, card_text
from dptune.job.delivery.privacy_section import has_guarantee, table
from dptune.job.delivery.verification import CARD, CONFIG, CardError, headings, section_of
from dptune.job.delivery.weights import BASE, LORA, NamedBase, form_of, partial_of, weights_file, written_adapter
from dptune.job.result import RunResult
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder


def write_weights(
    model: Any,
    tokenizer: Any,
    folder: RunFolder,
    base: NamedBase,
    kept: Mapping[str, Any],
) -> None:
    """Write trained weights and tokenizer, to be delivered once the ledger is finished, without a path of this machine.

    Args:
        kept: what else is needed to use them, by name of file, as JSON; see ``PreparedRun.kept``. Public.
    """
    with written_adapter(model, folder) as partial:
        write_tokenizer(tokenizer, partial, base.name)
        for name, content in {**kept, BASE: base.to_dict()}.items():
            write_json(partial / name, content)
        if weights_file(partial).name == LORA.weights:
            _change(partial / CONFIG, base_model_name_or_path=base.name, revision=base.revision)


def write_tokenizer(tokenizer: Any, folder: Path, base: str) -> None:
    """Write a tokenizer's files, in which ``base`` stands for a path of this machine."""
    with naming(folder):
        tokenizer.save_pretrained(str(folder))
    if (named := folder / "tokenizer_config.json").exists() and "name_or_path" in named.read_text("utf-8"):
        _change(named, name_or_path=base)


def deliver(folder: RunFolder, result: RunResult) -> None:
    """Put ledger and card beside the weights, and all under its name. The ledger must be finished."""
    discard_partial(partial := partial_of(folder))
    shutil.copyfile(folder.ledger, partial / folder.ledger.name)
    write_card(partial, result)
    for path in partial.rglob("*"):  # some libraries write files that every user may read
        path.chmod(PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE)
    partial.chmod(PRIVATE_DIRECTORY)
    forget_times(partial)
    put_folder(partial, folder.adapter)


def write_card(path: Path, result: RunResult) -> str:
    """Write the card of a folder that holds all else already: metadata for the hub, and the text, which is returned.

    No line of it, the checked section apart, follows from anything but settings and public records.
    """
    section, epsilon = section_of(path)
    train = read_ledger(RunFolder(path).ledger).header.train
    text, is_lora = card_text(section, result, epsilon, train), form_of(train) is LORA
    about = ModelCardData(
        base_model=result.base,
        library_name="peft" if is_lora else "transformers",
        pipeline_tag="text-classification" if result.task == "classify" else "text-generation",
        tags=[*([TAG] if has_guarantee(epsilon) else []), *(["lora", "transformers"] if is_lora else [])],
    )
    write_text(path / CARD, f"---\n{about}\n---\n{text}")
    return text


def _change(path: Path, **values: Any) -> None:
    content = read_json(path)
    write_text(path, json.dumps(content | values, indent=2, sort_keys=True) + "\n")


TITLE = "Audit"
BEGIN, FINISH = "<!-- dptune: not compared by `dptune verify` -->", "<!-- dptune: end of audit -->"
_DIGITS = 4
#: Rows of the table on what each of the three checks could have found, and the figures that say it in words.
_POWERS = {"coins": "power", "noise": "noise_power", "draw": "sample_rate_power"}


def audit_section(figures: Mapping[str, Any], ledger: str, day: date) -> str:
    """The section, between its own marks: what was shown, what could have been, and what is proved.

    Args:
        figures: as ``RunAudit.to_dict`` has them.
        ledger: SHA-256 of the ledger of the audited run.

    Example:
        >>> from datetime import date
        >>> from dptune.job.delivery.deliverable import audit_section
        >>> figures = {"epsilon_audited": 1.6549, "could_be_shown_at_most": 5.43, "epsilon_certified": 7.99}
        >>> figures |= {"delta": 1e-5, "confidence": 0.95, "canaries": 1000, "false_alarms": 0.001, "accusations": []}
        >>> print(audit_section(figures, "0" * 64, date(2026, 1, 31)).splitlines()[7])
        | epsilon_audited | 1.654 at least, shown with confidence 0.95 at delta 1e-05 |
    """
    shown, most = (at_least(figures[name], _DIGITS) for name in ("epsilon_audited", "could_be_shown_at_most"))
    chance = f"a sound run is accused with probability {at_most(figures['false_alarms'], 2)} at most"
    accused = "; ".join(figures["accusations"])
    rows = {
        "epsilon_audited": f"{shown} at least, shown with confidence {at_least(figures['confidence'], 6)} at delta "
        f"{at_most(figures['delta'], _DIGITS)}",
        "could be shown at most": f"{most}, if all guesses were right",
        "epsilon_certified": f"{at_most(figures['epsilon_certified'], _DIGITS)} (what is proved)",
        "verdict": f"{f'ACCUSED: {accused}' if accused else 'not accused'}; {chance}",
        **{title: _sentence(figures[name]) for title, name in _POWERS.items() if name in figures},
        "canaries": f"{figures['canaries']} gradients of an auditor, who saw every release",
        "date": day.isoformat(),
        "audited by": f"dptune {version('dptune')}",
        "audited run": f"ledger with SHA-256 {ledger}",
    }
    said = "`dptune verify` does not compare this section. `dptune audit-run` with the run's folder computes it again."
    lines = [
        BEGIN,
        f"## {TITLE}",
        "",
        said,
        "",
        *table(rows),
        "",
        "An audit finds errors; it proves no privacy.",
        FINISH,
    ]
    return "\n".join(lines)


def _sentence(power: str) -> str:
    """The power of a check as the text of a cell of a table."""
    return power[:1].upper() + power[1:]


def write_audit(run: Path, figures: Mapping[str, Any], ledger: str, day: date) -> Path:
    """Write the section onto the card of a tuned run's adapter, in place of an earlier one, and return the card.

    Raises: ConfigError for a run without a card; CardError for a section "Audit" that dptune did not write.
    """
    card = RunFolder(run).adapter / CARD
    if not card.is_file():
        fix = "leave --card out: a study's report has what its audits show"
        raise ConfigError("--card", f"{card.parent} holds no {CARD}: cells of a study have no card", fix=fix)
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    earlier, end, after = rest.partition(FINISH)
    # Whatever else stands between the marks, such as the section "Privacy", would be lost with the earlier audit.
    whole = not begin or (end and [name for _, name in headings(earlier)] == [TITLE.casefold()])
    if not whole or _audits(before + "\n\n" + after):
        problem = f'has a section "{TITLE}" that dptune did not write, or of which a part is missing'
        raise CardError(f"{card}: {problem}. Fix: rename that heading, and use --card once more.")
    kept = before.rstrip("\n") + ("\n\n" + after.strip("\n") if after.strip() else "")
    write_text(card, f"{kept}\n\n{audit_section(figures, ledger, day)}\n")
    forget_times(card)
    return card


def audit_note(path: Path, ledger: str) -> str:
    """What ``verify`` says of the sections "Audit" of a delivered folder's card; empty without any.

    Args:
        ledger: SHA-256 of the folder's own ledger.
    """
    if not (found := audits(path / CARD)):
        return ""
    text = (path / CARD).read_text(encoding="utf-8", errors="replace")
    named = f"ledger with SHA-256 {ledger}" in text
    other = "" if named and len(found) == 1 else " It is not about this ledger, or there are several."
    return (
        f'NOT compared: the section "{found[0]}" of {path / CARD}, which anyone may have written.{other} '
        "`dptune audit-run` with the run's folder computes it again."
    )


def audits(card: Path) -> list[str]:
    """The names of all sections of a card that a reader may take for an audit; none without a card."""
    return _audits(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else []


def _audits(text: str) -> list[str]:
    return [one.strip("#> ") for one, name in headings(text) if "audit" in name]
