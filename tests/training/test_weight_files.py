"""A checkpoint's files of weights: what their headers tell, and what only their numbers do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from broken_models import BROKEN, WEIGHTS
from safetensors.torch import load_file, save_file
from tiny_classifiers import configuration
from tiny_models import CPU, gpt2
from transformers import AutoModelForMaskedLM

from dptune.core.errors import ConfigError
from dptune.training.models import weight_files
from dptune.training.models.classifier import empty_classifier, head_names, load_classifier, load_classifier_config
from dptune.training.models.model import ModelSource, load_base
from dptune.training.models.weight_files import Stored, check_enough, check_finite, stored_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gpt2().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_without_weights_is_one_that_is_planned(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert stored_weights(str(folder), None) == {}
    check_enough(str(folder), 10**12, {})


def test_other_files_beside_the_weights_are_not_read(folder: Path) -> None:
    """Mistral's checkpoints hold all weights twice; transformers reads one of the two."""
    (folder / "consolidated.safetensors").write_bytes(b"another format")
    (folder / "model.safetensors.index.json").write_text("{")
    assert load_base(ModelSource(str(folder)), CPU)


@pytest.mark.parametrize(("asked", "enough"), [(0, True), (200, True), (201, False)])
def test_weights_in_4_bits_are_enough_for_twice_as_many(asked: int, enough: bool) -> None:
    stored = {"a": Stored(Path("a"), "U8", (6, 10)), "b": Stored(Path("a"), "U8", (40,))}
    if enough:
        check_enough("model", asked, stored)
    else:
        with pytest.raises(ConfigError, match=r"model/config\.json asks for 201 weights, .* hold 100\. Fix: give"):
            check_enough("model", asked, stored)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_real_numbers_of_any_size_are_taken(dtype: torch.dtype, folder: Path) -> None:
    weights = {name: one.to(dtype) for name, one in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    assert load_base(ModelSource(str(folder)), CPU)


def test_a_number_that_the_dtype_does_not_hold_is_none(folder: Path) -> None:
    """1e39 is a number in float64, and infinite in the float32 that the model is read in."""
    weights = {name: one.double() for name, one in load_file(folder / WEIGHTS).items()}
    weights["transformer.ln_f.bias"][0] = 1e39
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"ln_f\.bias in .*model\.safetensors holds a number that is not finite"):
        load_base(ModelSource(str(folder)), CPU)


@pytest.mark.parametrize("place", [0, -1])
def test_every_weight_is_looked_at(place: int) -> None:
    names = [name for name, _ in gpt2().named_parameters()]
    for name in names:
        model = gpt2()
        with torch.no_grad():
            model.get_parameter(name).view(-1)[place] = torch.nan
        with pytest.raises(ConfigError, match=f"weight {name} of 'it' holds a number"):
            check_finite("it", model)
    check_finite("it", gpt2())


def test_scales_of_weights_in_4_bits_are_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights themselves are bytes, of which each is a number."""
    monkeypatch.setattr(weight_files, "states_of", lambda weight: [torch.tensor([1.0, torch.nan])])
    with pytest.raises(ConfigError, match="holds a number that is not finite"):
        check_finite("it", gpt2())


def test_a_file_is_named_whatever_prefix_its_names_have() -> None:
    model = gpt2()
    with torch.no_grad():
        model.transformer.wte.weight[0, 0] = torch.inf
    for key in ("transformer.wte.weight", "wte.weight", "model.transformer.wte.weight"):
        with pytest.raises(ConfigError, match=r"wte\.weight in the file holds a number"):
            check_finite("it", model, {key: Stored(Path("the file"), "F32", (1,))})
    with pytest.raises(ConfigError, match=r"wte\.weight of 'it' holds a number"):
        check_finite("it", model, {"not.a.wte.weights": Stored(Path("the file"), "F32", (1,))})


@pytest.mark.parametrize("name", ["cut in half", "a pointer", "a shard less"])
def test_a_model_of_the_hub_names_the_file_of_its_snapshot(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN[name][0](folder)
    monkeypatch.setattr(weight_files, "try_to_load_from_cache", lambda *_, **__: str(folder / "config.json"))
    with pytest.raises(ConfigError, match=BROKEN[name][1]):
        stored_weights("somebody/model", "0" * 40)
    monkeypatch.setattr(weight_files, "try_to_load_from_cache", lambda *_, **__: None)
    assert stored_weights("somebody/model", "0" * 40) == {}


@pytest.mark.parametrize("name", ["cut in half", "empty", "NaN of a rare token"])
def test_a_classifier_is_refused_by_the_same_names(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    gpt2().save_pretrained(folder)
    source = ModelSource(str(folder))
    config = load_classifier_config(source, ["no", "yes"], 0)
    head = head_names(source, empty_classifier(source, config))
    assert load_classifier(source, config, head, CPU)
    BROKEN[name][0](folder)
    with pytest.raises(ConfigError, match=BROKEN[name][1]):
        load_classifier(source, config, head, CPU)


def test_an_encoder_whose_weights_are_of_another_shape_is_refused(tmp_path: Path) -> None:
    AutoModelForMaskedLM.from_config(configuration("bert")).save_pretrained(tmp_path / "model")
    source = ModelSource(str(tmp_path / "model"))
    config = load_classifier_config(source, ["no", "yes"], 0)
    head = head_names(source, empty_classifier(source, config))
    weights = load_file(tmp_path / "model" / WEIGHTS)
    name = next(name for name in weights if name.endswith("query.weight"))
    weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"query\.weight of shape .*, and its config\.json asks for"):
        load_classifier(source, config, head, CPU)
