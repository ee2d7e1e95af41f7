"""ModelSource: where the frozen weights come from, and the folder or hub id by which transformers reads them.

GGUF files: checked by their header, then converted once into a checkpoint of safetensors in the user's cache.

Transformers dequantises such a file each time that it loads it, and keeps it marked as quantised, which cannot be
saved or trained. The converted checkpoint holds the same numbers, and is read like any other.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError, first_line, is_out_of_memory
from dptune.core.files import (
    PRIVATE_FILE,
    locked,
    private_directory,
    read_json,
    replacing_folder,
    sha256,
    sha256_once,
    write_json,
)
from dptune.training.models.memory import check_memory
from dptune.training.models.model_names import name_of, path_of, revision_of, rounding


@dataclass(frozen=True)
class ModelSource:
    """The source of the frozen weights.

    Attributes:
        source: a hub id, a local directory, a GGUF file, or ``package:NAME``, an installed package that holds either.
        revision: the 40-digit commit of a hub id, or the version of a package, which may be left out; None for a
            directory or a file.
        dtype: dtype of the frozen weights, "float32" or "bfloat16"; in 4 bits, of the products with them.
        load_in_4bit: hold the weights of linear layers in 4 bits (bitsandbytes' NF4).
    """

    source: str
    revision: str | None = None
    dtype: str = "float32"
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "revision", revision_of(self.source, self.revision))

    @cached_property
    def location(self) -> str:
        """The hub id or the folder that transformers reads. A GGUF file is converted at its first use, into a cache.

        Raises: ConfigError for a GGUF file that cannot be read, or is larger than memory.
        """
        path = path_of(self.source)
        if path is not None and path.is_file():
            path = converted(path, self.dtype, partial(check_memory, self.source))
        return self.source if path is None else str(path)

    @property
    def kind(self) -> str | None:
        """GGML's name of the type of most weights of a GGUF file, such as "Q4_1"; None for other models."""
        return self._origin.get("kind")

    @property
    def file_digest(self) -> str | None:
        """SHA-256 of the GGUF file that was converted, whatever lies there now; None for other models."""
        return self._origin.get("sha256")

    @cached_property
    def _origin(self) -> dict[str, Any]:
        path = path_of(self.source)
        return {} if path is None or path.is_dir() else read_json(Path(self.location) / ORIGIN)

    @property
    def rounding(self) -> str | None:
        """What a GGUF file does to the published weights, in words; None where it rounds none, and of other models."""
        return None if self.kind is None else rounding(self.kind)


def model_folder(source: str, dtype: str = "float32") -> str:
    """The folder that ``from_pretrained`` reads of a model that lies in an installed package or a GGUF file.

    Args:
        source: ``package:NAME``, or the path of a GGUF file, which is converted once into the user's cache.
        dtype: dtype of the converted weights, "float32" or "bfloat16".

    Raises: ConfigError for a package or a file that holds no model.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> model_folder(mkdtemp(prefix="checkpoint")).startswith(mkdtemp()[:4])  # a folder stays as it is
        True
    """
    return ModelSource(source, dtype=dtype).location


def named_as(base: ModelSource, model: Any) -> Any:
    """The model, which calls itself what the user called it: adapters' files repeat the name."""
    if base.location != base.source:
        model.name_or_path = model.config._name_or_path = name_of(base.source)
    return model


#: File of a converted checkpoint that says what it was made of.
ORIGIN = "gguf.json"
#: Environment variable that names another folder for converted checkpoints.
CACHE = "DPTUNE_CACHE"

_FIELD = "model.source"
_AGAIN = "copy or download it again, completely"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
#: struct's letters of the types of values; strings (8) and lists (9) are read by name.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """What the header of a GGUF file says.

    Attributes:
        architecture: family of the model by llama.cpp's name, such as "llama".
        numbers: number of weights.
        kind: GGML's name of the type that holds most of them, such as "Q4_1".
    """

    architecture: str
    numbers: int
    kind: str


def cache_folder() -> Path:
    """The folder of converted checkpoints: $DPTUNE_CACHE, or by default dptune/models in the user's caches."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(base, "dptune", "models"))


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file, in a tenth of a second.

    Raises: ConfigError for a file that is damaged or cut off, or where the library gguf is not installed.
    """
    if find_spec("gguf") is None:
        problem = f"{file.name} is a GGUF file, and the library gguf, which reads it, is not installed"
        raise ConfigError(_FIELD, problem, fix="pip install 'dptune[models]'")
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            about, tensors, start = _parse(content)
            size = len(content)
        numbers, end, counts = 0, start, dict[str, int]()
        for shape, number, offset in tensors:
            kind, count = GGMLQuantizationType(number), math.prod(shape)
            block, bytes_each = GGML_QUANT_SIZES[kind]
            numbers, end = numbers + count, max(end, start + offset + count // block * bytes_each)
            counts[kind.name] = counts.get(kind.name, 0) + count
        architecture = about["general.architecture"]
        if not (isinstance(architecture, str) and counts):
            raise ValueError("it names no architecture, or no weights")
    except (struct.error, ValueError, KeyError, TypeError, ArithmeticError) as error:  # alignment 0, too
        problem = f"{file} is not a GGUF file, or its header is damaged or cut off ({first_line(error)})"
        raise ConfigError(_FIELD, problem, fix=_AGAIN) from None
    if end > size:
        problem = f"{file} is cut off: its weights end at byte {end:,}, and it has {size:,}"
        raise ConfigError(_FIELD, problem, fix=_AGAIN)
    return Header(architecture, numbers, max(counts, key=lambda name: counts[name]))


def converted(file: Path, dtype: str, check_memory: Callable[[int], None]) -> Path:
    """The checkpoint that a GGUF file holds, as a folder in the user's cache, which is made if need be.

    The folder holds weights in ``dtype``, the configuration, the tokenizer and the chat template. A file with the same
    content, whatever it is called and lies beside, is converted once for each dtype and release of transformers.

    Args:
        check_memory: called with the bytes that the conversion takes, before it begins; may raise.

    Raises: ConfigError for a damaged file, for one that changes meanwhile, for an architecture that transformers does
        not read, and for a folder of another user in the cache.
    """
    import transformers

    digest = sha256_once(file)
    target = private_directory(cache_folder()) / f"{digest}-{dtype}-transformers-{transformers.__version__}"
    if _is_converted(target):
        return target
    header = read_header(file)
    check_memory(header.numbers * (6 if dtype == "bfloat16" else 4) + file.stat().st_size)
    with locked(target.with_name(f".{target.name}.lock"), wait=True):
        if _is_converted(target):  # another process made it meanwhile
            return target
        weights = f"{header.numbers:,} weights, {rounding(header.kind) or header.kind}"
        _log.info("%s is converted once (%s): half a minute for 135 million", file.name, weights)
        begun = time.monotonic()
        with replacing_folder(target) as folder:
            _convert(file, header, dtype, folder)
            if sha256(file) != digest:  # else the folder would hold other weights than its name says, for good
                fix = "wait until it is copied or downloaded, and run the command again"
                raise ConfigError(_FIELD, f"{file} changed while it was converted", fix=fix)
            about = {"file": file.name, "sha256": digest, "kind": header.kind, "dtype": dtype}
            write_json(folder / ORIGIN, about)
            for path in folder.iterdir():
                path.chmod(PRIVATE_FILE)
        seconds, peak = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gib = peak / (2**30 if sys.platform == "darwin" else 2**20)
        _log.info("converted in %.0f s into %s; the process took %.1f GiB at most", seconds, target, gib)
    return target


def _is_converted(target: Path) -> bool:
    """Whether a checkpoint lies there. Raises: ConfigError for one that another user could have put there."""
    if target.is_symlink() or (target.exists() and _owner(target) != _owner(target.parent)):
        problem = f"{target} is a link, or of another user, who may have put other weights there"
        raise ConfigError(_FIELD, problem, fix=f"remove it, or give {CACHE} a folder of your own")
    return (target / ORIGIN).is_file()


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _convert(file: Path, header: Header, dtype: str, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer to ``folder``. Raises: ConfigError naming what cannot be read."""
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from dptune.training.models.causal import auto_class, check_configuration, check_weights

    # A folder of its own, for transformers also reads what lies beside: an adapter, a template, a tokenizer with code.
    alone = folder / "alone"
    alone.mkdir()
    (alone / file.name).symlink_to(file.resolve())
    told, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        place: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(alone, **place)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        check_configuration(str(file), config)
        read, report = auto_class(config).from_pretrained(
            alone, **place, config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
        check_weights(str(file), read, report)
        if hasattr(config := read.config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):  # a model of its own, for the one that was read counts as quantised
            model = type(read)(config)
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(alone, **place)
        _without_others(tokenizer, model.get_input_embeddings().num_embeddings).save_pretrained(folder)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises any type for a file that it cannot read
        if is_out_of_memory(error):
            raise
        if "not supported" in str(error):
            problem = (
                f"{file.name} is of architecture {header.architecture!r}, which transformers cannot read from GGUF"
            )
            fix = "give the model's checkpoint in safetensors, or a GGUF file of Llama, Mistral, Qwen or GPT-2"
            raise ConfigError(_FIELD, problem, fix=fix) from error
        problem = f"{file} cannot be converted ({first_line(error)})"
        raise ConfigError(_FIELD, problem, fix=f"{_AGAIN}, or give the model's checkpoint in safetensors") from error
    finally:
        transformers_logging.set_verbosity(told)
        if bars:
            transformers_logging.enable_progress_bar()
        shutil.rmtree(alone)


def _without_others(tokenizer: Any, count: int) -> Any:
    """The tokenizer without tokens that transformers adds behind the model's own, such as GPT-2's end-of-text token."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    others = {token["content"] for token in content["added_tokens"] if token["id"] >= count}
    if not others:
        return tokenizer
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in others]
    named = {name: token for name, token in tokenizer.special_tokens_map.items() if str(token) not in others}
    own = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=own, chat_template=tokenizer.chat_template, **named)


class _Reader:
    """Reads a header from its beginning on, value by value.

    The reader of the package gguf keeps each token as an object, and for a damaged length runs for hours.

    Raises: ValueError, struct.error, KeyError or ArithmeticError for a damaged header.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def numbers(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{letters}", self.content, self.at)
        self.at += struct.calcsize(f"<{letters}")
        return found

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if self.at + length > len(self.content):
            raise ValueError("a text ends behind the end of the file")
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """The value of a key; None for a list, which is passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _LIST:
            return self.numbers(_SCALARS[kind])[0]
        inner, count = self.numbers("IQ")
        if inner != _STRING:
            self.at += count * struct.calcsize(f"<{_SCALARS[inner]}")
            return None
        for _ in range(count):
            length = self.numbers("Q")[0]  # moves ``at`` itself
            self.at += length
        return None


def _parse(content: mmap.mmap) -> tuple[dict[str, Any], list[tuple[tuple[int, ...], int, int]], int]:
    """Values by key; shape, type and offset of each tensor; and the byte at which the tensors begin."""
    reader = _Reader(content)
    magic, version, count, pairs = reader.numbers("4sIQQ")
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}")
    about = {reader.text(): reader.value(reader.numbers("I")[0]) for _ in range(pairs)}
    tensors = []
    for _ in range(count):
        reader.text()
        shape = reader.numbers(f"{min(reader.numbers('I')[0], 8)}Q")
        tensors.append((shape, *reader.numbers("IQ")))
    alignment = int(about.get("general.alignment", 32))
    return about, tensors, -(-reader.at // alignment) * alignment
