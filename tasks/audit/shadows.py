"""Shadow models of the likelihood-ratio attacks: the attacker's own runs, on records and coins of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.audit.text.likelihood import Passage, ending_losses
from dptune.audit.text.membership import balanced_coins, lira_scores, rmia
from dptune.core.progress import progress
from dptune.mechanisms.registry import build, of_model
from dptune.privacy.entropy import FixedSeed
from dptune.records.canaries import Canary, content_with
from dptune.records.parquet_file import encode_content, form_at, read_records
from dptune.training.loop import train
from dptune.training.models.model import load_base
from dptune.training.models.own_weights import groups_of, start_training
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, header_of
from dptune.training.tokens.encoding import stored_tokens
from tasks.audit.target import Target
from tasks.experiment.preparation import plan_of
from tasks.paths import PUBLIC_VALIDATION, SPLITS


def shadow_scores(
    target: Target,
    canaries: Sequence[Canary],
    passages: Sequence[Passage],
    scores: NDArray[np.float64],
    public: NDArray[np.float64],
) -> dict[str, NDArray[np.float64]]:
    """(canaries,) of the scores that need ``audit.shadows`` shadow models, by name: LiRA of the target's calibrated
    ``scores``, and RMIA with models in and out.

    A shadow is fine-tuned like the cell, but without noise, on those canaries that the attacker's own coins choose and
    on records of nobody in the cell: the attack split, or public records where telemetry is private. It uses no
    training record of a cell, so nothing is charged. Beside the attack split the scores are private: they depend on
    its records. Beside public records they are functions of the adapter, public data and the auditor's secrets.

    Args:
        passages: the passage of each canary.
        public: (canaries,) the base model's losses.
    """
    settings = target.settings
    coins = balanced_coins(settings.shadows, len(passages), np.random.default_rng(settings.seed))
    rows = []
    for index in progress(range(settings.shadows), "shadow models", total=settings.shadows):
        model = _train_shadow(target, canaries, coins[index], index)
        limit = target.cell.training.max_length
        found = ending_losses(model, target.tokenizer, passages, max_length=limit, rows=target.rows)
        rows.append(found.total)
    losses, lengths = np.stack(rows), np.maximum(found.tokens, 1)
    return {
        "shadows": lira_scores(scores, public - losses, coins),
        "rmia": rmia((public - scores) / lengths, losses / lengths, coins),
    }


def _train_shadow(target: Target, canaries: Sequence[Canary], included: NDArray[np.bool_], seed: int) -> Any:
    """Train one shadow model; it is returned in evaluation mode."""
    cell = target.cell
    records = read_records(PUBLIC_VALIDATION if cell.telemetry == "private" else SPLITS / "attack.parquet")
    form = form_at(records.about)
    chosen = [one for one, coin in zip(canaries, included, strict=True) if coin]
    texts = [str(text) for text in records.text.to_pylist()]
    texts += [encode_content(content_with(one.carrier, one.secret, form, one.kind)) for one in chosen]
    label, length = str(records.about["label"]), cell.training.max_length
    tokens = stored_tokens(texts, target.tokenizer, form=form, file=label, max_length=length)
    base = load_base(cell.model.weights, next(target.public.parameters()).device)
    model = start_training(base, cell.training.trained, cell.lora, cell.seed)
    units = PrivacyUnits.records(len(texts))
    training = replace(cell.training, sampler="poisson", max_batch=None)  # of other units, and without a price
    plan = plan_of(training, len(units), min(training.expected_batch_size, len(units)), cell.delta)
    blocks, entropy = groups_of(model), FixedSeed(seed)
    dimension = sum(weight.numel() for block in blocks for weight in block.parameters)
    mechanism = build("nonprivate", of_model("nonprivate", {}, len(blocks), dimension))
    header = header_of(mechanism, units, entropy, delta=cell.delta, train=cell.training.trained.said)
    with tempfile.TemporaryDirectory() as directory:
        spec = RunSpec(model, tokens, units, mechanism, replace(plan, checkpoint_every=plan.steps), header)
        train(spec, Path(directory), entropy).close()
    return model.eval()
