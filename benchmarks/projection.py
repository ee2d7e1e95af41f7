"""What studies would cost, from what was measured: ``python -m benchmarks.projection FILE... [--docs]``.

Files are those of benchmarks.speed or benchmarks.gpu, of one kind of machine. Each line of the table says whether its
time was measured there or computed, and from what. ``--docs`` writes the table into docs/howto/cluster.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cells import TOGETHER
from benchmarks.measure import Line, Results

DOCS = Path(__file__).parents[1] / "docs" / "howto" / "cluster.md"
START, END = "<!-- projection: generated -->", "<!-- projection: end -->"
#: profiles/paper.yaml: records of the real table's training split, batch, epochs, and the width of a batch.
RECORDS, BATCH, EPOCHS, TOKENS = 73_271, 16, 3, 512
#: The paper's 1,600 runs (arXiv 2507.22565), evenly over its four models, by their parameters.
RUNS = 400
PARAMETERS = {"GPT-2-small": 0.124e9, "Llama-3.2-1B": 1.24e9, "Llama-3.2-3B": 3.21e9, "Mistral-7B": 7.24e9}
_SHAPE = re.compile(r"(?P<model>.+) (?P<kind>\w+) (?P<batch>\d+)x(?P<tokens>\d+)")
_PRIVATE = ("dptune static, Poisson batches", "dptune static")


@dataclass(frozen=True)
class Measured:
    """One measured private step. ``seconds`` is a record's."""

    model: str
    kind: str
    batch: int
    tokens: int
    contender: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.kind}, batch {self.batch}, {self.tokens} tokens ({self.contender})"


def measured(results: Results) -> list[Measured]:
    """Every private step among the lines, cells that share a pass included."""
    found = []
    for line in results.lines:
        if line.seconds and line.contender in (*_PRIVATE, TOGETHER):
            found.append(_measured(line))
    return found


def _measured(line: Line) -> Measured:
    parts = _SHAPE.fullmatch(line.shape)
    assert parts, line.shape
    seconds = statistics.median(line.seconds) / line.batch
    return Measured(parts["model"], parts["kind"], line.batch, int(parts["tokens"]), line.contender, seconds)


def rows(steps: list[Measured]) -> Iterator[tuple[str, float, str]]:
    """What, hours, and how they are known."""
    for model, parameters in PARAMETERS.items():
        found = _nearest(steps, model)
        if found is None:
            continue
        runs = f"the paper's grid, {model}: {RUNS} runs of {EPOCHS} epochs of {RECORDS:,} records, {TOKENS} tokens"
        factor, how = found.seconds * TOKENS / found.tokens, f"from {found.name}, by tokens"
        if found.model != model:
            factor, how = factor * parameters / PARAMETERS[found.model], f"{how} and parameters"
        yield runs, RUNS * EPOCHS * RECORDS * factor / 3600, f"computed {how}"
    for model in dict.fromkeys(step.model for step in steps if step.model in ("default", *PARAMETERS)):
        found = _nearest(steps, model)
        assert found
        hours = 10_000_000 * found.seconds / 3600
        yield f"one epoch of 10,000,000 records, {model}, {found.tokens} tokens", hours, f"computed from {found.name}"


def _nearest(steps: list[Measured], model: str) -> Measured | None:
    """The measured step most like a run of the paper: this model or the largest smaller one, its batch, most tokens."""
    size = PARAMETERS.get(model, 0.0)
    fitting = [step for step in steps if step.model == model]
    if not fitting:
        smaller = [step for step in steps if 0 < PARAMETERS.get(step.model, 0) < size]
        largest = max((PARAMETERS[step.model] for step in smaller), default=0.0)
        fitting = [step for step in smaller if PARAMETERS[step.model] == largest]
    order = [*_PRIVATE[::-1], _PRIVATE[0], TOGETHER]
    return max(
        fitting,
        key=lambda step: (step.kind == "bfloat16", step.batch == BATCH, step.tokens, order.index(step.contender)),
        default=None,
    )


def table(results: Results) -> str:
    """Markdown."""
    lines = [f"One machine of this kind: {results.machine['kind']}, {results.machine['threads']} threads.", ""]
    lines += ["| what | time | how it is known |", "| --- | --- | --- |"]
    lines += [f"| {what} | {hours:,.3g} hours | {how} |" for what, hours, how in rows(measured(results))]
    steps = [f"| {step.name}: a record | {1000 * step.seconds:.3g} ms | measured |" for step in measured(results)]
    return "\n".join([*lines, *steps]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--docs", action="store_true", help="write it into docs/howto/cluster.md")
    arguments = parser.parse_args()
    text = table(Results.read(arguments.files))
    print(text)
    if arguments.docs:
        before, found, rest = DOCS.read_text(encoding="utf-8").partition(START)
        _, closed, after = rest.partition(END)
        if not (found and closed):
            raise SystemExit(f"{DOCS}: has no markers {START} and {END}")
        DOCS.write_text(f"{before}{START}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
