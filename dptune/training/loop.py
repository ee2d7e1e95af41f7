"""The private training loop: one file to read from top to bottom.

knobs    = mechanism.knobs()                 # from past releases only
ledger.charge(mechanism.release(knobs, q))   # on disk before the noisy value exists; may refuse
batch    = units.draw(q)                     # Poisson, secret coins; may be empty
released = mechanism.privatise(per-sample gradients of the batch, knobs)
optimizer.step(released.gradient)
controller.observe(released)
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dptune.errors import ConfigError
from dptune.mechanisms.control import total_norms
from dptune.mechanisms.local_updates import LocalUpdates
from dptune.mechanisms.mechanism import Knobs, Mechanism, Observation, Released, RunFacts
from dptune.mechanisms.planning import Schedule, planned
from dptune.mechanisms.policy_file import fits_unit
from dptune.privacy.entropy import Entropy, uniform
from dptune.privacy.filters import renyi_cost
from dptune.privacy.ledger import BudgetError, Ledger, LedgerError, RunHeader, composition_of
from dptune.privacy.release import Composition
from dptune.training.checkpoints import Progress, load_checkpoint, save_checkpoint
from dptune.training.data import PrivacyUnits, Tokens, micro_batches
from dptune.training.evaluation import mean_loss
from dptune.training.federated import local_update
from dptune.training.model import (
    assert_trained,
    freeze_down,
    frozen_fingerprint,
    train_adapters,
    trainable_state,
    uses_dropout,
)
from dptune.training.per_sample import PairGradients, PairModules, lora_pairs, per_sample_gradients

_PUBLIC_RECORDS = 32  # behind every look of a controller at the public loss


@dataclass(frozen=True)
class Plan:
    """The public schedule of a run.

    Attributes:
        sample_rate: q, of each unit at each step.
        expected_batch_size: q times units; divides every sum, never the realised size.
        steps: releases to make; charges of a killed process count among them.
        learning_rate: AdamW's, after warm-up.
        warmup_steps: linear warm-up.
        physical_batch_size: rows of every micro-batch, filled up where units are fewer; changes no result.
        checkpoint_every: steps between checkpoints.
        autocast: "bfloat16" runs the forward pass in it; None is float32.
    """

    sample_rate: float
    expected_batch_size: float
    steps: int
    learning_rate: float = 5e-4
    warmup_steps: int = 100
    physical_batch_size: int = 16
    checkpoint_every: int = 50
    autocast: str | None = None

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then constant."""
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The torch dtype of ``autocast``."""
        return getattr(torch, self.autocast) if self.autocast else None


@dataclass
class StepReport:
    """What a step hands to whoever logs. ``private`` must not leave a run with private telemetry.

    Attributes:
        step: 1-based optimiser step.
        releases: length of the ledger.
        composition: what the ledger holds so far.
        knobs: radii, noise multiplier and what the controller tells; as public as what it reads.
        public: functions of the configuration and of releases.
        private: functions of raw records (batch loss, clipped fraction).
    """

    step: int
    releases: int
    composition: Composition
    knobs: dict[str, float]
    public: dict[str, float]
    private: dict[str, float] = field(repr=False)


def train(
    model: Any,
    tokens: Tokens,
    units: PrivacyUnits,
    mechanism: Mechanism,
    plan: Plan,
    header: RunHeader,
    directory: Path,
    entropy: Entropy,
    on_step: Callable[[StepReport], None] = lambda report: None,
    public: Tokens | None = None,
) -> Ledger:
    """Fine-tune the model's adapters, resuming what ``directory`` holds of the run.

    Guarantee: the final weights are a function of releases that the returned ledger lists, charged before they
    were made, so its certified epsilon is theirs (add/remove one of ``units``). Private: ``tokens``, ``units``'
    members, and every gradient. Public: everything else.

    Args:
        model: PEFT model on its device, as the checkpoint's run started it (same initialisation).
        directory: receives ledger.jsonl and checkpoint.safetensors.
        on_step: called after each step.
        public: public records, for controllers that follow the loss on them.

    A run whose controller moves the noise may use up its budget early; it then ends with fewer releases.

    Returns: the ledger, still open: the caller finishes it when the run's results are safe.

    Raises: ConfigError, LedgerError, CheckpointError, BudgetError; RuntimeError if adapters did not move.
    """
    _check(model, tokens, units, mechanism, plan, header, entropy)
    if mechanism.freezes_down:
        freeze_down(model)
    pairs = lora_pairs(model)
    optimizer = _optimizer(pairs, plan)
    initial, fingerprint = trainable_state(model), frozen_fingerprint(model)
    mechanism.start(_facts(pairs, plan, header))
    ledger, progress = _open(model, optimizer, mechanism, plan, header, directory)
    # Dropout masks must be secret: known masks would tie the records of a batch together.
    torch.manual_seed(secrets.randbits(63) if not entropy.leaks else progress.step)
    run = _Run(model, pairs, tokens, units, mechanism, plan, ledger, optimizer, entropy, public)
    step = progress.step
    try:
        while ledger.releases < plan.steps:
            knobs = _affordable(mechanism, ledger, plan)
            if knobs is None and step and mechanism.controller.adaptive:
                _save(model, optimizer, mechanism, ledger, step, directory)
                break
            train_adapters(model)
            report = _step(run, knobs or mechanism.knobs(), step)
            step += 1
            on_step(report)
            if step % plan.checkpoint_every == 0 or ledger.releases == plan.steps:
                _save(model, optimizer, mechanism, ledger, step, directory)
        if step == 0:
            raise BudgetError(
                f"{directory}: every release is charged and no checkpoint was written before the process died. "
                "Fix: checkpoint more often (training.checkpoint_every), which starts another run."
            )
        # B starts at zero, so without noise A has no gradient at the first step.
        if mechanism.private or step > 1:
            assert_trained(model, initial, fingerprint)
    except BaseException:
        ledger.close()
        raise
    return ledger


@dataclass(frozen=True)
class _Run:
    """What stays the same from step to step."""

    model: Any
    pairs: list[PairModules]
    tokens: Tokens
    units: PrivacyUnits
    mechanism: Mechanism
    plan: Plan
    ledger: Ledger
    optimizer: torch.optim.Optimizer
    entropy: Entropy
    public: Tokens | None


def _facts(pairs: list[PairModules], plan: Plan, header: RunHeader) -> RunFacts:
    return RunFacts(
        pair_sizes=tuple(len(_zeros(pair)) for pair in pairs),
        device=pairs[0].up.weight.device,
        expected_batch_size=plan.expected_batch_size,
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        epsilon=header.epsilon,
        delta=header.delta,
    )


def _affordable(mechanism: Mechanism, ledger: Ledger, plan: Plan) -> Knobs | None:
    """The controller's knobs, with more noise where the filter asks for it; None when the budget is used up.

    Decided before the batch is drawn, from releases alone. The filter keeps in reserve what the remaining steps
    cost at the most noise that a controller may choose, so that a run can always finish.
    """
    knobs, renyi_filter = mechanism.knobs(), ledger.header.renyi_filter
    if renyi_filter is not None and mechanism.controller.adaptive:
        wanted = mechanism.effective_noise_multiplier(knobs)
        quietest = mechanism.most_noise()
        later = plan.steps - ledger.releases - 1
        reserve = later * renyi_cost(renyi_filter.order, plan.sample_rate, quietest)
        spent = renyi_filter.spent(ledger.composition) + reserve
        allowed = renyi_filter.raise_noise_multiplier(wanted, plan.sample_rate, spent)
        if not math.isfinite(allowed):
            return None
        knobs = mechanism.at_effective_noise_multiplier(knobs, allowed)
    return knobs if ledger.admits(mechanism.release(knobs, plan.sample_rate)) else None


def _check(
    model: Any,
    tokens: Tokens,
    units: PrivacyUnits,
    mechanism: Mechanism,
    plan: Plan,
    header: RunHeader,
    entropy: Entropy,
) -> None:
    """Everything that must not come to light after a charge."""
    _check_header(units, mechanism, header, entropy)
    if not math.isclose(plan.sample_rate * len(units), plan.expected_batch_size):
        raise ConfigError("plan.expected_batch_size", "is not sample_rate x units", fix="use calibration.sampling")
    if (mechanism.local is not None) != (units.kind == "client"):
        raise ConfigError("data.unit", f"{units.kind} does not fit {mechanism.name}", fix="give it units of clients")
    if mechanism.local is None and units.most > plan.physical_batch_size:
        problem = f"{plan.physical_batch_size} is less than the {units.most} rows that one unit may bring"
        raise ConfigError("training.physical_batch_size", problem, fix="raise it")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and tokens.width > positions:
        raise ConfigError("training.max_length", f"{tokens.width} exceeds the model's {positions}", fix="lower it")
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and mechanism.private and not header.leaks and uses_dropout(model):
        raise ConfigError(
            "lora.dropout", "on a CPU its masks come from a seed of 32 bits", fix="set it to 0, or use CUDA"
        )


def _check_header(units: PrivacyUnits, mechanism: Mechanism, header: RunHeader, entropy: Entropy) -> None:
    """The header must describe this very run; ``verify`` believes it."""
    if entropy.leaks != header.leaks:
        raise ConfigError("header.leaks", "does not declare the run's entropy", fix="give it entropy.leaks")
    if (header.unit, header.units) != (units.kind, len(units)):
        raise ConfigError("header.unit", "is not the unit that is sampled", fix="give it units.kind and len(units)")
    if composition_of(header.inherited) != mechanism.controller.inherited:
        raise ConfigError("header.inherited", "is not what the mechanism was made from", fix="give it inherited")
    unit = mechanism.controller.inherited_unit
    if unit is not None and not fits_unit(unit, header.unit):
        # A release that is private about encounters says little about a patient who has many.
        problem = f"the hyper-policy's run was private about one {unit}, this one about one {header.unit}"
        raise ConfigError("init_from", problem, fix="start from a run with the same unit")
    if (header.mechanism, header.published_accountant) != (mechanism.name, mechanism.published_accountant):
        raise ConfigError("header.mechanism", "is not the one that runs", fix="give it the mechanism's own names")


def _save(
    model: Any, optimizer: torch.optim.Optimizer, mechanism: Mechanism, ledger: Ledger, step: int, directory: Path
) -> None:
    controller = mechanism.controller.state_dict()
    progress = Progress(ledger.header.run_id, step, ledger.releases, ledger.chain, controller)
    save_checkpoint(directory / "checkpoint.safetensors", model, optimizer, progress)


def _step(run: _Run, knobs: Knobs, step: int) -> StepReport:
    mechanism, plan, ledger = run.mechanism, run.plan, run.ledger
    ledger.charge(mechanism.release(knobs, plan.sample_rate))
    batch = run.units.draw(plan.sample_rate, run.entropy)
    raw = _RawStatistics()
    zeros = [_zeros(pair) for pair in run.pairs]
    released = mechanism.privatise(_gradients(run, batch, raw), zeros, knobs, plan.expected_batch_size, run.entropy)
    learning_rate = plan.learning_rate_at(step)
    _apply(run.pairs, released.gradient, run.optimizer, learning_rate)
    moved = {
        "noise_multiplier": knobs.noise_multiplier,
        **{f"radius_{index}": radius for index, radius in enumerate(released.knobs.radii)},
        **mechanism.controller.metrics(),  # before it observes: what this release was made with
    }
    mechanism.controller.observe(_observation(run, released))
    public = {"learning_rate": learning_rate}
    private = raw.summary(released.knobs)
    # Without noise the sum is as private as the records.
    norm = float(torch.stack([part.norm() for part in released.gradient]).norm())
    (public if mechanism.private else private)["gradient_norm"] = norm
    return StepReport(step + 1, ledger.releases, Counter(ledger.composition), moved, public, private)


def _observation(run: _Run, released: Released) -> Observation:
    renyi_filter, ledger = run.ledger.header.renyi_filter, run.ledger
    if renyi_filter is not None and run.mechanism.controller.adaptive:
        spent = renyi_filter.spent(ledger.composition) / renyi_filter.budget
    else:
        spent = ledger.releases / run.plan.steps
    return Observation(
        releases=ledger.releases,
        released=released,
        spent=spent,
        public_loss=lambda: _public_loss(run),
        adapter_figures=lambda: _adapter_figures(run),
    )


def _public_loss(run: _Run) -> float:
    if run.public is None:
        raise ConfigError("controller", "follows the loss on public records, and none were given", fix="give them")
    sample = replace(run.public, rows=run.public.rows[:_PUBLIC_RECORDS])
    return mean_loss(run.model, sample, _PUBLIC_RECORDS, autocast=run.plan.autocast_dtype)


@torch.no_grad()
def _adapter_figures(run: _Run) -> dict[str, list[float]]:
    """Norms of B A and of Adam's moments, for every pair: functions of released values."""
    figures: dict[str, list[float]] = {"product": [], "momentum": [], "second_moment": []}
    for pair in run.pairs:
        # ||B A||^2 = trace of (A A^T)(B^T B): two small matrices in place of a large one.
        down, up = pair.down.weight.double(), pair.up.weight.double()
        figures["product"].append(float(((down @ down.T) * (up.T @ up)).sum().clamp(min=0).sqrt()))
        for name, key in (("momentum", "exp_avg"), ("second_moment", "exp_avg_sq")):
            moments = [run.optimizer.state[parameter][key].norm() for parameter in pair.parameters]
            figures[name].append(float(torch.stack(moments).norm()))
    return figures


def _zeros(pair: PairModules) -> torch.Tensor:
    size = sum(parameter.numel() for parameter in pair.parameters)
    return torch.zeros(size, dtype=torch.float64, device=pair.up.weight.device)


def _gradients(run: _Run, batch: list[Any], raw: _RawStatistics) -> Iterator[PairGradients]:
    device, plan = run.pairs[0].up.weight.device, run.plan
    if run.mechanism.local is not None:
        yield from _local_updates(run, run.mechanism.local, batch, raw)
        return
    for part in micro_batches(batch, plan.physical_batch_size):
        ids, mask = run.tokens.batch(part.records, device, height=plan.physical_batch_size)
        owners = torch.full((len(ids),), part.units, device=device)
        owners[: len(part.owners)] = torch.from_numpy(part.owners)
        gradients, losses = per_sample_gradients(
            run.model, run.pairs, ids, mask, owners, part.units, autocast=plan.autocast_dtype
        )
        raw.losses.append(losses[: len(part.records)])
        raw.norms.append(gradients.norms())
        yield gradients


def _local_updates(run: _Run, local: LocalUpdates, batch: list[Any], raw: _RawStatistics) -> Iterator[PairGradients]:
    for members in batch:
        if not len(members):
            continue  # a client whose patients are all elsewhere sends nothing
        # Another order every round, or a client's last records would never be used.
        records = members[np.argsort(uniform(run.entropy, len(members)))]
        update = local_update(
            run.model,
            run.pairs,
            run.tokens,
            records,
            rows=run.plan.physical_batch_size,
            steps=local.local_steps,
            learning_rate=local.local_learning_rate,
            autocast=run.plan.autocast_dtype,
        )
        raw.losses.append(update.losses())
        raw.norms.append(update.norms())
        yield update


@dataclass
class _RawStatistics:
    """Un-noised figures of one batch, for research telemetry only; nothing in the loop reads them."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)

    def summary(self, knobs: Knobs) -> dict[str, float]:
        """Size and mean loss of the batch, and the share of (unit, radius) that was clipped."""
        if not self.losses:
            return {"batch_units": 0.0}
        norms, losses = torch.cat(self.norms), torch.cat(self.losses)
        figures = {"batch_units": float(len(norms)), "batch_loss": float(losses.mean())}
        if len(knobs.radii) == 1:
            norms = total_norms(norms)[:, None]
        if knobs.radii:
            figures["clipped_fraction"] = float((norms > norms.new_tensor(knobs.radii)).double().mean())
        return figures


def _apply(
    pairs: list[PairModules], gradients: list[torch.Tensor], optimizer: torch.optim.Optimizer, learning_rate: float
) -> None:
    for pair, gradient in zip(pairs, gradients, strict=True):
        start = 0
        for parameter in pair.parameters:
            parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).to(parameter.dtype)
            start += parameter.numel()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _optimizer(pairs: list[PairModules], plan: Plan) -> torch.optim.AdamW:
    parameters = [parameter for pair in pairs for parameter in pair.parameters]
    return torch.optim.AdamW(parameters, lr=plan.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)


def _open(
    model: Any,
    optimizer: torch.optim.Optimizer,
    mechanism: Mechanism,
    plan: Plan,
    header: RunHeader,
    directory: Path,
) -> tuple[Ledger, Progress]:
    """Start the run, or take it up where its ledger and checkpoint left it."""
    path, checkpoint = directory / "ledger.jsonl", directory / "checkpoint.safetensors"
    releases = planned(mechanism, Schedule(plan.sample_rate, plan.steps, header.delta))
    if path.exists() and not checkpoint.exists():
        Ledger.discard_unborn(path)
    if not path.exists():
        if checkpoint.exists():
            raise LedgerError(f"{checkpoint}: has no ledger beside it. Fix: restore the ledger, or remove the folder.")
        ledger = Ledger.create(path, header, releases)
        return ledger, Progress(ledger.header.run_id, 0, 0, ledger.chain, {})
    ledger = Ledger.resume(path, releases)
    _check_same_run(ledger, header)
    if not checkpoint.exists():
        return ledger, Progress(ledger.header.run_id, 0, ledger.releases, ledger.chain, {})
    try:
        progress = load_checkpoint(checkpoint, model, optimizer, ledger)
    except BaseException:
        ledger.close()
        raise
    mechanism.controller.load_state_dict(progress.controller)
    return ledger, progress


def _check_same_run(ledger: Ledger, header: RunHeader) -> None:
    ours, theirs = header.to_dict() | {"run_id": ""}, ledger.header.to_dict() | {"run_id": ""}
    changed = [key for key in ours if ours[key] != theirs.get(key)]
    if changed:
        ledger.close()
        raise LedgerError(
            f"{ledger.path}: was started with other settings ({', '.join(changed)}). Fix: use another run directory."
        )
