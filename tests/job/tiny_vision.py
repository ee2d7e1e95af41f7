"""Tiny checkpoints of random weights as they are published: a text model and a tower for images in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_tuning
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

_TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
#: The class that each family's checkpoints are published as, and its configuration.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"text_config": _TEXT, "vision_config": _TOWER}),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": _TEXT
            | {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "vision_config": _TOWER
            | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
            "audio_config": None,
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": _QWEN | {"num_position_embeddings": 16}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": _TEXT | {"rope_parameters": _ROTARY}, "vision_config": _QWEN},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral"} | _TEXT,
            "vision_config": {"model_type": "pixtral", "head_dim": 8} | _TOWER,
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": _TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 48},
            "vision_config": _TOWER
            | {
                "intermediate_size": 64,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
}


def vision_checkpoint(family: str, folder: Path) -> Path:
    """Save a family's model with the tiny tokenizer to a new folder, and return it."""
    name, options = KINDS[family]
    torch.manual_seed(1)
    getattr(transformers, name)(AutoConfig.for_model(family, **options)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_tuning.checkpoint()).save_pretrained(folder)
    return folder
