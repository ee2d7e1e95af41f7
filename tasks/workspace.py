"""The copy of the checkout in which DVC runs a queued experiment, and deletes afterwards.

What such a run spends must outlive the copy, and what was spent before must be known in it: a cell that is finished in
the checkout must not be paid for again. So the folders that DVC does not keep are the checkout's own, by links. So are
the user's files that params.yaml names by a relative path, which git need not know.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from dptune.core.errors import DptuneError
from dptune.core.files import private_directory, replacing_folder
from tasks.paths import AUDITS, DATA, ENSEMBLES, FAILURES, POLICY, REPORTS, RUNS, SECRETS, SPENT, TOKENS
from tasks.settings.strict import load_yaml

#: Ledgers, secrets and all else that no DVC command restores or removes.
KEPT_FOLDERS = (RUNS, AUDITS, ENSEMBLES, POLICY, SECRETS, TOKENS, DATA / "mlartifacts")
KEPT_FILES = (DATA / "mlflow.db", DATA / "mlflow.lock", FAILURES, SPENT)
#: Variable in which DVC gives a stage the name of the experiment that it runs for.
EXPERIMENT_NAME = "DVC_EXP_NAME"
_COPIES = (".dvc", "tmp", "exps")
_PARAMS = Path("params.yaml")
_STAGES = Path("dvc.yaml")


def checkout_of(directory: Path) -> Path | None:
    """The checkout that ``directory`` is DVC's copy of for ``dvc exp run --queue`` or ``--temp``; None if none."""
    parts = directory.parts
    for place in range(len(parts) - len(_COPIES)):
        if parts[place : place + len(_COPIES)] == _COPIES:
            return Path(*parts[:place])
    return None


def share_checkout() -> None:
    """In a copy, let every kept folder and file, and every file that params.yaml names, be the checkout's.

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
    outputs = _outputs()
    for path in _named_files():
        if any(path == out or path in out.parents or out in path.parents for out in outputs):
            continue  # a stage of the copy would write its output through the link, into the checkout
        if not path.is_absolute() and not path.exists() and (checkout / path).exists():
            if ".." in path.parts:
                problem = "leads out of the checkout, and experiments of DVC run in a copy of it"
                raise DptuneError(f"params.yaml: {path}: {problem}. Fix: give its absolute path.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(checkout / path)


def _named_files() -> list[Path]:
    """What params.yaml names of data, models and plug-ins; a hub id is no path, and is in no checkout either."""
    try:
        content = load_yaml(_PARAMS.read_text(encoding="utf-8"))
        data, models = content.get("data", {}), content.get("experiment", {}).get("models", {})
        named = [data.get("path"), data.get("public"), content.get("pretrain", {}).get("path")]
        named += [model.get("source") for model in models.values()]
        roots = [str(module).partition(".")[0] for module in content.get("plugins") or ()]
        named += [file for root in roots for file in (root, f"{root}.py")]
    except (OSError, ValueError, AttributeError):
        return []  # who reads the settings says what is wrong with them
    return [Path(name) for name in named if isinstance(name, str) and name]


def _outputs() -> list[Path]:
    """What the stages of dvc.yaml write, which DVC puts into a copy itself."""
    try:
        stages = load_yaml(_STAGES.read_text(encoding="utf-8")).get("stages", {})
        kinds = [stage.get(kind) or () for stage in stages.values() for kind in ("outs", "metrics", "plots")]
    except (OSError, ValueError, AttributeError):
        return []  # DVC, which started this stage, has read the file
    return [Path(name) for named in kinds for one in named for name in ([one] if isinstance(one, str) else one)]


def keep_pages(folder: Path, name: str) -> None:
    """In a copy, write a folder of pages to data/reports of the checkout too, under the name of DVC's experiment.

    Args:
        name: that of the folder where DVC tells none.
    """
    checkout = checkout_of(Path.cwd())
    if checkout is not None:
        own = re.sub(r"[^\w.-]+", "-", os.environ.get(EXPERIMENT_NAME) or name).lstrip(".") or "experiment"
        with replacing_folder(private_directory(checkout / REPORTS) / own / folder.name) as made:
            shutil.copytree(folder, made, dirs_exist_ok=True)
