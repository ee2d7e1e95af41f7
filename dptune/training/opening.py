"""Opening a run: everything that is checked, started or restored before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dptune.errors import ConfigError
from dptune.mechanisms.interfaces import RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, planned
from dptune.mechanisms.policy_file import fits_unit
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger, LedgerError, RunHeader, composition_of
from dptune.privacy.set_aside import RELEASED, fresh_start
from dptune.training.checkpoints import CheckpointError, Progress, load_checkpoint
from dptune.training.data import PrivacyUnits, Tokens
from dptune.training.model import freeze_down, frozen_fingerprint, trainable_state, uses_dropout
from dptune.training.per_sample import PairModules, lora_pairs
from dptune.training.ranks import Ranks
from dptune.training.rehearsal import check_width, rehearse
from dptune.training.run import Auditor, Plan, Run, Share, StepReport


def open_run(
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
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    auditor: Auditor | None = None,
) -> Run:
    """Start a run, or take it up where its folder left it; see ``train``. A checkpoint is written in any case."""
    _check(model, tokens, units, mechanism, plan, header, entropy)
    if auditor is None and units.planted.any():
        raise ConfigError("auditor", "is missing, and units hold gradients of one", fix="give it, or empty the slots")
    share = open_share(model, tokens, units, mechanism, plan, entropy, ranks)
    optimizer, initial = _optimizer(share.weights, plan), trainable_state(model)
    if auditor is not None:
        auditor.start(mechanism, [pair.size for pair in share.pairs], units.planted)
    mechanism.start(_facts(share.pairs, plan, header))
    ledger, progress = _open(model, optimizer, mechanism, plan, header, directory)
    run = Run(
        **vars(share),
        ledger=ledger,
        optimizer=optimizer,
        public=public,
        directory=directory,
        on_step=on_step,
        initial=initial,
        step=progress.step,
        auditor=auditor,
    )
    try:
        if auditor is not None:
            auditor.opened(ledger.releases)
        # Before anything is charged: a disk that takes no checkpoint would cost the steps of every new try.
        run.save()
    except BaseException:
        ledger.close()
        raise
    return run


def open_share(
    model: Any,
    tokens: Tokens,
    units: PrivacyUnits,
    mechanism: Mechanism,
    plan: Plan,
    entropy: Entropy,
    ranks: Ranks,
) -> Share:
    """This rank's part of a run, after it and the others agreed on what is run; see ``train``."""
    ranks.check(mechanism)
    if mechanism.clipper.freeze_down:
        freeze_down(model)
    pairs, fingerprint = lora_pairs(model), frozen_fingerprint(model)
    _check_fits(mechanism, pairs)
    rehearse(model, pairs)
    check_width(model, tokens.width)
    ranks.agree(
        {
            "model": (fingerprint, [(pair.name, pair.size) for pair in pairs]),
            "device": pairs[0].up.weight.device.type,
            "data": (
                units.kind,
                len(units),
                units.most,
                len(tokens.rows),
                tokens.width,
                tokens.padding,
                tokens.truncated,
            ),
            "mechanism": (mechanism.name, repr(mechanism.clipper), mechanism.plugins),
            "plan": plan,
            "entropy": entropy.leaks,
        }
    )
    own = units.part(ranks.rank, ranks.world)
    return Share(model, pairs, tokens, own, mechanism, plan, entropy, ranks, fingerprint)


def _check_fits(mechanism: Mechanism, pairs: list[PairModules]) -> None:
    """The mechanism was built for this model: radii, sensitivity and what an accountant counts follow from its size."""
    fix = "build it with the options of dptune.mechanisms.registry.of_model(name, options, pairs, parameters)"
    if mechanism.pairs != len(pairs):
        problem = f"was built for {mechanism.pairs} LoRA pairs, and the model has {len(pairs)}"
        raise ConfigError(f"mechanisms.{mechanism.name}.pairs", problem, fix=fix)
    dimension, own = mechanism.noise.dimension, sum(pair.size for pair in pairs)
    if dimension not in (0, own):  # without one, what its paper claims is infinite
        problem = f"was built for {dimension} parameters, and the adapters have {own}"
        raise ConfigError(f"mechanisms.{mechanism.name}.dimension", problem, fix=fix)


def _facts(pairs: list[PairModules], plan: Plan, header: RunHeader) -> RunFacts:
    return RunFacts(
        pair_sizes=tuple(pair.size for pair in pairs),
        device=pairs[0].up.weight.device,
        expected_batch_size=plan.expected_batch_size,
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        epsilon=header.epsilon,
        delta=header.delta,
    )


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
    if (mechanism.clipper.federation is not None) != (units.kind == "client"):
        raise ConfigError("data.unit", f"{units.kind} does not fit {mechanism.name}", fix="give it units of clients")
    if units.kind != "client" and units.most > plan.physical_batch_size:
        problem = f"{plan.physical_batch_size} is less than the {units.most} rows that one unit may bring"
        raise ConfigError("training.physical_batch_size", problem, fix="raise it")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and 0 < positions < tokens.width:  # XLNet says -1
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
    if header.plugins != mechanism.plugins:
        raise ConfigError("header.plugins", "does not name the code that runs", fix="give it mechanism.plugins")
    unit = mechanism.controller.inherited_unit
    if unit is not None and not fits_unit(unit, header.unit):
        # A release that is private about encounters says little about a patient who has many.
        problem = f"the hyper-policy's run was private about one {unit}, this one about one {header.unit}"
        raise ConfigError("init_from", problem, fix="start from a run with the same unit")
    if (header.mechanism, header.published_accountant) != (mechanism.name, mechanism.published_accountant):
        raise ConfigError("header.mechanism", "is not the one that runs", fix="give it the mechanism's own names")


def _optimizer(weights: list[torch.Tensor], plan: Plan) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=plan.learning_rate, betas=(0.9, 0.999), weight_decay=0.0, foreach=True)


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
    left = [name for name in RELEASED if (directory / name).exists()]
    if path.exists() and not left:
        Ledger.discard_unborn(path)
    if not path.exists():
        if left:
            lost = f"{directory / left[0]}: has no ledger beside it"
            raise LedgerError(f"{lost}. Fix: restore the ledger; or {fresh_start(directory)}.")
        ledger = Ledger.create(path, header, releases)
        return ledger, Progress(ledger.header.run_id, 0, 0, ledger.chain, {})
    ledger = Ledger.resume(path, releases)
    _check_same_run(ledger, header)
    if not checkpoint.exists():
        return ledger, Progress(ledger.header.run_id, 0, ledger.releases, ledger.chain, {})
    try:
        progress = load_checkpoint(checkpoint, model, optimizer, ledger)
        _restore(mechanism, progress, checkpoint)
    except BaseException:
        ledger.close()
        raise
    return ledger, progress


def _restore(mechanism: Mechanism, progress: Progress, checkpoint: Path) -> None:
    if not progress.step:
        return  # nothing was observed yet
    try:
        mechanism.controller.load_state_dict(progress.controller)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = f"its controller's state does not fit {mechanism.name} ({type(error).__name__}: {error})"
        fix = f"restore it; or {fresh_start(checkpoint.parent)}"
        raise CheckpointError(f"{checkpoint}: is damaged: {why}. Fix: {fix}.") from None


def _check_same_run(ledger: Ledger, header: RunHeader) -> None:
    ours, theirs = header.to_dict() | {"run_id": ""}, ledger.header.to_dict() | {"run_id": ""}
    changed = [key for key in ours if ours[key] != theirs.get(key)]
    if changed:
        ledger.close()
        raise LedgerError(
            f"{ledger.path}: was started with other settings ({', '.join(changed)}). "
            f"Fix: take them back; or {fresh_start(ledger.path.parent)}."
        )
