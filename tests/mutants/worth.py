"""What a minute of tests buys: the CPU seconds of the dearest files of tests, and the planted bugs that name them.

    python -m tests.mutants.worth                 # the tests of `make test`, in one process
    python -m tests.mutants.worth tests/privacy   # only these

Prints a table in Markdown. `make mutants` fails unless a test that a bug names catches it, so that named means caught.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant

_QUICK = "not system and not long and not slow and not gpu and not scale"
_SHOWN = 15


class Clock:
    """A plugin of pytest that adds up the CPU seconds of each file's tests, their processes included."""

    def __init__(self) -> None:
        """Begin without a measured test."""
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test with its fixtures."""
        begun = cpu_seconds()
        result = yield
        file = item.nodeid.partition("::")[0]
        self.seconds[file] += cpu_seconds() - begun  # type: ignore[assignment]  # a Counter of floats
        self.tests[file] += 1
        return result


def cpu_seconds() -> float:
    """Seconds of CPU that this process and those that it waited for have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def table(
    seconds: Mapping[str, float], tests: Mapping[str, int], mutants: Sequence[Mutant], shown: int = _SHOWN
) -> str:
    """A row for each of the dearest files, and one for all of them, in Markdown.

    >>> bug = Mutant("half", "too little noise", "a.py", "1", "2", ("tests/test_a.py::test_it",))
    >>> seconds = {"tests/test_a.py": 30.0, "tests/test_b.py": 60.0}
    >>> print(table(seconds, {"tests/test_a.py": 2, "tests/test_b.py": 9}, [bug]))
    | file | tests | CPU seconds | planted bugs | bugs a minute |
    | --- | --: | --: | --: | --: |
    | tests/test_b.py | 9 | 60.0 | 0 | 0.0 |
    | tests/test_a.py | 2 | 30.0 | 1 | 2.0 |
    | all | 11 | 90.0 | 1 | 0.7 |
    """
    named = Counter(file for one in mutants for file in {test.partition("::")[0] for test in one.tests})
    dearest = sorted(seconds, key=lambda file: -seconds[file])[:shown]
    rows = [(file, tests[file], seconds[file], named[file]) for file in dearest]
    caught = sum(any(test.partition("::")[0] in seconds for test in one.tests) for one in mutants)
    rows.append(("all", sum(tests.values()), sum(seconds.values()), caught))
    lines = ["| file | tests | CPU seconds | planted bugs | bugs a minute |", "| --- | --: | --: | --: | --: |"]
    lines += [f"| {file} | {count} | {cpu:.1f} | {bugs} | {60 * bugs / cpu:.1f} |" for file, count, cpu, bugs in rows]
    return "\n".join(lines)


def main() -> int:
    """The command; its exit status is pytest's."""
    clock = Clock()
    status = pytest.main(["--quiet", "-p", "no:cacheprovider", "-m", _QUICK, *sys.argv[1:]], plugins=[clock])
    print(table(clock.seconds, clock.tests, MUTANTS))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
