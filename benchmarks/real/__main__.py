"""The field's benchmarks on real models, by parts: ``python -m benchmarks.real --part sst2 --minutes 9``.

The same command goes on where it was stopped. ``--list`` says what a part consists of, ``--report`` what was found.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import quiet
from benchmarks.real.plan import CASES, DEFAULTS, MODELS, WEIGHTS, Run, runs_of
from benchmarks.real.report import numbers, report, weights_numbers
from benchmarks.real.work import Bench, carry_out_all, read_results
from dptune.core.files import write_json

#: The case of README.md's picture.
_PICTURED = "sst2-6920"
PARTS = (*dict.fromkeys(case.part for case in CASES), DEFAULTS)


def listed(runs: Sequence[Run], found: dict[str, dict[str, Any]]) -> list[str]:
    """The runs of a part, how many are done, and how long the rest may take by runs of the same case."""
    done = [run for run in runs if run.name in found]
    lines = [f"{'done' if run.name in found else '    '}  {run.name}" for run in runs]
    known: dict[str, list[float]] = {}
    for line in found.values():
        known.setdefault(line["case"], []).append(line["seconds"])
    left = [run for run in runs if run.name not in found]
    seconds = sum(statistics.median(known[run.case.name]) for run in left if run.case.name in known)
    unknown = sum(run.case.name not in known for run in left)
    lines.append(f"{len(done)} of {len(runs)} runs are done.")
    if seconds:
        lines.append(f"{len(left) - unknown} of the others may take {seconds / 3600:.2g} hours, by runs of their case.")
    if unknown:
        lines.append(f"Of {unknown} others no run of their case is done, so nothing is known of their time.")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing of a part, list it, or print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="required unless --report is given, which then prints all parts")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the published data")
    parser.add_argument("--out", type=Path, default=Path("data/benchmarks/real"), help="results, ledgers and adapters")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop at the end of a step after so many minutes")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--only", metavar="WORD", nargs="+", default=[], help="runs whose names hold all these words")
    parser.add_argument("--model", metavar="NAME=PATH", nargs="+", default=[],
                        help=f"another place of a model ({', '.join(MODELS)}): a folder or a GGUF file")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the runs and what is done; run nothing")
    parser.add_argument("--report", action="store_true", help="print tables of all results")
    parser.add_argument(
        "--numbers",
        type=Path,
        metavar="FILE",
        help="with --report: write what README.md's picture shows; of part weights, its table",
    )
    asked = parser.parse_args(argv)
    if asked.report:
        found = read_results(asked.out / "results.jsonl")
        print("\n".join(report(found, [asked.part] if asked.part else list(PARTS))))
        if asked.numbers:
            pictured = next(case for case in CASES if case.name == _PICTURED)
            shown = weights_numbers(found) if asked.part == WEIGHTS else numbers(found, pictured)
            write_json(asked.numbers, shown)
        return
    if asked.part is None:
        parser.error("--part is required")
    places = dict(pair.partition("=")[::2] for pair in asked.model)
    if unknown := [name for name in places if name not in MODELS]:
        parser.error(f"--model names {unknown[0]!r}, which is none of {', '.join(MODELS)}")
    runs = [run for run in runs_of(asked.part, CASES) if all(word in run.name for word in asked.only)]
    bench = Bench(asked.out, asked.data, asked.device, {**MODELS, **places})
    if asked.list:
        print("\n".join(listed(runs, bench.results)))
        return
    quiet()
    _, failed = carry_out_all(bench, runs, asked.minutes)
    print("\n".join(listed(runs, bench.results)[len(runs) :]))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; the next call tries them again")


if __name__ == "__main__":
    main()
