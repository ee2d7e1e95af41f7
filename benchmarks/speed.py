"""The price of privacy on a CPU: ``make bench``, or ``python -m benchmarks.speed [--minutes M] [--readme]``.

The default model's shape as ``make repro`` trains it, beside the plain LoRA step and Opacus; every mechanism beside
``static``; the sizes of all-MiniLM-L6-v2, SmolLM2-135M and GPT-2 small where time is left. Tables, JSON and a picture
go to data/benchmarks/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.cells import CELLS, measure_cells
from benchmarks.measure import Deadline, Effort, Results, machine, measure, quiet
from benchmarks.report import show
from benchmarks.shapes import Setting, Shape
from benchmarks.steps import (
    BANDS,
    MECHANISM_LINES,
    POISSON,
    STEPS,
    CannotRunError,
    Contender,
    clipped_gradients,
    disagreement,
)

CPU = torch.device("cpu")
#: As in params.yaml: `pretrain` and `training`.
DEFAULT = Shape("default", batch=64, tokens=160, physical=32)
#: Shapes with the sizes of real models. A step takes seconds, so each contender has two rounds.
LARGER = (
    Shape("all-MiniLM-L6-v2", batch=128, tokens=36, physical=16),
    Shape("SmolLM2-135M", batch=16, tokens=128, physical=16),
    Shape("GPT-2-small", batch=16, tokens=128, physical=16),
)
TOLERANCE = 1e-3


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    quiet()
    deadline = Deadline(arguments.minutes)
    results = Results(arguments.output / "speed.json", machine(CPU))
    check_peers(Setting(DEFAULT, CPU), results)
    rounds, only = arguments.rounds, arguments.only
    work = [
        ("steps", DEFAULT, (*STEPS, POISSON), Effort(rounds, seconds=1.5)),
        ("cells", DEFAULT, (), Effort(2, steps=3)),
        ("bands", DEFAULT, BANDS, Effort(rounds, seconds=1.5)),
        ("mechanisms", DEFAULT, MECHANISM_LINES, Effort(max(1, rounds // 2), seconds=0.7, memory=1)),
        *(("steps", shape, STEPS, Effort(2, steps=1, least=90, memory=1)) for shape in LARGER),
    ]
    for table, shape, contenders, effort in work:
        if not named(shape, arguments.shape):
            continue
        chosen = choose(contenders, only)
        if chosen:
            print(f"{shape.name}: {', '.join(one.name for one in chosen)}", flush=True)
            measure(table, Setting(shape, CPU), chosen, effort, results, deadline)
        elif table == "cells" and only is None:
            print(f"{shape.name}: {CELLS} cells", flush=True)
            measure_cells(Setting(shape, CPU), effort, results, deadline)
    show(results, "speed", arguments.output, arguments.readme)


def check_peers(setting: Setting, results: Results) -> None:
    """Note how far clipped gradients are apart; in float32 stop if they are not the same."""
    try:
        difference = disagreement(clipped_gradients(setting))
    except CannotRunError as error:
        print(error)
        return
    if setting.shape.autocast is None and difference > TOLERANCE:
        raise SystemExit(f"clipped gradients of dptune and Opacus differ by {difference:.1e}: nothing was measured")
    results.notes["clipped_gradient_difference"] = difference


def choose(contenders: tuple[Contender, ...], only: list[str] | None) -> list[Contender]:
    """Those that are asked for, and the peer of any of them."""
    wanted = [one for one in contenders if only is None or one.name in only]
    peers = {one.peer for one in wanted}
    return [one for one in contenders if one in wanted or one.name in peers]


def named(shape: Shape, words: list[str]) -> bool:
    """Whether the shape's name has every word."""
    return all(word.lower() in shape.name.lower() for word in words)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.5, help="when to stop; what is measured by then is shown")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders or mechanisms; their peer joins them")
    parser.add_argument("--shape", nargs="+", default=[], metavar="WORD", help="shapes with all these in their names")
    parser.add_argument("--output", type=Path, default=Path("data/benchmarks"))
    parser.add_argument("--readme", action="store_true", help="write tables and picture into benchmarks/README.md")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
