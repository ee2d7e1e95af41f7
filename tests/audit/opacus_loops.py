"""Private steps made of Opacus, alone and under a Trainer of transformers, as functions that ``dptune audit`` takes.

The model is linear and its loss is its output, so that the gradient of a record is the record itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

SIZE, BATCH, RECORDS = 1024, 16, 160
Step = Callable[[Any], NDArray[Any]]


class Output(torch.nn.Module):
    """The mean of the model's outputs as a loss; with ghost clipping, Opacus asks for the loss of each record."""

    reduction = "mean"

    def forward(self, outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs if self.reduction == "none" else outputs.sum() / max(1, len(outputs))


def opacus_step(mode: str = "hooks", *, poisson: bool = True, noise: float = 1.0, clip: float = 1.0) -> Step:
    """A step of ``PrivacyEngine``: FUNCTION for one batch, or for a list of micro-batches."""
    warnings.filterwarnings("ignore", module="opacus|torch")
    model: Any = torch.nn.Linear(SIZE, 1, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(torch.zeros(RECORDS, SIZE), torch.zeros(RECORDS)), batch_size=BATCH)
    criterion: Any = Output()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=clip,
        poisson_sampling=poisson,
        grad_sample_mode=mode,
    )
    model, optimizer = made[:2]
    criterion = made[2] if mode == "ghost" else criterion

    def step(gradients: Any) -> NDArray[Any]:
        parts = gradients if isinstance(gradients, list) else [gradients]
        optimizer.zero_grad()
        for number, part in enumerate(parts, start=1):
            optimizer.signal_skip_step(do_skip=number < len(parts))
            records = torch.from_numpy(part)
            criterion(model(records).squeeze(1), torch.zeros(len(records))).backward()
            optimizer.step()
            if number < len(parts):
                optimizer.zero_grad()
        (weight,) = model.parameters()
        return weight.grad.flatten().numpy()

    return step
