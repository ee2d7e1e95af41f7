"""Heads train in full beside the adapters: their per-sample gradients are a loop's, and nothing escapes the clipper."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tiny_classifiers import HEADS, adapted_classifier, classifier, configuration, labelled, row_gradient
from tiny_models import CPU, each_record, make_header, make_plan, weights
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
)

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.settings import Lora, UpdateRule
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import MECHANISMS, build
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.parameter_groups import lora_pairs, trained_blocks
from dptune.training.gradients.per_sample import PairGradients, per_sample_gradients
from dptune.training.loop import train
from dptune.training.losses import PADDING, _mean_over, is_classifier, label_logits, model_losses, reads_mean
from dptune.training.models.classifier import (
    declares_mean,
    empty_classifier,
    head_names,
    load_classifier,
    load_classifier_config,
)
from dptune.training.models.model import ModelSource, attach_lora
from dptune.training.models.trained_layers import HEAD, HeadModules
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import Run
from dptune.training.spec import RunSpec

#: Trained parameters of each head: three labels, width 32.
SIZES = {
    "bert": 99,
    "bert without pooler": 99 + 32 * 33,
    "roberta": 99 + 32 * 33,
    "distilbert": 99 + 32 * 33,
    "modernbert": 99,
    "bert by the mean of its tokens": 99,
    "modernbert by the mean of its tokens": 99,
    "gpt2": 96,
    "llama": 96,
}


def found_gradients(model: object, tokens: Tokens, height: int | None = None, **options: object) -> PairGradients:
    count = len(tokens.rows)
    ids, mask = tokens.batch(np.arange(count), CPU, height=height)
    return per_sample_gradients(model, trained_blocks(model), ids, mask, None, count, **options)  # type: ignore[arg-type]


def flat(gradients: Gradients, units: int) -> torch.Tensor:
    """(units, parameters) from one-hot weighted sums, which is what a clipper uses."""
    rows = []
    for unit in range(units):
        factors = torch.zeros_like(gradients.norms())
        factors[unit] = 1.0
        rows.append(torch.cat(gradients.weighted_sum(factors)))
    return torch.stack(rows)


def looped(model: object, tokens: Tokens) -> torch.Tensor:
    parameters = [parameter for block in trained_blocks(model) for parameter in block.parameters]  # type: ignore[arg-type]
    return torch.stack([row_gradient(model, row, parameters) for row in tokens.rows]).double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)).max())


def in_float64(model: Any) -> Any:
    """The model with all weights in float64, the head's too, which otherwise stays in float32."""
    for module in model.double().modules():
        module._forward_pre_hooks.clear()
    return model


@pytest.mark.parametrize("family", HEADS)
def test_equal_to_a_loop_over_records(family: str) -> None:
    """Adapters, weights and biases of the head, on right-padded records; the filled-up rows add nothing.

    With a model in float64 only the sums are in float32. In float32 they are within 1e-5 of the exact gradients, or
    twice as far from them as the loop itself where that rounds more.
    """
    model, tokens = adapted_classifier(family), labelled(6)
    rounded, found = looped(model, tokens), flat(found_gradients(model, tokens), 6)
    filled = flat(found_gradients(model, tokens, height=8), 6)
    model = in_float64(model)
    exact = looped(model, tokens)
    assert error(flat(found_gradients(model, tokens), 6), exact) < 1e-6
    assert error(flat(found_gradients(model, tokens, height=8), 6), exact) < 1e-6
    tolerance = max(1e-5, 2 * error(rounded, exact))
    assert error(found, exact) < tolerance
    assert error(filled, exact) < tolerance


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_equal_to_opacus(family: str) -> None:
    opacus = pytest.importorskip("opacus")
    model, tokens = adapted_classifier(family), labelled(6)
    ids, mask = tokens.batch(np.arange(6), CPU)
    found = flat(found_gradients(model, tokens), 6)
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), strict=False, loss_reduction="sum")
    wrapped.train()  # it records nothing in evaluation mode; these models have no dropout
    model_losses(wrapped._module, ids, mask).sum().backward()
    parameters = [parameter for block in trained_blocks(wrapped._module) for parameter in block.parameters]
    expected = torch.cat([parameter.grad_sample.flatten(1) for parameter in parameters], dim=1).double()  # type: ignore[attr-defined]
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("family", HEADS)
def test_the_head_is_one_block_with_all_that_is_new(family: str) -> None:
    model = adapted_classifier(family)
    *pairs, head = trained_blocks(model)
    assert isinstance(head, HeadModules)
    assert (head.name, head.size) == (HEAD, SIZES[family])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == head.size + sum(pair.size for pair in pairs)
    with pytest.raises(ConfigError, match="would not be privatised"):
        lora_pairs(model)  # code that knows of no head refuses the model


@pytest.mark.parametrize("family", HEADS)
def test_a_record_is_clipped_as_a_whole_with_its_head(family: str) -> None:
    """Flat clipping: one norm over adapters and head; per pair: the head has a radius of its own."""
    model, tokens = adapted_classifier(family), labelled(5)
    blocks, expected = trained_blocks(model), looped(model, tokens)
    gradients, radius = found_gradients(model, tokens), 0.01
    flatly = build("static", {"noise_multiplier": 1.0, "max_grad_norm": radius, "pairs": len(blocks)})
    total = torch.cat(flatly.clipper.clipped_sum(gradients, flatly.knobs()))
    scaled = (expected * (radius / expected.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(0)
    assert float((total - scaled).norm() / scaled.norm()) < 1e-4
    assert float(expected.norm(dim=1).min()) > radius
    each = build("per_pair", {"noise_multiplier": 1.0, "max_grad_norm": radius, "pairs": len(blocks)})
    own = radius / math.sqrt(len(blocks))
    heads = expected[:, -blocks[-1].size :]
    scaled = (heads * (own / heads.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(0)
    found = each.clipper.clipped_sum(gradients, each.knobs())[-1]
    assert float((found - scaled).norm() / scaled.norm()) < 1e-4


def test_neighbours_do_not_change_one_bit() -> None:
    for family in ("roberta", "gpt2", "bert by the mean of its tokens"):
        model, tokens = adapted_classifier(family), labelled(6)
        whole = flat(found_gradients(model, tokens, height=8), 6)
        others = replace(tokens, rows=tokens.rows[:5])
        assert torch.equal(whole[:5], flat(found_gradients(model, others, height=8), 5))


@pytest.mark.parametrize("family", HEADS)
def test_the_model_never_sees_the_label(family: str) -> None:
    """Another label moves the loss and not the logits: the entry is neither a token nor attended to."""
    model, tokens = adapted_classifier(family), labelled(3)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    losses = []
    for label in range(2):
        rows = [np.append(row[:-1], label).astype(np.int32) for row in tokens.rows]
        losses.append(model_losses(model, *replace(tokens, rows=rows).batch(np.arange(3), CPU)))
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(losses[0], losses[1])


def test_the_start_is_public_and_seeded() -> None:
    first, again, other = (weights(adapted_classifier("roberta", randomised=False, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    heads = [name for name in first if "classifier" in name]
    assert len(heads) == 4
    assert all(torch.equal(first[name], other[name]) == name.endswith("bias") for name in heads)
    deviation = float(first[next(name for name in heads if "dense.weight" in name)].std())
    assert deviation == pytest.approx(0.02, rel=0.1)


def test_a_head_on_bfloat16_trains_in_float32() -> None:
    model = attach_lora(classifier("roberta").bfloat16(), Lora(rank=2, dropout=0.0), 3, ("classifier",))
    head = trained_blocks(model)[-1]
    assert {parameter.dtype for parameter in head.parameters} == {torch.float32}
    found = found_gradients(model, labelled(4)).matrix()
    assert bool(found.isfinite().all())
    assert float(found[:, -head.size :].norm()) > 0


@pytest.mark.parametrize("family", HEADS)
def test_rehearsal_passes_and_leaves_the_model_as_it_was(family: str) -> None:
    model = adapted_classifier(family)
    before = weights(model)
    rehearse(model, trained_blocks(model))
    assert all(torch.equal(parameter, before[name]) for name, parameter in weights(model).items())


def test_rehearsal_finds_a_head_that_mixes_records() -> None:
    model = adapted_classifier("roberta")
    head = trained_blocks(model)[-1].layers[0]
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].roll(1, 0),))
    with pytest.raises(ConfigError, match="gives a record another gradient"):
        rehearse(model, trained_blocks(model))


def test_a_trainable_norm_beside_the_head_is_refused() -> None:
    model = adapted_classifier("modernbert")
    model.get_base_model().head.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="would not be privatised"):
        trained_blocks(model)


def test_a_head_with_other_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers that are not linear"):
        attach_lora(classifier("modernbert"), Lora(rank=2, dropout=0.0), 3, ("head", "classifier"))


# --- checkpoints -----------------------------------------------------------------------------------------------


def saved(model: object, folder: Path) -> ModelSource:
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    return ModelSource(str(folder))


def test_what_a_checkpoint_lacks_is_the_head(tmp_path: Path) -> None:
    """A masked BERT has no pooler; a BERT with one keeps it frozen."""
    config = configuration("bert")
    masked = saved(AutoModelForMaskedLM.from_config(config), tmp_path / "masked")
    whole = saved(classifier("bert").bert, tmp_path / "whole")
    for base, expected in ((masked, ("bert.pooler", "classifier")), (whole, ("classifier",))):
        own = load_classifier_config(base, ("no", "yes"), 0)
        names = head_names(base, empty_classifier(base, own))
        assert names == expected
        model = load_classifier(base, own, names, CPU)
        assert model.config.id2label == {0: "no", 1: "yes"}
        assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"lacks weights .*pooler"):
        load_classifier(masked, load_classifier_config(masked, ("no", "yes"), 0), ("classifier",), CPU)


def test_refused_checkpoints(tmp_path: Path) -> None:
    tuned = saved(AutoModelForSequenceClassification.from_config(configuration("bert")), tmp_path / "tuned")
    with pytest.raises(ConfigError, match="has the head of another task already"):
        load_classifier_config(tuned, ("a", "b"), 0)
    T5Config(d_model=32).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match="is an encoder-decoder"):
        load_classifier_config(ModelSource(str(tmp_path / "t5")), ("a", "b"), 0)
    masked = saved(AutoModelForMaskedLM.from_config(configuration("roberta")), tmp_path / "masked")
    with pytest.raises(ConfigError, match="in 4 bits, or otherwise quantised, is not supported"):
        load_classifier_config(replace(masked, load_in_4bit=True), ("a", "b"), 0)


# --- runs ------------------------------------------------------------------------------------------------------


def run_spec(family: str, name: str = "static", noise: float = 0.5, **options: object) -> RunSpec:
    model, tokens = adapted_classifier(family, randomised=False), labelled(12)
    blocks, units = trained_blocks(model), each_record(tokens)
    mechanism = build(name, {"noise_multiplier": noise, "pairs": len(blocks), **options})
    entropy = OsEntropy()
    header = replace(
        make_header(entropy, units), mechanism=mechanism.name, published_accountant=mechanism.published_accountant
    )
    return RunSpec(model, tokens, units, mechanism, make_plan(12, physical_batch_size=8), header)


#: Certified mechanisms that need no clients and no learned controller, each with the options that it needs here.
TRAIN_HEADS: dict[str, dict[str, object]] = {
    "static": {},
    "auto_s": {},
    "psac": {},
    "per_pair": {},
    "banded": {"bands": 2},
    "dp_lora": {},
    "quantile": {},
    "dc_sgd_p": {},
    "adaclip": {},
    "geoclip": {"rank": 4},
    "laplace": {},
    "lmo_dp": {},
    "plrvo": {},
}


@pytest.mark.parametrize("optimizer", ["adam_bc", "sgd"])
def test_every_update_rule_trains_heads(optimizer: Literal["adam_bc", "sgd"], tmp_path: Path) -> None:
    spec = run_spec("roberta")
    spec = replace(spec, plan=replace(spec.plan, rule=UpdateRule(optimizer=optimizer, average="tail")))
    before = weights(spec.model)
    train(spec, tmp_path, OsEntropy()).close()
    assert all(not torch.equal(before[name], one) for name, one in weights(spec.model).items())


@pytest.mark.parametrize("name", TRAIN_HEADS)
def test_mechanisms_train_heads(name: str, tmp_path: Path) -> None:
    spec = run_spec("roberta", name, **TRAIN_HEADS[name])
    before = weights(spec.model)
    with train(spec, tmp_path, OsEntropy()) as ledger:
        assert ledger.releases == 4
    after = weights(spec.model)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["rldp", "rldp_published"])
def test_learned_controllers_refuse_heads_before_a_charge(name: str, tmp_path: Path) -> None:
    assert name in MECHANISMS
    spec = run_spec("bert", name)
    with pytest.raises(ConfigError, match="figures that a classification head does not have"):
        train(spec, tmp_path, OsEntropy())
    assert not list(tmp_path.iterdir())


def test_resumed_and_whole_runs_have_one_head(tmp_path: Path) -> None:
    """The checkpoint holds the head too."""
    spec = run_spec("distilbert")
    with train(spec, tmp_path, OsEntropy()):
        pass
    again = replace(run_spec("distilbert"), header=spec.header)
    with train(again, tmp_path, OsEntropy()):
        pass
    assert all(torch.equal(weights(spec.model)[name], weight) for name, weight in weights(again.model).items())


@pytest.mark.parametrize("optimizer", ["adamw", "adam_bc", "sgd"])
def test_a_stopped_run_goes_on_with_the_heads_own_rate(
    optimizer: Literal["adamw", "adam_bc", "sgd"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, where released gradients follow the number of the release: the rate needs no place in checkpoints."""
    privatise, begin = Mechanism.privatise, Run.begin

    def fixed(mechanism: Mechanism, batches: Any, zeros: Any, *given: Any) -> Released:
        draw = torch.Generator().manual_seed(given[-1])
        gradient = [torch.randn(len(zero), generator=draw) for zero in zeros]
        return replace(privatise(mechanism, batches, zeros, *given), gradient=gradient, deviations=(0.3,) * len(zeros))

    def trained(folder: Path, ratio: float, header: RunHeader | None = None) -> dict[str, torch.Tensor]:
        spec = run_spec("bert")
        rule = UpdateRule(optimizer=optimizer, head_rate_ratio=ratio)
        plan = replace(spec.plan, rule=rule, checkpoint_every=1)
        train(replace(spec, plan=plan, header=header or spec.header), folder, OsEntropy()).close()
        return weights(spec.model)

    def stop(run: Run) -> Any:
        if run.step == 2:
            run.ledger.close()
            raise KeyboardInterrupt
        return begin(run)

    monkeypatch.setattr(Mechanism, "privatise", fixed)
    whole, plain = trained(tmp_path / "whole", 20.0), trained(tmp_path / "plain", 1.0)
    header = run_spec("bert").header
    monkeypatch.setattr(Run, "begin", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "stopped", 20.0, header)
    monkeypatch.setattr(Run, "begin", begin)
    resumed = trained(tmp_path / "stopped", 20.0, header)
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
    for name, weight in plain.items():
        assert torch.equal(weight, whole[name]) == ("classifier" not in name), name


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert", "bert by the mean of its tokens"])
def test_checkpointed_encoders_have_the_same_gradients(family: str) -> None:
    model, tokens = adapted_classifier(family), labelled(4)
    found = flat(found_gradients(model, tokens, checkpointing=True), 4)
    assert torch.equal(found, flat(found_gradients(model, tokens), 4))


def test_units_of_many_records_sum_their_heads_gradients() -> None:
    model, tokens = adapted_classifier("bert"), labelled(4)
    ids, mask = tokens.batch(np.arange(4), CPU)
    owners = torch.tensor([0, 1, 1, 1])
    found = flat(per_sample_gradients(model, trained_blocks(model), ids, mask, owners, 2), 2)
    expected = looped(model, tokens)
    assert error(found, torch.stack([expected[0], expected[1:].sum(0)])) < 1e-5
    assert PrivacyUnits.of("customer", np.array([0, 1, 1, 1]), 3).most == 3


def test_a_model_without_token_embeddings_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """CANINE hashes characters; transformers raises where it is asked for its embeddings."""
    config = AutoConfig.for_model(
        "canine", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    base = ModelSource(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"\(CanineForSequenceClassification\) has no table of token embeddings\. Fix: "
    ):
        empty_classifier(base, load_classifier_config(base, ("a", "b"), 0))


# --- the mean of the tokens' states ----------------------------------------------------------------------------


def declaring(folder: Path, pooling: object, modules: object = None) -> ModelSource:
    """A BERT's checkpoint with the files by which sentence-transformers says how it makes a vector of a text."""
    base = saved(classifier("bert").bert, folder)
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    listed.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(pooling if isinstance(pooling, str) else json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(listed if modules is None else modules))
    return base


@pytest.mark.parametrize(
    ("pooling", "mean"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True),
        ({"pooling_mode": "mean"}, True),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, False),
        ({}, False),
    ],
)
def test_a_checkpoint_says_whether_a_head_reads_the_mean(pooling: object, mean: bool, tmp_path: Path) -> None:
    base = declaring(tmp_path / "model", pooling)
    config = load_classifier_config(base, ("no", "yes"), 0)
    names = head_names(base, empty_classifier(base, config))
    model = load_classifier(base, config, names, CPU)
    assert names == ("classifier",)
    assert reads_mean(model) is mean
    assert is_classifier(model)
    assert type(model) is (BertForTokenClassification if mean else BertForSequenceClassification)


def test_damaged_declarations_are_named(tmp_path: Path) -> None:
    torn = declaring(tmp_path / "torn", '{"pooling_mode_mean')
    with pytest.raises(DptuneError, match=r"1_Pooling/config\.json: is not complete JSON"):
        load_classifier_config(torn, ("no", "yes"), 0)
    other = declaring(tmp_path / "other", {}, modules={"a": 1})
    with pytest.raises(DptuneError, match=r"modules\.json: holds .* where a list belongs"):
        load_classifier_config(other, ("no", "yes"), 0)
    for number, path in enumerate(("../elsewhere", "/elsewhere", "1_Pooling/../../elsewhere", 3, None)):
        listed = [{"type": "sentence_transformers.models.Pooling", "path": path}]
        outside = declaring(tmp_path / f"outside {number}", {"pooling_mode_mean_tokens": True}, modules=listed)
        with pytest.raises(ConfigError, match=r"modules\.json names .* is not a folder of this checkpoint"):
            load_classifier_config(outside, ("no", "yes"), 0)
    odd = declaring(tmp_path / "odd", {"pooling_mode_mean_tokens": True}, modules=["Pooling", 3])
    assert not declares_mean(odd)


def test_padding_and_other_rows_move_no_mean() -> None:
    """The mean is over a row's own tokens: it equals that of the unpadded row, whatever the padding holds."""
    model, tokens = classifier("bert by the mean of its tokens"), labelled(longest=9)
    ids, mask = tokens.batch(np.arange(6), CPU, height=8, width=20)
    logits, labels = label_logits(model, ids, mask)
    assert logits.shape == (8, 3)
    assert labels[6:].tolist() == [-1, -1]
    for row, expected in zip(tokens.rows, logits, strict=False):
        own = torch.from_numpy(~row[:-1].astype(np.int64))[None]
        torch.testing.assert_close(expected, model(input_ids=own).logits[0].mean(0), rtol=1e-5, atol=1e-6)
    noisy = ids.where(mask != PADDING, 5)
    torch.testing.assert_close(label_logits(model, noisy, mask)[0][:6], logits[:6], rtol=0, atol=0)


def test_a_mean_of_half_precision_logits_is_taken_in_float32() -> None:
    """As autocast gives them: a sum of 400 in 8 bits of precision would be off by a percent."""
    logits = torch.linspace(0.5, 1.5, 800).reshape(1, 400, 2).bfloat16()
    seen = torch.ones(1, 400, dtype=torch.int64)
    assert _mean_over(logits, seen).dtype == torch.float32
    torch.testing.assert_close(_mean_over(logits, seen), logits.double().mean(dim=1).float())
