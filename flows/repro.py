"""`make repro`: runs `dvc repro` and shows one progress display for all of its stages.

python -m flows.repro [TARGET or option of dvc repro ...]
python -m flows.repro --profile FILE      # the profile, as an experiment of DVC in a copy of the checkout; or several

At a terminal, the stages, their cells and the time left are drawn in place; of the stages' own lines, only warnings and
errors are shown. Elsewhere each line is passed on. Either way data/repro.log keeps all of them. `dvc repro` by itself
does the same work.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self

import yaml
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import private_directory
from dptune.core.progress import EVENTS
from flows.common.child import child
from tasks.mlflow.experiments import remembered
from tasks.paths import DATA, REPORT, REPORTS
from tasks.profile import PARAMS, members, overrides, read_profile
from tasks.settings.mechanisms import own_epsilons
from tasks.settings.params import load_settings
from tasks.stage import ERROR_FILE, INTERRUPTED, USER_ERROR, last_error, say_error

LOG = DATA / "repro.log"
#: Minutes that the shipped study took on two idle cores, without setup: the least and the most of several runs.
_MEASURED = (10, 12)
_SHIPPED = ("nonprivate", "static", "quantile", "rldp", "rldp_published")
_MORE = {"static": (2.0, 1.0, 4.0, 8.0)}
_NEXT = "Afterwards     make repro PROFILE=profiles/price-of-privacy.yaml draws what privacy costs with three seeds"
_SECONDS_BETWEEN_READS = 0.3
_MOST_METERS = 8
_TOOK = re.compile(r"^this run took (\d+) seconds$", re.MULTILINE)
_STAGE = re.compile(r"(?P<what>Running stage|Stage) '(?P<name>[^']+)'")
# DVC's remarks on git and on its own options: nothing that this project's users have to do.
_REMARKS = re.compile(
    r"(Updating|Generating) lock file|To track the changes|To enable auto|Use `dvc push`|\s+(git add|dvc config) "
    r"|WARNING: (No file hash info found for|'[^']*' is empty)"  # outputs that a first run has not made, or left empty
)
_STATUS = {0: 0, 252: INTERRUPTED, -signal.SIGTERM: INTERRUPTED}  # 252: how DVC ends after Ctrl-C
_IMPORTANT = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^(error|warning|stopped|ERROR)\b", re.IGNORECASE)


def main(arguments: list[str]) -> int:
    """Run `dvc repro` with the arguments. Returns its exit status; the last line of a failure is its cause and fix.

    Profiles that a file names run one after the other, up to one that fails; all are checked before the first starts.
    """
    os.umask(0o077)
    private_directory(DATA)
    if arguments[:1] != ["--profile"]:
        for line in opening(LOG) if not arguments else ():
            print(line, file=sys.stderr, flush=True)
        LOG.unlink(missing_ok=True)
        return _run(["repro", *arguments])
    if len(arguments) != 2:
        raise ConfigError(
            "--profile", "names no file, or stands beside other arguments", fix="give --profile FILE and nothing else"
        )
    profiles = {profile: overrides(profile) for profile in members(Path(arguments[1]))}
    if len(profiles) > 1:
        _check_all(profiles)
    LOG.unlink(missing_ok=True)
    for place, (profile, values) in enumerate(profiles.items(), start=1):
        if len(profiles) > 1:
            print(f"study {place} of {len(profiles)}: {profile}", file=sys.stderr, flush=True)
        options = [f"--set-param={value}" for value in values]
        status = _run(["exp", "run", "--temp", "--name", _free_name(profile.stem), *options])
        if status:
            return status
    return 0


def _check_all(profiles: Iterable[Path]) -> None:
    """Look at each study's records, models and metrics, which a single one does when it starts.

    Raises: DptuneError that names the first profile that could not run.
    """
    from tasks.experiment.checks import check_models, check_source

    for profile in profiles:
        settings = load_settings(PARAMS, read_profile(profile))
        try:
            check_source(settings.data)
            check_models(settings)
        except DptuneError as error:
            raise DptuneError(f"{profile}: {error}") from None


def _run(arguments: list[str]) -> int:
    """Run DVC with the arguments, show its progress, and close with where its results are. Returns: its exit status."""
    console = Console(stderr=True)
    started = time.monotonic()
    command = child("dvc", *arguments)
    with TemporaryDirectory() as folder:
        error, events = Path(folder) / "error", Path(folder) / "events"
        events.touch()
        os.environ |= {ERROR_FILE: str(error), EVENTS: str(events)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        with _stopping(process), LOG.open("a", encoding="utf-8") as log:
            if console.is_terminal and not console.is_dumb_terminal:
                _draw(process, log, StageDisplay(console, _stages(command), events))
            else:
                for line in _lines(process, log):
                    print(line, file=sys.stderr, flush=True)
            status = process.wait()
        cause = error.read_text(encoding="utf-8") if error.exists() else ""
    if status == 0 and "--temp" in command:
        own = REPORTS / command[command.index("--name") + 1] / "report"
        _close(console, own, [f"Report         {own / 'report.html'}", "Compare        make experiments"])
    elif status == 0:
        seconds = time.monotonic() - started
        with LOG.open("a", encoding="utf-8") as log:
            log.write(took(seconds))
        _say_where(console, seconds)
    # A flow that was stopped says in its last line how far it came.
    elif status == -signal.SIGTERM and not LOG.read_text("utf-8").rstrip().rpartition("\n")[2].startswith("stopped"):
        print("stopped; run again to go on", file=sys.stderr)
    else:
        print(cause, end="", file=sys.stderr)
    return _STATUS.get(status, USER_ERROR)


@contextmanager
def _stopping(process: subprocess.Popen[str]) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM end DVC, and this process after DVC's stage has said how far it came.

    A terminal sends Ctrl-C to all processes. SIGTERM is passed on to DVC and its stage.
    """

    before: dict[int, Any] = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_name(name: str) -> str:
    """``name``, numbered if an experiment of DVC has it already: DVC would refuse it, or run every stage again."""
    listing = [sys.executable, "-m", "dvc", "exp", "list", "--all-commits", "--name-only"]
    taken = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split()
    name = re.sub(r"[^\w-]+", "-", name)
    numbered = (f"{name}-{number}" for number in count(2))
    return next(one for one in chain([name], numbered) if one not in taken)


def _stages(command: list[str]) -> list[str]:
    """The stages that DVC will come to, if all of the pipeline is asked for."""
    if command[-1] != "repro" and "--temp" not in command:
        return []
    return list(yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"])


def _lines(process: subprocess.Popen[str], log: IO[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)
        log.flush()
        if line.strip() and not _REMARKS.match(line):
            yield line.rstrip()


def _draw(process: subprocess.Popen[str], log: IO[str], display: StageDisplay) -> None:
    with display:
        for line in _lines(process, log):
            if found := _STAGE.match(line):
                display.enter(found["name"], runs=found["what"] == "Running stage")
            elif _IMPORTANT.search(line):
                display.print(line)
        if process.wait() != 0:
            display.fail()


def _say_where(console: Console, seconds: float) -> None:
    """Say where a study's pages are, and what one does next."""
    page = REPORT / "index.html"
    lines = [
        f"Report         {page if page.exists() else REPORT / 'report.html'}",
        "Guarantee      .venv/bin/dptune verify data/runs/RUN/ledger.jsonl   (RUN: a folder there)",
        "Compare        make ui  (MLflow and Prefect), or make experiments  (DVC)",
        *([f"In MLflow      {page_links.table}"] if (page_links := remembered()) else []),
        "Record         commit dvc.lock to compare later runs with this one  (keep it private for real data)",
        f"All lines of this run are in {LOG}; it took {_duration(seconds)}.",
    ]
    _close(console, REPORT, lines)


def _close(console: Console, folder: Path, lines: list[str]) -> None:
    """Close with the answer of the report in ``folder``, if it has one, and with ``lines``."""
    answer = folder / "answer.md"
    text = "\n".join([*([answer.read_text(encoding="utf-8").strip(), ""] if answer.exists() else []), *lines])
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(Panel(Text(text), title="done", expand=False))
    else:
        print(text, file=sys.stderr)


def _duration(seconds: float) -> str:
    if seconds >= 60:
        return f"{seconds / 60:.1f} minutes"
    return "1 second" if round(seconds) == 1 else f"{seconds:.0f} seconds"


def _main() -> int:
    try:
        return main(sys.argv[1:])
    except (DptuneError, OSError) as error:
        say_error(last_error(error))
        return USER_ERROR


# Announcement: what the study runs and shows, and how long that takes on this machine.


def opening(log: Path) -> list[str]:
    """First lines of `make repro`; none where params.yaml cannot be read, which the first stage says.

    Args:
        log: of the run before, if there was one; ``took`` is its last line.
    """
    try:
        settings = load_settings()
    except (DptuneError, OSError):
        return []
    study = settings.experiment
    own = own_epsilons(settings.mechanisms, study)
    epsilons = ", ".join(f"{one:g}" for one in study.epsilons)
    further = "".join(f" ({name}: {', '.join(f'{one:g}' for one in sorted(all_of))})" for name, all_of in own.items())
    grid = (study.mechanisms, study.epsilons, study.seeds)
    shipped = (*grid, own) == (_SHIPPED, (2.0,), (0,), _MORE)
    seeds = f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}"
    return [
        f"Study {study.name!r}: {', '.join(study.mechanisms)}",
        f"               at {study.accounting} epsilon {epsilons}{further}, {seeds}, on {', '.join(study.models)}",
        f"You get        {REPORT / 'report.html'}: the best model at the privacy that is paid, proofs and attacks",
        f"It takes       {_how_long(log, shipped)}. What is done already is skipped.",
        *([_NEXT] if shipped else []),
    ]


def took(seconds: float) -> str:
    """The line of a log that says how long its run took."""
    return f"this run took {seconds:.0f} seconds\n"


def _how_long(log: Path, shipped: bool) -> str:
    before = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if said := _TOOK.search(before):
        stages = f"\n{before}".count("\nRunning stage '")
        return f"what changed; the last run here took {_duration(int(said[1]))} for {stages} stage{'s' * (stages != 1)}"
    if shipped:
        return f"{_MEASURED[0]} to {_MEASURED[1]} minutes on two idle cores; here it may use {cores}"
    return f"a time that has not been measured for these settings; here it may use {cores} cores"


# Display of a pipeline's run: the stages that are done, the one that runs, and the meters of its processes.


class _TimeLeft(TimeRemainingColumn):
    """Time left of a meter. Stages differ too much in length for theirs to be told from those that are done."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["meter"] else Text("")


class StageDisplay:
    """Draws stages and meters in place at a terminal. Use as a context manager.

    A meter is drawn from the events that ``dptune.core.progress.Meter`` appends to a file, whichever process it is in.
    """

    def __init__(self, console: Console, stages: list[str], events: Path) -> None:
        """Draw on ``console``; ``stages`` are all that will come, or none if that is not known."""
        self._console, self._stages, self._events = console, stages, events
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            _TimeLeft(compact=True),
            console=console,
            expand=True,
        )
        self._whole = self._progress.add_task("starting", total=len(stages) or None, count="", meter=False)
        self._meters: dict[str, TaskID] = {}
        self._passed = 0
        self._stage, self._began, self._runs = "", time.monotonic(), False
        self._position = 0
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def enter(self, stage: str, *, runs: bool) -> None:
        """Say that a stage begins, or that nothing in it changed."""
        self._leave()
        self._stage, self._began, self._runs = stage, time.monotonic(), runs
        if not runs:
            self._leave()

    def fail(self) -> None:
        """Say that the stage that runs has failed or was stopped."""
        if self._stage:
            self._progress.console.print(Text.assemble(("✗ ", "red"), self._stage))
        self._stage = ""

    def print(self, line: str) -> None:
        """Print a line above the display."""
        self._progress.console.print(Text(line))

    def _leave(self) -> None:
        """Print a line for the stage that ended, and remove its meters."""
        if self._stage:
            took = f"{time.monotonic() - self._began:.0f} s" if self._runs else "nothing changed"
            self._progress.console.print(Text.assemble(("✓ ", "green"), f"{self._stage:<12}", (took, "dim")))
            self._passed += 1
        self._stage = ""
        for task in self._meters.values():
            self._progress.remove_task(task)
        self._meters.clear()

    def _read(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_READS):
            self._update()

    def _update(self) -> None:
        of = f"{self._passed + bool(self._stage)} of {len(self._stages)}" if self._stages else ""
        what = self._stage or ("ending" if self._passed == len(self._stages) > 0 else "starting")
        self._progress.update(self._whole, description=what, completed=self._passed, count=of)
        for event in self._new_events():
            self._show(event)

    def _new_events(self) -> list[dict[str, Any]]:
        """Events that were appended since the last call; a line that is still being written waits for the next."""
        try:
            with self._events.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _show(self, event: dict[str, Any]) -> None:
        key = event["meter"]
        if event["ended"]:
            if key in self._meters:
                self._progress.remove_task(self._meters.pop(key))
            return
        if key not in self._meters:
            if len(self._meters) == _MOST_METERS or not self._stage:
                return
            self._meters[key] = self._progress.add_task(
                f"  {event['what']}", total=event["total"], count="", meter=True
            )
        count = " of ".join(str(number) for number in (event["done"], event["total"]) if number is not None)
        self._progress.update(self._meters[key], completed=event["done"], count=f"{count} {event['unit']}".strip())

    def __enter__(self) -> Self:
        self._progress.start()
        self._reader.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._reader.join()
        self._leave()
        self._progress.remove_task(self._whole)
        self._progress.stop()


if __name__ == "__main__":
    sys.exit(_main())
