"""What a run cannot do right is refused by layer name before anything is charged; what it can do is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from test_per_sample import computed, error, looped
from tiny_families import CAUSAL, GEMMA4, families, tiny
from tiny_models import (
    adapted,
    each_record,
    gpt2,
    llama,
    make_header,
    make_plan,
    records,
    release_lines,
    trainable,
    weights,
)
from transformers.pytorch_utils import Conv1D

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.training.gradients import gradient_check
from dptune.training.gradients.gradient_check import check_width, first_evaluation, rehearse
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.per_sample import Layout, Taps, by_row
from dptune.training.gradients.shared_pass import shared_copy, train_together
from dptune.training.loop import train
from dptune.training.models.causal import evaluation_mode, most_positions
from dptune.training.models.model import attach_lora
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec

_LINEAR = (torch.nn.Linear, Conv1D)
#: Families of which PEFT's all-linear names a layer that is not linear, or that a text does not reach.
_NOT_ALL = {
    "bart": "encoder_attn.k_proj",
    "bigbird_pegasus": "encoder_attn.k_proj",
    "deepseek_v4": "o_a_proj",
    "falcon_mamba": "out_proj",
    "jamba": "dt_proj",
    "mamba": "out_proj",
    "mbart": "encoder_attn.k_proj",
    "mixtral": "gate",
    "olmoe": "gate",
    "phimoe": r"router \(PhimoeTopKRouter\) cannot take",  # a linear layer that returns two tensors
    "qwen3_moe": "experts",
}


def attached(family: str, modules: tuple[str, ...] | str) -> Any:
    model = attach_lora(tiny(family, **CAUSAL[family]), Lora(2, 4, 0.0, modules), 0)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def run(model: Any, folder: Path, mechanism: Any = None, tokens: Any = None) -> None:
    entropy, tokens = OsEntropy(), tokens or records()
    chosen = mechanism or build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))})
    units = each_record(tokens)
    names = {"mechanism": chosen.name, "published_accountant": chosen.published_accountant}
    header = make_header(entropy, units, **names)
    train(RunSpec(model, tokens, units, chosen, make_plan(steps=2), header), folder, entropy).close()


@pytest.mark.parametrize("family", families(*(name for name in CAUSAL if name not in _NOT_ALL)))
def test_all_linear_layers_of_a_family_equal_a_loop_or_are_named(family: str) -> None:
    base = tiny(family, **CAUSAL[family])
    output = base.get_output_embeddings()
    linear = [n for n, module in base.named_modules() if isinstance(module, _LINEAR) and module is not output]
    model = attached(family, "all-linear")
    pairs = lora_pairs(model)
    assert [pair.name.removeprefix("base_model.model.") for pair in pairs] == linear
    rehearse(model, pairs)
    assert error(computed(model, records(3)), looped(model, records(3))) < 1e-3


@pytest.mark.parametrize("family", families(*_NOT_ALL))
def test_a_layer_that_cannot_be_done_right_is_named(family: str) -> None:
    def attempt() -> None:
        model = attached(family, "all-linear")
        rehearse(model, lora_pairs(model))

    with pytest.raises(ConfigError, match=_NOT_ALL[family]):
        attempt()


def test_a_router_is_named_and_the_other_layers_can_be_trained() -> None:
    """A router is a linear layer that returns two tensors; PEFT's adapter fails in the middle of the model."""

    def attach(modules: Any) -> Any:
        return attach_lora(tiny("llama4_text"), Lora(2, 4, 0.0, modules), 0)

    model = attach("all-linear")
    with pytest.raises(ConfigError) as refused:
        rehearse(model, lora_pairs(model))
    said = str(refused.value)
    assert "layers.0.feed_forward.router (Llama4Router) cannot take an adapter (AttributeError" in said
    others = re.search(r"Fix: name other layers \((.+)\)\.", said)
    assert others is not None, said
    model = attach(tuple(others[1].split(", ")))
    rehearse(model, lora_pairs(model))


@pytest.mark.parametrize("bits", [torch.float32, torch.bfloat16])
def test_a_rehearsal_leaves_the_model_as_it_was(bits: torch.dtype) -> None:
    model = adapted("llama", randomised=True).to(bits)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    rehearse(model, lora_pairs(model))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_scaling_looks_like_mixed_rows(family: str) -> None:
    model = attach_lora(tiny(family), Lora(2, 1_000_000, 0.0, "all-linear"), 0)
    rehearse(model, lora_pairs(model))


def test_rows_times_tokens_side_by_side_are_as_they_are_alone(tmp_path: Path) -> None:
    """Two runs of OPT's feed-forward layers in one pass, with batches packed across them."""
    base, tokens, found = tiny("opt"), records(), []
    for together in (False, True):
        opened = []
        for seed in (1, 2):
            model = attach_lora(shared_copy(base), Lora(4, 8, 0.0, ("fc1", "fc2", "q_proj")), seed)
            mechanism = build("static", {"noise_multiplier": 0.7, "pairs": len(lora_pairs(model))})
            entropy, units = FixedSeed(seed), each_record(tokens)
            header = make_header(entropy, units, accounting="noise_only")
            plan, folder = make_plan(physical_batch_size=3), tmp_path / f"{together}{seed}"
            opened.append(open_run(RunSpec(model, tokens, units, mechanism, plan, header), folder, entropy))
            if not together:
                assert train_together(base, [opened.pop()]) == [None]
            found.append(weights(model) if not together else model)
        if together:
            assert train_together(base, opened) == [None, None]
    for alone, model in zip(found[:2], found[2:], strict=True):
        for name, value in weights(model).items():
            torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=2e-5)


def test_opt_trains_the_layers_that_see_rows_times_tokens(tmp_path: Path) -> None:
    model = attached("opt", ("fc1", "fc2"))
    assert error(computed(model, records(5)), looped(model, records(5))) < 1e-4
    run(model, tmp_path)
    assert release_lines(tmp_path) == 2


def _mixing(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A GPT-2 whose last attention sees its inputs changed, and puts its outputs back as they were."""
    model = attach_lora(gpt2(), Lora(rank=2, dropout=0.0), 0)
    layer = model.get_base_model().transformer.h[1].attn.c_attn
    real = layer.forward
    layer.forward = lambda states: real(change(states))
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states + 0.1 * states.mean(0, keepdim=True),  # as batch normalisation does
        lambda states: states + 1e-3 * states.mean(0, keepdim=True),
        lambda states: states.roll(1, 0),
        lambda states: states.flip(0),
        lambda states: torch.cat([states[:1], states[1:].flip(0)]),
        lambda states: torch.cat([states[:-1], states[-1:] + states[:1]]),
    ],
    ids=["mean", "a little mean", "rolled", "flipped", "first_right", "last_wrong"],
)
def test_a_layer_whose_rows_are_mixed_is_refused_before_a_charge(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """Their shapes are right, so nothing but a comparison finds them."""
    with pytest.raises(ConfigError, match=r"layer base_model.*gives a record another gradient in a batch than alone"):
        run(_mixing(change), tmp_path)
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states + 5 * states[:1] if states.dtype == torch.float32 else states,
        lambda states: (states + 1e8 * states[:1]) - 1e8 * states[:1],
        lambda states: (states + 1e6 * states.mean(0, keepdim=True)) - 1e6 * states.mean(0, keepdim=True),
    ],
    ids=["in_float32", "rounding_by_a_record", "rounding_by_all"],
)
def test_records_that_are_coupled_in_the_run_s_own_type_alone_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """In float64 nothing of it is seen; without one record the sum of clipped gradients moved by 19 radii in 256."""
    with pytest.raises(ConfigError, match="gives a record another gradient in a batch than alone"):
        run(_mixing(change), tmp_path)
    assert release_lines(tmp_path) == 0


def _rounded(size: float) -> Any:
    """A GPT-2 whose last attention rounds in a batch, as kernels do by shape, and does not of a record alone."""

    def change(states: torch.Tensor) -> torch.Tensor:
        added = size * (len(states) > 1)
        return (states + added) - added

    return _mixing(change)


def test_a_layer_that_only_rounds_is_taken_by_its_gradients_in_float64(tmp_path: Path) -> None:
    """In float32 it is as far off as rows that are mixed."""
    model = _rounded(1e6)
    pairs = lora_pairs(model)
    before = {name: (one, one.clone(), one.data_ptr()) for name, one in model.named_parameters()}
    close = gradient_check._DOUBTFUL[torch.float32][1]
    with evaluation_mode(model), gradient_check._random_up_factors(pairs):
        off, _ = gradient_check._distances(model, pairs, *gradient_check.made_up_records(model), False)
    assert max(off) > close
    rehearse(model, pairs)
    for name, parameter in model.named_parameters():
        one, value, place = before[name]
        assert parameter is one
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, value), name
        assert parameter.data_ptr() == place or "lora_B" in name
    run(model, tmp_path)
    assert release_lines(tmp_path) == 2


def test_without_float64_a_layer_that_only_rounds_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for a copy in float64, say: as much as mixed rows may differ is not taken on trust."""

    def refuse(_model: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(gradient_check, "in_float64", refuse)
    little, much = _rounded(1e4), _rounded(1e6)
    rehearse(little, lora_pairs(little))
    with pytest.raises(ConfigError, match="gives a record another gradient"):
        rehearse(much, lora_pairs(much))


@pytest.mark.parametrize("seed", range(6))
def test_gemma_4_is_taken_at_every_start(seed: int) -> None:
    """The query gradients of its last layer are small differences of large numbers: float32 is 5 % off at some."""
    model = attach_lora(tiny("gemma4_text", seed=seed, **GEMMA4), Lora(8, 16, 0.0, ("q_proj", "v_proj")), 0)
    rehearse(model, lora_pairs(model))


@pytest.mark.parametrize("row", range(3))
def test_each_record_of_the_batch_is_compared_with_itself_alone(row: int, tmp_path: Path) -> None:
    """One record's inputs alone are mixed with its neighbour's, and no record's that is by itself."""

    def change(states: torch.Tensor) -> torch.Tensor:
        mixed = states.clone()
        if len(states) > 1:
            mixed[row] += 0.1 * states[row - 1].detach()  # or the neighbour's gradient would show it too
        return mixed

    with pytest.raises(ConfigError, match=r"layer base_model.*gives a record another gradient in a batch than alone"):
        run(_mixing(change), tmp_path)
    assert release_lines(tmp_path) == 0


def test_a_layer_of_which_float64_computes_no_numbers_is_refused(tmp_path: Path) -> None:
    """Its code may know no float64: then the repetition says nothing of it, and above all not that it is right."""
    double: list[int] = []

    def change(states: torch.Tensor) -> torch.Tensor:
        if states.dtype == torch.float64:
            double.append(len(states))
            return states * math.nan
        return states + 0.1 * states.mean(0, keepdim=True)

    with pytest.raises(ConfigError, match=r"gives a record another gradient|finite"):
        run(_mixing(change), tmp_path)
    assert double
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize("memory", [True, False], ids=["float64", "no_float64"])
def test_rows_that_are_mixed_are_refused_in_half_precision_too(memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record reads half of its neighbour too: rounding to 8 bits is far from as much."""

    def refuse(_model: Any) -> Any:
        raise MemoryError

    if not memory:
        monkeypatch.setattr(gradient_check, "in_float64", refuse)
    model = _mixing(lambda states: states + 0.5 * (len(states) > 1) * states.roll(1, 0)).to(torch.bfloat16)
    pairs = lora_pairs(model)
    with evaluation_mode(model), gradient_check._random_up_factors(pairs):
        off, _ = gradient_check._distances(model, pairs, *gradient_check.made_up_records(model), False)
    assert 0.3 < max(off) < 0.9
    with pytest.raises(ConfigError, match="gives a record another gradient"):
        rehearse(model, pairs)


@pytest.mark.parametrize("fails", [False, True])
def test_all_of_a_model_is_float64_for_a_while_and_its_own_tensors_come_back(fails: bool) -> None:
    """Buffers too, such as the frequencies of rotations; and after an error, such as memory that is full."""

    class FullError(Exception):
        pass

    model = adapted("llama")
    tensors = {
        name: one for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_floating_point()
    }
    assert any("inv_freq" in name for name in tensors)
    before = {name: (one.dtype, one.data_ptr(), one.detach().clone()) for name, one in tensors.items()}
    with pytest.raises(FullError) if fails else nullcontext(), gradient_check.in_float64(model):
        within = [one.dtype for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
        if fails:
            raise FullError
    assert within == [torch.float64] * len(tensors)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    for name, (dtype, place, value) in before.items():
        assert (after[name].dtype, after[name].data_ptr()) == (dtype, place), name
        assert torch.equal(after[name], value), name


def test_weights_in_4_bits_are_not_taken_for_float64() -> None:
    """Their products are made in a half precision, so that the distances would be compared with a billionth."""
    model = adapted("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    before = [one.dtype for one in model.parameters()]
    with pytest.raises(ConfigError, match=r"^model\.load_in_4bit"):
        gradient_check.in_float64(model).__enter__()
    assert [one.dtype for one in model.parameters()] == before


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "qwen3"])
def test_nothing_is_rounded_to_float32_in_float64(family: str) -> None:
    """Norms, softmax and rotations of these are made in float32 by their own code."""
    model = attach_lora(tiny(family), Lora(4, 8, 0.0, "all-linear"), 0)
    pairs = lora_pairs(model)
    with evaluation_mode(model), gradient_check._random_up_factors(pairs), gradient_check.in_float64(model):
        off, _ = gradient_check._distances(model, pairs, *gradient_check.made_up_records(model), False)
    assert max(off) < 1e-12


def test_layers_that_put_tokens_first_are_refused_by_name(tmp_path: Path) -> None:
    """XLNet's feed-forward layers, of which an unchecked product left memory as it was."""
    model = attach_lora(tiny("xlnet"), Lora(2, 4, 0.0, ("layer_1", "layer_2")), 0)
    with pytest.raises(ConfigError, match=r"ff\.layer_1 saw a tensor of shape \(7, 3, 32\) for 3 rows of 7 tokens"):
        run(model, tmp_path)
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize("shape", [(5, 7, 4), (7, 3, 4), (1, 7, 4), (20, 4), (3, 4), (4,), (3, 7, 2, 2)])
def test_rows_of_another_number_never_reach_the_table(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="layer of no rows saw a tensor of shape"):
        by_row(torch.zeros(shape), 3, 7, "of no rows")
    model = adapted()
    layout = Layout.of(lora_pairs(model))
    taps = Taps(torch.zeros(3, sum(layout.sizes)), layout, ["of no rows"] * 2, 7)
    with pytest.raises(ConfigError, match="layer of no rows"):
        taps.tap(0, 0, torch.zeros(shape), torch.zeros(shape, requires_grad=True))


def test_rows_times_tokens_come_apart_row_by_row() -> None:
    states = torch.arange(3 * 7 * 4.0).view(3, 7, 4)
    assert torch.equal(by_row(states.flatten(0, 1), 3, 7, "x"), states)
    assert torch.equal(by_row(states.flatten(0, 1), 3, -1, "x"), states)
    assert by_row(states, 3, 7, "x") is states


def _peft(config: Any) -> Any:
    return get_peft_model(llama(), config)


_QUERIES = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "aLoRA": (lambda: _peft(LoraConfig(r=2, alora_invocation_tokens=[5, 6], **_QUERIES)), "ALoraLinearVariant"),
    "AdaLoRA": (lambda: _peft(AdaLoraConfig(init_r=2, target_r=1, total_step=9, tinit=1, tfinal=1, **_QUERIES)), "SVD"),
    "DoRA": (lambda: _peft(LoraConfig(r=2, use_dora=True, **_QUERIES)), "DoraLinearVariant"),
    "a bias": (lambda: _peft(LoraConfig(r=2, lora_bias=True, init_lora_weights=False, **_QUERIES)), "q_proj"),
    "an embedding": (lambda: attach_lora(llama(), Lora(2, 4, 0.0, ("embed_tokens",)), 0), "embed_tokens.*Embedding"),
    "no such layer": (lambda: attach_lora(llama(), Lora(2, 4, 0.0, ("nosuch",)), 0), "no layer is called 'nosuch'"),
    "one of two": (lambda: attach_lora(llama(), Lora(2, 4, 0.0, ("q_proj", "Q_proj")), 0), "'Q_proj'.*q_proj, up_proj"),
    "a norm": (lambda: attach_lora(llama(), Lora(2, 4, 0.0, ("norm",)), 0), "LlamaRMSNorm"),
    "a name as an expression": (lambda: attach_lora(llama(), Lora(2, 4, 0.0, "q_proj"), 0), "matches no layer"),
    "none": (lambda: llama(), "no adapter called default"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_is_no_plain_lora_on_linear_layers_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = _REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        run(make(), tmp_path)
    assert release_lines(tmp_path) == 0


def test_transformers_own_checkpointing_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    model = adapted("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match=r"gradient checkpointing switched on.* set training\.gradient_checkpointing"):
        run(model, tmp_path)
    model = adapted("llama")
    model.enable_input_require_grads()
    with pytest.raises(ConfigError, match="enable_input_require_grads"):
        run(model, tmp_path)
    assert release_lines(tmp_path) == 0
    model.disable_input_require_grads()
    run(model, tmp_path)


def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    model = adapted("llama")
    model.merge_adapter()
    with pytest.raises(ConfigError, match="is merged"):
        run(model, tmp_path)


@pytest.mark.parametrize("name", ["static", "per_pair", "rldp", "quantile", "adaclip", "geoclip"])
def test_a_mechanism_of_another_model_is_refused_before_a_charge(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"mechanisms\.{name}\.pairs: was built for 1 parameter groups.*has 4.*of_model"
    ):
        run(adapted("llama"), tmp_path, build(name, {"noise_multiplier": 1.0}))
    assert release_lines(tmp_path) == 0


def test_an_accountant_that_counts_parameters_counts_those_that_train(tmp_path: Path) -> None:
    options = {"k": 9, "theta": 0.1, "pairs": 4, "dimension": 5}
    with pytest.raises(ConfigError, match=r"mechanisms\.plrvo\.dimension: was built for 5 parameters"):
        run(adapted("llama"), tmp_path, build("plrvo", options))


def test_records_of_one_token_have_no_gradient_in_rows_times_tokens_either() -> None:
    tokens = records(4)
    tokens.rows[:] = [row[:1] for row in tokens.rows]
    assert (computed(attached("opt", ("fc1", "q_proj")), tokens) == 0).all()


def test_a_model_that_takes_no_such_width_is_refused_before_a_charge() -> None:
    """MPT names its longest text ``max_seq_len``, which no rule on the configuration knows."""
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=16, vocab_size=50)
    model = attach_lora(MptForCausalLM(config), Lora(2, 4, 0.0, ("out_proj",)), 0)
    check_width(model, 16)
    with pytest.raises(ConfigError) as refused:
        check_width(model, 40)
    found = re.fullmatch(
        r"training\.max_length: the model does not take 40 tokens .* Fix: use (\d+) or less\.", str(refused.value)
    )
    assert found is not None
    check_width(model, int(found[1]))
    with pytest.raises(ConfigError):
        check_width(model, int(found[1]) + 1)


def test_an_evaluation_that_fails_at_every_length_is_not_blamed_on_the_length() -> None:
    model = adapted("llama")
    base = model.get_base_model()
    real = base.forward

    def fails_without_gradients(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            raise ValueError("matC_old has wrong shape")
        return real(*given, **named)

    base.forward = fails_without_gradients
    rehearse(model, lora_pairs(model))
    with pytest.raises(ConfigError, match=r"^model: \(LlamaForCausalLM\) evaluates no text \(ValueError: matC_old has"):
        check_width(model, 16)


def test_a_model_whose_predictions_are_no_numbers_at_a_width_is_refused_before_a_charge() -> None:
    model = adapted("llama")
    with torch.no_grad():
        base = model.get_base_model()
        base.lm_head.register_forward_hook(lambda _, __, out: out / (torch.arange(out.shape[1])[:, None] < 12))
    check_width(model, 12)
    said = r"the model does not take 16 tokens \(ArithmeticError: .*not finite numbers\)\. Fix: use 12 or less"
    with pytest.raises(ConfigError, match=said):
        check_width(model, 16)


def test_linear_attention_that_keeps_no_cache_is_evaluated_without_one() -> None:
    """RecurrentGemma fails where its cache is asked for, and no run asks for it."""
    model = attach_lora(tiny("recurrent_gemma"), Lora(2, 4, 0.0, ("linear_x", "linear_y")), 0)
    check_width(model, 16)


def test_an_error_of_the_first_evaluation_names_the_model_and_a_full_device_itself() -> None:
    model = adapted("llama")
    named = r"^model: \(Llama.*IndexError: too short.*Fix: give another model, or eval"
    with pytest.raises(ConfigError, match=named), first_evaluation(model):
        raise IndexError("too short")
    for raised in (ConfigError("data", "is wrong", fix="mend it"), torch.OutOfMemoryError("full")):
        with pytest.raises(type(raised)) as same, first_evaluation(model):
            raise raised
        assert same.value is raised


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_roberta_reads_as_many_tokens_as_are_behind_its_padding_token(padding: int) -> None:
    """It counts positions from that token's number on, so that its table is longer than its longest text."""
    model = attach_lora(tiny("roberta", is_decoder=True, pad_token_id=padding), Lora(2, 4, 0.0, ("query",)), 0)
    most = most_positions(model.get_base_model())
    assert most == 63 - padding
    check_width(model, most)
    with pytest.raises(ConfigError, match=rf"does not take {most + 1} tokens .* Fix: use {most} or less"):
        check_width(model, most + 1)
