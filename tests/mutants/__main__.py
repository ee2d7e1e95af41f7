"""Plant every bug of the list in a copy of the repository, and see whether the tests that are named notice it.

    python -m tests.mutants                          # all of them, two at a time
    python -m tests.mutants --only halved_noise      # one, or several names with commas between them
    python -m tests.mutants --only prediction        # all whose file's path holds the word

Ends with 1 if a bug survives that the list does not call harmless, or if the list no longer fits the code.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.runner import Outcome, UnsoundTestsError, run


def chosen(only: str) -> list[Mutant]:
    """The mutants with these names, or in files whose path holds such a word; all of them for an empty text."""
    words = [word for word in only.split(",") if word]
    return [one for one in MUTANTS if not words or one.name in words or any(word in one.file for word in words)]


def summary(outcomes: list[Outcome], seconds: float) -> str:
    """One sentence, and before it a line for each bug that was not caught."""
    kinds = [outcome.kind for outcome in outcomes]
    told = [f"{outcome.kind}: {outcome.mutant.name}: {outcome.detail}" for outcome in outcomes if outcome.notable]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(["caught", "survived", *kinds]))
    return "\n".join([*told, f"Of {len(outcomes)} planted bugs: {counted} ({seconds / 60:.1f} minutes)."])


def main() -> int:
    """The command."""
    parser = ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="NAMES", help="names, or words in their files' paths")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    arguments = parser.parse_args()
    mutants, begun = chosen(arguments.only), time.monotonic()
    if not mutants or arguments.jobs < 1:
        parser.error("nothing to run: see the names in tests/mutants/bugs.yaml, and give one job or more")
    try:
        outcomes = run(ROOT, mutants, arguments.jobs, lambda line: print(line, flush=True))
    except UnsoundTestsError as error:
        print(error, file=sys.stderr)
        return 1
    print(summary(outcomes, time.monotonic() - begun))
    return int(any(outcome.fails for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
