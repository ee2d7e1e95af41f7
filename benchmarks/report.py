"""Tables and a picture of measured lines: ``python -m benchmarks.report FILE... [--readme]``.

Several files are shown as one, for what a GPU measured in several commands.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import Line, Results

FOLDER = Path(__file__).parent


def tables(results: Results) -> str:
    """Markdown: the machine, then a table for every shape."""
    parts = [_machine(results)]
    for table, shape in _groups(results):
        parts += [f"**{TITLES[table]}: {shape}**", "\n".join(_table(results, table, shape))]
    return "\n\n".join(parts) + "\n"


def _machine(results: Results) -> str:
    machine, versions = results.machine, results.machine["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = f"{machine['kind']}, {machine['threads']} threads; {packages}; commit {machine['commit'] or 'unknown'}."
    difference = results.notes.get("clipped_gradient_difference")
    if difference is not None:
        text += f" Mean clipped gradients of dptune and both Opacus modes differ by {difference:.0e} of their length."
    return text + " Each ratio is the median over rounds (least to most)."


def _groups(results: Results) -> Iterator[tuple[str, str]]:
    return iter(dict.fromkeys((line.table, line.shape) for line in results.lines))


def _table(results: Results, table: str, shape: str) -> Iterator[str]:
    lines = [line for line in results.lines if (line.table, line.shape) == (table, shape)]
    reasons = {line.failed for line in lines}
    if len(reasons) == 1 and not any(line.seconds for line in lines):
        yield reasons.pop()
        return
    columns = COLUMNS[table]
    header = [title.replace("PEER", lines[0].peer) for title in columns]
    yield _row([NAMES[table], *header])
    yield _row(["---"] * (len(columns) + 1))
    for line in lines:
        missing = [line.failed or "not measured"] + [""] * (len(columns) - 1)
        yield _row([line.contender, *([show(results, line) for show in columns.values()] if line.seconds else missing)])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _time_ratio(results: Results, line: Line) -> str:
    ratios = results.ratios(line)
    if line.contender == line.peer or not ratios:
        return "1" if ratios else ""
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def _gain(results: Results, line: Line) -> str:
    ratios = [1 / ratio for ratio in results.ratios(line)]
    if line.contender == line.peer or not ratios:
        return "1"
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def _milliseconds(results: Results, line: Line) -> str:
    milliseconds = 1000 * statistics.median(line.seconds)
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _records(results: Results, line: Line) -> str:
    records = line.batch / statistics.median(line.seconds)
    return f"{records:.0f}" if records >= 100 else f"{records:.3g}"


def _memory(results: Results, line: Line) -> str:
    return "" if line.memory is None else f"{line.memory:.0f}"


def _memory_ratio(results: Results, line: Line) -> str:
    peer = results.peer_of(line)
    return f"{line.memory / peer.memory:.2f}" if peer and line.memory and peer.memory else ""


def _share(results: Results, line: Line) -> str:
    shares = line.figures.get("controller_share")
    return f"{statistics.median(shares):.1%}" if shares else ""


TITLES = {
    "steps": "A step",
    "gradients": "Gradients of all weights",
    "mechanisms": "Mechanisms",
    "bands": "Correlated noise",
    "cells": "Cells",
}
NAMES = {"steps": "who", "gradients": "who", "mechanisms": "mechanism", "bands": "mechanism", "cells": ""}
_Column = Callable[[Results, Line], str]
COLUMNS: dict[str, dict[str, _Column]] = {
    "steps": {
        "time / PEER": _time_ratio,
        "ms a step": _milliseconds,
        "records a second": _records,
        "peak MB": _memory,
        "memory / PEER": _memory_ratio,
    },
    "mechanisms": {
        "time / PEER": _time_ratio,
        "ms a step": _milliseconds,
        "in its controller": _share,
        "memory / PEER": _memory_ratio,
    },
    "bands": {
        "time / PEER": _time_ratio,
        "ms a step": _milliseconds,
        "peak MB": _memory,
        "memory / PEER": _memory_ratio,
    },
    "gradients": {
        "time / PEER": _time_ratio,
        "ms a batch": _milliseconds,
        "peak MB": _memory,
        "memory / PEER": _memory_ratio,
    },
    "cells": {"cells an hour over one after another": _gain, "ms a cell's step": _milliseconds},
}


def draw(results: Results, path: Path) -> None:
    """Bars of each ratio with its spread, one panel a table; raises SystemExit without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("The picture needs matplotlib: pip install matplotlib (or leave --readme out).") from None
    groups = [
        (table, shape, [line for line in results.lines if (line.table, line.shape) == (table, shape) and line.seconds])
        for table, shape in _groups(results)
    ]
    groups = [group for group in groups if group[2] and group[0] != "cells"]
    if not groups:
        return
    heights = [len(lines) + 2 for *_, lines in groups]
    figure = Figure(figsize=(8, 0.24 * sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(groups), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    for panel, (_, shape, lines) in zip(panels, groups, strict=True):
        _bars(panel, results, shape, lines)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _bars(panel: object, results: Results, shape: str, lines: list[Line]) -> None:
    lines = [line for line in lines[::-1] if results.ratios(line)]
    ratios = [results.ratios(line) for line in lines]
    middles = [statistics.median(one) for one in ratios]
    spread = [
        [middle - min(one) for middle, one in zip(middles, ratios, strict=True)],
        [max(one) - middle for middle, one in zip(middles, ratios, strict=True)],
    ]
    ours = ["tab:blue" if _is_ours(line) else "tab:gray" for line in lines]
    names = [line.contender for line in lines]
    panel.barh(names, middles, xerr=spread, color=ours, height=0.7, error_kw={"capsize": 2, "lw": 0.8})  # type: ignore[attr-defined]
    panel.axvline(1.0, color="black", lw=0.8)  # type: ignore[attr-defined]
    panel.set_title(f"{shape}: time of a step over {lines[0].peer}", fontsize=9, loc="left")  # type: ignore[attr-defined]
    panel.tick_params(labelsize=8)  # type: ignore[attr-defined]


def _is_ours(line: Line) -> bool:
    return line.table == "mechanisms" or line.contender.startswith("dptune")


def write_readme(results: Results, section: str, readme: Path = FOLDER / "README.md") -> None:
    """Replace what stands between the section's markers, and its picture beside the file."""
    picture = readme.parent / f"{section}.png"
    draw(results, picture)
    start, end = f"<!-- {section}: generated -->", f"<!-- {section}: end -->"
    before, found, rest = readme.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{readme}: has no markers {start} and {end}")
    shown = f"![Time of a step]({picture.name})\n\n" if picture.exists() else ""
    readme.write_text(f"{before}{start}\n\n{shown}{tables(results)}\n{end}{after}", encoding="utf-8")


def show(results: Results, section: str, folder: Path, readme: bool) -> None:
    """Print the tables; the picture where matplotlib is."""
    print(tables(results))
    if readme:
        write_readme(results, section)
    try:
        draw(results, folder / f"{section}.png")
    except SystemExit as error:
        print(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of benchmarks.speed or benchmarks.gpu")
    parser.add_argument("--readme", metavar="SECTION", choices=["speed", "gpu"], help="also write it there")
    arguments = parser.parse_args()
    results = Results.read(arguments.files)
    print(tables(results))
    if arguments.readme:
        write_readme(results, arguments.readme)


if __name__ == "__main__":
    main()
