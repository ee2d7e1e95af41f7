"""Private steps made of Opacus, alone and under a Trainer of transformers, as functions that ``dptune audit`` takes.

The model is linear and its loss is its output, so that the gradient of a record is the record itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


class MeanAlone(Output):
    """A loss that forgets what Opacus asks of it for ghost clipping."""

    def forward(self, outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.sum() / max(1, len(outputs))


def opacus_step(
    mode: str = "hooks", *, poisson: bool = True, noise: float = 1.0, criterion: Output | None = None
) -> Step:
    """A step of ``PrivacyEngine``: FUNCTION for one batch, or for a list of micro-batches."""
    warnings.filterwarnings("ignore", module="opacus|torch")
    model: Any = torch.nn.Linear(SIZE, 1, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(torch.zeros(RECORDS, SIZE), torch.zeros(RECORDS)), batch_size=BATCH)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion or Output(),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
        grad_sample_mode=mode,
    )
    model, optimizer = made[:2]
    loss: Any = made[2] if mode == "ghost" else Output()

    def step(gradients: Any) -> NDArray[Any]:
        parts = gradients if isinstance(gradients, list) else [gradients]
        optimizer.zero_grad()
        for number, part in enumerate(parts, start=1):
            optimizer.signal_skip_step(do_skip=number < len(parts))
            records = torch.from_numpy(part)
            loss(model(records).squeeze(1), torch.zeros(len(records))).backward()
            optimizer.step()
            if number < len(parts):
                optimizer.zero_grad()
        (weight,) = model.parameters()
        return weight.grad.flatten().numpy()

    return step


class Linear(torch.nn.Module):
    """A model for a Trainer, which asks a model for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(SIZE, 1, bias=False)

    def forward(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(records).sum() / max(1, len(records))}


def trainer_step(folder: Path) -> Step:
    """The training step of transformers' Trainer, with the optimizer of Opacus."""
    from transformers import Trainer, TrainingArguments

    loader: Any = DataLoader(TensorDataset(torch.zeros(RECORDS, SIZE)), batch_size=BATCH)
    inner: Any = Linear()
    model, optimizer, _ = PrivacyEngine().make_private(
        module=inner,
        optimizer=torch.optim.SGD(inner.parameters(), lr=1.0),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments, optimizers=(optimizer, None))
    trainer.current_gradient_accumulation_steps = 1  # what train() sets before the first step

    def step(gradients: Any) -> NDArray[Any]:
        optimizer.zero_grad()
        trainer.training_step(model, {"records": torch.from_numpy(gradients)})
        optimizer.step()
        return inner.layer.weight.grad.flatten().numpy()

    return step


def opacus_loader(ids: int, size: int, *, poisson: bool) -> Callable[[], Iterator[Any]]:
    """Batches of ids from the loader that ``make_private`` returns."""
    made = torch.nn.Linear(1, 1)
    plain: Any = DataLoader(TensorDataset(torch.arange(ids)), batch_size=size, shuffle=True)
    loader = PrivacyEngine().make_private(
        module=made,
        optimizer=torch.optim.SGD(made.parameters(), lr=1.0),
        data_loader=plain,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
    )[2]

    def epoch() -> Iterator[Any]:
        for (batch,) in loader:
            yield batch

    return epoch
