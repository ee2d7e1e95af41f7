"""Weights in a run's folder, before and after it is finished, and the form in which they are delivered."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dptune.core.errors import DptuneError, first_line
from dptune.core.files import read_json, sha256
from dptune.job.delivery.named_base import BASE
from dptune.privacy.run_folder import RunFolder
from dptune.training.models.model_names import ADAPTER, CHANGED, CHANGED_WEIGHTS


@dataclass(frozen=True)
class DeliveredForm:
    """A form in which trained weights are delivered. Public.

    Attributes:
        noun: what the card calls them.
        weights: name of the file of weights.
        config: name of the file that says how they are loaded.
    """

    noun: str
    weights: str
    config: str


#: LoRA adapters, loaded by PEFT; a whole checkpoint, loaded by ``from_pretrained``; or weights that take the place of
#: the base model's own.
LORA = DeliveredForm("adapter", "adapter_model.safetensors", ADAPTER)
CHECKPOINT = DeliveredForm("checkpoint", "model.safetensors", "config.json")
PART = DeliveredForm("changed weights", CHANGED_WEIGHTS, CHANGED)
FORMS = (LORA, PART, CHECKPOINT)


def form_of(train: str) -> DeliveredForm:
    """The form in which the weights of a run are delivered.

    Args:
        train: what trained, as the header of its ledger names it.

    >>> form_of("layers: last 2").weights, form_of("bias").weights
    ('model.safetensors', 'changed_weights.safetensors')
    """
    kind = train.partition(":")[0]
    return LORA if kind == "lora" else CHECKPOINT if kind in ("all", "layers") else PART


def form_within(folder: Path) -> DeliveredForm | None:
    """The form of the weights in a folder that was delivered; None of another folder, such as a base model's."""
    found = (form for form in FORMS if (folder / form.config).is_file())
    return next((form for form in found if form is not CHECKPOINT or (folder / BASE).is_file()), None)


def weights_file(folder: Path) -> Path:
    """The file of the trained weights in the folder of a run's adapter; an adapter's, where there is none."""
    return next((folder / form.weights for form in FORMS if (folder / form.weights).is_file()), folder / LORA.weights)


def check_names(folder: Path, train: str) -> None:
    """Check that changed weights are those that are listed beside them, and what the ledger says that trained.

    Weights of another form pass: an adapter and a checkpoint are whole, and their digests are on the card.

    Args:
        train: what trained, as the header of the ledger names it.

    Raises: DptuneError naming a weight that is not listed, or is missing; DamagedFileError for a file that cannot be
        read.
    """
    if form_of(train) is not PART:
        return
    weights, fix = folder / PART.weights, "take the whole folder that the run delivered"
    listed, said = read_json(folder / PART.config, lambda one: (set(one["weights"]), one["train"]), fix=fix)
    try:
        with safe_open(weights, framework="np") as file:
            found = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise DptuneError(f"{weights}: cannot be read ({first_line(error)}). Fix: {fix}.") from None
    if other := next(iter(sorted(listed ^ found)), ""):
        problem = f"{weights}: {'lacks' if other in listed else 'holds'} {other}, which {PART.config} "
        raise DptuneError(f"{problem}{'lists' if other in listed else 'does not list'}. Fix: {fix}.")
    if said != train:
        raise DptuneError(f"{folder / PART.config}: says that {said} trained, and the ledger {train}. Fix: {fix}.")


def partial_of(folder: RunFolder) -> Path:
    """The folder that holds the weights until the ledger is finished."""
    return folder.adapter.with_name(".adapter.partial")


@contextmanager
def written_adapter(model: Any, folder: RunFolder) -> Iterator[Path]:
    """Context that gives the partial folder with the run's weights in it; an error within it removes the folder.

    On a full disk, what stays would make the next try fail too.
    """
    from dptune.training.models.own_weights import save_trained  # torch takes seconds, and ``weights_in`` needs none

    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_trained(model, partial)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def adapter_digest(run: Path) -> str:
    """Digest of the trained weights, which ties the result and the ledger to them."""
    return sha256(weights_file(RunFolder(run).adapter))


def weights_in(run: Path) -> list[Path]:
    """Whatever holds weights in a run's folder: adapter and checkpoint, also where a kill left a half of them."""
    folder = RunFolder(run)
    whole = (folder.adapter, partial_of(folder), folder.checkpoint)
    half = sorted(run.glob(f".{folder.checkpoint.name}.*"))
    return [path for path in (*whole, *half) if path.exists() or path.is_symlink()]
