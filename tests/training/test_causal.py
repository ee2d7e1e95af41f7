"""Only causal language models are loaded; all others are refused by name before anything is charged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_families import BIDIRECTIONAL, CAUSAL, configuration, families, tiny
from tiny_models import CPU, gpt2, llama
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    GPT2DoubleHeadsModel,
    GPT2Model,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from dptune.core.errors import ConfigError
from dptune.training.models.causal import auto_class, check_causal, check_weights, most_positions
from dptune.training.models.model import ModelSource, check_headers, load_base, load_config, without_weights
from dptune.training.models.weight_files import report_of, stored_weights, unused_layers

_SMALL = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
_BART = {
    f"{half}_{name}": value
    for half in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 48))
} | {"d_model": 32, "vocab_size": 97, "max_position_embeddings": 64}


def loaded(model: Any, folder: Path, **changes: Any) -> Any:
    """The model as ``load_base`` reads it, with changes of its configuration on disk."""
    model.save_pretrained(folder)
    if changes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return load_base(ModelSource(str(folder)), CPU)


@pytest.mark.parametrize("family", families(*CAUSAL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_models_pass(family: str, dtype: torch.dtype) -> None:
    check_causal(family, tiny(family, **CAUSAL[family]).to(dtype))


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_what_sees_later_tokens_is_found_out_whatever_its_configuration_says(family: str) -> None:
    with pytest.raises(ConfigError, match="is not causal: other tokens from position") as refused:
        check_causal(family, tiny(family))
    assert type(tiny(family)).__name__ in str(refused.value)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlnet"])
def test_in_half_precision_too(family: str) -> None:
    """Weights large enough for later tokens to count, as trained ones are."""
    with pytest.raises(ConfigError, match="is not causal"):
        check_causal(family, tiny(family, initializer_range=0.2).to(torch.bfloat16))


@pytest.mark.parametrize("after", [1, 3, 7])
def test_a_model_that_looks_one_token_ahead_at_one_position_is_found_out(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt2()
    real = model.transformer.wte.forward

    def ahead(ids: torch.Tensor) -> torch.Tensor:
        states = real(ids).clone()
        states[:, after - 1] += 0.01 * states[:, after]
        return states

    monkeypatch.setattr(model.transformer.wte, "forward", ahead)
    with pytest.raises(ConfigError, match=f"from position {after} on"):
        check_causal("looking ahead", model)


def test_the_probe_leaves_modes_and_randomness_alone() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    check_causal("llama", model)
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "camembert", "rembert", "roformer", "xlm"])
def test_an_encoder_is_refused_before_its_weights_are_read(family: str, tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_config(configuration(family))
    with pytest.raises(ConfigError, match=rf"model\.source.*{type(model).__name__}.*is an encoder"):
        loaded(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="is an encoder"):
        load_base(ModelSource(str(tmp_path)), CPU)


@pytest.mark.parametrize("family", ["bert-generation", "xlnet"])
def test_an_encoder_that_no_list_knows_is_refused_by_what_it_does(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not causal"):
        loaded(tiny(family), tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "opt", "qwen2", "bert"])
def test_a_classifier_is_refused_by_name(family: str, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(configuration(family))
    with pytest.raises(ConfigError, match=f"{type(model).__name__}.*whose head would be lost"):
        loaded(model, tmp_path)


def test_a_classifier_that_hides_its_name_loses_no_head_in_silence(tmp_path: Path) -> None:
    for number, family in enumerate(("gpt2", "llama")):
        model = AutoModelForSequenceClassification.from_config(configuration(family))
        with pytest.raises(ConfigError, match=r"score\.weight|lm_head\.weight"):
            loaded(model, tmp_path / str(number), architectures=None)


def test_an_encoder_decoder_is_refused_and_its_decoder_alone_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BartForConditionalGeneration.*is an encoder-decoder"):
        loaded(BartForConditionalGeneration(BartConfig(**_BART)), tmp_path / "bart")
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration.*is an encoder-decoder"):
        loaded(T5ForConditionalGeneration(T5Config(**_SMALL)), tmp_path / "t5")
    assert loaded(BartForCausalLM(BartConfig(**_BART)), tmp_path / "decoder").config.is_decoder


def test_a_model_of_another_kind_is_refused_in_a_sentence(tmp_path: Path) -> None:
    vision = ViTForImageClassification(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16)
    )
    with pytest.raises(ConfigError, match="ViTForImageClassification") as refused:
        loaded(vision, tmp_path / "vision")
    assert len(str(refused.value)) < 400
    with pytest.raises(ConfigError, match="has no such form"):
        loaded(vision, tmp_path / "nameless", architectures=None)


def test_random_weights_are_no_checkpoint(tmp_path: Path) -> None:
    bare = LlamaModel(llama().config)  # its output layer is not tied
    with pytest.raises(
        ConfigError, match=r"lacks weights of LlamaForCausalLM, which would be random \(lm_head\.weight"
    ):
        loaded(bare, tmp_path / "bare")
    with pytest.raises(ConfigError, match="multiple_choice_head"):
        loaded(GPT2DoubleHeadsModel(gpt2().config), tmp_path / "two heads")
    assert loaded(GPT2Model(gpt2().config), tmp_path / "tied")  # its output layer is its embedding


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "fp8"])
def test_quantised_weights_but_4_bits_are_refused_whatever_is_installed(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"holds quantised weights \\({method}\\), on which dptune does not train"):
        loaded(gpt2(), tmp_path, quantization_config={"quant_method": method, "load_in_8bit": True})


def test_whole_weights_that_are_said_to_be_of_4_bits_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra quantized")
    with pytest.raises(ConfigError, match=r"holds whole weights.*Fix: take quantization_config out"):
        loaded(gpt2(), tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def test_a_decoder_with_an_encoders_name_is_accepted(tmp_path: Path) -> None:
    for family in ("bert", "roberta", "electra"):
        assert loaded(tiny(family, is_decoder=True), tmp_path / family).config.is_decoder


@pytest.mark.parametrize("family", ["bloom", "falcon", "gemma", "gpt_neox", "mixtral", "opt", "phi", "qwen2", "rwkv"])
def test_causal_checkpoints_load(family: str, tmp_path: Path) -> None:
    assert loaded(tiny(family, **CAUSAL[family]), tmp_path)


def test_weights_that_are_cut_off_are_refused_with_their_reason(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"model\.source.*model\.safetensors is cut off or damaged"):
        load_base(ModelSource(str(tmp_path)), CPU)


def test_the_width_of_a_model_goes_by_several_names() -> None:
    """MPT calls it max_seq_len; XLNet says -1 for none."""
    for values, width in (({"max_seq_len": 16}, 16), ({"max_position_embeddings": -1}, None), ({}, None)):
        config = SimpleNamespace(**values)
        config.get_text_config = lambda config=config: config
        assert most_positions(SimpleNamespace(config=config, named_modules=list)) == width


@pytest.mark.parametrize("family", families(*CAUSAL))
def test_headers_tell_what_the_loader_tells(family: str, tmp_path: Path) -> None:
    """By every family's own names, prefixes and joined experts: no checkpoint that loads is refused by its headers."""
    tiny(family, **CAUSAL[family]).save_pretrained(tmp_path)
    base = ModelSource(str(tmp_path))
    config = load_config(base)
    empty, stored = without_weights(base, config), stored_weights(str(tmp_path), None)
    _, whole = auto_class(config).from_pretrained(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    found = report_of(empty, stored)
    assert found is not None
    assert {name: set(keys) for name, keys in found.items()} == {name: set(keys) for name, keys in whole.items()}
    assert check_headers(base, empty, lambda report: check_weights(str(tmp_path), empty, report)) == ()
    assert unused_layers(empty, whole["unexpected_keys"]) == []
