"""An ensemble on disk: one LoRA adapter for each shard, and notes on its tuning. All of it is private.

    ensemble/
      ensemble.json         number of models, key of the partition, fingerprint of the base, LoRA scaling
      shard-000/            adapter_model.safetensors, adapter_config.json, shard.json

A shard without records has an adapter too, untouched, which is the public model.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.core.files import private_directory, read_json, write_json
from dptune.core.settings import RECORD, Lora, ShardTuning, check_unit
from dptune.job.base_model import Base
from dptune.training.data import Tokens
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.stacked_adapters import StackedAdapters
from dptune.training.models.model import assert_frozen, frozen_fingerprint, train_adapters, trainable_state
from dptune.training.models.own_weights import groups_of, save_trained
from dptune.training.models.pretrain import fit
from dptune.training.models.weight_files import read_tensors

_MANIFEST = "ensemble.json"
_SHARD = "shard.json"


@dataclass(frozen=True)
class Manifest:
    """The description of an ensemble. Public: it tells nothing about any record.

    Attributes:
        models: number of slots.
        key: unit that is never split between shards, "record" or the name of a column.
        base: fingerprint of the base model's weights.
        source: hub id or folder of the base model.
        revision: its commit, for a hub id.
        dtype: dtype of the base model's weights.
        data: label of the records' source, "synthetic" included.
        protocol: options of the protocol that it answers by, its budget among them; empty if it serves nobody.
        telemetry: "research" if figures computed from its models were ever published, else "private", which is
            also what the ledgers of manifests without it say.
        form: what the records are: texts, prompts with targets, or chats (``dptune.records.parquet_file.FORMS``).
        load_in_4bit: whether the base model's linear layers are held in 4 bits.
    """

    models: int
    key: str
    base: str
    source: str
    revision: str | None
    dtype: str
    data: str
    protocol: dict[str, Any]
    telemetry: str = "private"
    form: str = "text"
    load_in_4bit: bool = False


def shard_directory(ensemble: Path, shard: int) -> Path:
    """The folder of a shard's adapter."""
    return ensemble / f"shard-{shard:03d}"


def tune_shard(base: Base, tuning: ShardTuning, tokens: Tokens, shard: int, key: str, ensemble: Path) -> None:
    """Tune one shard's adapter on a fresh copy of the base, and write it. Not private by itself.

    The model is opened, checked and given adapters as for a run of ``dptune.job``. It is then trained as PMixED's paper
    trains it, with neither clipping nor noise. A ``RunSpec`` would not fit: its ledger names how many units train,
    which of one shard is private, and lists releases, of which training makes none; each answer pays when it is given.

    No other shard has any influence: the base is loaded anew, the adapter starts at B = 0, and its random numbers have
    a seed of their own.

    Args:
        base: the base model, opened with the adapters' settings.
        key: unit that is never split between shards; see ``dptune.prediction.ensemble``.

    Raises: ConfigError for adapters that cannot be stacked, before any weight is read, and as ``Base.start``.
    """
    _check_stacks(base.lora)
    peft, device = base.start(tuning.seed), base.device
    fingerprint, vocabulary = frozen_fingerprint(peft), peft.config.vocab_size
    rehearse(peft, groups_of(peft))  # answers come from one pass over the public and a private row: they may not mix
    for name, parameter in peft.named_parameters():
        if "lora_B" in name and bool(parameter.any()):
            raise RuntimeError(f"{name} does not start at 0: it holds weights of an earlier training")
    if tokens.rows:
        initial = trainable_state(peft)
        train_adapters(peft)
        # Dropout draws from torch's own generator, whose state would follow what was tuned before.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(tuning.seed + shard)
            _fit(peft, tokens, tuning, shard)
        _check_tuned(peft, initial, fingerprint)
    directory = private_directory(shard_directory(ensemble, shard))
    save_trained(peft, directory)
    write_json(directory / _SHARD, {"base": fingerprint, "vocabulary": vocabulary, "key": key})


def _check_stacks(lora: Lora) -> None:
    """Raise ConfigError for adapters that an ensemble cannot stack: it scales all layers alike, and starts at B = 0."""
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(lora, name):
            raise ConfigError(f"lora.{name}", "is not for ensembles: they scale all layers alike", fix="leave it out")
    if lora.init_lora_weights == "orthogonal":
        problem = "orthogonal is not for ensembles, whose adapters start at B = 0"
        raise ConfigError("lora.init_lora_weights", problem, fix="use true or gaussian")


def _fit(peft: Any, tokens: Tokens, tuning: ShardTuning, shard: int) -> None:
    fit(
        peft,
        tokens,
        epochs=tuning.epochs,
        batch_size=tuning.batch_size,
        learning_rate=tuning.learning_rate,
        seed=tuning.seed + shard,
        description=f"tuning shard {shard}",
        schedule=tuning.schedule,
    )


def _check_tuned(peft: Any, initial: dict[str, torch.Tensor], fingerprint: str) -> None:
    """Check that the frozen weights did not change, and reset an adapter that is not finite to its start.

    Nothing else is refused: whether an ensemble can be built must not depend on any record.
    """
    assert_frozen(peft, fingerprint)
    adapter = {name: parameter for name, parameter in peft.named_parameters() if parameter.requires_grad}
    if not all(bool(torch.isfinite(parameter).all()) for parameter in adapter.values()):
        with torch.no_grad():
            for name, parameter in adapter.items():
                parameter.copy_(initial[name])


def is_tuned(ensemble: Path, shard: int) -> bool:
    """Whether the shard is complete: whether its note is there, which is written last."""
    return (shard_directory(ensemble, shard) / _SHARD).exists()


def write_manifest(ensemble: Path, manifest: Manifest) -> None:
    """Write the manifest, after the last shard: it marks the ensemble as complete."""
    write_json(ensemble / _MANIFEST, asdict(manifest))


def read_manifest(ensemble: Path) -> Manifest:
    """Read the manifest of a complete ensemble.

    Raises: ConfigError if there is none, or it is damaged.
    """
    try:
        return Manifest(**read_json(ensemble / _MANIFEST))
    except (OSError, ValueError, TypeError):
        problem = f"{ensemble} holds no whole ensemble"
        raise ConfigError("ensemble", problem, fix="run `python -m flows.prediction`, which tunes one") from None


def known_manifest(ensemble: Path) -> Manifest | None:
    """Read the manifest of an ensemble; None if the ensemble was never complete.

    Raises: ConfigError if the manifest is damaged.
    """
    return read_manifest(ensemble) if (ensemble / _MANIFEST).exists() else None


def load_adapters(ensemble: Path, manifest: Manifest, model: Any, device: torch.device) -> StackedAdapters:
    """Load and stack all adapters for ``model``, a base all of whose parameters are frozen.

    Raises: ConfigError for a shard without adapter, of another base or vocabulary, or of another shape.
    """
    fingerprint = frozen_fingerprint(model)
    if manifest.base != fingerprint:
        raise ConfigError("model", "is not the base that the ensemble was tuned on", fix="give it the same checkpoint")
    found, scalings = [], set()
    for shard in range(manifest.models):
        adapter, scaling = _read_shard(shard_directory(ensemble, shard), fingerprint, model.config.vocab_size, manifest)
        found.append(adapter)
        scalings.add(scaling)
    if len(scalings) != 1:
        raise ConfigError("ensemble", "its shards have different LoRA scalings", fix="tune all of them alike")
    return StackedAdapters.of(found, scalings.pop(), device)


def _read_shard(
    directory: Path, base: str, vocabulary: int, manifest: Manifest
) -> tuple[dict[str, torch.Tensor], float]:
    try:
        about = read_json(directory / _SHARD)
        config = read_json(directory / "adapter_config.json")
        adapter = read_tensors(directory / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        problem = f"{directory} has no adapter ({type(error).__name__})"
        raise ConfigError("ensemble", problem, fix="tune that shard again") from None
    if about["vocabulary"] != vocabulary:
        problem = f"{directory} has a vocabulary of {about['vocabulary']}, the base one of {vocabulary}"
        raise ConfigError("ensemble", problem, fix="tune all shards on one base")
    if about["base"] != base:
        raise ConfigError("ensemble", f"{directory} was tuned on another base", fix="tune that shard again")
    if about["key"] != manifest.key:
        problem = f"{directory} holds records by {about['key']}, the ensemble says by {manifest.key}"
        raise ConfigError("ensemble", problem, fix="tune the ensemble again")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in adapter.values()):  # tuning leaves none that are not
        problem = f"{directory / 'adapter_model.safetensors'} holds numbers that are not finite: it was damaged"
        raise ConfigError("ensemble", problem, fix="restore it, or tune that shard again")
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    return adapter, config["lora_alpha"] / root


# Assigns records to shards by a keyed hash of each record, so that one that joins or leaves moves no other.


def shard_of(text: str, unit: int, key: str, models: int, salt: bytes) -> int:
    """The shard of one record, from 0. It depends on nothing but that record and public or secret constants.

    Args:
        unit: key of the record's unit.
        key: "record" hashes the text; the name of a column of units hashes ``unit``.
        salt: secret; without it, guesses of a record could be tested against shards.
    """
    name = text if key == RECORD else str(unit)
    digest = hmac.digest(salt, f"{key}:{name}".encode(), "sha256")
    return int.from_bytes(digest, "big") % models


def partition(texts: Sequence[str], units: NDArray[Any], key: str, models: int, salt: bytes) -> list[NDArray[np.int64]]:
    """The indices of each shard's records, in ascending order. Empty texts (canaries left out) are in no shard.

    Adding or removing one record changes one shard. If ``key`` is a column, so does one unit with all its records.
    Sizes of shards depend on the records and are private.

    Raises: ConfigError for an unknown key, or fewer than one model.

    Example:
        >>> import numpy as np
        >>> from dptune.prediction.ensemble import partition
        >>> texts = [f"Order {n} is late." for n in range(6)]
        >>> shards = partition(texts, np.arange(6), key="record", models=2, salt=b"a secret of 16 bytes")
        >>> sorted(np.concatenate(shards).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    check_unit(key, "prediction.partition")
    if models < 1:
        raise ConfigError("prediction.models", f"{models} is not positive", fix="use 1 or more")
    shards: list[list[int]] = [[] for _ in range(models)]
    for index, (text, unit) in enumerate(zip(texts, units, strict=True)):
        if text:
            shards[shard_of(text, int(unit), key, models, salt)].append(index)
    return [np.array(shard, dtype=np.int64) for shard in shards]
