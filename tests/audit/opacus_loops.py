"""Private steps made of Opacus, alone and under trainers of transformers and TRL, as functions for ``dptune audit``.

The model is linear and its loss is its output, so that the gradient of a record is the record itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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

    inner: Any = Linear()
    model, optimizer = _private(inner, rate=1.0)
    trainer = Trainer(model, TrainingArguments(str(folder), report_to=[], use_cpu=True), optimizers=(optimizer, None))
    return _trainers(trainer, model, optimizer, inner.layer)


def sft_step(folder: Path) -> Step:
    """The training step of TRL's SFTTrainer, with the optimizer of Opacus.

    Its loss is that of one of two words, so at weights of 0, which stay, a gradient is minus half the record.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class Body(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(SIZE, 1, bias=False)
            torch.nn.init.zeros_(self.layer.weight)

        def forward(self, records: torch.Tensor, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=self.layer(records).unsqueeze(1).expand(-1, 2, 1))

    class Words(PreTrainedModel):
        config_class, base_model_prefix = PretrainedConfig, "body"

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.body, self.generation_config = Body(), GenerationConfig()
            self.head = torch.nn.Linear(1, 2, bias=False).requires_grad_(requires_grad=False)
            self.head.weight.copy_(torch.tensor([[1.0], [0.0]]))

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

        def forward(self, **inputs: Any) -> SimpleNamespace:
            return self.body(**inputs)

    words = Tokenizer(WordLevel({"a": 0, "[E]": 1}, unk_token="a"))
    inner: Any = Words()
    trainer = SFTTrainer(
        inner,
        SFTConfig(str(folder), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"input_ids": [[0, 1]]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[E]", pad_token="[E]"),
    )
    model, trainer.optimizer = _private(inner, rate=0.0)

    def more(records: int) -> dict[str, torch.Tensor]:
        return {"attention_mask": torch.ones(records, 2), "labels": torch.zeros(records, 2, dtype=torch.long)}

    return _trainers(trainer, model, trainer.optimizer, inner.body.layer, more)


def _private(inner: Any, rate: float) -> tuple[Any, Any]:
    """Model and optimizer that ``make_private`` returns."""
    loader: Any = DataLoader(TensorDataset(torch.zeros(RECORDS, SIZE)), batch_size=BATCH)
    made: tuple[Any, ...] = PrivacyEngine().make_private(
        module=inner.train(),
        optimizer=torch.optim.SGD([one for one in inner.parameters() if one.requires_grad], lr=rate),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return made[0], made[1]


def _trainers(
    trainer: Any, model: Any, optimizer: Any, layer: Any, more: Callable[[int], dict[str, torch.Tensor]] | None = None
) -> Step:
    trainer.current_gradient_accumulation_steps = 1  # what train() sets before the first step

    def step(gradients: Any) -> NDArray[Any]:
        optimizer.zero_grad()
        trainer.training_step(model, {"records": torch.from_numpy(gradients)} | (more(len(gradients)) if more else {}))
        optimizer.step()
        return layer.weight.grad.flatten().numpy()

    return step


def trainer_loader(ids: int, size: int, folder: Path) -> Callable[[], Iterator[Any]]:
    """Batches of ids from the loader of transformers' Trainer, which one run reads again in every epoch."""
    from transformers import Trainer, TrainingArguments

    data: Any = [{"records": number} for number in range(ids)]
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=size, report_to=[], use_cpu=True)
    loader = Trainer(Linear(), arguments, train_dataset=data).get_train_dataloader()

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield batch["records"]

    return epoch


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
