"""Interleaved rounds: every contender takes its turn in each, so that a ratio compares neighbours in time.

Time is the wall clock's, without set-up and without the first steps. Memory is the peak of a run: on a GPU the
allocator's own count, on a CPU that of a process which runs nothing else, without what imports and a tiny run hold.
What was measured is on the disk after every trial.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import Setting
from benchmarks.steps import CannotRunError, Contender
from dptune.core.files import write_text

_MOST_STEPS = 64  # of a trial


@dataclass
class Line:
    """What is known of one contender at one shape.

    Attributes:
        table: which table it belongs to.
        seconds: a step, of each round.
        memory: MB at the peak.
        figures: what the contender told of itself, of each round.
        failed: why there is nothing, or no more.
    """

    table: str
    shape: str
    batch: int
    contender: str
    peer: str
    seconds: list[float] = field(default_factory=list)
    memory: float | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""


@dataclass
class Results:
    """Lines, and the file that they are written to after every change."""

    path: Path | None
    machine: dict[str, Any]
    notes: dict[str, float] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Results:
        """Several files of one kind of machine as one; of the same line in two of them the later counts."""
        merged: dict[tuple[str, str, str], Line] = {}
        notes: dict[str, float] = {}
        machines: dict[str, dict[str, Any]] = {}
        for path in paths:
            data = json.loads(path.read_text(encoding="utf-8"))
            machines[data["machine"]["kind"]] = data["machine"]
            notes |= data["notes"]
            for line in (Line(**values) for values in data["lines"]):
                merged[line.table, line.shape, line.contender] = line
        if len(machines) != 1:
            raise SystemExit(f"measured on different machines, which are no peers: {', '.join(machines)}")
        return cls(None, machines.popitem()[1], notes, list(merged.values()))

    def line(self, table: str, setting: Setting, contender: str, peer: str) -> Line:
        """A new line."""
        self.lines.append(Line(table, setting.shape.name, setting.shape.batch, contender, peer))
        return self.lines[-1]

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path:
            data = {"machine": self.machine, "notes": self.notes, "lines": [asdict(line) for line in self.lines]}
            write_text(self.path, json.dumps(data, indent=1) + "\n")

    def peer_of(self, line: Line) -> Line | None:
        """The line that its ratios are taken over."""
        same = (one for one in self.lines if (one.table, one.shape) == (line.table, line.shape))
        return next((one for one in same if one.contender == line.peer), None)

    def ratios(self, line: Line) -> list[float]:
        """Time over the peer's in the same round."""
        peer = self.peer_of(line)
        return [ours / theirs for ours, theirs in zip(line.seconds, peer.seconds, strict=False)] if peer else []


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: every contender's turns.
        seconds: of a turn, reached by as many steps as the plain contender needs for it.
        warmup: steps before those that count.
        steps: in place of ``seconds``.
        least: seconds that must be left to try at all.
        memory: processes to measure it in on a CPU, of which the median counts.
    """

    rounds: int = 5
    seconds: float = 2.0
    warmup: int = 1
    steps: int | None = None
    least: float = 0.0
    memory: int = 3


class Deadline:
    """An end of time."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


class Stopwatch:
    """Called after every step; tells the mean of those after the warm-up."""

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self._device, self._marks, self._steps = device, (warmup, warmup + steps), steps
        self._count, self._stamps = 0, list[float]()

    def __call__(self) -> None:
        self._count += 1
        if self._count in self._marks:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._stamps.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """A step."""
        start, end = self._stamps
        return (end - start) / self._steps


def measure(
    table: str, setting: Setting, contenders: Sequence[Contender], effort: Effort, results: Results, deadline: Deadline
) -> None:
    """All rounds of a shape, as far as time allows; lines that could not be measured say why."""
    pairs = [(one, results.line(table, setting, one.name, one.peer)) for one in contenders]
    try:
        steps = _plan_steps(setting, contenders, effort, deadline)
    except (CannotRunError, torch.OutOfMemoryError) as error:
        for _, line in pairs:
            line.failed = _reason(error)
        results.save()
        return
    for turn in range(effort.rounds):
        first = turn % len(pairs)  # nobody is always first, nor always after the same
        for contender, line in pairs[first:] + pairs[:first]:
            if not line.failed and deadline.left > 0:
                _take_turn(setting, contender, line, effort.warmup, max(steps, contender.steps))
                results.save()
        if turn == 0 and effort.memory and setting.device.type == "cpu":
            _measure_memory(setting, pairs, effort.memory, results, deadline)


def _take_turn(setting: Setting, contender: Contender, line: Line, warmup: int, steps: int) -> None:
    watch = Stopwatch(setting.device, warmup, steps)
    on_gpu = setting.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        figures = contender.run(setting, warmup + steps, watch)
    except (CannotRunError, torch.OutOfMemoryError) as error:
        line.failed = _reason(error)
        return
    except Exception as error:  # what a peer cannot do is a result
        if not contender.foreign:
            raise
        line.failed = _reason(error)
        return
    line.seconds.append(watch.seconds)
    for name, value in figures.items():
        line.figures.setdefault(name, []).append(value)
    if on_gpu:
        line.memory = max(line.memory or 0.0, torch.cuda.max_memory_allocated() / 2**20)


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    name = "" if isinstance(error, CannotRunError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0][:120]


def _plan_steps(setting: Setting, contenders: Sequence[Contender], effort: Effort, deadline: Deadline) -> int:
    """As many as fill a turn of the first contender; trying it out also warms the machine up.

    Raises: CannotRunError if one round takes longer than there is time.
    """
    if deadline.left < effort.least:
        raise CannotRunError("not enough time was left (--minutes)")
    watch = Stopwatch(setting.device, 1, 1)
    contenders[0].run(setting, 2, watch)
    steps = effort.steps or max(1, min(_MOST_STEPS, round(effort.seconds / watch.seconds)))
    needed = watch.seconds * sum(max(steps, one.steps) + effort.warmup for one in contenders)
    if needed > deadline.left:
        raise CannotRunError(f"not enough time: one round takes {needed / 60:.1f} minutes here (--minutes)")
    return steps


# ---------------------------------------------------------------------------------------------- memory on a CPU


def _measure_memory(
    setting: Setting, pairs: Sequence[tuple[Contender, Line]], times: int, results: Results, deadline: Deadline
) -> None:
    for contender, line in pairs:
        if line.seconds and deadline.left > 0:
            found = [peak_memory(setting, contender) for _ in range(times)]
            known = [memory for memory in found if memory is not None]
            line.memory = statistics.median(known) if known else None
            results.save()


def peak_memory(setting: Setting, contender: Contender) -> float | None:
    """MB at the peak of a few steps in a process of their own; None where the system does not tell."""
    if not Path("/proc/self/status").exists():
        return None
    # Forked from a server that has imported everything: a process costs no seven seconds of imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.measure", *(["opacus"] if importlib.util.find_spec("opacus") else [])])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_alone, args=(setting, contender, torch.get_num_threads(), sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None  # killed, or it raised; what it wrote is on stderr
    finally:
        process.join()


def _run_alone(setting: Setting, contender: Contender, threads: int, sender: Connection) -> None:
    torch.set_num_threads(threads)
    quiet()
    contender.run(setting.smallest(), contender.steps, lambda: None)  # lazy imports, and the library's own pages
    before = status("VmRSS")
    contender.run(setting, max(2, contender.steps), lambda: None)
    sender.send(status("VmHWM") - before)


def status(name: str) -> float:
    """MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 2**10


# -------------------------------------------------------------------------------------------------- the machine


def machine(device: torch.device) -> dict[str, Any]:
    """Its kind, and the versions that matter; no name of a host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    versions = {}
    for package in ("torch", "transformers", "peft", "opacus", "trl"):
        if importlib.util.find_spec(package):
            versions[package] = importlib.metadata.version(package)
    return {
        "kind": f"{kind}, {cores} CPU cores" if device.type == "cuda" else f"{kind}, {cores} cores",
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def quiet() -> None:
    """No warnings of libraries about models that were never meant to be good."""
    import warnings

    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
