"""Record the golden figures and the defaults anew, after a version was raised or a part or setting was added.

    python -m tests.golden

Refuses, and writes nothing, where a figure or a default moved and no version was raised.
"""

from __future__ import annotations

import sys

import torch

from tests.golden import table
from tests.golden.runs import RUNS


def main() -> int:
    """The command. Returns: the exit status."""
    torch.set_num_threads(1)
    known, defaults = table.read(), table.present_defaults()
    runs = {name: table.rounded(run.figures()) for name, run in RUNS.items()}
    problems = [table.problem_of_run(name, known, figures) for name, figures in runs.items()]
    problems += table.problems_of_defaults(known, defaults)
    unraised = [problem for problem in problems if "raise" in problem]
    for problem in unraised:
        print(f"{problem}.", file=sys.stderr)
    if unraised:
        return 1
    kept = {name: known["runs"][name] if name in known["runs"] and not problem else runs[name]
            for name, problem in zip(runs, problems, strict=False)}  # fmt: skip
    table.write(kept, defaults)
    print(f"recorded {len(runs)} golden runs and the defaults of {len(defaults)} sections and parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
