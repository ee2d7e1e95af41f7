"""Ways in which a checkpoint's files can be broken, each with what an error must say of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_PIECES = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
QUERY, NORM, WORDS, PLACES = "c_attn.weight", "ln_f.bias", "wte.weight", "wpe.weight"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], object]


def shard(folder: Path) -> None:
    """Split the weights into two files and an index."""
    whole = load_file(folder / WEIGHTS)
    names = sorted(whole)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: whole[name] for name in half}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / WEIGHTS).unlink()


def _bytes(change: Callable[[bytes], bytes], file: str = WEIGHTS) -> Change:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def _sharded(change: Change) -> Change:
    return lambda folder: (shard(folder), change(folder))


def _tensors(change: Callable[[Tensors], Tensors | None]) -> Change:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        found = change(tensors) or tensors
        save_file({name: one.contiguous() for name, one in found.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return changed


def _one(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(end))
        tensors[name] = change(tensors[name].clone())

    return _tensors(changed)


def _number(end: str, value: float, place: int = 0) -> Change:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[place] = value
        return tensor

    return _one(end, changed)


def _header(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        change(header)
        written = json.dumps(header).encode()
        return struct.pack("<Q", len(written)) + written + content[8 + size :]

    return _bytes(changed)


def _config(**changes: Any) -> Change:
    def changed(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return changed


def _tokenizer(**changes: Any) -> Change:
    return _bytes(lambda whole: json.dumps(json.loads(whole) | changes).encode(), "tokenizer.json")


def _index(content: str) -> Change:
    return _sharded(lambda folder: (folder / INDEX).write_text(content))


def _without(end: str) -> Change:
    return _tensors(lambda tensors: {name: one for name, one in tensors.items() if not name.endswith(end)})


def _overlap(header: dict[str, Any]) -> None:
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


#: The change, and what the error says: the file, or where there is none to blame the name of the weight, and the cause.
BROKEN: dict[str, tuple[Change, str]] = {
    "cut in half": (_bytes(lambda whole: whole[: len(whole) // 2]), r"model\.safetensors is cut off or damaged"),
    "a byte less": (_bytes(lambda whole: whole[:-1]), r"model\.safetensors is cut off or damaged"),
    "a byte more": (_bytes(lambda whole: whole + b"x"), r"model\.safetensors is cut off or damaged"),
    "empty": (_bytes(lambda whole: b""), r"model\.safetensors is empty"),
    "no file of weights": (_bytes(lambda whole: b"<html>" * 99), r"model\.safetensors is cut off or damaged"),
    "a huge header": (_bytes(lambda whole: b"\xff" * 8 + whole[8:]), r"model\.safetensors is cut off or damaged"),
    "tensors that overlap": (_header(_overlap), r"model\.safetensors is cut off or damaged"),
    "a type of no kind": (
        _header(lambda header: header["transformer.wte.weight"].update(dtype="F7")),
        r"model\.safetensors is cut off or damaged",
    ),
    "a pointer": (
        _bytes(lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        r"model\.safetensors is a pointer of Git LFS.*git lfs pull",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"no file named model\.safetensors"),
    "a link to nowhere": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).symlink_to(folder / "gone")),
        r"model\.safetensors is a link to a file that is not there",
    ),
    "a folder": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
        r"model\.safetensors is a folder",
    ),
    "a shard less": (_sharded(lambda folder: (folder / SHARDS[1]).unlink()), rf"{SHARDS[1]} is missing"),
    "a shard cut off": (_sharded(_bytes(lambda whole: whole[:-4], SHARDS[1])), rf"{SHARDS[1]} is cut off or damaged"),
    "an empty shard": (_sharded(_bytes(lambda whole: b"", SHARDS[0])), rf"{SHARDS[0]} is empty"),
    "a torn index": (_index('{"weight_map": {'), r"index\.json is not an index of shards"),
    "an index of nothing": (_index("{}"), r"index\.json is not an index of shards"),
    "an index that is a list": (_index("[]"), r"index\.json is not an index of shards"),
    "another shape": (
        _one(QUERY, lambda one: one.T),
        r"holds transformer.*c_attn\.weight of shape \(48, 16\)",
    ),
    "a weight less": (_without(QUERY), r"lacks weights of GPT2LMHeadModel.*c_attn\.weight"),
    "other names": (
        _tensors(lambda tensors: {f"model.{name}": one for name, one in tensors.items()}),
        r"lacks weights of GPT2LMHeadModel",
    ),
    "NaN": (_number(QUERY, float("nan")), r"c_attn\.weight in .*model\.safetensors holds a number that is not finite"),
    "NaN of a rare token": (
        _number(WORDS, float("nan"), -1),
        r"wte\.weight in .* holds a number that is not finite",
    ),
    "NaN far off": (
        _number(PLACES, float("nan"), -1),
        r"wpe\.weight in .* holds a number that is not finite",
    ),
    "infinity": (_number(NORM, float("inf")), r"ln_f\.bias in .*model\.safetensors holds a number that is not finite"),
    "less than any number": (_number(NORM, -float("inf")), r"ln_f\.bias in .*safetensors holds a number that is not"),
    "NaN in a shard": (
        lambda folder: (_number(WORDS, float("nan"))(folder), shard(folder)),
        rf"wte\.weight in .*{SHARDS[1]} holds a number that is not finite",
    ),
    "all zero": (
        _tensors(lambda tensors: {name: torch.zeros_like(one) for name, one in tensors.items()}),
        r"gives the same predictions for different texts.*all zero",
    ),
    "all the same": (
        _tensors(lambda tensors: {name: torch.full_like(one, 0.01) for name, one in tensors.items()}),
        r"gives the same predictions for different texts",
    ),
    "attention that goes nowhere": (
        _tensors(lambda tensors: {name: one * (".attn.c_proj." not in name) for name, one in tensors.items()}),
        r"no gradient at all of a short text.*all zero",
    ),
    "too large": (
        _tensors(lambda tensors: {name: one * 1e16 for name, one in tensors.items()}),
        r"computes infinities or NaN for a short text in float32",
    ),
    "a number too large": (
        _number(WORDS, 1e20, -1),
        r"wte\.weight in .*model\.safetensors holds a number that is too large to compute with \(1e\+20\)",
    ),
    "no perplexity": (_one("ln_f.weight", lambda one: one + 1e9), r"an infinite perplexity \(a loss of \d"),
    "whole numbers": (_one(QUERY, lambda one: one.to(torch.int8)), r"c_attn\.weight in .*is stored as I8, which is no"),
    "truth values": (_one(QUERY, lambda one: one > 0), r"c_attn\.weight in .*is stored as BOOL"),
    "complex numbers": (_one(QUERY, lambda one: one.to(torch.complex64)), r"c_attn\.weight in .*is stored as C64"),
    "no layers": (_config(n_layer=0), r"config\.json asks for 0 layers, and adapters need at least one"),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS), r"model\.safetensors holds no weights"),
    "an index of files elsewhere": (
        _index(json.dumps({"weight_map": {"a": "../model.safetensors"}})),
        r"index\.json names '\.\./model\.safetensors', which is not a file in the same folder",
    ),
    "an index of numbers": (_index('{"weight_map": {"a": 5}}'), r"index\.json names 5, which is not a file"),
    "a width in words": (_config(n_embd="16"), r"cannot be loaded \(Validation error for field 'n_embd': .*int"),
    "more layers": (_config(n_layer=3), r"(lacks weights of GPT2LMHeadModel.*h\.1|config\.json asks for)"),
    "far more layers": (_config(n_layer=10**5), r"config\.json asks for 100,000 layers, and the files beside it hold"),
    "wider": (_config(n_embd=64), r"config\.json asks for [\d,]+ weights, and the files beside it hold"),
    "another vocabulary": (_config(vocab_size=310), r"wte\.weight of shape \(300, 16\), and its config\.json asks for"),
    "more positions": (_config(n_positions=48), r"wpe\.weight of shape \(24, 16\), and its config\.json asks for"),
    "another family": (
        _config(model_type="llama", architectures=["LlamaForCausalLM"]),
        r"(config\.json asks for 6,[\d,]+ weights|no layer is called 'c_attn')",
    ),
    "not tied": (_config(tie_word_embeddings=False), r"lacks weights of GPT2LMHeadModel.*lm_head\.weight"),
    "classes that are a number": (_config(architectures=5), r"config\.json: architectures is 5, not a list of names"),
    "classes that are numbers": (_config(architectures=[1]), r"architectures is \[1\], not a list of names"),
    "a text model that is a number": (_config(text_config=5), r"text_config is 5, not a configuration of a model"),
    "an encoder that is not there": (
        _config(is_encoder_decoder=True),
        r"config\.json: is_encoder_decoder is true, and GPT2LMHeadModel has no encoder",
    ),
    "a tokenizer of nothing": (
        _tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}),
        r"tokenizer: maps made-up texts such as .* to no token",
    ),
    "a tokenizer of one token": (
        _tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": ".+"}, "content": "a"}),
        r"tokenizer: maps made-up texts such as .* to the same tokens",
    ),
    "a tokenizer that fails": (
        _tokenizer(model={"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0}} | _PIECES, post_processor=None),
        r"tokenizer: fails over made-up texts such as .*UNK",
    ),
    "a norm of nothing": (_config(layer_norm_epsilon=-1e9), r"computes infinities or NaN for a short text"),
    "pickled": (
        lambda folder: (torch.save(load_file(folder / WEIGHTS), folder / "model.bin"), (folder / WEIGHTS).unlink()),
        r"model\.bin holds pickled weights.*save the model as safetensors",
    ),
}
#: What is refused without a look at the numbers: within milliseconds, and by a dry run too.
BY_HEADERS = (
    *("classes that are a number", "classes that are numbers", "a text model that is a number"),
    *("an encoder that is not there", "a tokenizer of nothing"),
    *("no layers", "no tensors", "an index of files elsewhere", "an index of numbers", "a width in words"),
    *("a tokenizer of one token", "a tokenizer that fails"),
    *("cut in half", "empty", "a pointer", "a link to nowhere", "a shard less", "a torn index", "wider"),
    *("another shape", "a weight less", "other names", "whole numbers", "truth values", "complex numbers"),
    *("more layers", "far more layers", "another vocabulary", "more positions", "not tied", "another family"),
)
