"""The copy of the checkout in which DVC runs a queued experiment, and deletes afterwards.

What such a run spends must outlive the copy, and what was spent before must be known in it: a cell that is finished in
the checkout must not be paid for again. So the folders that DVC does not keep are the checkout's own, by links.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from dptune.errors import DptuneError
from dptune.files import private_directory
from tasks.paths import AUDITS, DATA, ENSEMBLES, FAILURES, POLICY, REPORTS, RUNS, SECRETS, TOKENS

#: Ledgers, secrets and all else that no DVC command restores or removes.
KEPT_FOLDERS = (RUNS, AUDITS, ENSEMBLES, POLICY, SECRETS, TOKENS, DATA / "mlartifacts")
KEPT_FILES = (DATA / "mlflow.db", DATA / "mlflow.lock", FAILURES)
#: Variable in which DVC gives a stage the name of the experiment that it runs for.
EXPERIMENT_NAME = "DVC_EXP_NAME"
_COPIES = (".dvc", "tmp", "exps")


def checkout_of(directory: Path) -> Path | None:
    """The checkout that ``directory`` is DVC's copy of for ``dvc exp run --queue`` or ``--temp``; None if none."""
    parts = directory.parts
    for place in range(len(parts) - len(_COPIES)):
        if parts[place : place + len(_COPIES)] == _COPIES:
            return Path(*parts[:place])
    return None


def share_kept() -> None:
    """In a copy, let every kept folder and file be the checkout's.

    Raises: DptuneError if the copy has one of its own, whose spending would be deleted with it.
    """
    checkout = checkout_of(Path.cwd())
    if checkout is None:
        return
    private_directory(DATA)
    for folder in KEPT_FOLDERS:
        private_directory(checkout / folder)
    for path in (*KEPT_FOLDERS, *KEPT_FILES):
        try:
            path.symlink_to(checkout / path)
        except FileExistsError:
            if path.resolve() != (checkout / path).resolve():
                fix = "delete this copy of the checkout, and queue the experiment again"
                raise DptuneError(f"{path.absolute()}: is not the checkout's {path}. Fix: {fix}.") from None


def keep_pages(folder: Path, name: str) -> None:
    """In a copy, write a folder of pages to data/reports of the checkout too, under the name of DVC's experiment.

    Args:
        name: that of the folder where DVC tells none.
    """
    checkout = checkout_of(Path.cwd())
    if checkout is not None:
        own = re.sub(r"[^\w.-]+", "-", os.environ.get(EXPERIMENT_NAME) or name).lstrip(".") or "experiment"
        shutil.copytree(folder, private_directory(checkout / REPORTS) / own / folder.name, dirs_exist_ok=True)
