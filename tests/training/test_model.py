"""Base models come pinned or local, as safetensors; adapters load with PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_models import CPU, adapted, gpt2, llama, trainable

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.training.models.model import (
    DivergedError,
    ModelSource,
    assert_trained,
    attach_lora,
    frozen_fingerprint,
    load_base,
    save_adapter,
    trainable_state,
)

IDS = torch.arange(1, 9)[None]


@pytest.mark.parametrize("revision", [None, "main", "abc", "A" * 40, "0" * 39, "0" * 40 + "\n"])
def test_a_hub_model_without_a_pinned_commit_is_refused(revision: str | None) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision"):
        ModelSource("openai-community/gpt2", revision)


def test_a_pinned_hub_model_and_a_local_folder_are_accepted(tmp_path: Path) -> None:
    assert ModelSource("openai-community/gpt2", "0123456789" * 4).revision == "0123456789" * 4
    assert ModelSource(str(tmp_path)).revision is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_local_checkpoint_loads_frozen(tmp_path: Path, dtype: str) -> None:
    base = gpt2()
    base.save_pretrained(tmp_path)
    loaded = load_base(ModelSource(str(tmp_path), dtype=dtype), CPU)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert next(loaded.parameters()).dtype == getattr(torch, dtype)
    if dtype == "float32":
        torch.testing.assert_close(loaded.eval()(input_ids=IDS).logits, base.eval()(input_ids=IDS).logits)


def test_a_pickled_checkpoint_is_refused(tmp_path: Path) -> None:
    base = gpt2()
    base.config.save_pretrained(tmp_path)
    torch.save(base.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.source"):
        load_base(ModelSource(str(tmp_path)), CPU)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.source"):
        load_base(ModelSource(str(tmp_path)), CPU)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_saved_adapter_loads_anywhere_with_equal_logits(tmp_path: Path, family: str) -> None:
    model = adapted(family, randomised=True).eval()
    save_adapter(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    base = gpt2() if family == "gpt2" else llama()
    plain = base.eval()(input_ids=IDS).logits.clone()
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert not torch.allclose(loaded(input_ids=IDS).logits, plain)


def test_adapters_are_float32_reproducible_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    models = []
    for _ in range(2):
        base = llama().to(torch.bfloat16)
        torch.manual_seed(5)
        models.append(attach_lora(base, Lora(rank=4), init_seed=3))
        assert torch.rand(1) == expected
    first, second = (trainable(model) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(parameter.dtype == torch.float32 for parameter in first.values())


def test_an_unknown_family_with_layers_of_other_names_asks_for_its_projections() -> None:
    base = gpt2()
    base.config.model_type = "novel"
    assert attach_lora(base, Lora(), init_seed=0).peft_config["default"].target_modules == {"c_attn"}
    base = gpt2()
    base.config.model_type = "novel"
    for block in base.transformer.h:
        block.attn.mixed = block.attn.c_attn
        del block.attn.c_attn
    with pytest.raises(ConfigError, match=r"lora\.target_modules: not known for model type 'novel'.*mixed"):
        attach_lora(base, Lora(), init_seed=0)


def test_an_adapter_that_did_not_move_is_noticed() -> None:
    model = adapted()
    with pytest.raises(DivergedError, match="did not move"):
        assert_trained(model, trainable_state(model), frozen_fingerprint(model))


def moved() -> tuple[PeftModel, dict[str, torch.Tensor], object]:
    model = adapted()
    initial, fingerprint = trainable_state(model), frozen_fingerprint(model)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.1)
    return model, initial, fingerprint


def test_an_adapter_that_is_not_finite_is_noticed() -> None:
    model, initial, fingerprint = moved()
    assert_trained(model, initial, fingerprint)
    with torch.no_grad():
        next(iter(trainable(model).values()))[0, 0] = float("nan")
    with pytest.raises(DivergedError, match=r"not finite.*Fix: lower training.learning_rate"):
        assert_trained(model, initial, fingerprint)


@pytest.mark.parametrize("change", ["one entry", "two rows swapped"])
def test_a_frozen_weight_that_changed_is_noticed(change: str) -> None:
    model, initial, fingerprint = moved()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        if change == "one entry":
            weight[3, 3] += 1e-3
        else:
            weight[[3, 4]] = weight[[4, 3]].clone()
    with pytest.raises(RuntimeError, match="frozen"):
        assert_trained(model, initial, fingerprint)
