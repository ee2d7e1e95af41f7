"""Weights of a run, before and after it is finished: their delivered form, and the base model that they belong to.

The base is named in a file of the delivered folder, by which another model under the same name is recognised. Needs no
torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dptune.core.errors import DataError, DptuneError, first_line
from dptune.core.files import read_json, sha256, why_unreadable
from dptune.job.result import RunResult
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.release import DEALT_BY_RANK
from dptune.privacy.run_folder import RunFolder
from dptune.training.models.model_names import ADAPTER, CHANGED, CHANGED_WEIGHTS, rounding


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


def check_weights(run: Path, contents: LedgerContents) -> bool:
    """Check that ledger, result and weights of a study's finished run belong together.

    ``result.json`` is not signed: what somebody changed together with it agrees. Nor does it tell apart the ledgers of
    two runs of the same settings.

    Args:
        run: its folder.
        contents: content of its ledger.

    Returns: False where nothing was compared: of a run that has not ended, and where the result, as that of ``tune``,
        names no digest, or no folder of weights lies beside it.

    Raises: DataError naming the file that is another run's; DamagedFileError for a result that cannot be read.
    """
    folder = RunFolder(run)
    if not folder.is_finished or not folder.adapter.is_dir():
        return False
    result, header = RunResult.read(folder.result), contents.header
    if result.adapter_sha256 is None:
        return False
    same = all(getattr(result, name) == getattr(header, name) for name in _OF_THE_LEDGER)
    prices, stated = contents.epsilons, (result.epsilon_noise_only, result.epsilon_certified)
    # Earlier versions certified what they dealt by rank, at the price of its noise.
    by_rank = set(prices.leaks) == {DEALT_BY_RANK} and math.isfinite(result.epsilon_certified)
    proved = (prices.noise_only, prices.noise_only if by_rank else prices.certified)
    # The price tells apart runs of other noise. A later accountant may price a little lower, but a result that says
    # less than its ledger proves was edited.
    pairs = zip(proved, stated, strict=True)
    priced = all(one * (1 - _SAME_PRICE) <= own <= one * (1 + _ROUNDING) for own, one in pairs)
    counted = (result.budget_epsilon, result.releases) == (header.epsilon, contents.releases)
    if not same or not priced or not counted:
        problem = f"is of another run than {folder.result.name} beside it"
        raise DataError(problem, fix="restore the two files of this run; do not trust them", file=folder.ledger)
    weights = weights_file(folder.adapter)
    if why := why_unreadable(weights):
        raise DataError(why, fix="restore the weights of this run", file=weights)
    if sha256(weights) != result.adapter_sha256:
        problem = f"is not what the run of this ledger wrote, by the SHA-256 in {folder.result.name}"
        raise DataError(problem, fix="restore the weights of this run; do not trust these", file=weights)
    return True


#: Fields of a result that repeat the header of the ledger.
_OF_THE_LEDGER = ("mechanism", "accounting", "unit", "units", "delta", "telemetry", "data")
_SAME_PRICE, _ROUNDING = 0.05, 1e-6


def weights_in(run: Path) -> list[Path]:
    """Whatever holds weights in a run's folder: adapter and checkpoint, also where a kill left a half of them."""
    folder = RunFolder(run)
    whole = (folder.adapter, partial_of(folder), folder.checkpoint)
    half = sorted(run.glob(f".{folder.checkpoint.name}.*"))
    return [path for path in (*whole, *half) if path.exists() or path.is_symlink()]


#: File of a delivered folder. Folders that earlier versions delivered lack it.
BASE = "base.json"
#: What is said of a folder without it.
NO_DIGEST = "an earlier dptune delivered the adapter, without a digest of its base model"


@dataclass(frozen=True)
class NamedBase:
    """The base model of a deliverable, which holds adapters alone. Public.

    Attributes:
        name: a hub id, a package, or the last part of a path.
        revision: the commit of a hub id, or the version of a package; None for a folder or a GGUF file.
        sha256: digest of its configuration and weights, see ``training.weight_files.digest_of_weights``. Of a model
            given from Python, of its numbers in memory (``training.model.frozen_fingerprint``). None where the weights
            were converted while they were loaded, so that no file here holds them.
        in_memory: type of the numbers of a model given from Python, such as "float32", or "4 bits"; None for other
            models.
        kind: GGML's name of the type of most weights of a GGUF file, such as "Q4_1"; None for other models. ``sha256``
            is then that of the file.
    """

    name: str
    revision: str | None
    sha256: str | None
    in_memory: str | None = None
    kind: str | None = None

    @property
    def known_as(self) -> str:
        """Name and revision."""
        return f"{self.name} at {self.revision}" if self.revision else self.name

    @property
    def row(self) -> str:
        """What the card says of it."""
        if self.sha256 is None:
            return f"{self.known_as}; no digest of its weights"
        of = f"its numbers in memory ({self.in_memory})" if self.in_memory else "its configuration and weights"
        row = f"{self.known_as}; SHA-256 of {'its GGUF file' if self.kind else of} {self.sha256}"
        return f"{row}; {rounded}" if self.kind and (rounded := rounding(self.kind)) else row

    def to_dict(self) -> dict[str, Any]:
        """The content of ``BASE``. Only a GGUF file has a kind, so that earlier versions read all other folders."""
        return {name: value for name, value in asdict(self).items() if name != "kind" or value is not None}


def read_base(path: Path) -> NamedBase | None:
    """The base that a delivered folder names; None where an earlier version delivered it.

    Raises: DamagedFileError for a file that names none.
    """
    file = path / BASE
    if not file.is_file():
        return None

    def make(said: dict[str, Any]) -> NamedBase:
        found = NamedBase(**said)
        values = [getattr(found, item.name) for item in fields(found)]
        if not found.name or not all(value is None or isinstance(value, str) for value in values):
            raise ValueError("names no base model")
        return found

    return read_json(file, make, fix="take the whole folder that was delivered")


def base_of(adapter: Path) -> tuple[str, str | None]:
    """Name and revision of the model that delivered weights were tuned on."""
    if (named := read_base(adapter)) is not None:
        return named.name, named.revision
    config = read_json(adapter / ADAPTER)  # of an earlier version, which delivered nothing but adapters
    return str(config.get("base_model_name_or_path")), config.get("revision")
