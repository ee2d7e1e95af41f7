"""Stage: what each does around its work, which is privacy of files, logging, and errors without tracebacks.

A queued experiment of DVC runs in a copy of the checkout, which DVC deletes afterwards. What such a run spends must
outlive the copy, and what was spent before must be known in it: a cell that is finished in the checkout must not be
paid for again. So the folders that DVC does not keep are the checkout's own, by links. So are the user's files that
params.yaml names by a relative path, which git need not know. Cells are named by digests of what some stages made, and
DVC's cache of runs knows nothing of these stages, whose outputs persist: a copy begins with the checkout's outputs.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from dptune.cli.console import Command
from dptune.core.errors import DptuneError
from dptune.core.files import PRIVATE_FILE, private_directory, replacing_folder, write_text
from tasks.paths import AUDITS, DATA, ENSEMBLES, FAILURES, MLFLOW_PAGE, POLICY, REPORTS, RUNS, SECRETS, SPENT, TOKENS
from tasks.settings.strict import load_yaml

#: Exit status of an error that trying again cannot mend.
USER_ERROR = 2
#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Variable with the file that takes the last line of a command that fails: one for whoever started the command.
ERROR_FILE = "DPTUNE_ERROR_FILE"
#: Ledgers, secrets and all else that no DVC command restores or removes.
KEPT_FOLDERS = (RUNS, AUDITS, ENSEMBLES, POLICY, SECRETS, TOKENS, DATA / "mlartifacts")
KEPT_FILES = (DATA / "mlflow.db", DATA / "mlflow.lock", MLFLOW_PAGE, FAILURES, SPENT)
#: Variable in which DVC gives a stage the name of the experiment that it runs for.
EXPERIMENT_NAME = "DVC_EXP_NAME"
_COPIES = (".dvc", "tmp", "exps")
_PARAMS = Path("params.yaml")
_STAGES = Path("dvc.yaml")


def run_command(work: Callable[..., None]) -> None:
    """``run_stage`` with what the command line gives for the parameters of ``work``."""
    # Tracebacks must not print local variables: they hold records. Of a wrong option, the last line is the error.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @functools.wraps(work)
    def run(**given: Any) -> None:
        run_stage(functools.partial(work, **given))

    app.command(cls=Command)(run)
    app()


def run_stage(work: Callable[[], None]) -> None:
    """Run a stage's work; whatever ends it, the last line says the cause and the fix.

    A problem that the user can fix has status 2; any other has status 1, and its traceback is kept in a file.
    """
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("dptune").setLevel(logging.INFO)  # Prefect, if it was first, lets only warnings through
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error") == "error":
        logging.getLogger("transformers").setLevel(logging.ERROR)  # imported already, it has read the variable
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    try:
        private_directory(DATA)
        share_checkout()
        if Path(".dvc").is_dir():
            # DVC makes its copies readable to all; the folder around them keeps others out.
            private_directory(Path(".dvc") / "cache")
        work()
    except (DptuneError, OSError) as error:
        say_error(last_error(error))
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("stopped; run again to go on", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        keep_failure(error)
        say_error(unknown_failure(error))
        raise SystemExit(1) from error


def say_error(sentence: str) -> None:
    """Print the last line of a command that failed, and write it to the file that ``ERROR_FILE`` names, if any."""
    if file := os.environ.get(ERROR_FILE):
        with suppress(OSError):  # a full disk, say, which the sentence may be about
            write_text(Path(file), f"error: {sentence}\n")
    print(f"error: {sentence}", file=sys.stderr)


def last_error(error: DptuneError | OSError) -> str:
    """The sentence of an error that the user can fix."""
    if isinstance(error, DptuneError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    fix = "free space or make it writable"
    if isinstance(error, FileNotFoundError):
        fix = "run `dvc repro`, which makes it"
    elif isinstance(error, PermissionError):
        fix = "change its permissions or those of its folder"
    return f"{where}{error.strerror or error}. Fix: {fix}."


def unknown_failure(error: BaseException) -> str:
    """The sentence of an error that nobody foresaw."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    return f"{what}. Fix: the traceback is in {FAILURES}; run again to go on, and report it if it comes back."


def keep_failure(error: BaseException) -> None:
    """Add an error's traceback to the file of failures, for the owner's eyes only."""
    keep_text("".join([f"{' '.join(sys.orig_argv)}\n", *traceback.format_exception(error), "\n"]))


def keep_text(text: str) -> None:
    """Add a text to the file of failures, for the owner's eyes only."""
    with suppress(OSError):
        descriptor = os.open(FAILURES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


# The copy of the checkout.


def checkout_of(directory: Path) -> Path | None:
    """The checkout that ``directory`` is DVC's copy of for ``dvc exp run --queue`` or ``--temp``; None if none."""
    parts = directory.parts
    for place in range(len(parts) - len(_COPIES)):
        if parts[place : place + len(_COPIES)] == _COPIES:
            return Path(*parts[:place])
    return None


def share_checkout() -> None:
    """In a copy, let every kept folder and file, and every file that params.yaml names, be the checkout's.

    Outputs that persist are copied, where the copy has none: a stage keeps those that fit, and else writes its own.

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
    _begin_with_outputs(checkout)
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


def _begin_with_outputs(checkout: Path) -> None:
    for path in _outputs(persisting=True):
        if (checkout / path).is_dir() and not path.exists():
            with replacing_folder(path) as made:
                shutil.copytree(checkout / path, made, dirs_exist_ok=True)


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


def _outputs(*, persisting: bool = False) -> list[Path]:
    """What the stages of dvc.yaml write, which DVC puts into a copy itself, or only what persists."""
    try:
        stages = load_yaml(_STAGES.read_text(encoding="utf-8")).get("stages", {})
        kinds = [stage.get(kind) or () for stage in stages.values() for kind in ("outs", "metrics", "plots")]
    except (OSError, ValueError, AttributeError):
        return []  # DVC, which started this stage, has read the file
    options = [{one: {}} if isinstance(one, str) else one for named in kinds for one in named]
    found = [(name, own) for one in options for name, own in one.items()]
    return [Path(name) for name, own in found if not persisting or (own or {}).get("persist")]


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
