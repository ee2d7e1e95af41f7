"""Texts tune a checkpoint of texts and images: its text model alone, under the names that its own class gives them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from tiny_tuning import rows
from tiny_vision import KINDS, vision_checkpoint

import dptune
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.job.delivery.adapter_loading import load_adapter
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.models.model import ModelSource, attach_lora, load_base, load_config, without_weights
from dptune.training.models.trained_layers import linear_layers

_USUAL = ("gemma3", "qwen3_5", "mistral3")
_FAMILIES = [family if family in _USUAL else pytest.param(family, marks=pytest.mark.slow) for family in KINDS]
_QUICK: dict[str, Any] = {
    "epsilon": 8,
    "epochs": 0.5,
    "expected_batch_size": 8,
    "rank": 2,
    "max_length": 16,
    "device": "cpu",
}


def adapted(folder: Path, modules: tuple[str, ...] | str | None) -> list[str]:
    source = ModelSource(str(folder))
    model = attach_lora(without_weights(source, load_config(source)), Lora(2, 4, 0.0, modules), 0)
    return [pair.name.removeprefix("base_model.model.") for pair in lora_pairs(model)]


@pytest.mark.one_case
@pytest.mark.parametrize("family", _FAMILIES)
def test_the_adapter_loads_on_the_checkpoints_own_class(family: str, tmp_path: Path) -> None:
    folder = vision_checkpoint(family, tmp_path / "base")
    tuned = dptune.tune(folder, rows(), out=tmp_path / "out", **_QUICK)
    path, ids = tuned.folder / "adapter", torch.arange(5, 17)[None]
    own = getattr(transformers, KINDS[family][0])
    base = own.from_pretrained(folder, dtype=torch.float32).eval()
    modules = dict(base.named_modules())
    with safe_open(str(path / "adapter_model.safetensors"), "pt") as file:
        layers = {re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", key) for key in file.keys()}  # noqa: SIM118
    assert layers
    assert layers <= modules.keys()
    assert not [name for name in layers if "vision" in name or "visual" in name]
    with torch.no_grad():
        plain = base(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        loaded = PeftModel.from_pretrained(base, str(path)).eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
        ran = tuned.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        source = ModelSource(str(folder))
        ours = load_adapter(path, source, load_base(source, torch.device("cpu")))
        again = ours(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert not torch.allclose(plain, ran, atol=1e-4)
    torch.testing.assert_close(loaded.logits, ran, rtol=0, atol=1e-6)
    torch.testing.assert_close(again, ran, rtol=0, atol=1e-6)
    card = (path / "README.md").read_text()
    loader = re.search(r"^base = (\w+)\.from_pretrained", card, re.MULTILINE)
    assert loader is not None
    assert type(getattr(transformers, loader[1]).from_pretrained(folder)) is own


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize(
    "modules",
    [None, ("q_proj", "v_proj"), r".*(q|v)_proj", r".*layers.*self_attn\.(q|v)_proj"],
    ids=["default", "names", "expression", "expression of layers"],
)
def test_what_names_layers_of_both_adapts_those_of_the_text_model(family: str, modules: Any, tmp_path: Path) -> None:
    found = adapted(vision_checkpoint(family, tmp_path), modules)
    assert found
    assert all(name.endswith(("q_proj", "v_proj")) and "language_model" in name for name in found)
    assert len(found) >= (2 if family == "qwen3_5" else 4)


def test_all_linear_is_all_of_the_text_model(tmp_path: Path) -> None:
    folder = vision_checkpoint("gemma3", tmp_path)
    source = ModelSource(str(folder))
    linear = linear_layers(without_weights(source, load_config(source)))
    assert adapted(folder, "all-linear") == linear
    assert len(linear) == 4 * 7


def test_a_layer_of_a_tower_alone_is_refused_with_those_of_the_text_model(tmp_path: Path) -> None:
    folder = vision_checkpoint("gemma3", tmp_path)
    with pytest.raises(
        ConfigError, match=r"no layer is called 'out_proj'\. Fix: .*\(down_proj, gate_proj, k_proj, o_p"
    ):
        adapted(folder, ("q_proj", "out_proj"))
    with pytest.raises(
        ConfigError, match=r"matches no layer\. Fix: match whole names such as model\.language_model\.l"
    ):
        adapted(folder, r".*vision.*q_proj")


def test_how_much_is_adapted_is_said(tmp_path: Path) -> None:
    """Three of four layers of Qwen3.5 have attention of another kind, with other names."""
    from dptune.job.base_model import open_base
    from dptune.job.settings import TuneSettings

    folder = vision_checkpoint("qwen3_5", tmp_path)
    said = open_base(str(folder), TuneSettings(epsilon=1.0)).adapted
    expected = r"2 of \d+ linear layers of the text model \(q_proj, v_proj\), in 1 of 4 transformer layers"
    assert re.fullmatch(expected, said)
