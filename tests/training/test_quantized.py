"""Frozen weights in 4 bits: gradients of adapters, files, and what cannot be read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_per_sample import computed, error, looped
from test_together import alone, assert_close, cells, opened, side_by_side
from tiny_models import CPU, FAMILIES, records, trainable, weights, with_prompts
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dptune.core.errors import ConfigError
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.models import quantization
from dptune.training.models.model import (
    Lora,
    ModelSource,
    attach_lora,
    frozen_fingerprint,
    load_base,
    load_config,
    save_adapter,
)
from dptune.training.models.quantization import in_4bit, keep_layout, method_of

pytest.importorskip("bitsandbytes", reason="weights in 4 bits need pip install 'dptune[quantized]'")


@cache
def saved(family: str) -> str:
    folder = mkdtemp(prefix="dptune tiny base ")
    FAMILIES[family]().save_pretrained(folder)
    return folder


def base(family: str = "llama", **changes: Any) -> Any:
    return load_base(ModelSource(saved(family), **{"load_in_4bit": True, **changes}), CPU)


def adapted(family: str, modules: Any = None, **changes: Any) -> Any:
    model = attach_lora(base(family, **changes), Lora(4, 8, 0.0, modules), 7)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_alone_are_held_in_4_bits(family: str) -> None:
    found = {name: weight.dtype for name, weight in base(family).named_parameters()}
    small = {name for name, dtype in found.items() if dtype == torch.uint8}
    assert len(small) >= 8
    assert not any(
        "embed" in name or "wte" in name or "lm_head" in name or "norm" in name or "ln_" in name for name in small
    )
    assert not any(weight.requires_grad for weight in base(family).parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("modules", [None, "all-linear"])
def test_gradients_are_those_of_a_loop_over_records(family: str, modules: Any) -> None:
    model, tokens = adapted(family, modules), with_prompts(records(5))
    expected = looped(model, tokens)
    some = expected.abs().amax(dim=1) > 0
    assert some.sum() >= 3
    assert error(computed(model, tokens)[some], expected[some]) < 1e-5
    assert torch.equal(computed(model, tokens), computed(model, tokens, checkpointing=True))
    rehearse(model, lora_pairs(model))


def test_products_may_be_in_bfloat16() -> None:
    model = adapted("llama", dtype="bfloat16")
    rehearse(model, lora_pairs(model))
    assert {pair.up.weight.dtype for pair in lora_pairs(model)} == {torch.float32}


def test_an_adapter_says_the_same_when_it_is_loaded_again(tmp_path: Path) -> None:
    model, ids = adapted("llama"), torch.tensor([[5, 6, 7, 8]])
    save_adapter(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)


def test_runs_share_one_base_with_its_scales(tmp_path: Path) -> None:
    shared, tokens = base("gpt2"), records()
    copied = dict(shared_copy(shared).named_parameters())
    for name, weight in shared.named_parameters():
        assert copied[name].data_ptr() == weight.data_ptr()
        assert getattr(copied[name], "quant_state", None) is getattr(weight, "quant_state", None)
    layers = dict(shared_copy(shared).named_modules())
    held = {name: module.quant_state for name, module in shared.named_modules() if hasattr(module, "quant_state")}
    assert held
    assert all(layers[name].quant_state is state for name, state in held.items())
    group = cells(tokens, ["static", "quantile"], learning_rate=1e-3)
    expected = [alone(cell, shared, tokens, tmp_path / f"alone{cell.seed}") for cell in group]
    runs = [opened(cell, shared, tokens, tmp_path / f"{cell.seed}") for cell in group]
    assert side_by_side(shared, runs) == [None] * len(runs)
    for cell, weights_alone in zip(group, expected, strict=True):
        assert_close(weights(cell.model), weights_alone)


def test_the_checksum_of_frozen_weights_sees_numbers_and_scales() -> None:
    model = base()
    before = frozen_fingerprint(model)
    assert frozen_fingerprint(base()) == before
    weight = model.model.layers[0].self_attn.q_proj.weight
    for tensor in (weight.data, weight.quant_state.absmax):
        kept = tensor.clone()
        tensor.view(-1)[0] += 1
        assert frozen_fingerprint(model) != before
        tensor.copy_(kept)
        assert frozen_fingerprint(model) == before


def test_the_checksum_sees_scales_that_are_quantised_themselves(tmp_path: Path) -> None:
    twice = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=twice).save_pretrained(tmp_path)
    model = load_base(ModelSource(str(tmp_path)), CPU)
    state = model.model.layers[0].self_attn.q_proj.weight.quant_state
    for tensor in (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code):
        before, kept = frozen_fingerprint(model), tensor.clone()
        tensor.view(-1)[0] += 1
        assert frozen_fingerprint(model) != before
        tensor.copy_(kept)
        assert frozen_fingerprint(model) == before


def test_a_checkpoint_that_is_in_4_bits_already_is_read_as_it_is(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "small")
    source = ModelSource(str(tmp_path / "small"))
    assert method_of(load_config(source)) == "bitsandbytes (4 bit)"
    assert in_4bit(source, load_config(source))
    loaded = load_base(source, CPU)
    assert frozen_fingerprint(loaded) == frozen_fingerprint(base())
    model = attach_lora(loaded, Lora(2, 4, 0.0), 0)
    assert error(computed(model, records(3)), looped(model, records(3))) < 1e-5


def test_weights_stay_as_they_were_read_whatever_passes(tmp_path: Path) -> None:
    """bitsandbytes repacks them, and rounds their scales, at the first pass in evaluation mode on some CPUs."""
    model, before = base(), frozen_fingerprint(base())
    model.eval()(torch.tensor([[5, 6, 7]]))
    assert frozen_fingerprint(model) == before
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ConfigError, match=r"bitsandbytes repacked, and rounded.* Fix: load it again"):
        keep_layout(model)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"\(bitsandbytes\)"),
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\)"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path: Path, stored: dict[str, Any], named: str) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": stored}))
    with pytest.raises(ConfigError, match=rf"quantised weights {named}, on which.* Fix: .* with model.load_in_4bit"):
        load_config(ModelSource(str(tmp_path)))


def test_without_the_library_it_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"load_in_4bit: .* is not installed\. Fix: pip install 'dptune\[quantized\]'"
    ):
        load_config(ModelSource(saved("llama"), load_in_4bit=True))
    load_config(ModelSource(saved("llama")))
