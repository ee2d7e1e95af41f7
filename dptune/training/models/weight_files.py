"""A checkpoint's files of weights: whole, all there, enough for its configuration, and finite numbers in them.

Transformers names neither the file nor what is wrong with it, and reads integers, or a number that is none, without a
word. Headers are read in milliseconds, however large the files are; numbers are looked at once they are in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers.utils import logging as transformers_logging

from dptune.core.errors import ConfigError, first_line
from dptune.core.files import POINTER, DamagedFileError, not_a_file, read_json, sha256_once, why_unreadable
from dptune.training.models.model_names import ADAPTER, path_of
from dptune.training.models.quantization import method_of, states_of

_FIELD = "model.source"
_CONFIG, _WHOLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: Types that weights of numbers may be stored in, by safetensors' names.
_NUMBERS = ("F", "BF")
#: No square of such a number is one in float32 or bfloat16.
_TOO_LARGE = 1.8e19
#: A model of so many layers is built within seconds.
_LAYERS = 1000
_NUMBER = re.compile(r"\.\d+\.")
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, by its file's header.

    Attributes:
        dtype: safetensors' name of its type, such as "F32".
        shape: its sizes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def stored_weights(source: str, revision: str | None) -> dict[str, Stored]:
    """Read the headers of a checkpoint's safetensors files: its tensors by name.

    None of a folder that holds none, as where a model is only planned, and of a hub id that is not downloaded yet.

    Raises: ConfigError naming the file that is missing, cut off, damaged, pickled, or no file of weights.
    """
    folder = _folder_of(source, revision)
    if folder is not None and (folder / ADAPTER).is_file():  # transformers would put it into the model unasked
        problem = f"{folder} holds a model and an adapter for it ({ADAPTER}), which no digest of the model counts"
        raise ConfigError(_FIELD, problem, fix="move the adapter away, or merge it into the weights and save them")
    found: dict[str, Stored] = {}
    for file in [] if folder is None else _files(folder):
        found |= _header(file)
    return found


def digest_of_weights(source: str, revision: str | None) -> str | None:
    """SHA-256 of a checkpoint's configuration and weights, whatever its folder is called.

    In its folder ``sha256sum config.json model.safetensors | sha256sum`` prints the same; of shards, each that the
    index names, in the order of their names. Of a GGUF file it is what ``sha256sum`` prints. Every byte counts: in a
    sample of them other weights could hide. A core reads one to two GB a second, shards are read side by side, and a
    file that did not change is read once a process.

    Returns: 64 hexadecimal digits; None where no such files are here, as of a model that was converted on its way.
    """
    if (path := path_of(source)) is not None and path.is_file():
        return sha256_once(path)
    folder = path or _folder_of(source, revision)
    files = [] if folder is None else _files(folder)
    if folder is None or not files:
        return None
    listed = sorted([folder / _CONFIG, *files])
    with ThreadPoolExecutor() as readers:
        lines = (f"{one}  {file.name}\n" for one, file in zip(readers.map(sha256_once, listed), listed, strict=True))
        return sha256("".join(lines).encode()).hexdigest()


def check_enough(source: str, asked: int, stored: dict[str, Stored]) -> None:
    """Refuse a configuration that asks for much more than the files hold: it would fill the memory with random weights.

    Args:
        asked: number of parameters of the configuration's model. In 4 bits a stored number holds two of them.

    Raises: ConfigError naming config.json, and both numbers.
    """
    held = sum(one.numbers for one in stored.values())
    if stored and 2 * held < asked:
        problem = f"{source}/config.json asks for {asked:,} weights, and the files beside it hold {held:,}"
        raise ConfigError(_FIELD, problem, fix="give config.json and weights of the same model")


def check_layers(source: str, config: Any, stored: dict[str, Stored]) -> None:
    """Refuse no layers at all, and a number that no file here could hold, before so many are built for minutes.

    Raises: ConfigError naming config.json.
    """
    asked = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(asked, int) and asked < 1:
        problem = f"{source}/config.json asks for {asked} layers, and adapters need at least one"
        raise ConfigError(_FIELD, problem, fix="give the config.json of these weights")
    if stored and isinstance(asked, int) and asked > max(_LAYERS, len(stored)):  # some families share one layer's
        problem = (
            f"{source}/config.json asks for {asked:,} layers, and the files beside it hold {len(stored):,} tensors"
        )
        raise ConfigError(_FIELD, problem, fix="give config.json and weights of the same model")


class UndrawnWeights(TorchFunctionMode):
    """Context in which no first numbers are drawn for weights without memory: PyTorch takes half of a build for them.

    Of this thread alone, as transformers' ``no_init_weights`` is not.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            weight = args[0] if args else kwargs["tensor"]
            if weight.is_meta:
                return weight
        return function(*args, **kwargs)


def report_of(empty: Any, stored: dict[str, Stored]) -> dict[str, Collection[Any]] | None:
    """What transformers' own loader says of a checkpoint's names and shapes, without reading one number of it.

    It renames, splits and joins as when it loads, on tensors of device "meta" that have the headers' shapes.

    Args:
        empty: the model, without memory behind its weights.

    Returns: loading info; None where there are no files, or this loader fails, which the real one then may do or not.
    """
    if not stored:
        return None
    tensors = {name: torch.empty(one.shape, device="meta") for name, one in stored.items()}
    told, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with UndrawnWeights():
            _, report = type(empty).from_pretrained(
                None,
                config=deepcopy(empty.config),
                state_dict=tensors,
                dtype=empty.dtype,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception:
        return None
    finally:
        transformers_logging.set_verbosity(told)
        if bars:
            transformers_logging.enable_progress_bar()
    return dict(report)


def unused_layers(empty: Any, unexpected: Collection[Any]) -> list[str]:
    """Names of stored weights that a model has in its other layers: it is made with fewer layers than were saved.

    Buffers that older releases saved, and heads that it does not have, are not among them.
    """
    kinds = {_NUMBER.sub(".N.", name) for name, _ in empty.named_parameters()}
    return sorted(name for name in map(str, unexpected) if _NUMBER.search(name) and _NUMBER.sub(".N.", name) in kinds)


def check_finite(source: str, model: Any, stored: dict[str, Stored] | None = None) -> None:
    """Look at every weight once. A number that is none reaches every gradient, or waits for the record that meets it;
    so does one beyond any trained weight, whose square is none.

    Args:
        stored: the headers of the files that the weights were read from, for the file's name.

    Raises: ConfigError naming the weight, and its file, where a number is not finite, or was stored as something else.
    """
    quantised = method_of(model.config) is not None
    for name, weight in model.named_parameters():
        one = _stored_as(name, stored or {})
        where = f"weight {name} in {one.file}" if one else f"weight {name} of {source!r}"
        if one and not quantised and weight.is_floating_point() and not one.dtype.startswith(_NUMBERS):
            problem = f"{where} is stored as {one.dtype}, which is not a type of real numbers"
            raise ConfigError(_FIELD, problem, fix="save the model again in float32 or bfloat16")
        sizes = [_largest(part) for part in (weight, *states_of(weight))]
        if not all(size < _TOO_LARGE for size in sizes):  # nor a NaN
            finite = all(map(math.isfinite, sizes))
            what = f"too large to compute with ({max(sizes):.2g})" if finite else "not finite (NaN or infinity)"
            problem = f"{where} holds a number that is {what}"
            raise ConfigError(_FIELD, problem, fix=f"{_AGAIN}; if it was trained so, train it again")


@torch.no_grad()
def _largest(weight: torch.Tensor) -> float:
    """The largest size of its numbers; NaN if one of them is."""
    if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
        return 0.0
    least, most = map(float, torch.aminmax(weight.detach()))
    return max(-least, most)  # of a NaN both are


def _folder_of(source: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        return Path(source)
    found = try_to_load_from_cache(source, _CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads: one, or the shards that an index names."""
    whole, index = folder / _WHOLE, folder / _INDEX
    if whole.exists() or whole.is_symlink():
        return [whole]
    if not index.exists():
        if pickled := sorted(path for kind in ("pytorch_model*", "model*") for path in folder.glob(f"{kind}.bin")):
            problem = f"{pickled[0]} holds pickled weights, which may run code and are not read"
            fix = "save the model as safetensors, where you trust the file: from_pretrained(...).save_pretrained(...)"
            raise ConfigError(_FIELD, problem, fix=fix)
        return []
    try:
        named = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{index} is not an index of shards ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(_FIELD, problem, fix=_AGAIN) from None
    for name in named:  # a file elsewhere would be read, and no digest of the folder would count it
        if not isinstance(name, str) or Path(name).name != name:
            problem = f"{index} names {name!r}, which is not a file in the same folder"
            raise ConfigError(_FIELD, problem, fix=_AGAIN)
    return [folder / name for name in sorted(named)]


def _header(file: Path) -> dict[str, Stored]:
    if what := why_unreadable(file):
        fix = "run `git lfs pull` in its clone" if POINTER in what else f"{_AGAIN}, completely"
        raise ConfigError(_FIELD, f"{file} {what}", fix=fix)
    try:
        with safe_open(file, framework="pt") as weights:
            parts = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
            found = {name: Stored(file, str(part.get_dtype()), tuple(part.get_shape())) for name, part in parts.items()}
    except OSError:
        raise
    except Exception as error:  # the library's own, and whatever a header may make it raise
        raise ConfigError(_FIELD, f"{file} is cut off or damaged ({first_line(error)})", fix=_AGAIN) from None
    if not found:
        raise ConfigError(_FIELD, f"{file} holds no weights", fix=_AGAIN)
    return found


def _stored_as(name: str, stored: dict[str, Stored]) -> Stored | None:
    """The tensor that a weight was read from; a file may leave out, or have, the prefix of the model's own class."""
    if name in stored:
        return stored[name]
    others = (one for key, one in stored.items() if key.endswith(f".{name}") or name.endswith(f".{key}"))
    return next(others, None)


def read_tensors(path: Path, *, fix: str = "restore a copy of it") -> dict[str, Any]:
    """The tensors of a safetensors file that dptune wrote.

    Raises: DamagedFileError, one sentence, for one that is missing, or cut off at any byte.
    """
    try:
        if other := not_a_file(path):
            raise OSError(f"is {other}, not a file")
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        problem = "is missing" if not path.exists() else f"was cut off or edited ({first_line(error)})"
        raise DamagedFileError(f"{path}: {problem}. Fix: {fix}.") from None
