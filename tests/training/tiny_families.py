"""A tiny model of random weights of many families, as transformers builds them from their configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "d_model": 32,
    "d_inner": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "rotary_dim": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "state_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "emb_dim": 32,
    "n_heads": 4,
    "n_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Families whose position t sees tokens up to t, with what their configurations need beside the sizes.
CAUSAL: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        "bart", "bigbird_pegasus", "biogpt", "bloom", "codegen", "cohere", "deepseek_v4", "diffllama", "ernie4_5",
        "exaone4", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox",
        "gpt_oss", "gptj", "granite", "granitemoe", "helium", "jamba", "jetmoe", "lfm2", "llama", "mamba", "mbart",
        "mistral", "mixtral", "modernbert-decoder", "mpt", "nemotron", "olmo2", "olmoe", "openai-gpt", "opt",
        "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "recurrent_gemma", "rwkv", "smollm3",
        "stablelm", "starcoder2", "xglm",
    )
} | {
    "falcon": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "electra": {"is_decoder": True},
    "xlm-roberta": {"is_decoder": True},
    "xlm": {"causal": True},
}  # fmt: skip
#: What Gemma 4's text model needs beside the sizes.
GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "head_dim": 8,
    "num_kv_shared_layers": 0,
}
#: Families whose position t sees tokens after t.
BIDIRECTIONAL = (
    "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
)  # fmt: skip
_USUAL = {
    "bart", "bloom", "falcon", "gemma", "gpt2", "gpt_neox", "llama", "mamba", "mistral", "mixtral", "opt", "phi",
    "qwen2", "roberta", "xlm",
}  # fmt: skip
_NO_SETTER = {"falcon": ("head_dim",), "gemma4_text": ("head_dim",), "xlnet": ("max_position_embeddings",)}


def configuration(family: str, **options: Any) -> Any:
    """The family's configuration with as many of the sizes as it knows."""
    default = AutoConfig.for_model(family)
    known = {
        name: value
        for name, value in _SIZES.items()
        if name not in _NO_SETTER.get(family, ()) and hasattr(default, name)
    }
    return AutoConfig.for_model(family, **(known | options))


def tiny(family: str, *, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configuration(family, **options)).requires_grad_(False).eval()


def families(*names: str) -> list[Any]:
    """Parameters of a test: the usual families, and the others where slow tests run."""
    return [name if name in _USUAL else pytest.param(name, marks=pytest.mark.slow) for name in names]
