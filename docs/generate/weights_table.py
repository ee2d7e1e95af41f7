"""Table of what trains at equal certified epsilon, from weights.json: kept figures of runs that take hours.

``python -m benchmarks.real --part weights --report --numbers docs/generate/weights.json`` writes that file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.generate.tables import table

MEASURED = Path(__file__).with_name("weights.json")
#: The line of a page in whose place the tables stand.
MARKER = "<!-- tables of docs/generate/weights.json -->"
_BUDGETS = (1.0, 3.0, 8.0)


def on_page(markdown: str) -> str:
    """A page's Markdown, with the tables in place of its marker."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(lines(json.loads(MEASURED.read_text(encoding="utf-8")))))


def lines(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the tables.

    Args:
        numbers: the result of ``benchmarks.real.report.weights_numbers``.
    """
    planned, trials, runs = numbers["planned"], numbers["trials"], numbers["runs"]
    tried = f"{len(trials)} of {planned['trials']} trials"
    if runs:
        yield f"{len(runs)} of {planned['runs']} runs, at rates that {tried} chose ({numbers['stand_in']})."
    else:
        yield f"{tried} have run ({numbers['stand_in']}), and none of the {planned['runs']} runs."
    yield ""
    if runs:
        yield from _of_runs(runs)
    if trials:
        yield from _of_trials(trials)


def _of_runs(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table of runs: a row for each kind of trained weights, with its accuracy at each budget and its memory."""
    head = ["`train`", "weights", "rate", *(f"right at a certified {budget:g}, %" for budget in _BUDGETS),
            "noise of a weight at 3", "all noise at 3, radii", "memory, MiB"]  # fmt: skip
    rows = []
    for train in dict.fromkeys(run["train"] for run in runs):
        own = [run for run in runs if run["train"] == train]
        middle = next((run for run in own if run["budget"] == _BUDGETS[1]), None)
        rows.append([
            f"`{train}`", f"{own[0]['weights']:,}", f"{own[0]['rate']:g}",
            *(_spread([run["accuracy"] for run in own if run["budget"] == budget]) for budget in _BUDGETS),
            *([f"{middle['noise']:.2g}", f"{middle['noise_length']:.2g}"] if middle else ["", ""]),
            f"{max(run['memory'] for run in own):.0f}",
        ])  # fmt: skip
    yield from [*table(head, rows).splitlines(), ""]


def _of_trials(trials: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table of trials: a row each. The best trial of a kind of trained weights is in bold."""
    rows = []
    for train in dict.fromkeys(trial["train"] for trial in trials):
        own = [trial for trial in trials if trial["train"] == train]
        best = max(own, key=lambda trial: (trial["accuracy"], -trial["loss"]))
        for trial in own:
            mark = "**" if trial is best else ""
            figures = f"{trial['rate']:g}", f"{trial['accuracy']:.1f}", f"{trial['loss']:.3f}"
            cost = f"{trial['noise_length']:.2g}", f"{trial['memory']:.0f}"
            rows.append([f"`{train}`", f"{trial['weights']:,}", *(f"{mark}{one}{mark}" for one in figures), *cost])
    head = ["trial of", "weights", "rate", "right, % of the dev set", "loss", "all noise, radii", "memory, MiB"]
    yield from [*table(head, rows).splitlines(), ""]


def _spread(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, with their number where it is not three."""
    if not values:
        return "not run"
    mean = f"{statistics.mean(values):.1f}"
    if len(values) == 1:
        return f"{mean} (one run)"
    return f"{mean} ± {statistics.stdev(values):.1f}" + ("" if len(values) == 3 else f" ({len(values)} runs)")
