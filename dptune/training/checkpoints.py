"""Checkpoints: one safetensors file, replaced whole, that says which ledger it relies on.

The ledger is ahead of the weights: a killed run resumes from its last checkpoint, keeps every charge, and so
can only over-count.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dptune.errors import DivergedError, DptuneError
from dptune.files import replacing
from dptune.privacy.ledger import Ledger, chain_after
from dptune.privacy.set_aside import fresh_start

_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # what AdamW keeps of each weight


class CheckpointError(DptuneError):
    """A checkpoint that is damaged or belongs to another run."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        run_id: of the ledger.
        step: optimiser steps that are in the weights.
        releases: length of the ledger when the checkpoint was written.
        chain: the ledger's checksum at that length.
        controller: the controller's state; as public as what it reads.
    """

    run_id: str
    step: int
    releases: int
    chain: str
    controller: dict[str, Any]


def save_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write adapter weights, optimiser moments and progress; whole or not at all, mode 0600.

    Raises: DivergedError if a weight is not finite; OSError naming ``path`` if the disk does not take it.
    """
    tensors = {}
    for name, parameter in _trainable(model).items():
        weight = tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        if not np.isfinite(weight.numpy()).all():
            problem = f"after step {progress.step} the adapter weight {name} is not finite"
            raise DivergedError(str(path.parent), problem, fix="lower the learning rate, or raise the warm-up")
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
    plain = {}
    for key, value in progress.controller.items():
        if isinstance(value, torch.Tensor):
            tensors[f"controller.{key}"] = value.detach().cpu().contiguous().clone()
        else:
            plain[key] = value
    with replacing(path) as temporary:
        described = json.dumps(asdict(replace(progress, controller=plain)))
        save_file(tensors, temporary, metadata={"progress": described})


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> Progress:
    """Restore a run's weights, moments and progress in place; all of it, or nothing is touched.

    Raises: CheckpointError if the file is damaged, or its ledger is another one or shorter than it was.
    """
    parameters = _trainable(model)
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads(file.metadata()["progress"]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no iterator)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read ({type(error).__name__})") from None
    _check_progress(path, progress, ledger)
    moments = {name: _moments(name, tensors) for name in parameters}
    _check_tensors(path, tensors, parameters, moments)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
            if moments[name]:
                optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in moments[name].items()
                }
    prefix = "controller."
    controller = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return replace(progress, controller=progress.controller | controller)


def _check_progress(path: Path, progress: Progress, ledger: Ledger) -> None:
    if progress.run_id != ledger.header.run_id:
        raise CheckpointError(f"{path}: belongs to run {progress.run_id}, not to {ledger.path}. Fix: restore the pair.")
    counts = (progress.step, progress.releases)
    if not (all(type(count) is int for count in counts) and 0 <= progress.step <= progress.releases):
        raise _damaged(path, f"counts step {progress.step!r} of {progress.releases!r} releases")
    if not isinstance(progress.controller, dict):
        raise _damaged(path, "holds no controller")
    if chain_after(ledger.path, progress.releases) != progress.chain:
        raise CheckpointError(
            f"{path}: was written when {ledger.path} held {progress.releases} releases that are no longer there. "
            "Fix: restore the ledger; its charges cannot be forgotten."
        )


def _check_tensors(
    path: Path,
    tensors: dict[str, torch.Tensor],
    parameters: dict[str, torch.nn.Parameter],
    moments: dict[str, dict[str, torch.Tensor]],
) -> None:
    if {key.removeprefix("weight.") for key in tensors if key.startswith("weight.")} != set(parameters):
        raise CheckpointError(f"{path}: holds other adapter weights than this model. Fix: use the run's own settings.")
    for name, parameter in parameters.items():
        if tensors[f"weight.{name}"].shape != parameter.shape:
            raise CheckpointError(f"{path}: {name} has another shape here. Fix: use the run's own settings.")
        for key, value in moments[name].items():
            if key not in _MOMENTS or value.shape != (() if key == "step" else parameter.shape):
                raise _damaged(path, f"holds no moments of AdamW for {name}")
        if moments[name] and set(moments[name]) != _MOMENTS:
            raise _damaged(path, f"lacks moments of AdamW for {name}")
    for key, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise _damaged(path, f"{key} is not finite")


def _moments(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The optimiser's state of one weight, by its key."""
    parts = {key: key.split(".", 2) for key in tensors if key.startswith("optimizer.") and key.count(".") > 1}
    return {key: tensors[whole] for whole, (_, key, owner) in parts.items() if owner == name}


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged: {problem}. Fix: restore it; or {fresh_start(path.parent)}.")


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
