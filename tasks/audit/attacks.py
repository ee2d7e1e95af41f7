"""Attacks on one finished cell: its adapter, step and sampling. They write only data/audits/<run>/audit.json."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.text.extraction import (
    before_secret,
    chance,
    compare,
    exposures,
    instruction,
    recites,
    sample_endings,
)
from dptune.audit.text.likelihood import Passage, ending_tokens, passage_ids, passage_of, token_scores
from dptune.audit.text.membership import alignment_scores, membership_report, own_scores, rmia, roc, score_plugins
from dptune.core.declarations import plain
from dptune.core.files import jsonable, sha256, write_json
from dptune.core.settings import RECORD
from dptune.privacy.run_folder import RunFolder
from dptune.records.canaries import SECRET_LENGTH, Canary, content_with
from dptune.records.diabetes.narratives import public_texts
from dptune.records.parquet_file import Records, decode_content, encode_content, read_records
from dptune.records.reading.record import Record
from dptune.training.evaluation import label_probabilities
from dptune.training.tokens.encoding import labelled_tokens, stored_tokens
from tasks.audit.mechanism_attacks import crafted_attack, one_run_figures, sampling_audit, step_attack
from tasks.audit.registry import comparisons, parts, violations
from tasks.audit.target import Target, load_target, shadow_scores
from tasks.experiment.preparation import corpus_of
from tasks.experiment.quality import first
from tasks.identity import code_digest
from tasks.paths import AUDITS, EVAL, PUBLIC_VALIDATION, SPLITS, TRAIN, planted_secrets
from tasks.settings.experiment import Audit

#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 5
_log = logging.getLogger(__name__)
_Strings = TypeVar("_Strings", tuple[str, str], tuple[str, str, str])
_NO_SECRET = "0" * SECRET_LENGTH
_CONTEXTS, _GENERATED_ROWS = 8, 512
_PUBLIC_TEXTS = 256  # texts whose gradients the alignment score holds back
_MOST_NUMBERS = 1 << 28  # entries of the gradients that the alignment score keeps: one gibibyte
_LARGEST_LOG = 700.0  # the logarithm of the largest perplexity that a float can hold, roughly


def audit_cell(directory: Path, settings: Audit, device: str, cells: int = 1, seeds: int = 1) -> dict[str, Any]:
    """Run every attack on the cell in ``directory``, write the audit and return it.

    Args:
        cells: number of cells that are audited together; they share the chance ``settings.false_alarms``.
        seeds: number of them that differ by their seed alone; their bounds on one figure hold together at
            ``settings.confidence``.

    Raises: DataError if the run is not finished, its ledger missing or damaged, or data, secrets or model are not
    those that it was trained with.
    """
    checks = cells * comparisons()
    target = load_target(directory, settings, torch.device(device), checks, seeds)
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
    """A digest of all that decides an audit: the run, the settings, the secrets, the attacks and their version."""
    content = [json.dumps(plain(settings), sort_keys=True), str(VERSION), *sorted(ATTACKS)]
    content += map(str, score_plugins())
    read = (RunFolder(directory).ledger, RunFolder(directory).crafted, planted_secrets(), TRAIN, EVAL)
    content += [_digest(path, os.stat(path)) for path in read if path.exists()]
    return hashlib.sha256("".join(content).encode()).hexdigest()[:16]


def _digest(path: Path, stat: os.stat_result) -> str:
    return _digest_of(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _digest_of(path: Path, *_: int) -> str:
    """The SHA-256 of a file, kept while its size and time stay the same: all audits read the same records."""
    return sha256(path)


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
    """Texts that the model generates where a secret would follow, after public texts that carry none, or prompts."""
    settings = target.settings
    texts = public_texts(
        min(_CONTEXTS, settings.generations), settings.seed, "contexts", target.source, target.template
    )
    shares = np.array_split(np.arange(settings.generations), len(texts))
    samples, asked = list[str](), settings.prompt == "instruction"
    for text, share in zip(texts, shares, strict=True):
        samples += sample_endings(
            target.adapted,
            target.tokenizer,
            len(share),
            rows=_GENERATED_ROWS,
            seed=settings.seed + len(samples),
            prompt=instruction(text) if asked else before_secret(target.passage(text, _NO_SECRET), _NO_SECRET),
        )
    return samples


def _coin_attacks(target: Target) -> dict[str, Any]:
    """Attacks that guess which audit canaries are in the data: members and non-members differ by a coin alone."""
    settings = target.settings
    triples = {(one.carrier, one.secret, one.kind): one for one in target.secrets.audit}
    canaries = [triples[triple] for triple in _uncut(target, list(triples))]
    if not canaries:
        return {}
    included = np.array([bool(one.included) for one in canaries])
    passages = [target.passage(one.carrier, one.secret, one.kind) for one in canaries]
    scores, public = _text_scores(target, passages)
    aligned = _can_align(target, len(canaries))
    if aligned:
        scores["alignment"] = _alignment(target, canaries)
    if settings.shadows:
        scores |= shadow_scores(target, canaries, passages, scores["calibrated"], public)
    # The bound holds for a score that was chosen without the coins: settings and sizes choose it here.
    best = "alignment" if aligned else "rmia" if settings.shadows else "calibrated"
    # A client has many records: one of them in or out is no statement about a client.
    bound = (
        {} if target.contents.header.unit == "client" else {"one_run": one_run_figures(target, scores[best], included)}
    )
    return {
        **bound,
        "canaries": {name: _membership_figures(values[included], values[~included]) for name, values in scores.items()},
    }


def _text_scores(
    target: Target, passages: list[Passage], *, mean: bool = False
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """(texts,) of every score of texts by the losses of both models, by name; and the public model's losses."""
    told = [
        ending_tokens(
            model,
            target.tokenizer,
            passages,
            max_length=target.cell.training.max_length,
            rows=target.rows,
            label="likelihoods",
        )
        for model in (target.adapted, target.public)
    ]
    lengths = np.array([max(1, len(one)) for one in told[0].losses])
    sums, of_public = (np.array([one.sum() for one in of.losses]) for of in told)
    adapted, public = (sums / lengths, of_public / lengths) if mean else (sums, of_public)
    ratios = rmia(sums / lengths, of_public[None] / lengths)
    plain = {"likelihood": -adapted, "calibrated": public - adapted, "rmia": ratios}
    return {**plain, **token_scores(*told), **own_scores(adapted, public)}, public


def _can_align(target: Target, canaries: int) -> bool:
    """Whether the gradients of all canaries fit in memory. Logs a warning if not."""
    trained = target.base.dimension
    if trained * (canaries + _PUBLIC_TEXTS) <= _MOST_NUMBERS:
        return True
    _log.warning("no alignment score: %d gradients of %d numbers are too many to keep", canaries, trained)
    return False


def _start(target: Target) -> Any:
    """The model as the cell started to train it."""
    return target.base.start(target.cell.seed).eval()


def _alignment(target: Target, canaries: list[Canary]) -> NDArray[np.float64]:
    """(canaries,) how far the trained weights moved along each one's gradient."""
    cell, limit = target.cell, target.cell.training.max_length
    texts = [encode_content(content_with(one.carrier, one.secret, target.form, one.kind)) for one in canaries]
    tokens = stored_tokens(texts, target.tokenizer, form=target.form, file="canaries", max_length=limit)
    public = corpus_of(cell, PUBLIC_VALIDATION, target.tokenizer).tokens
    return alignment_scores(_start(target), target.adapted, tokens, first(public, _PUBLIC_TEXTS), rows=target.rows)


def _uncut(target: Target, planted: list[_Strings]) -> list[_Strings]:
    """The (text, secret) pairs, or with their kind, that training did not cut before the secret's end.

    One without a text before its secret is kept: training saw its beginning. Logs a warning about the others.
    """
    limit = target.cell.training.max_length
    lengths = map(len, passage_ids(target.tokenizer, [target.passage(*one) for one in planted]))
    whole = [pair for pair, length in zip(planted, lengths, strict=True) if length < limit or not pair[0]]
    if len(whole) < len(planted):
        _log.warning(
            "%d of %d canaries lie beyond the %d tokens of training.max_length and show nothing",
            len(planted) - len(whole),
            len(planted),
            limit,
        )
    return whole


def record_membership(target: Target) -> dict[str, Any]:
    """Training records against held-out ones: by what is answered given the prompt, or the second half of a text given
    the first.

    The likelihood's figures are those of RLDP's paper (arXiv 2507.22565, equations 37 to 39) too: the mean
    log-probability and the mean perplexity of the endings of all these records, and one AUC, for both rank alike.
    """
    if not target.settings.records or not len(read_records(non_members(target)).record):
        return {}
    if target.cell.task.classifies:
        return {"membership": _label_membership(target)}
    members, others = (_sample(read_records(path), target) for path in (SPLITS / "train.parquet", non_members(target)))
    scores, _ = _text_scores(target, [*members, *others], mean=True)
    count, likelihood = len(members), scores["likelihood"]
    found = {name: _membership_figures(values[:count], values[count:]) for name, values in scores.items()}
    found["likelihood"] |= {
        "mean_log_probability": float(likelihood.mean()),
        "mean_perplexity": float(np.exp(np.minimum(-likelihood, _LARGEST_LOG)).mean()),
    }
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


#: The attacks on a cell, in the order in which they are made: functions from ``Target`` to figures by the keys of their
#: parts (``tasks.audit.registry``); those that do not apply to the cell are left out.
ATTACKS: dict[str, Callable[[Target], dict[str, Any]]] = {
    "canaries": canary_attacks,
    "membership": record_membership,
    "crafted": crafted_attack,
    "sampling": sampling_audit,
    "step": step_attack,
}
