"""A search whose candidates compute no gradients and deliver no files, and one of which fails where a test says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_search import asked, outcomes, usual

from dptune.job.search import candidates as candidates_module
from dptune.job.search import search as search_module
from dptune.job.search.plan import Journal, Plan
from dptune.job.search.search import search, working_folder
from dptune.privacy.ledger import Ledger
from dptune.privacy.selection_law import SelectionLaw
from dptune.privacy.spent_budgets.register import Register
from dptune.training import loop, run_start
from dptune.training.gradients import shared_pass as together
from dptune.training.run import Run


@lru_cache(maxsize=1)
def _known() -> tuple[Any, Any]:
    """The prices of the search, and its base model, which take most of a search's time."""
    return search_module.plan_of_search(usual(), asked(score="public")), usual().base.load()


@dataclass
class Staged:
    """A search of ``count`` candidates, at most ``together`` in a pass, of which number ``victim`` fails.

    Attributes:
        place: where: "open", "begin", "pass", "complete", "save", "end", "weights" or "score".
        errors: what it raises there, one after the other; nothing afterwards.
        tries: how often each candidate was opened, by its name.
        never_shared: whether each pass of several fails, for lack of memory.
        made: steps that were made.
        kill_at: number of the event at which the process dies; 0 never. Each charge and file is two events.
        events: names of all events so far.
        winner: name of the winner.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    count: int
    victim: int
    place: str = ""
    errors: list[BaseException] = field(default_factory=list)
    together: int = 4
    tries: dict[str, int] = field(default_factory=dict)
    never_shared: bool = False
    made: int = 0
    kill_at: int = 0
    events: list[str] = field(default_factory=list)
    winner: str = ""

    def __post_init__(self) -> None:
        patch, (prices, base), opened = self.patch, _known(), run_start._open
        patch.setattr(SelectionLaw, "draw", lambda law, entropy: self.count)
        patch.setattr(search_module, "plan_of_search", lambda *_: prices)
        patch.setattr(type(usual().base), "load", lambda _: base)
        patch.setattr(os, "fsync", lambda _: None)
        # Noise alone moves the weights, and nothing is delivered: what is tried here is the candidates' fates.
        patch.setattr(run_start, "rehearse", lambda *_, **__: None)
        patch.setattr(run_start, "check_width", lambda *_: None)
        patch.setattr(loop, "gradients_of", lambda run, batch: self._gradients([run]))
        patch.setattr(together._Pass, "gradients", lambda one, number: self._gradients_together(one))
        patch.setattr(together._Pass, "_compute", lambda *_: self._be_full())
        patch.setattr(candidates_module, "write_weights", lambda *_: None)
        patch.setattr(search_module, "_publish", self._publish)
        patch.setattr(search_module, "_load", lambda *_: None)

        def open_(spec: Any, optimizer: Any, directory: Path) -> Any:
            self.tries[directory.name] = self.tries.get(directory.name, 0) + 1
            self._fail("open", directory)
            return opened(spec, optimizer, directory)

        patch.setattr(run_start, "_open", open_)
        for name in ("begin", "complete", "save", "end"):
            patch.setattr(Run, name, self._staged(name, getattr(Run, name), lambda run, *_: run.directory))
        for name, place, at in (("write_weights", "weights", 2), ("_score", "score", 1)):
            real = getattr(candidates_module, name)
            patch.setattr(candidates_module, name, self._staged(place, real, lambda *given, at=at: given[at].path))
        written = ((Journal, "end"), (Ledger, "charge"), (Ledger, "finish"), (Run, "save"))
        for owner, name in (*written, (Run, "complete")):
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _publish(self, shared: Any, winner: Any, *_: Any) -> None:
        self.winner = winner.name

    def _be_full(self) -> None:
        if self.never_shared:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def _gradients(self, runs: list[Run]) -> Iterator[Any]:
        for run in runs:
            self._fail("pass", run.directory)
        yield from ()

    def _gradients_together(self, one: Any) -> Iterator[Any]:
        """No gradients; what breaks a shared pass breaks it for every run of its step."""
        self._be_full()
        if (error := getattr(one, "broke", None)) is not None:
            raise RuntimeError("an earlier micro-batch failed") from error
        try:
            yield from self._gradients(one._runs)
        except Exception as error:
            one.broke = error
            raise

    def _staged(self, place: str, real: Callable[..., Any], directory: Callable[..., Path]) -> Any:
        def act(*given: Any, **more: Any) -> Any:
            self._fail(place, directory(*given))
            return real(*given, **more)

        return act

    def _counted(self, name: str, real: Callable[..., Any]) -> Any:
        def act(*given: Any, **more: Any) -> Any:
            what = (
                f"outcome of {'victim' if given[1] == self.name else 'another'}"
                if name == "end" and len(given) > 1
                else name
            )
            self._event(f"before {what}")
            found = real(*given, **more)
            self.made += name == "complete"
            self._event(f"after {what}")
            return found

        return act

    def _event(self, name: str) -> None:
        self.events.append(name)
        if len(self.events) == self.kill_at:
            raise KeyboardInterrupt

    def _fail(self, place: str, directory: Path) -> None:
        if place == self.place and self.errors and directory.name == self.name:
            raise self.errors.pop(0)

    @property
    def name(self) -> str:
        """The victim's."""
        return self.names[self.victim]

    @property
    def names(self) -> list[str]:
        """Those of all candidates."""
        return [one.name for one in Plan.read(working_folder(self.folder / "out")).candidates]

    def start(self) -> None:
        """Start the search, or go on with it. Raises: what ends it."""
        settings = asked(score="public", keep_losers=True, together=self.together)
        search(usual(), settings, self.folder / "out", Register(self.folder / "spent.jsonl"))

    @property
    def scores(self) -> dict[str, float | None]:
        """The score of each candidate that has an outcome, by its name; None of one that failed."""
        return {name: found["score"] for name, found in outcomes(self.folder / "out").items()}
