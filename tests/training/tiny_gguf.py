"""A tiny Llama as a GGUF file with tokenizer and chat template, and a package that is installed beside the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

CHAT = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
WIDTH, LAYERS, HEADS, INNER = 32, 2, 2, 64


def _byte_letters() -> list[str]:
    """The letters by which a byte-level tokenizer writes the 256 bytes, as GPT-2 has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + number) for number in range(len(others))]


def write_gguf(file: Path, *, kind: str = "F32", architecture: str = "llama", seed: int = 0) -> Path:
    """Write a model of 262 tokens, two layers and 32 numbers a token; its matrices are of type ``kind``."""
    gguf = pytest.importorskip("gguf", reason="needs the library gguf (pip install 'dptune[models]')")
    tokens = [*_byte_letters(), "th", "in", "er", "an", "<|pad|>", "<|end|>"]
    writer, draw = gguf.GGUFWriter(str(file), architecture), np.random.default_rng(seed)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["t h", "i n", "e r", "a n"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 2)
    writer.add_chat_template(CHAT)
    matrices = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH)}
    norms = ["output_norm"]
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        norms += [f"{at}attn_norm", f"{at}ffn_norm"]
        matrices |= {f"{at}attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        matrices |= {f"{at}ffn_gate": (INNER, WIDTH), f"{at}ffn_up": (INNER, WIDTH), f"{at}ffn_down": (WIDTH, INNER)}
    for name, shape in matrices.items():
        numbers = draw.normal(0, 0.2, shape).astype(np.float32)
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def install_package(folder: Path, name: str, files: Mapping[str, Path], version: str = "1.2") -> Path:
    """Put a package with these files, by their paths inside, into ``folder``, as pip leaves an installed one."""
    listed = []
    for inside, source in files.items():
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        listed.append(inside)
    module = folder / name.replace("-", "_") / "__init__.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text("raise RuntimeError('nothing of a package is imported')\n")
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "RECORD").write_text("".join(f"{inside},,\n" for inside in listed))
    return folder
