"""The folder of a run, and the names of its files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from dptune.core.files import DamagedFileError, read_json
from dptune.privacy.ledger_file import is_complete

#: Key of ``RunFolder.cell`` from the moment on in which the run has a ledger.
CHARGES = "charges"


class RunFolder:
    """The paths of a run's files. No other module spells these names.

    Attributes:
        path: the folder; it need not exist.
        ledger: the run's ledger.
        checkpoint: weights, optimizer and controller of a fine-tuning run that is under way.
        state: the releases of a policy run so far; ``progress`` is its curve.
        adapter: folder of the weights, PEFT's.
        controller: folder of a learned hyper-policy.
        history: points of the learning curves; ``knobs`` are the mechanism's settings along the way.
        served: number of answers that an ensemble gave.
        failure: the error of a run that diverged, which is not resumed: with other noise it might end well.
        result: figures of a finished run, for the report.
        results: the same for a run that makes several things at once.
        cell: settings of the run; of a policy run, ``policy_cell``.
        booking: which records pay for the run, and the register that counts it.
        canaries: coins and scores of the gradients that an auditor planted in a run of ``tune``. Private.
        crafted: the same of a pipeline's cell, among the secrets of its workspace. Private.
        lock: lock of the process that works in the folder.
        searching: of a search, the secret folder beside this one, which holds it until its winner is out.
        mlflow_run: id of the run in MLflow.

    Example:
        >>> from pathlib import Path
        >>> from dptune.privacy.run_folder import RunFolder
        >>> folder = RunFolder(Path("tuned"))
        >>> folder.ledger.as_posix(), folder.has_begun
        ('tuned/ledger.jsonl', False)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.state = path / "state.safetensors"
        self.progress = path / "progress.json"
        self.adapter = path / "adapter"
        self.controller = path / "controller"
        self.history = path / "history.jsonl"
        self.knobs = path / "knobs.jsonl"
        self.served = path / "served.json"
        self.failure = path / "failure.json"
        self.result = path / "result.json"
        self.results = path / "results.json"
        self.cell = path / "cell.json"
        self.policy_cell = path / "job.json"
        self.booking = path / "booking.json"
        self.canaries = path / "audit_canaries.json"
        self.lock = path / "lock"
        self.mlflow_run = path / "mlflow_run"
        whole = path.absolute()
        self.crafted = whole.parent.parent / "secrets" / "crafted" / f"{whole.name}.json"
        self.searching = whole.with_name(f".{whole.name}.searching") if whole.name else whole / ".searching"

    @property
    def is_secret(self) -> bool:
        """Whether the folder lies in the secret folder of a search, as those of its candidates do."""
        return any(part.startswith(".") and part.endswith(".searching") for part in self.path.absolute().parts)

    @property
    def settings(self) -> dict[str, Any]:
        """What the folder's run was started with; empty for a new one. Raises: DamagedFileError."""
        if not self.cell.exists():
            return {}
        fix = f"restore it; or `dptune set-aside {shlex.quote(str(self.path))}`, after which the next run spends again"
        if not (found := read_json(self.cell, fix=fix)):
            raise DamagedFileError(f"{self.cell}: holds no settings. Fix: {fix}.")
        return found

    @property
    def has_begun(self) -> bool:
        """Whether the run's ledger has its first line; without that nothing was charged to it."""
        if not self.ledger.is_file():
            return False
        with self.ledger.open("rb") as file:
            return file.readline().endswith(b"\n")

    @property
    def lost_its_ledger(self) -> bool:
        """Whether somebody removed the run's ledger, or emptied it: what it released stays released."""
        return bool(self.settings.get(CHARGES)) and not self.has_begun

    @property
    def states(self) -> tuple[Path, ...]:
        """Files whose headers state how many releases they rely on. They also exist before the first charge."""
        return self.checkpoint, self.state

    @property
    def released(self) -> tuple[Path, ...]:
        """Files that prove that the run released something, even if its ledger is missing or empty."""
        outcome = (self.adapter, self.controller, self.history, self.knobs, self.served, self.result, self.results)
        return *self.states, *outcome

    @property
    def is_finished(self) -> bool:
        """Whether a fine-tuning run has ended, and left its result."""
        return self.result.exists() and is_complete(self.ledger)
