"""The flow's working directory as the machines of a cluster must see it: this very one, no copy under the same path.

Ledgers, the register of what was spent, plans and locks lie in it. Workers that saw a copy would charge other files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory

from dptune.errors import DptuneError
from tasks.paths import DATA


@dataclass(frozen=True)
class SharedFolder:
    """A folder that other machines must see.

    Attributes:
        path: its path, the same everywhere.
        mark: name of an empty folder in its ``data`` that is there as long as the flow runs; empty for none.
    """

    path: Path
    mark: str = ""

    def check(self) -> None:
        """Raise DptuneError if this machine does not see the folder, or sees another one."""
        if not (self.path / DATA / self.mark).is_dir():
            problem = f"the worker on {gethostname()} sees no {self.path / DATA}, or another one than the flow's"
            fix = "share the flow's folder with every machine, under the same path"
            raise DptuneError(f"experiment.runner: {problem}. Fix: {fix}.")


@contextmanager
def shared_folder(runner: str) -> Iterator[SharedFolder]:
    """Context with the working directory, marked for the workers if ``runner`` is the address of a cluster."""
    if "://" not in runner:
        yield SharedFolder(Path.cwd())
        return
    with TemporaryDirectory(prefix=".flow-", dir=DATA) as mark:
        yield SharedFolder(Path.cwd(), Path(mark).name)
