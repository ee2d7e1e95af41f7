"""Attacks on one finished cell: its adapter, step and sampling. They write only data/audits/<run>/audit.json."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.draw_test import audit_draw
from dptune.audit.one_run import one_run
from dptune.audit.refutation import refutation, run_certificate
from dptune.audit.sample_rate import audited_sample_rate
from dptune.audit.step import audit_step
from dptune.audit.text.extraction import before_secret, chance, compare, exposures, recites, sample_endings
from dptune.audit.text.likelihood import Passage, ending_losses, passage_ids, passage_of
from dptune.audit.text.membership import auc, membership_report, own_scores, roc, score_plugins
from dptune.audit.verdict import certificate, judged
from dptune.core.declarations import plain
from dptune.core.errors import DataError
from dptune.core.files import jsonable, sha256, write_json
from dptune.core.units import RECORD
from dptune.mechanisms.planning import Schedule, price
from dptune.mechanisms.registry import build, of_model, takes_noise
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder
from dptune.records.canaries import SECRET_LENGTH
from dptune.records.parquet_file import Records, decode_content, read_records
from dptune.records.public_texts import public_texts
from dptune.records.reading.record import Record
from dptune.training.gradients.parameter_groups import trained_blocks
from dptune.training.scores import label_probabilities
from dptune.training.tokens.labelled_texts import labelled_tokens
from dptune.training.unit_groups import Turn
from tasks.audit.registry import comparisons, parts, violations
from tasks.audit.shadows import shadow_scores
from tasks.audit.target import Target, load_target
from tasks.experiment.crafted_canaries import crafted_file, read_crafted
from tasks.experiment.preparation import corpus_of, plan_of, units_of
from tasks.identity import code_digest
from tasks.paths import AUDITS, EVAL, SPLITS, TRAIN, planted_secrets
from tasks.settings.audit import Audit

#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 2
_log = logging.getLogger(__name__)
_NO_SECRET = "0" * SECRET_LENGTH
_CONTEXTS, _GENERATED_ROWS = 8, 512
_LARGEST_LOG = 700.0  # the logarithm of the largest perplexity that a float can hold, roughly


def audit_cell(directory: Path, settings: Audit, device: str, cells: int = 1) -> dict[str, Any]:
    """Run every attack on the cell in ``directory``, write the audit and return it.

    Args:
        cells: number of cells that are audited together; they share the chance ``settings.false_alarms``.

    Raises: DataError if the run is not finished, its ledger missing or damaged, or data, secrets or model are not
    those that it was trained with.
    """
    checks = cells * comparisons()
    target = load_target(directory, settings, torch.device(device), checks)
    audit: dict[str, Any] = {
        "label": target.cell.label,
        "code": code_digest("audit.attacks"),
        "telemetry": target.cell.telemetry,
        "confidence": settings.confidence,
        "alarm_confidence": target.alarm_confidence,
        "delta": target.cell.delta,
        **jsonable(target.contents.epsilons.to_dict()),
    }
    wanted = parts(target.cell.telemetry)
    for name, attack in ATTACKS.items():
        if mine := [part.key for part in wanted if part.attack == name]:
            found = attack(target)
            audit |= {key: found[key] for key in mine if key in found}
    audit["violations"] = violations(audit)
    write_json(audit_file(directory), audit)
    return audit


def audit_file(directory: Path) -> Path:
    """The file of the audit of the cell in ``directory``."""
    return AUDITS / directory.name / "audit.json"


def audit_key(directory: Path, settings: Audit) -> str:
    """A digest of all that decides an audit: the run, the settings, the secrets and the version of attacks."""
    content = [json.dumps(plain(settings), sort_keys=True), str(VERSION)]
    content += map(str, score_plugins())
    read = (RunFolder(directory).ledger, crafted_file(directory), planted_secrets(), TRAIN, EVAL)
    content += [sha256(path) for path in read if path.exists()]
    return hashlib.sha256("".join(content).encode()).hexdigest()[:16]


def canary_attacks(target: Target) -> dict[str, Any]:
    """Attacks on the planted secrets. They read the released adapter, public texts and the auditor's own secrets, so
    their figures reveal no more about anybody's records than the adapter does.
    """
    settings, secrets = target.settings, target.secrets
    results: dict[str, Any] = {}
    planted = [(one.carrier, one.secret) for one in secrets.extraction]
    if planted:
        distinct = list(dict.fromkeys(secret for _, secret in planted))
        results["extraction"] = compare(_samples(target), distinct, settings.seed).to_dict()
    seen = _uncut(target, planted)
    if seen:
        one_each = {secret: (target.passage(text, secret), secret) for text, secret in seen}
        bits = exposures(
            target.adapted,
            target.tokenizer,
            list(one_each.values()),
            candidates=settings.candidates,
            max_length=target.cell.training.max_length,
            rows=target.rows,
            seed=settings.seed,
        )
        results["exposure"] = {
            "mean": float(bits.mean()),
            "most": float(bits.max()),
            "chance": chance(settings.candidates),
            "possible": float(np.log2(settings.candidates + 1)),
        }
        passages = [(target.passage(text, secret), secret) for text, secret in seen]
        found = {secret for passage, secret in passages if recites(target.adapted, target.tokenizer, passage, secret)}
        results["extraction"]["recited"] = len(found)
    if secrets.audit:
        results |= _coin_attacks(target)
    return results


def _samples(target: Target) -> list[str]:
    """Texts that the model generates where a secret would follow, after public texts that carry none."""
    settings = target.settings
    texts = public_texts(min(_CONTEXTS, settings.generations), settings.seed, "contexts", target.source)
    shares = np.array_split(np.arange(settings.generations), len(texts))
    samples: list[str] = []
    for text, share in zip(texts, shares, strict=True):
        samples += sample_endings(
            target.adapted,
            target.tokenizer,
            len(share),
            rows=_GENERATED_ROWS,
            seed=settings.seed + len(samples),
            prompt=before_secret(target.passage(text, _NO_SECRET), _NO_SECRET),
        )
    return samples


def _coin_attacks(target: Target) -> dict[str, Any]:
    """Attacks that guess which audit canaries are in the data: members and non-members differ by a coin alone."""
    settings = target.settings
    pairs = {(one.carrier, one.secret): one for one in target.secrets.audit}
    canaries = [pairs[pair] for pair in _uncut(target, list(pairs))]
    if not canaries:
        return {}
    included = np.array([bool(one.included) for one in canaries])
    passages = [target.passage(one.carrier, one.secret) for one in canaries]
    scores = {"likelihood": -_losses(target, target.adapted, passages)}
    public = _losses(target, target.public, passages)
    scores["calibrated"] = scores["likelihood"] + public
    scores |= own_scores(-scores["likelihood"], public)
    if settings.shadows and target.cell.telemetry == "private":
        _log.warning(
            "no shadow models: what they find reveals something about the attack split's records, which "
            "telemetry forbids"
        )
    elif settings.shadows:
        scores["shadows"] = shadow_scores(target, canaries, passages, scores["calibrated"], public)
    best = "shadows" if "shadows" in scores else "calibrated"
    # A client has many records: one of them in or out is no statement about a client.
    bound = {} if target.contents.header.unit == "client" else {"one_run": _one_run(target, scores[best], included)}
    return {
        **bound,
        "canaries": {name: _membership_figures(values[included], values[~included]) for name, values in scores.items()},
    }


def _uncut(target: Target, planted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (text, secret) pairs that training did not cut before the secret's end. Logs a warning about the others."""
    limit = target.cell.training.max_length
    lengths = map(len, passage_ids(target.tokenizer, [target.passage(text, secret) for text, secret in planted]))
    whole = [pair for pair, length in zip(planted, lengths, strict=True) if length < limit]
    if len(whole) < len(planted):
        _log.warning(
            "%d of %d canaries lie beyond the %d tokens of training.max_length and show nothing",
            len(planted) - len(whole),
            len(planted),
            limit,
        )
    return whole


def _one_run(target: Target, scores: NDArray[np.float64], included: NDArray[np.bool_]) -> dict[str, Any]:
    """The bound for the report, and what the coins say, and could have said, against the run's certificate."""
    reported = one_run(scores, included, target.cell.delta, target.settings.confidence)
    known = run_certificate(target.contents.header, target.contents.composition)
    against = refutation(scores, included, known, target.cell.delta, target.alarm_confidence)
    return {**reported.to_dict(), **against.to_dict()}


def record_membership(target: Target) -> dict[str, Any]:
    """Training records against held-out ones: by what is answered given the prompt, or the second half of a text given
    the first; and by perplexity.

    Perplexity is of the whole text: on the same tokens it ranks records as their mean log probability does.
    """
    if not target.settings.records or not len(read_records(non_members(target)).record):
        return {}
    if target.cell.task.classifies:
        return {"membership": _label_membership(target)}
    members, others = (_sample(read_records(path), target) for path in (SPLITS / "train.parquet", non_members(target)))
    passages = [*members, *others]
    likelihood = -_losses(target, target.adapted, passages, mean=True)
    public = _losses(target, target.public, passages, mean=True)
    calibrated = likelihood + public
    whole = [replace(passage, prompt="", ending=passage.text) for passage in passages]
    perplexity = np.exp(np.minimum(_losses(target, target.adapted, whole, mean=True), _LARGEST_LOG))
    scores = {"likelihood": likelihood, "calibrated": calibrated, "perplexity": -perplexity}
    scores |= own_scores(-likelihood, public)
    count = len(members)
    found = {name: _membership_figures(values[:count], values[count:]) for name, values in scores.items()}
    return {"membership": found}


def non_members(target: Target) -> Path:
    """The file of records that did not train, and are alike those that did."""
    return SPLITS / "attack.parquet" if target.fixed else EVAL


def _label_membership(target: Target) -> dict[str, Any]:
    """Training records against others by the likelihood of their own label, of the tuned and of the base model."""
    losses: dict[str, list[NDArray[np.float64]]] = {"tuned": [], "base": []}
    for path in (SPLITS / "train.parquet", non_members(target)):
        records = read_records(path)
        chosen = np.random.default_rng(target.settings.seed).permutation(len(records.record))[: target.settings.records]
        found = [Record(decode_content(records.text[int(one)].as_py(), target.form), 0, path.name, 0) for one in chosen]
        tokens = labelled_tokens(found, target.tokenizer, target.cell.training.max_length, target.cell.task.labels)
        for name, model in (("tuned", target.adapted), ("base", target.public)):
            probabilities, own = label_probabilities(model, tokens, target.rows)
            with np.errstate(divide="ignore"):
                losses[name].append(-np.log(probabilities[np.arange(len(own)), own]))
    calibrated = [base - tuned for base, tuned in zip(losses["base"], losses["tuned"], strict=True)]
    likelihood = [-tuned for tuned in losses["tuned"]]
    return {"likelihood": _membership_figures(*likelihood), "calibrated": _membership_figures(*calibrated)}


def _sample(records: Records, target: Target) -> list[Passage]:
    """Random records, one of a unit where units have many; the second half of the words is the ending."""
    order = np.random.default_rng(target.settings.seed).permutation(len(records.record))
    if target.cell.unit != RECORD:
        _, first = np.unique(records.unit[order], return_index=True)
        order = order[np.sort(first)]
    stored = records.text.to_pylist()
    contents = (decode_content(stored[index], target.form) for index in order[: target.settings.records])
    return [passage_of(content, target.tokenizer) for content in contents]


def _membership_figures(members: NDArray[np.float64], others: NDArray[np.float64]) -> dict[str, Any]:
    """Figures of a membership attack for the report, and its whole ROC curve for a picture."""
    curve = roc(members, others)
    points = {
        "false_positive_rate": curve.false_positive_rate.tolist(),
        "true_positive_rate": curve.true_positive_rate.tolist(),
    }
    return {**membership_report(members, others), "roc": points}


def _losses(target: Target, model: Any, passages: list[Passage], *, mean: bool = False) -> NDArray[np.float64]:
    losses = ending_losses(
        model,
        target.tokenizer,
        passages,
        max_length=target.cell.training.max_length,
        rows=target.rows,
        label="likelihoods",
    )
    return losses.mean if mean else losses.total


def crafted_attack(target: Target) -> dict[str, Any]:
    """Bounds from planted gradients: on epsilon, and on the sample rate with which they entered batches."""
    canaries = read_crafted(target.directory)
    if canaries is None:
        return {}
    found = _one_run(target, canaries.scores, canaries.included)
    members, others = canaries.scores[canaries.included], canaries.scores[~canaries.included]
    shown = {**found, "auc": auc(members, others), "watched": canaries.watched, "releases": target.contents.releases}
    rates = {release.sample_rate for release in target.contents.composition}
    draw = audited_sample_rate(
        canaries.scores,
        canaries.included,
        canaries.moves,
        max(rates),
        target.settings.confidence,
        target.alarm_confidence,
        OsEntropy(),
    )
    return {"crafted": shown, "draw": draw.to_dict()}


def sampling_audit(target: Target) -> dict[str, Any]:
    """Compare new draws from the run's own units and plan with the sample rate in its ledger.

    Allowed under private telemetry: if sampling is right, the p-values have the same law whatever the data is.
    """
    cell = target.cell
    corpus = corpus_of(cell, TRAIN, target.tokenizer)
    units, expected_batch_size = units_of(cell, corpus)
    records = len(corpus.tokens.rows)
    # The ledger holds the rate of a unit's own group, which with b bands is b times the plain sample rate.
    charged = min(target.contents.composition, key=lambda release: release.sample_rate)
    bands, run_id = len(charged.coefficients) or 1, target.contents.header.run_id
    rate = plan_of(cell.training, len(units), expected_batch_size).sample_rate
    found = audit_draw(
        units.with_slots(np.ones(cell.crafted, dtype=bool)),
        np.zeros(records, dtype=bool) if corpus.absent is None else corpus.absent,
        min(1.0, bands * rate),
        charged.sample_rate,
        1 - target.alarm_confidence,
        OsEntropy(),
        [Turn.of(run_id, bands, row, charged.dealt_by) for row in range(bands)],
    )
    return {"sampling": found.to_dict()}


def step_attack(target: Target) -> dict[str, Any]:
    """Attack one private step of the cell's mechanism, with the noise in the ledger and made-up gradients.

    Raises: DataError if the step that was attacked is none that the ledger was charged for.
    """
    composition, settings = target.contents.composition, target.settings
    if not settings.step_trials or any(release.coefficients for release in composition):
        return {}
    charged = min(composition, key=lambda release: release.noise_multiplier)
    dimension = int(dict(charged.claims).get("dimension", 0))
    options = of_model(target.cell.mechanism, target.cell.options, len(trained_blocks(target.adapted)), dimension)
    if takes_noise(target.cell.mechanism, options):
        options["noise_multiplier"] = charged.noise_multiplier
    inherits = options.pop("init_from", None)  # a hyper-policy moves the radii, which the attack scales away
    mechanism = build(target.cell.mechanism, options)
    found = audit_step(
        mechanism,
        trials=settings.step_trials,
        confidence=settings.confidence,
        delta=target.cell.delta,
        entropy=OsEntropy(),
    )
    # The ledger names what a hyper-policy leaked; that is no part of this step.
    attacked = replace(found.release, raw_inputs=charged.raw_inputs) if inherits else found.release
    check_audited(attacked, charged, RunFolder(target.directory).ledger)
    # The certified figures are those of the ledger, whatever was attacked; the attacked sample is in every batch.
    certified = certificate(Counter({replace(charged, sample_rate=1.0): 1}), target.cell.delta)
    verdict = judged(found, certified, settings.false_alarms, target.checks)
    figures: dict[str, Any] = {
        "scene": found.scene,
        "trials": found.trials,
        "mu_audited": found.mu_audited,
        "epsilon_audited": found.epsilon_audited,
        **price(mechanism, Schedule(1.0, 1, target.cell.delta)).to_dict(),
        **verdict.to_dict(),
    }
    return {"step": figures | jsonable({key: value for key, value in figures.items() if isinstance(value, float)})}


def check_audited(audited_release: Release, charged_release: Release, ledger: Path) -> None:
    """Check that the attacked step is the ledger's, but for the sample rate: else its audit is not about this run.

    Raises: DataError that names what differs.
    """
    expected = replace(charged_release, sample_rate=audited_release.sample_rate)
    pairs = [(item.name, getattr(audited_release, item.name), getattr(expected, item.name)) for item in fields(Release)]
    different = [f"{name} {_shortly(ours)} in place of {_shortly(its)}" for name, ours, its in pairs if ours != its]
    if different:
        problem = f"was charged for another step than the one that was attacked, which has {'; '.join(different)}"
        raise DataError(problem, fix="audit with the code and options that the run was made with", file=ledger)


def _shortly(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]


#: The attacks on a cell, in the order in which they are made: functions from ``Target`` to figures by the keys of their
#: parts (``tasks.audit.registry``); those that do not apply to the cell are left out.
ATTACKS: dict[str, Callable[[Target], dict[str, Any]]] = {
    "canaries": canary_attacks,
    "membership": record_membership,
    "crafted": crafted_attack,
    "sampling": sampling_audit,
    "step": step_attack,
}
