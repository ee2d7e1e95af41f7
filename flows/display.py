"""Display of a pipeline's run: the stages that are done, the one that runs, and the meters of its processes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

_SECONDS_BETWEEN_READS = 0.3
_MOST_METERS = 8


class _TimeLeft(TimeRemainingColumn):
    """Time left of a meter. Stages differ too much in length for theirs to be told from those that are done."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["meter"] else Text("")


class StageDisplay:
    """Draws stages and meters in place at a terminal. Use as a context manager.

    A meter is drawn from the events that ``dptune.progress.Meter`` appends to a file, whichever process it is in.
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
