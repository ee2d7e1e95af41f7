"""The weights that a finished run leaves in its folder: the adapter, and a learned hyper-policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dptune.core.files import put_folder, sha256
from dptune.job.delivery.weights import written_adapter
from dptune.mechanisms.agents.rl import LearnedControl
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.run_folder import RunFolder
from tasks.experiment.preparation import PreparedCell


def write_adapter(model: Any, directory: Path) -> None:
    """Write a run's adapter, whole or not at all."""
    folder = RunFolder(directory)
    with written_adapter(model, folder) as partial:
        put_folder(partial, folder.adapter)


def adapter_digest(directory: Path) -> str:
    """Digest of the adapter's weights, which ties the result and the ledger to them."""
    return sha256(RunFolder(directory).adapter / "adapter_model.safetensors")


def write_policy(prepared: PreparedCell, contents: LedgerContents, directory: Path) -> None:
    """Write a learned hyper-policy, which another run can start from (``init_from``)."""
    controller = prepared.spec.mechanism.controller
    if isinstance(controller, LearnedControl):
        header = contents.header
        policy = controller.saved_policy(
            prepared.cell.label, header.run_id, header.unit, contents.composition, contents.epsilons.leaks
        )
        if policy is not None:
            policy.write(RunFolder(directory).controller)
