"""The price of privacy on a GPU: ``python -m benchmarks.gpu [--shape WORD ...] [--minutes M] [--dry-run]``.

Needs dptune, torch, transformers and peft; measures Opacus when it is installed. Every result is in the JSON file as
soon as it is there, so a run may be cut or done in parts: give each part its own ``--output``, and show them together
with ``python -m benchmarks.report FILE... --readme gpu``. ``--dry-run`` takes the same way with tiny models on a CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cells import measure_cells
from benchmarks.measure import Deadline, Effort, Results, machine, measure, quiet
from benchmarks.report import show
from benchmarks.shapes import Setting, Shape
from benchmarks.speed import check_peers, choose, named
from benchmarks.steps import MECHANISM_LINES, POISSON, STEPS

_SMALL = 16  # records of a batch whose Poisson variant is measured too
TABLES = ("steps", "cells", "mechanisms")
#: (model, dtype of the frozen weights, autocast) -> rows that fit 80 GB, by tokens
_KINDS = {
    ("GPT-2-small", "float32", None): {128: 64, 400: 32},
    ("GPT-2-small", "float32", "bfloat16"): {128: 64, 400: 32},
    ("Llama-3.2-1B", "bfloat16", "bfloat16"): {128: 32, 400: 16},
}


def shapes(dry_run: bool) -> list[Shape]:
    """What is measured, small batches first; a dry run has the same families and dtypes, tiny."""
    batches, names = ((4, 8), {128: 16, 400: 24}) if dry_run else ((16, 256), {128: 128, 400: 400})
    tiny = {"GPT-2-small": "tiny GPT-2", "Llama-3.2-1B": "tiny Llama"} if dry_run else {}
    return [
        Shape(tiny.get(model, model), batch, names[tokens], min(batch, 4 if dry_run else rows), dtype, autocast)
        for batch in batches
        for tokens in (128, 400)
        for (model, dtype, autocast), fitting in _KINDS.items()
        for rows in [fitting[tokens]]
    ]


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    device = torch.device("cpu" if arguments.dry_run else arguments.device)
    quiet()
    deadline, effort = Deadline(arguments.minutes), _effort(arguments)
    chosen = _chosen(arguments)
    results = Results(arguments.output / "gpu.json", machine(device))
    check_peers(Setting(replace(chosen[0], batch=4, physical=2), device), results)
    # The order of importance, for time may run out.
    for table in arguments.table:
        for shape in chosen if table == "steps" else chosen[:1]:
            print(f"{table}: {shape.name}", flush=True)
            _measure(table, Setting(shape, device), effort, results, deadline, arguments.only)
    show(results, "gpu", arguments.output, arguments.readme)


def _measure(
    table: str, setting: Setting, effort: Effort, results: Results, deadline: Deadline, only: list[str] | None
) -> None:
    if table == "cells":
        measure_cells(setting, effort, results, deadline)
        return
    steps = (*STEPS, POISSON) if setting.shape.batch <= _SMALL else STEPS
    contenders = choose(steps if table == "steps" else MECHANISM_LINES, only)
    if contenders:
        measure(table, setting, contenders, effort, results, deadline)


def _effort(arguments: argparse.Namespace) -> Effort:
    if arguments.dry_run:
        return Effort(rounds=1, steps=1, warmup=1, memory=0)
    return Effort(arguments.rounds, arguments.seconds, warmup=3, steps=arguments.steps)


def _chosen(arguments: argparse.Namespace) -> list[Shape]:
    available = shapes(arguments.dry_run)
    chosen = [shape for shape in available if named(shape, arguments.shape)]
    if not chosen:
        names = "\n".join(shape.name for shape in available)
        raise SystemExit(f"no shape has all of {arguments.shape} in its name:\n{names}")
    rows = arguments.physical
    return [replace(shape, physical=min(rows, shape.batch)) for shape in chosen] if rows else chosen


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a CPU, every line once")
    parser.add_argument("--shape", nargs="+", default=[], metavar="WORD", help="shapes with all these in their names")
    parser.add_argument("--table", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders or mechanisms; their peer joins them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a contender's turn")
    parser.add_argument("--steps", type=int, help="of a turn, in place of --seconds")
    parser.add_argument("--physical", type=int, help="rows of a micro-batch, in place of what fits 80 GB")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop; what is measured by then is shown")
    parser.add_argument("--output", type=Path, default=Path("data/benchmarks"))
    parser.add_argument("--readme", action="store_true", help="write tables and picture into benchmarks/README.md")
    arguments = parser.parse_args(argv)
    if arguments.dry_run and arguments.readme:
        parser.error("a dry run has no figures for the README")
    return arguments


if __name__ == "__main__":
    main()
