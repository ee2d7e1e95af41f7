"""Ensembles' plans: settings, folder, shards, protocols; and the tuning of shards.

python -m tasks.prediction.ensembles data/ensembles/<ensemble>/plan.json PART PARTS [--device cuda:0]

Processes share the shards, and a kill costs one shard of each. Shards share neither weights nor random numbers, so that
none depends on the process that tunes it, nor on what that one tuned before.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.core.declarations import plain
from dptune.core.errors import ConfigError
from dptune.core.files import private_directory, write_json, write_text
from dptune.core.settings import Lora, ScheduleSettings, ShardTuning
from dptune.job.base_model import Base
from dptune.prediction import ensemble
from dptune.prediction.deployment import SERVED_OPTIONS, has_answered
from dptune.prediction.ensemble import partition
from dptune.prediction.protocols import FixedMixture, Published
from dptune.records.parquet_file import form_at, read_about, read_records
from dptune.training.data import Tokens
from dptune.training.models.model import frozen_fingerprint
from tasks.experiment.cells import digests
from tasks.experiment.preparation import check_read, corpus_at, job_settings, open_model, token_file
from tasks.identity import name_digest
from tasks.paths import ENSEMBLES, TRAIN
from tasks.settings.experiment import Model
from tasks.settings.params import Settings
from tasks.settings.prediction import Prediction, Serve
from tasks.settings.strict import StrictModel, read_plan
from tasks.shared_work import make_part
from tasks.stage import run_command

#: Version of the tuning of ensembles, part of their names. Raise it when a change moves their weights: tests/golden
#: says when. A change of what only answers does not call for tuning again.
VERSION = 1
_LONGEST_NAME = 64  # the most characters of a column's name in the name of a folder
PLAN, _SALT = "plan.json", "salt"


class EnsemblePlan(StrictModel):
    """Everything that decides an ensemble. Public; the salt of its partition lies in its folder."""

    model: Model
    models: int
    partition: str
    lora: Lora
    tuning: ShardTuning
    max_length: int
    inputs: dict[str, str]
    version: int = 1

    @property
    def directory(self) -> Path:
        """The ensemble's own folder under data/ensembles."""
        by = re.sub(r"[^\w.-]", "_", self.partition)[:_LONGEST_NAME]
        return ENSEMBLES / f"{self.models}-by-{by}-{name_digest(plain(self))}"


def plans(settings: Settings) -> list[EnsemblePlan]:
    """Plan an ensemble for each number of models, on the experiment's first base model."""
    model, chosen = next(iter(settings.experiment.models.values())), settings.prediction
    inputs = digests(model, {})
    return [
        EnsemblePlan(
            model=model,
            models=models,
            partition=chosen.partition,
            lora=settings.lora,
            tuning=chosen.tuning,
            max_length=settings.training.max_length,
            inputs=inputs,
            version=VERSION,
        )
        for models in dict.fromkeys(chosen.models)
    ]


def served_protocol(serve: Serve, settings: Prediction, delta: float) -> FixedMixture:
    """The protocol that answers prompts.

    Raises: ConfigError naming the setting that is out of range.
    """
    alpha = settings.alphas_at(serve.epsilon, delta)[0]
    return FixedMixture(alpha=alpha, delta=delta, **serve.model_dump())


def scored_protocols(settings: Prediction, models: int, delta: float) -> dict[str, FixedMixture | Published]:
    """Every protocol that is scored on an ensemble of ``models`` models, by a short name.

    Raises: ConfigError naming the setting that is out of range.
    """
    protocols: dict[str, FixedMixture | Published] = {}
    for epsilon, tokens in itertools.product(settings.epsilons, settings.tokens):
        alphas = settings.alphas_at(epsilon, delta)
        for alpha in alphas:
            common: dict[str, Any] = {
                "epsilon": epsilon,
                "delta": delta,
                "tokens": tokens,
                "models": models,
                "alpha": alpha,
            }
            order = f".a{str(alpha).removesuffix('.0')}" if len(alphas) > 1 else ""
            where = f"eps{epsilon:g}.T{tokens}.N{models}{order}"
            if math.isinf(alpha):  # appendix B: without sampling, and with no provable variant of ours
                protocols[f"pmixed_published.{where}.q1"] = Published(subsample=1.0, **common)
                continue
            for unit, weight in itertools.product(settings.units, settings.public_weights):
                mixture = FixedMixture(public_weight=weight, unit=unit, **common)
                protocols[f"pmixed.{unit}.{where}.w{weight:g}"] = mixture
            for subsample in settings.subsamples:
                published = Published(subsample=subsample, with_replacement=settings.with_replacement, **common)
                protocols[f"pmixed_published.{where}.q{subsample:g}"] = published
    return protocols


def open_plan(plan: EnsemblePlan) -> None:
    """Make the ensemble's folder, with its plan and a secret salt of its own."""
    directory = private_directory(plan.directory)
    write_json(directory / PLAN, plan.model_dump(mode="json"))
    if not (directory / _SALT).exists():
        write_text(directory / _SALT, secrets.token_hex(32))


def tune_part(plan: EnsemblePlan, part: int, parts: int, device: str) -> None:
    """Tune the shards that are not complete and that no other process tunes. Raises: as ``make_part``.

    A shard whose process died is tuned again from its start.
    """
    make_part(
        "shard",
        range(plan.models),
        part,
        parts,
        lock=lambda shard: plan.directory / f"shard-{shard:03d}.lock",
        is_made=lambda shard: ensemble.is_tuned(plan.directory, shard),
        make=lambda shard: tune(plan, shard, device),
    )


def tune(plan: EnsemblePlan, shard: int, device: str) -> None:
    """Tune one shard."""
    base = base_of(plan, device)
    ensemble.tune_shard(
        base, plan.tuning, shard_tokens(plan, base.tokenizer, shard), shard, plan.partition, plan.directory
    )


def base_of(plan: EnsemblePlan, device: str) -> Base:
    """Check the ensemble's model and tokenizer as a cell's, without reading weights. Raises: ConfigError."""
    tuning = plan.tuning
    schedule = ScheduleSettings(
        expected_batch_size=tuning.batch_size,
        epochs=tuning.epochs,
        learning_rate=tuning.learning_rate,
        max_length=plan.max_length,
        records_per_unit=1,
    )
    return open_model(plan.model, job_settings(plan.model, None, plan.lora, schedule, device))


def shard_tokens(plan: EnsemblePlan, tokenizer: Any, shard: int) -> Tokens:
    """The records of one shard. Private. Raises: ConfigError as ``tokens_of``."""
    records = read_records(TRAIN)
    texts = [str(text) for text in records.text.to_pylist()]
    salt = (plan.directory / _SALT).read_text(encoding="utf-8").encode()
    dealt = partition(texts, records.unit, plan.partition, plan.models, salt)[shard]
    every = tokens_of(plan, TRAIN, tokenizer)
    return Tokens([every.rows[index] for index in dealt], every.padding, every.width)


def tokens_of(plan: EnsemblePlan, records: Path, tokenizer: Any) -> Tokens:
    """The token ids of a file of records; prompts have no loss. Private.

    Raises: ConfigError if data or model are no longer those of the plan.
    """
    path = token_file(records, plan.inputs, plan.max_length)
    found = corpus_at(path, records, tokenizer, plan.max_length).tokens
    check_read(plan.model, "plan", plan.inputs, [path])
    return found


def close_plan(plan: EnsemblePlan, protocol: FixedMixture | None, telemetry: str) -> None:
    """Write the manifest, which says that the ensemble is complete, and by which protocol it answers.

    Call it before anything computed from the ensemble is published.

    Args:
        protocol: the protocol; None for an ensemble that answers nobody.
        telemetry: the experiment's telemetry. Once "research" it stays so: published figures cannot be taken back.

    Raises: ConfigError if the ensemble has answered by another protocol already, or has answered under private
        telemetry, which ``telemetry`` would end.
    """
    options, known = _options(protocol) if protocol else {}, ensemble.known_manifest(plan.directory)
    if known is not None and has_answered(plan.directory):
        if protocol and known.protocol != options:
            changed = sorted(key for key in options if known.protocol.get(key) != options[key])
            problem = f"{plan.directory} has answered with other settings ({', '.join(changed)})"
            raise ConfigError("prediction.serve", problem, fix="restore them: its budget cannot be changed")
        if (known.telemetry, telemetry) == ("private", "research"):
            problem = f"{plan.directory} has answered under private telemetry; research would publish its figures"
            raise ConfigError("experiment.telemetry", problem, fix="set it back to private")
        return
    about = read_about(TRAIN)
    manifest = ensemble.Manifest(
        models=plan.models,
        key=plan.partition,
        base=frozen_fingerprint(base_of(plan, "cpu").load()),
        source=plan.model.source,
        revision=plan.model.revision,
        dtype=plan.model.dtype,
        load_in_4bit=plan.model.load_in_4bit,
        data=str(about["label"]),
        form=form_at(about),
        protocol=options,
        telemetry=known.telemetry if known is not None and known.telemetry == "research" else telemetry,
    )
    ensemble.write_manifest(plan.directory, manifest)


def _options(protocol: FixedMixture) -> dict[str, Any]:
    return {name: getattr(protocol, name) for name in SERVED_OPTIONS}


def main(
    plan: Annotated[Path, typer.Argument(help="plan.json of the ensemble, which the flow writes")],
    part: Annotated[int, typer.Argument(help="number of the part, from 0")],
    parts: Annotated[int, typer.Argument(help="number of parts")],
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Tune the adapters of the shards that are not tuned, beside the processes of the other parts."""
    tune_part(read_plan(EnsemblePlan, plan, "prediction"), part, parts, device)


if __name__ == "__main__":
    run_command(main)
