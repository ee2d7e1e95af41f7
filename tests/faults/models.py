"""Checkpoints of families that must be refused or supported: random weights, the pipeline's own tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

_SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "d_model": 32, "d_inner": 48, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "ffn_dim": 48, "word_embed_proj_dim": 32, "embedding_size": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config(family: str) -> object:
    default = AutoConfig.for_model(family)
    known = {key: value for key, value in _SIZES.items() if hasattr(default, key)}
    if family == "xlnet":
        known.pop("max_position_embeddings", None)
    return AutoConfig.for_model(family, **known)


def main(tokenizer: str, out: str) -> None:
    torch.manual_seed(0)
    made = {
        "roberta": AutoModelForMaskedLM, "bert": AutoModelForMaskedLM, "electra": AutoModelForMaskedLM,
        "xlnet": AutoModelForCausalLM, "opt": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM,
    }  # fmt: skip
    for family, kind in made.items():
        folder = Path(out, family)
        kind.from_config(config(family)).save_pretrained(folder)
        for file in Path(tokenizer).glob("*token*"):
            shutil.copy(file, folder)
    head = AutoModelForSequenceClassification.from_config(config("gpt2"))
    folder = Path(out, "classifier")
    head.save_pretrained(folder)
    for file in Path(tokenizer).glob("*token*"):
        shutil.copy(file, folder)
    folder = Path(out, "four-bit")
    shutil.copytree(Path(out, "gpt2"), folder)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {
        "load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    rows = [f"Order {number} of customer {number % 50} is late by {number % 7} days." for number in range(240)]
    Path(out, "records.csv").write_text("text\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
