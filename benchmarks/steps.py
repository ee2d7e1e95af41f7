"""Who is measured: functions that run N optimiser steps on the same records and call ``tick`` after each.

Every contender starts from the same model and gets the same micro-batches; building them is in its time. The private
one is ``dptune.training.loop.train`` itself, with its ledger and the fsync of every charge.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad

from benchmarks.shapes import Setting, trainable
from dptune.core.settings import TrainingSampler
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import MECHANISMS, build
from dptune.privacy.entropy import OsEntropy
from dptune.training.data import Tokens
from dptune.training.gradients.parameter_groups import trained_blocks
from dptune.training.loop import train
from dptune.training.losses import COUNTED, PADDING, model_losses
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, TrainingPlan, header_of

IGNORED = -100  # the label that Hugging Face's and torch's losses leave out
LEARNING_RATE = 5e-4

Tick = Callable[[], None]
#: (setting, steps, tick) -> figures of its own, beside its time
Run = Callable[[Setting, int, Tick], dict[str, float]]


class CannotRunError(Exception):
    """A contender does not work here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One line of a table.

    Attributes:
        peer: the line that its ratio is taken over.
        steps: at least so many in every round.
        foreign: not ours, so that its failures are results.
    """

    name: str
    run: Run
    peer: str = "plain"
    steps: int = 1
    foreign: bool = False


# ------------------------------------------------------------------------------------------------ without privacy


def plain(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """The floor: LoRA as a user writes it with PEFT, with the model's own loss."""

    def loss(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if setting.shape.classifies:
            inputs, labels = texts_and_labels(ids, mask)
            return model(**inputs, labels=labels).loss
        labels = ids.masked_fill(mask == 0, IGNORED)
        return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    return _plain_steps(setting, steps, tick, loss)


def texts_and_labels(ids: torch.Tensor, mask: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A classifier's inputs and labels, as its user has them, of a batch whose rows end with their label."""
    is_label = mask == COUNTED
    seen = (mask.masked_fill(is_label, PADDING) != PADDING).long()
    return {"input_ids": ids * seen, "attention_mask": seen}, (ids * is_label).sum(dim=1)


def plain_with_ours(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """A lower floor: no privacy, but dptune's loss without logits and its activation of one kernel."""

    def loss(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model_losses(model, ids, mask).mean()

    return _plain_steps(setting, steps, tick, loss, ours=True)


def _plain_steps(
    setting: Setting, steps: int, tick: Tick, loss: Callable[..., torch.Tensor], ours: bool = False
) -> dict[str, float]:
    model = setting.model(ours=ours)
    optimizer = _adamw(model)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for ids, mask in setting.micro_batches():
            with setting.autocast():
                part = loss(model, ids, mask) * (setting.shape.physical / setting.shape.batch)
            part.backward()
        optimizer.step()
        tick()
    return {}


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(trainable(model), lr=LEARNING_RATE, weight_decay=0.0)


# --------------------------------------------------------------------------------------------------------- dptune

#: As in params.yaml, and RLDP's design AB; without dp_lora_fed, whose step is a round of local training.
ENTRIES: dict[str, dict[str, Any]] = {name: {} for name in MECHANISMS if name != "dp_lora_fed"} | {
    "banded": {"bands": 4},
    "rldp": {"interval": 8, "warmup": 8, "batch_size": 4},
    "rldp_ab": {"like": "rldp", "design": "AB", "interval": 8, "warmup": 8, "batch_size": 4},
    "rldp_published": {"interval": 8, "warmup": 8, "batch_size": 4},
}


def private(name: str, setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """A registered mechanism on batches of exactly the same records; also the controller's share of its step.

    Correlated noise takes no controller but the constant one, whose share is not measured, and its batches are a group
    of units dealt at random: as large on average, which may cost a micro-batch more.
    """
    options = ENTRIES[name] if name == "nonprivate" else ENTRIES[name] | {"noise_multiplier": 1.0}
    model = setting.model(ours=True)
    mechanism = build(name, options | {"pairs": len(trained_blocks(model))})
    watched = Watched(mechanism.controller)
    first: list[float] = []

    def on_step() -> None:
        tick()
        first.append(time.perf_counter())

    records = setting.records
    if bands := ENTRIES[name].get("bands"):  # a unit is met every so many steps: as many copies make batches as large
        records = replace(records, rows=list(records.rows) * bands)
    else:
        mechanism = replace(mechanism, controller=watched)
    _train(setting, model, mechanism, records, steps, on_step)
    elapsed = first[-1] - first[0]
    return {"controller_share": watched.seconds * (steps - 1) / steps / elapsed} if elapsed else {}


def private_poisson(
    name: str, setting: Setting, steps: int, tick: Tick, sampler: TrainingSampler = "poisson"
) -> dict[str, float]:
    """A mechanism as a real run has it: batches vary in size, micro-batches are filled up, checkpoints are written.

    Truncated batches are cut to the physical batch, so that each step is one micro-batch of one shape.
    """
    model = setting.model(ours=True)
    bands = {"bands": 8} if name == "banded" else {}
    mechanism = build(name, bands | {"noise_multiplier": 1.0, "pairs": len(trained_blocks(model))})
    _train(setting, model, mechanism, setting.poisson_records, steps, tick, 10, sampler)
    return {}


def _train(
    setting: Setting,
    model: Any,
    mechanism: Mechanism,
    records: Tokens,
    steps: int,
    tick: Tick,
    checkpoint_every: int = 1_000_000,
    sampler: TrainingSampler = "poisson",
) -> None:
    shape, count = setting.shape, len(records.rows)
    units = PrivacyUnits.of("record", np.arange(count), 1)
    plan = TrainingPlan(
        shape.batch / count,
        float(shape.batch),
        steps,
        learning_rate=LEARNING_RATE,
        warmup_steps=1,
        physical_batch_size=shape.physical,
        checkpoint_every=checkpoint_every,
        autocast=shape.autocast,
        sampler=sampler,
        max_batch=shape.physical if sampler == "truncated_poisson" else None,
    )
    entropy = OsEntropy()
    header = header_of(mechanism, units, entropy, delta=1e-5)
    spec = RunSpec(model, records, units, mechanism, plan, header, public=setting.records)
    with tempfile.TemporaryDirectory() as directory:
        train(spec, Path(directory), entropy, lambda _: tick()).close()


@dataclass
class Watched:
    """A controller that is watched: how long its methods take, and what it is told."""

    controller: Any
    seconds: float = 0.0
    observation: Any = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.controller, name)
        return self._timed(value) if name in ("knobs", "observe") else value

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(argument: Any) -> Any:
            self.observation, start = argument, time.perf_counter()
            try:
                return method(argument)
            finally:
                self.seconds += time.perf_counter() - start

        return call


# --------------------------------------------------------------------------------------------------------- Opacus


def opacus_hooks(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """Opacus with per-sample gradients from hooks: ``GradSampleModule`` and ``DPOptimizer``."""
    return _opacus_steps(setting, steps, tick, *opacus_around(setting.model(), setting))


def opacus_ghost(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """Opacus' ghost clipping: norms without gradients, then a second backward pass."""
    return _opacus_steps(setting, steps, tick, *opacus_around(setting.model(), setting, ghost=True))


def _opacus_steps(
    setting: Setting, steps: int, tick: Tick, wrapped: Any, optimizer: Any, criterion: Callable[..., Any]
) -> dict[str, float]:
    parts = setting.shape.batch // setting.shape.physical
    for _ in range(steps):
        for part, (ids, mask) in enumerate(setting.micro_batches(), start=1):
            # As its BatchMemoryManager does: only the last part of a batch moves the weights.
            optimizer.signal_skip_step(do_skip=part < parts)
            with setting.autocast():
                if setting.shape.classifies:
                    inputs, labels = texts_and_labels(ids, mask)
                    loss = criterion(wrapped(**inputs).logits.float(), labels)
                else:
                    logits = wrapped(input_ids=ids, attention_mask=mask, use_cache=False).logits
                    # Hugging Face's own way to shift: the labels move, for copying logits would cost more.
                    labels = pad(ids.masked_fill(mask == 0, IGNORED)[:, 1:], (0, 1), value=IGNORED)
                    loss = criterion(logits.flatten(0, 1).float(), labels.flatten(), shape=logits.shape)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tick()
    return {}


def opacus_around(
    model: Any, setting: Setting, *, ghost: bool = False, max_grad_norm: float = 1.0, noise_multiplier: float = 1.0
) -> tuple[Any, Any, Callable[..., Any]]:
    """Opacus' model, optimiser and loss, as its documentation puts them together for a language model."""
    if not importlib.util.find_spec("opacus"):
        raise CannotRunError("opacus is not installed")
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    options: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "expected_batch_size": setting.shape.batch,
    }
    if not ghost:
        wrapped = GradSampleModule(model)
        criterion = cross_entropy if setting.shape.classifies else _mean_of_sequences
        return wrapped, DPOptimizer(_adamw(model), **options), criterion
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=max_grad_norm, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(_adamw(model), **options)
    return wrapped, optimizer, DPLossFastGradientClipping(wrapped, optimizer, torch.nn.CrossEntropyLoss())


def _mean_of_sequences(logits: torch.Tensor, labels: torch.Tensor, shape: Any) -> torch.Tensor:
    """What ``DPLossFastGradientClipping`` computes before it averages."""
    losses = cross_entropy(logits, labels, reduction="none").view(shape[:2])
    return (losses.sum(dim=1) / (labels.view(shape[:2]) != IGNORED).sum(dim=1).clamp(min=1)).mean()


# ------------------------------------------------------------------------------------ the contenders, and a check

STEPS = (
    Contender("plain", plain),
    Contender("plain, dptune's loss and activation", plain_with_ours),
    Contender("dptune static", partial(private, "static")),
    Contender("Opacus hooks", opacus_hooks, foreign=True),
    Contender("Opacus ghost", opacus_ghost, foreign=True),
)
POISSON = Contender("dptune static, Poisson batches", partial(private_poisson, "static"), steps=8)
#: Both with the batches of a real run: those of ``MECHANISM_LINES`` are drawn for ``banded`` alone.
BANDS = (
    Contender("static", partial(private_poisson, "static"), peer="static", steps=16),
    Contender("banded, 8 bands", partial(private_poisson, "banded"), peer="static", steps=16),
)
#: Two intervals of RLDP, or its agent would be measured at rest; several rows of bands.
STEPS_AT_LEAST = {"rldp": 16, "rldp_ab": 16, "rldp_published": 16, "banded": 8}
MECHANISM_LINES = tuple(
    Contender(name, partial(private, name), peer="static", steps=STEPS_AT_LEAST.get(name, 1))
    for name in ["static", *sorted(set(ENTRIES) - {"static"})]
)


def clipped_gradients(setting: Setting) -> dict[str, torch.Tensor]:
    """The mean clipped gradient before noise, ours and Opacus', at a radius that clips half of the records.

    Raises: CannotRunError without Opacus.
    """
    radius = _median_norm(setting)
    return {
        "dptune static": _private_gradient(setting, radius),
        "Opacus hooks": _opacus_gradient(setting, radius, ghost=False),
        "Opacus ghost": _opacus_gradient(setting, radius, ghost=True),
    }


def disagreement(gradients: dict[str, torch.Tensor]) -> float:
    """The largest distance from the first, over the first's length."""
    first, *others = gradients.values()
    return max(float((other - first).norm() / first.norm()) for other in others)


def _median_norm(setting: Setting) -> float:
    """Of the per-sample gradients of the last micro-batch."""
    norms: list[torch.Tensor] = []

    def note(optimizer: Any) -> None:
        rows = torch.cat([part.flatten(1).float() for part in optimizer.grad_samples], dim=1)
        norms.append(rows.norm(dim=1).median())

    wrapped, optimizer, criterion = opacus_around(setting.model(moved=True), setting)
    optimizer.attach_step_hook(note)
    _opacus_steps(setting, 1, lambda: None, wrapped, optimizer, criterion)
    return float(norms[0])


def _private_gradient(setting: Setting, radius: float) -> torch.Tensor:
    model = setting.model(moved=True)
    parts = {"clipper": "flat", "noise": "none", "controller": "constant"}
    mechanism = build("clipped", parts | {"max_grad_norm": radius, "pairs": len(trained_blocks(model))})
    watched = Watched(mechanism.controller)
    _train(setting, model, replace(mechanism, controller=watched), setting.records, 1, lambda: None)
    return torch.cat([part.float().cpu() for part in watched.observation.released.gradient])


def _opacus_gradient(setting: Setting, radius: float, ghost: bool) -> torch.Tensor:
    taken: list[torch.Tensor] = []
    wrapped, optimizer, criterion = opacus_around(
        setting.model(moved=True), setting, ghost=ghost, max_grad_norm=radius, noise_multiplier=0.0
    )
    optimizer.attach_step_hook(lambda done: taken.extend(part.grad.flatten().clone().cpu() for part in done.params))
    _opacus_steps(setting, 1, lambda: None, wrapped, optimizer, criterion)
    return torch.cat(taken)
