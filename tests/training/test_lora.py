"""rsLoRA, patterns and starts mean what they mean in PEFT, and train on each record's own gradient."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_per_sample import computed, error, looped
from tiny_families import tiny
from tiny_models import CPU, FAMILIES, each_record, gpt2, llama, make_header, make_plan, records, trainable
from transformers import AutoConfig, AutoModelForCausalLM

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.shared_pass import shared_copy, train_together
from dptune.training.loop import train
from dptune.training.models.model import ModelSource, attach_lora, frozen_fingerprint, load_base, save_adapter
from dptune.training.models.trained_layers import lora_targets
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec

_RANKS = {"llama": {r"layers\.1\..*q_proj": 6, "down_proj": 2}, "gpt2": {r"h\.1\.attn\.c_attn": 6, "c_fc": 2}}
_ALPHAS = {"llama": {"v_proj": 3, "down_proj": 5}, "gpt2": {"c_attn": 3, "c_fc": 5}}
WAYS = ("rslora", "rank_pattern", "alpha_pattern", "all three", "gaussian", "orthogonal")


def options(way: str, family: str) -> dict[str, Any]:
    patterns = {"rank_pattern": _RANKS[family], "alpha_pattern": _ALPHAS[family]}
    if way == "all three":
        return {"rslora": True, **patterns}
    if way in patterns:
        return {way: patterns[way]}
    return {"rslora": True} if way == "rslora" else {"init_lora_weights": way}


def lora(way: str, family: str) -> Lora:
    return Lora(rank=4, alpha=8, dropout=0.0, target_modules="all-linear", **options(way, family))


def run(model: Any, folder: Path, **plan: Any) -> None:
    tokens, entropy = records(), OsEntropy()
    units, mechanism = each_record(tokens), build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))})
    spec = RunSpec(model, tokens, units, mechanism, make_plan(steps=3, **plan), make_header(entropy, units))
    train(spec, folder, entropy).close()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_each_records_own_and_peft_loads_the_same_model(way: str, family: str, tmp_path: Path) -> None:
    base = FAMILIES[family]()
    before = frozen_fingerprint(base)
    model = attach_lora(base, lora(way, family), init_seed=3)
    assert frozen_fingerprint(model) == before
    start = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    rehearse(model, lora_pairs(model))
    run(model, tmp_path / "run")
    assert not any(torch.equal(parameter, start[name]) for name, parameter in trainable(model).items())
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(std=0.2, generator=drawn)
    assert error(computed(model, records(4)), looped(model, records(4))) < 1e-4
    save_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(FAMILIES[family](), str(tmp_path / "adapter")).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits, rtol=0, atol=0)
    assert not torch.allclose(loaded(input_ids=ids).logits, FAMILIES[family]().eval()(input_ids=ids).logits, atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_ranks_and_scalings_are_those_asked_for(family: str) -> None:
    model = attach_lora(FAMILIES[family](), lora("all three", family), init_seed=0)
    ranks, alphas = {}, {}
    for pair in lora_pairs(model):
        ranks[pair.name] = pair.down.out_features
        alphas[pair.name] = pair.scaling * math.sqrt(pair.down.out_features)
    attention, last = {"llama": ("q_proj", "down_proj"), "gpt2": ("attn.c_attn", "c_fc")}[family]
    assert [rank for name, rank in ranks.items() if name.endswith(attention)] == [4, 6]
    assert [rank for name, rank in ranks.items() if name.endswith(last)] == [2, 2]
    assert {round(alpha, 6) for alpha in alphas.values()} == {3.0, 5.0, 8.0}
    assert [round(alpha) for name, alpha in alphas.items() if name.endswith(last)] == [5, 5]


@pytest.mark.parametrize("way", WAYS)
def test_every_start_leaves_the_model_as_it_was(way: str) -> None:
    """To rounding: an orthogonal start has B other than 0, and B A = 0."""
    ids, plain = torch.tensor([[3, 1, 4, 1, 5]]), llama().eval()
    model = attach_lora(llama(), lora(way, "llama"), init_seed=3).eval()
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-5)
    moved = any(bool(p.any()) for name, p in trainable(model).items() if "lora_B" in name)
    assert moved == (way == "orthogonal")
    again = attach_lora(llama(), lora(way, "llama"), init_seed=3)
    assert all(torch.equal(p, trainable(again)[name]) for name, p in trainable(model).items())
    other = attach_lora(llama(), lora(way, "llama"), init_seed=4)
    assert not all(torch.equal(p, trainable(other)[name]) for name, p in trainable(model).items())


@pytest.mark.parametrize(
    ("given", "field", "reason"),
    [
        ({"init_lora_weights": "eva"}, "init_lora_weights", "reads records"),
        ({"init_lora_weights": "corda"}, "init_lora_weights", "reads records"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights", "reads records"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights", "changes the frozen weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights", "changes the frozen weights"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights", "changes the frozen weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "changes the frozen weights"),
        ({"init_lora_weights": "mica"}, "init_lora_weights", "freezes the other factor"),
        ({"init_lora_weights": "gausian"}, "init_lora_weights", "is unknown"),
        ({"init_lora_weights": False}, "init_lora_weights", "random adapters"),
        ({"init_lora_weights": 1}, "init_lora_weights", "is unknown"),
        ({"init_lora_weights": "orthogonal", "rank": 3}, "init_lora_weights", "even ranks, not 3"),
        ({"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 5}}, "init_lora_weights", "even ranks, not 5"),
        ({"rslora": "yes"}, "rslora", "neither true nor false"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern", "not a positive whole number"),
        ({"rank_pattern": {"q_proj": True}}, "rank_pattern", "not a positive whole number"),
        ({"alpha_pattern": {"q_(proj": 4}}, "alpha_pattern", "is not the name of a layer"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern", "is not a mapping"),
    ],
)
def test_what_is_refused_is_refused_by_name_and_with_a_reason(given: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.{field}: .*{reason}.*Fix: "):
        Lora(**given)


@pytest.mark.parametrize("targets", [0, True, 2.5, "", (), ("",), (3,), {"q_proj": 4}])
def test_targets_that_name_no_layer_are_refused_and_do_not_count_as_left_out(targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules: .* names no layers.*leave it out"):
        Lora(target_modules=targets)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_no_adapted_layer_matches_is_refused(name: str) -> None:
    """PEFT ignores it."""
    with pytest.raises(ConfigError, match=rf"lora\.{name}: no adapted layer is called 'k_proj'.*q_proj, v_proj"):
        attach_lora(llama(), Lora(rank=4, dropout=0.0, **{name: {"k_proj": 2}}), 0)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_two_patterns_with_different_numbers_for_one_layer_are_refused(name: str) -> None:
    """PEFT takes the first, and sorts them where it saves an adapter: loaded again, it would scale by another alpha."""
    for pattern in ({"q_proj": 4, r"layers\.1\..*": 2}, {r"layers\.1\..*": 2, "q_proj": 4}):
        with pytest.raises(ConfigError, match=rf"lora\.{name}: layer model\.layers\.1\.self_attn\.q_proj matches"):
            attach_lora(llama(), Lora(rank=4, dropout=0.0, **{name: pattern}), 0)
    attach_lora(llama(), Lora(rank=4, dropout=0.0, **{name: {"q_proj": 2, r"layers\.1\..*": 2}}), 0)


@pytest.mark.parametrize(
    ("family", "expression", "count"),
    [("llama", r"model\.layers\.1\..*_proj", 7), ("gpt2", r".*\.(c_attn|c_fc)", 4), ("llama", r".*\.[kv]_proj", 4)],
)
def test_a_regular_expression_names_the_layers_that_peft_adapts(
    family: str, expression: str, count: int, tmp_path: Path
) -> None:
    model = attach_lora(FAMILIES[family](), Lora(rank=4, dropout=0.0, target_modules=expression), 3)
    names = [pair.name.removeprefix("base_model.model.") for pair in lora_pairs(model)]
    assert len(names) == count
    assert all(re.fullmatch(expression, name) for name in names)
    rehearse(model, lora_pairs(model))
    run(model, tmp_path / "run")
    save_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(FAMILIES[family](), str(tmp_path / "adapter")).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("q_proj", r"'q_proj' matches no layer\. Fix: match whole names such as model\.layers\.0\.self_attn\.q_proj"),
        (r".*self_attn", r"matches model\.layers\.0\.self_attn, which is not a linear layer"),
        (r".*(q_proj", r"is not a regular expression \("),
    ],
)
def test_an_expression_that_names_no_linear_layers_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.target_modules: .*{problem}"):
        attach_lora(llama(), Lora(rank=4, dropout=0.0, target_modules=expression), 0)


@pytest.mark.parametrize("start", [True, "orthogonal"])
def test_a_frozen_model_in_bfloat16_trains_adapters_in_float32(start: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    base = load_base(ModelSource(str(tmp_path / "base"), dtype="bfloat16"), CPU)
    before = frozen_fingerprint(base)
    model = attach_lora(base, Lora(rank=4, dropout=0.0, init_lora_weights=start), init_seed=1)
    start_weights = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    run(model, tmp_path / "run")
    assert frozen_fingerprint(model) == before
    for name, parameter in trainable(model).items():
        assert parameter.dtype == torch.float32
        assert torch.isfinite(parameter).all()
        assert not torch.equal(parameter, start_weights[name])
    found, expected = computed(model, records(4)), looped(model, records(4))
    assert found.dtype == torch.float64
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 0.1


def test_runs_in_one_pass_keep_ranks_and_scalings_of_layers(tmp_path: Path) -> None:
    """Two runs side by side equal each alone, noise and coins included."""
    base, tokens, found = llama(), records(), []
    for together in (False, True):
        opened = []
        for seed in (1, 2):
            model = attach_lora(shared_copy(base), lora("all three", "llama"), seed)
            mechanism = build("static", {"noise_multiplier": 0.7, "pairs": len(lora_pairs(model))})
            entropy, units = FixedSeed(seed), each_record(tokens)
            header, folder = make_header(entropy, units, accounting="noise_only"), tmp_path / f"{together}{seed}"
            spec = RunSpec(model, tokens, units, mechanism, make_plan(learning_rate=1e-3), header)
            opened.append(open_run(spec, folder, entropy))
            found.append(model)
            if not together:
                assert train_together(base, [opened[-1]]) == [None]
        if together:
            assert train_together(base, opened) == [None, None]
        for run in opened:
            run.ledger.close()
    for alone, beside in zip(found[:2], found[2:], strict=True):
        for name, weight in trainable(alone).items():
            torch.testing.assert_close(trainable(beside)[name], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("targets", [("c_attn", "lm_head"), r".*\.c_attn|lm_head"])
def test_an_output_layer_that_shares_its_weight_with_the_embeddings_is_refused(targets: Any) -> None:
    """PEFT adapts it, and merging moves the embeddings too."""
    with pytest.raises(ConfigError, match=r"include 'lm_head', which shares its weight with the embeddings"):
        attach_lora(gpt2(), Lora(rank=4, dropout=0.0, target_modules=targets), 0)
    attach_lora(llama(), Lora(rank=4, dropout=0.0, target_modules=("q_proj", "lm_head")), 0)  # its own weight


@pytest.mark.parametrize(
    ("family", "targets"),
    [("smollm3", ["q_proj", "v_proj"]), ("olmo2", ["q_proj", "v_proj"]), ("phi3", ["qkv_proj"]), ("gpt2", ["c_attn"])],
)
def test_a_family_outside_pefts_table_gets_its_attention_projections(family: str, targets: list[str]) -> None:
    sizes = {"vocab_size": 99, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=2, num_key_value_heads=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert lora_targets(model, Lora(rank=4, dropout=0.0)) == targets


@pytest.mark.parametrize("targets", [None, ("out_proj",), "all-linear"])
def test_a_fix_names_no_layer_that_peft_refuses(targets: Any) -> None:
    """Nor PEFT's own names of what it wrapped before it refused; the layers that it does name are taken."""
    with pytest.raises(ConfigError) as refused:
        attach_lora(tiny("mamba"), Lora(2, 4, target_modules=targets), 0)
    assert refused.value.fix == "name linear layers that PEFT adapts (dt_proj, in_proj, x_proj)"
    attach_lora(tiny("mamba"), Lora(2, 4, target_modules=("dt_proj", "in_proj", "x_proj")), 0)
