"""What is known of a search before any work: it has ended as asked, or its records paid before. Loads no torch."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from dptune.core.files import forget_times, read_json, write_json
from dptune.core.files import sha256 as digest_of
from dptune.core.plugins import plugins_of
from dptune.job.delivery.weights import weights_in
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import runs_within
from dptune.privacy.spent_budgets.register import Register
from dptune.training.models.model_names import path_of
from tasks.paths import EVAL, PUBLIC_MODEL, PUBLIC_VALIDATION, SPENT
from tasks.search.request import folder_of, model_of
from tasks.settings.params import Settings
from tasks.split_records import ATTACK_SIDE, TRAIN_SIDE, split_digest

#: In a search's folder: what its page was made of, and the page's answer.
_SHOWN = "shown.json"


def refuse_paid(settings: Settings) -> None:
    """Raise ConfigError if a new search was not told to accept that these records were searched before."""
    folder = RunFolder(folder_of(settings))
    begun = folder.cell.exists() or folder.searching.exists()
    if settings.search.rehearses or settings.search.again or begun or not SPENT.exists():
        return
    Register(SPENT).check(split_digest(), again=False)


def shown(settings: Settings, page: Path) -> str | None:
    """The page's answer, if it shows the ended search of this name, and neither settings nor files changed since.

    None also where weights of settings that were not chosen lie there: whoever runs the search again is told of them.
    """
    file = folder_of(settings) / _SHOWN
    if not (file.exists() and page.exists()) or any(map(weights_in, runs_within(file.parent))):
        return None
    known = read_json(file)
    same = known["asked"] == _asked(settings) and known["page"] == digest_of(page)
    return str(known["answer"]) if same else None


def remember_shown(settings: Settings, page: Path, answer: str) -> None:
    """Keep what a page was made of. The file bears no time, as all in the folder of a search."""
    file = folder_of(settings) / _SHOWN
    write_json(file, {"asked": _asked(settings), "page": digest_of(page), "answer": answer})
    forget_times(file.parent)


def _asked(settings: Settings) -> str:
    """A digest of all settings, of the code of plug-ins, and of the sizes and times of the files that a search reads or
    made."""
    given = [settings.data.path, settings.data.public, TRAIN_SIDE, EVAL, ATTACK_SIDE, PUBLIC_VALIDATION]
    given.append(path_of(model_of(settings)[1].source))
    folders = [PUBLIC_MODEL, RunFolder(folder_of(settings)).adapter]
    inside = [path for folder in (*filter(None, given), *folders) if folder.is_dir() for path in folder.rglob("*")]
    states = [
        (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted({*filter(None, given), *inside})
        if path.exists()
    ]
    code = [str(plugin) for plugin in plugins_of(settings.plugins)]
    return sha256(json.dumps([settings.model_dump(mode="json"), code, states]).encode()).hexdigest()
