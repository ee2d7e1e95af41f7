"""The opening of a run: everything that is checked, started or restored before its first step."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.policy_file import fits_unit
from dptune.mechanisms.interfaces import RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, as_charged, planned
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import first_release
from dptune.privacy.release import DEALT_BY_RANK
from dptune.privacy.run_folder import RunFolder, fresh_start
from dptune.privacy.run_header import composition_of
from dptune.training.checkpoints import CheckpointError, Progress, load_checkpoint
from dptune.training.data import Bins, Tokens, keys_of
from dptune.training.gradients.gradient_check import check_width, rehearse
from dptune.training.gradients.parameter_groups import Block
from dptune.training.gradients.step_memory import public_widths
from dptune.training.models.causal import most_positions
from dptune.training.models.model import freeze_down, frozen_fingerprint, trainable_state, uses_dropout
from dptune.training.models.own_weights import groups_of, own_weights, what_trains
from dptune.training.models.trained_layers import HeadModules
from dptune.training.optimizers import check_rule, make_optimizer
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.ranks import Ranks
from dptune.training.run import RankRun, Run, StepReport
from dptune.training.spec import OWNER, RunSpec, refuse_used

_log = logging.getLogger(__name__)


def open_run(
    spec: RunSpec,
    directory: Path,
    entropy: Entropy,
    on_step: Callable[[StepReport], None] = lambda report: None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Run:
    """Start a run, or resume the one in its folder; see ``train``. A checkpoint is written in any case."""
    _check(spec, entropy)
    rank = open_rank(spec, entropy, ranks)
    if spec.mechanism.bands > 1:
        # After the ranks agreed on the strategy that each of them calibrated: rank 0 alone makes noise.
        charged = first_release(RunFolder(directory).ledger)
        spec = rank.spec = replace(spec, mechanism=as_charged(spec.mechanism, charged))
        if spec.mechanism.dealt_by == "rank":
            _log.warning("%s goes on as it was begun: %s. Nothing is certified", directory, DEALT_BY_RANK)
    optimizer = make_optimizer(spec.plan.rule, rank.weights, spec.plan.learning_rate, _new_head(spec.model, rank.pairs))
    # Without noise a weight that no token reaches has no gradient, such as a position beyond the longest record.
    still = own_weights(spec.model) is not None and not spec.mechanism.private
    initial = {} if still else trainable_state(spec.model)
    if spec.auditor is not None:
        sizes = [pair.size for pair in rank.pairs]
        spec.auditor.start(spec.mechanism, sizes, spec.units.planted, spec.plan.sample_rate)
    plan, header = spec.plan, spec.header
    facts = RunFacts(
        pair_sizes=tuple(pair.size for pair in rank.pairs),
        device=rank.weights[0].device,
        expected_batch_size=plan.expected_batch_size,
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        epsilon=header.epsilon,
        delta=header.delta,
    )
    spec.mechanism.start(facts)
    ledger, progress = _open(spec, optimizer, directory)
    run = Run(
        **vars(rank),
        ledger=ledger,
        optimizer=optimizer,
        directory=directory,
        on_step=on_step,
        initial=initial,
        step=progress.step,
        restarts=sorted({*progress.restarts, *_restarts(spec.mechanism, ledger)}),
    )
    try:
        if spec.plan.law.name == "balls_in_bins" and ledger.releases < spec.plan.steps:
            run.bins = _bins(spec, ledger, progress, run.entropy)
        if spec.auditor is not None:
            spec.auditor.on_open(ledger.releases)
        # Written before anything is charged: on a full disk every new try would pay for steps that are then lost.
        run.save()
    except BaseException:
        ledger.close()
        raise
    return run


def open_rank(spec: RunSpec, entropy: Entropy, ranks: Ranks) -> RankRun:
    """This rank's part of a run, after it and the others agreed on what is run; see ``train``."""
    model, tokens, units, mechanism = spec.model, spec.tokens, spec.units, spec.mechanism
    if ranks.world > 1:
        ranks.check(mechanism)
    if mechanism.clipper.freeze_down:
        freeze_down(model)
    pairs, fingerprint = groups_of(model), frozen_fingerprint(model)
    _check_fits(mechanism, model, pairs)
    rehearse_run(spec, pairs)
    if ranks.world > 1:
        sizes = (units.most, len(tokens.rows), tokens.width, tokens.padding, tokens.truncated)
        ranks.agree(
            {
                "model": (fingerprint, [(pair.name, pair.size) for pair in pairs]),
                "device": pairs[0].parameters[0].device.type,
                "data": (units.kind, len(units), *sizes),
                "records": _digest(tokens, units),
                "mechanism": (mechanism.name, repr(mechanism.clipper), mechanism.plugins, mechanism.coefficients),
                "plan": spec.plan,
                "entropy": entropy.leaks,
            }
        )
    return RankRun(spec, pairs, units.part(ranks.rank, ranks.world), entropy, ranks, fingerprint)


def rehearse_run(spec: RunSpec, blocks: list[Block] | None = None) -> None:
    """Compute a run's gradients, and its widest batches, on made-up tokens; no record is read, and nothing is written.

    Args:
        blocks: the modules that train; None finds them.

    Raises: ConfigError as ``rehearse`` and ``check_width``.
    """
    model, plan = spec.model, spec.plan
    rehearse(model, groups_of(model) if blocks is None else blocks, checkpointing=plan.gradient_checkpointing)
    for width in public_widths(spec.tokens.width, plan.expected_batch_size, plan.physical_batch_size):
        check_width(model, width)


def _digest(tokens: Tokens, units: PrivacyUnits) -> str:
    """SHA-256 of all records, of the units that they belong to, and of the units' keys. Private.

    Ranks deal units out by number: in another order, one unit would be drawn by two ranks and move a sum twice.
    """
    digest = hashlib.sha256()
    for arrays in (tokens.rows, units.members, [] if units.keys is None else [units.keys]):
        for array in arrays:
            digest.update(len(array).to_bytes(8, "little") + np.asarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()


def _check_fits(mechanism: Mechanism, model: Any, pairs: list[Block]) -> None:
    """Check that the mechanism was built for this model: its size decides radii, sensitivity and epsilons."""
    fix = "build it with the options of dptune.mechanisms.registry.of_model(name, options, pairs, parameters)"
    if mechanism.pairs != len(pairs):
        problem = f"was built for {mechanism.pairs} parameter groups, and the model has {len(pairs)}"
        raise ConfigError(f"mechanisms.{mechanism.name}.pairs", problem, fix=fix)
    dimension, own = mechanism.noise.dimension, sum(pair.size for pair in pairs)
    if dimension not in (0, own):  # 0: none was given
        problem = f"was built for {dimension} parameters, and {own} train"
        raise ConfigError(f"mechanisms.{mechanism.name}.dimension", problem, fix=fix)
    head = any(isinstance(pair, HeadModules) for pair in pairs)
    mechanism.check_trained(head=head, own=own_weights(model) is not None)


def _new_head(model: Any, pairs: list[Block]) -> list[torch.Tensor]:
    """The weights of a classifier's new head, which have a learning rate of their own."""
    if (own := own_weights(model)) is not None:
        return [weight for name in own.head for weight in model.get_submodule(name).parameters()]
    return [weight for pair in pairs if isinstance(pair, HeadModules) for weight in pair.parameters]


def check_masks(device: torch.device) -> None:
    """Raise ConfigError for a device on which the masks of dropout are not secret."""
    if device.type == "cpu":
        problem = "on a CPU its masks come from a seed of 32 bits"
        raise ConfigError("lora.dropout", problem, fix="set it to 0, or use CUDA")


def _check(spec: RunSpec, entropy: Entropy) -> None:
    """Check everything that would otherwise fail only after a charge."""
    _check_header(spec, entropy)
    units, plan, mechanism = spec.units, spec.plan, spec.mechanism
    federation = mechanism.clipper.federation
    if units.last_record >= len(spec.tokens.rows):
        problem = f"name record {units.last_record}, and the last of tokens.rows is {len(spec.tokens.rows) - 1}"
        raise ConfigError("units", problem, fix="build both from the same records")
    if not math.isclose(plan.sample_rate * len(units), plan.expected_batch_size):
        raise ConfigError("plan.expected_batch_size", "is not sample_rate x units", fix="use calibration.sampling")
    if (federation is not None) != (units.kind == "client"):
        raise ConfigError("data.unit", f"{units.kind} does not fit {mechanism.name}", fix="give it units of clients")
    if mechanism.bands > 1 and (units.keys is None or len(units.keys) != len(units.members)):
        problem = f"do not have a key each, by which {mechanism.name} deals them into groups"
        raise ConfigError("units", problem, fix="make them with PrivacyUnits.of, and give it the keys")
    if plan.law.name == "balls_in_bins":
        keys_of(units)
    if federation is None and units.most > plan.physical_batch_size:
        problem = f"{plan.physical_batch_size} is less than the {units.most} rows that one unit may bring"
        raise ConfigError("training.physical_batch_size", problem, fix="raise it")
    check_rule(spec.plan.rule, spec.mechanism, spec.plan.steps)
    if spec.auditor is None and spec.units.planted.any():
        raise ConfigError("auditor", "is missing, and units hold gradients of one", fix="give it, or empty the slots")
    positions = most_positions(spec.model)
    if positions is not None and positions < spec.tokens.width:
        problem = f"{spec.tokens.width} exceeds the model's {positions}"
        raise ConfigError("training.max_length", problem, fix="lower it")
    if spec.mechanism.private and not spec.header.leaks and uses_dropout(spec.model):
        check_masks(next(spec.model.parameters()).device)


def _check_header(spec: RunSpec, entropy: Entropy) -> None:
    """Raise ConfigError unless the header describes this very run: ``verify`` relies on the header."""
    units, mechanism, header = spec.units, spec.mechanism, spec.header
    if not {*entropy.leaks} <= {*header.leaks}:
        raise ConfigError("header.leaks", "does not declare the run's entropy", fix="use entropy.leaks")
    if (header.unit, header.units) != (units.kind, len(units)):
        raise ConfigError("header.unit", "is not the unit that is sampled", fix="use units.kind and len(units)")
    if composition_of(header.inherited) != mechanism.controller.inherited:
        raise ConfigError(
            "header.inherited", "differs from what the mechanism inherits", fix="give it the inherited releases"
        )
    if header.plugins != mechanism.plugins:
        raise ConfigError("header.plugins", "does not name the code that runs", fix="use mechanism.plugins")
    unit = mechanism.controller.inherited_unit
    if unit is not None and not fits_unit(unit, header.unit):
        # A release that is private about single records says little about a unit that has many.
        problem = f"the hyper-policy's run was private about one {unit}, this one about one {header.unit}"
        raise ConfigError("init_from", problem, fix="start from a run with the same unit")
    if header.train != what_trains(spec.model):
        problem = f"says that {header.train} trains, and of the model {what_trains(spec.model)} does"
        raise ConfigError("header.train", problem, fix="use own_weights.what_trains(model)")
    if (header.mechanism, header.published_accountant) != (mechanism.name, mechanism.published_accountant):
        raise ConfigError("header.mechanism", "is not the one that runs", fix="give it the mechanism's own names")


def _open(spec: RunSpec, optimizer: torch.optim.Optimizer, directory: Path) -> tuple[Ledger, Progress]:
    """Start the run, or resume it from its ledger and checkpoint."""
    folder, mechanism = RunFolder(directory), spec.mechanism
    releases = planned(mechanism, Schedule(spec.plan.sample_rate, spec.plan.steps, spec.header.delta, spec.plan.law))
    if not folder.ledger.exists():
        refuse_used(spec)
    ledger, checkpoint = Ledger.open(folder.ledger, spec.header, releases, spec.booked), folder.checkpoint
    try:
        refuse_used(spec, ledger.header.run_id)
        if mechanism.noise.correlated is not None:  # two open runs would share the noise of past rows
            object.__setattr__(mechanism.noise, OWNER, ledger.header.run_id)
        if not checkpoint.exists():
            return ledger, Progress(ledger.header.run_id, 0, ledger.releases, ledger.chain, {})
        progress = load_checkpoint(checkpoint, spec.model, optimizer, ledger)
        _restore(mechanism, progress, checkpoint)
    except BaseException:
        ledger.close()
        raise
    return ledger, progress


def _bins(spec: RunSpec, ledger: Ledger, progress: Progress, entropy: Entropy) -> Bins:
    """The bins of a run by balls_in_bins: new ones for a new run, the checkpoint's for a resumed run.

    Raises: CheckpointError for a run that drew some of its batches, and whose secret is gone.
    """
    law = spec.plan.law
    keys = keys_of(spec.units)
    if progress.bins:
        return Bins.restored(law.batches, keys, progress.bins)
    if ledger.releases:
        path = RunFolder(ledger.path.parent).checkpoint
        why = f"{'does not hold' if path.exists() else 'is missing, with'} the secret of the run's bins"
        problem = f"{path}: {why}, and by other bins a unit could enter an epoch twice"
        raise CheckpointError(f"{problem}. Fix: restore it; or {fresh_start(path.parent)}.")
    return Bins.toss(law.batches, keys, entropy)


def _restarts(mechanism: Mechanism, ledger: Ledger) -> list[int]:
    """The ledger's length if correlated noise begins anew here, for the process that made its rows is gone."""
    if mechanism.bands == 1 or not ledger.releases:
        return []
    _log.warning(
        "%s: correlated noise begins anew at release %d, as the noise of past releases is never written. The price is "
        "the same; a little more noise stays in the weights.",
        ledger.path,
        ledger.releases + 1,
    )
    return [ledger.releases]


def _restore(mechanism: Mechanism, progress: Progress, checkpoint: Path) -> None:
    if not progress.step:
        return  # nothing was observed yet
    try:
        mechanism.controller.load_state_dict(progress.controller)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = f"its controller's state does not fit {mechanism.name} ({type(error).__name__}: {error})"
        fix = f"restore it; or {fresh_start(checkpoint.parent)}"
        raise CheckpointError(f"{checkpoint}: is damaged: {why}. Fix: {fix}.") from None
