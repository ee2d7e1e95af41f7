"""Checkpoints: one safetensors file, always replaced as a whole, that names the ledger that it relies on.

The ledger is ahead of the weights: a killed run resumes from its last checkpoint, keeps every charge, and so
can only over-count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dptune.core.errors import DivergedError, DptuneError
from dptune.core.files import replacing
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import chain_after
from dptune.privacy.run_folder import fresh_start
from dptune.training.data import check_kept
from dptune.training.optimizers import AVERAGED, State, kind_of


class CheckpointError(DptuneError):
    """A checkpoint that is damaged or belongs to another run."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        run_id: id in the run's ledger.
        step: number of optimiser steps that are in the weights.
        releases: length of the ledger when the checkpoint was written.
        chain: the ledger's checksum at that length.
        controller: the controller's state; as public as what it reads.
        restarts: lengths of the ledger at which correlated noise began anew, because the process before had ended.
        bins: secret by which units choose their batches (``draws.Bins.kept``), while some are still to be drawn; empty
            for other samplers than balls_in_bins. Private.
    """

    run_id: str
    step: int
    releases: int
    chain: str
    controller: dict[str, Any]
    restarts: list[int] = field(default_factory=list)
    bins: str = field(default="", repr=False)


def save_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write the weights that train, optimiser moments and progress, completely or not at all, with mode 0600.

    Raises: DivergedError if a weight is not finite; OSError naming ``path`` if the disk does not take it.
    """
    tensors = {}
    for name, parameter in _trainable(model).items():
        weight = tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        if not np.isfinite(weight.numpy()).all():
            problem = f"after step {progress.step} the weight {name} is not finite"
            raise DivergedError(f"{path.parent}: the run diverged: {problem}. Fix: lower the learning rate.")
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
    plain = {}
    for key, value in progress.controller.items():
        if isinstance(value, torch.Tensor):
            tensors[f"controller.{key}"] = value.detach().cpu().contiguous().clone()
        else:
            plain[key] = value
    with replacing(path) as temporary:
        described = asdict(replace(progress, controller=plain))
        if not progress.bins:
            del described["bins"]  # as earlier versions wrote it
        save_file(tensors, temporary, metadata={"progress": json.dumps(described)})


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> Progress:
    """Restore a run's weights, moments and progress in place; all of it, or nothing is touched.

    Raises: CheckpointError if the file is damaged (weights that are not finite, a step that its ledger contradicts,
        moments of another step), or its ledger is another one or shorter than it was. Nothing is then restored.
    """
    parameters = _trainable(model)
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads(file.metadata()["progress"]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no iterator)
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damage_error(path, str(error)) from None
    _check_progress(path, progress)
    if progress.run_id != ledger.header.run_id:
        raise CheckpointError(f"{path}: belongs to run {progress.run_id}, not to {ledger.path}. Fix: restore the pair.")
    if chain_after(ledger.path, progress.releases) != progress.chain:
        raise CheckpointError(
            f"{path}: was written when {ledger.path} held {progress.releases} releases that are no longer there. "
            "Fix: restore the ledger; its charges cannot be forgotten."
        )
    if {key.removeprefix("weight.") for key in tensors if key.startswith("weight.")} != set(parameters):
        raise CheckpointError(f"{path}: holds other weights than this model trains. Fix: use the run's own settings.")
    for name, parameter in parameters.items():
        if tensors[f"weight.{name}"].shape != parameter.shape:
            raise CheckpointError(f"{path}: {name} has another shape here. Fix: use the run's own settings.")
    _check_tensors(path, progress, tensors, parameters, kind_of(optimizer).state)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
            state = {
                key.split(".", 2)[1]: value
                for key, value in tensors.items()
                if key.startswith("optimizer.") and key.split(".", 2)[2] == name
            }
            if state:
                optimizer.state[parameter] = {
                    key: value if value.ndim == 0 else value.to(parameter.device) for key, value in state.items()
                }
    prefix = "controller."
    controller = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return replace(progress, controller=progress.controller | controller)


def progress_of(path: Path) -> Progress:
    """The progress that a checkpoint states, without its weights. Raises: CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return Progress(**json.loads(file.metadata()["progress"]))
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damage_error(path, str(error)) from None


def restarts(path: Path, mechanism: Mechanism) -> int | None:
    """How often correlated noise may have begun anew in a run, from its checkpoint; None for other noise."""
    return len(progress_of(path).restarts) if mechanism.bands > 1 else None


def _damage_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged ({why}). Fix: restore it; or {fresh_start(path.parent)}.")


def _check_progress(path: Path, progress: Progress) -> None:
    """Types and order of the numbers: each step is a release, and was charged before it was made."""
    if not (isinstance(progress.run_id, str) and isinstance(progress.chain, str)):
        raise _damage_error(path, "its run or checksum is not a text")
    if not isinstance(progress.controller, dict):
        raise _damage_error(path, "its controller has no table of values")
    radii = progress.controller.get("radii", [1.0])
    if not (isinstance(radii, list) and all(isinstance(one, float) and 0 < one < math.inf for one in radii)):
        raise _damage_error(path, "its controller's radii are not positive numbers")
    if type(progress.step) is not int or type(progress.releases) is not int:
        raise _damage_error(path, "its step or number of releases is not a whole number")
    if not 0 <= progress.step <= progress.releases:
        raise _damage_error(path, f"it says step {progress.step} of {progress.releases} releases")
    try:
        if progress.bins != "":
            check_kept(progress.bins)
    except (TypeError, ValueError):
        raise _damage_error(path, "the secret of its bins is not whole") from None
    rows = progress.restarts
    if not isinstance(rows, list) or any(type(row) is not int for row in rows) or rows != sorted(set(rows)):
        raise _damage_error(path, "its restarts are not rising row numbers")
    if rows and not 0 < rows[0] <= rows[-1] <= progress.releases:
        raise _damage_error(path, f"its restarts lie beyond its {progress.releases} releases")


def _check_tensors(
    path: Path,
    progress: Progress,
    tensors: dict[str, torch.Tensor],
    parameters: dict[str, torch.nn.Parameter],
    declared: Sequence[State],
) -> None:
    """Weights and the optimiser's state as a run leaves them: all there, finite, and as declared."""
    expected = {f"weight.{name}" for name in parameters}
    averaged = any(key.startswith(f"optimizer.{AVERAGED[0].name}.") for key in tensors)
    kept = (*declared, *(AVERAGED if averaged else ())) if progress.step else ()
    expected |= {f"optimizer.{one.name}.{name}" for one in kept for name in parameters}
    found = {key for key in tensors if not key.startswith("controller.")}
    if found != expected:
        raise _damage_error(path, f"{sorted(found ^ expected)[0]} is missing or does not belong there")
    for key in sorted(found):
        if not torch.isfinite(tensors[key]).all():
            raise _damage_error(path, f"{key} holds a value that is not finite")
    for name, parameter in parameters.items():
        if tensors[f"weight.{name}"].dtype != parameter.dtype:
            raise _damage_error(path, f"{name} has another type")
        for one in kept:
            if problem := one.problem(tensors[f"optimizer.{one.name}.{name}"], parameter, progress.step):
                raise _damage_error(path, f"the optimiser's state of {name} {problem}")


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
