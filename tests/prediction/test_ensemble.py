"""Shards share nothing, and all adapters in one pass say what PEFT says of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_ensemble import PROTOCOL, WIDTH, base, build, manifest, opened, texts
from tiny_families import tiny
from tiny_models import CPU, FAMILIES, adapted, gpt2, records, trainable

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora, ShardTuning
from dptune.prediction.ensemble import (
    load_adapters,
    partition,
    read_manifest,
    shard_directory,
    shard_of,
    tune_shard,
    write_manifest,
)
from dptune.prediction.predictor import next_log_probabilities
from dptune.training.data import Tokens, tokenize
from dptune.training.gradients.stacked_adapters import PUBLIC, StackedAdapters
from dptune.training.models.model import attach_lora, load_base, load_tokenizer, save_adapter
from dptune.training.models.pretrain import SCHEDULES, linear, one_cycle

RECORDS = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.integers(0, 9)), min_size=1, max_size=40)


@given(RECORDS, st.sampled_from(["record", "patient"]), st.integers(1, 9), st.data())
def test_a_record_more_or_less_changes_one_shard_only(
    records: list[tuple[str, int]], key: str, models: int, data: st.DataObject
) -> None:
    removed = data.draw(st.integers(0, len(records) - 1))
    without = records[:removed] + records[removed + 1 :]

    def shards(chosen: list[tuple[str, int]]) -> list[list[str]]:
        patients = np.array([patient for _, patient in chosen], dtype=np.int64)
        dealt = partition([text for text, _ in chosen], patients, key, models, b"secret")
        return [[chosen[index][0] for index in shard] for shard in dealt]

    before, after = shards(records), shards(without)
    assert sum(map(len, before)) == len(records)
    changed = [number for number in range(models) if before[number] != after[number]]
    assert changed == [shard_of(*records[removed], key, models, b"secret")]


@given(RECORDS, st.integers(1, 9))
def test_a_patient_is_in_one_shard_and_equal_texts_too(records: list[tuple[str, int]], models: int) -> None:
    patients = np.array([patient for _, patient in records])
    written = [text for text, _ in records]
    for key, names in (("patient", patients.tolist()), ("record", written)):
        homes: dict[Any, set[int]] = {}
        for number, shard in enumerate(partition(written, patients, key, models, b"secret")):
            for index in shard:
                homes.setdefault(names[index], set()).add(number)
        assert all(len(home) == 1 for home in homes.values())


def test_the_partition_is_keyed_and_even() -> None:
    """Chi-square over 8 shards of 4,000 texts; false alarm below 1e-6."""
    written, patients = [str(index) for index in range(4000)], np.arange(4000)
    sizes = np.array([len(shard) for shard in partition(written, patients, "record", 8, b"one")])
    assert ((sizes - 500) ** 2 / 500).sum() < 45
    other = partition(written, patients, "record", 8, b"two")
    assert any(set(a) != set(b) for a, b in zip(partition(written, patients, "record", 8, b"one"), other, strict=True))
    absent = partition(["a", "", "b"], np.arange(3), "record", 2, b"one")
    assert sorted(np.concatenate(absent)) == [0, 2]


@pytest.mark.parametrize(("key", "models", "field"), [("client", 2, "partition"), ("record", 0, "models")])
def test_a_partition_that_cannot_be_is_refused(key: str, models: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        partition(["a"], np.zeros(1), key, models, b"")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_adapters_in_one_pass_say_what_peft_says_of_each(tmp_path: Path, family: str) -> None:
    generator = torch.Generator().manual_seed(1)
    folders = []
    for number in range(3):
        model = adapted(family)
        with torch.no_grad():
            for parameter in trainable(model).values():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        save_adapter(model, tmp_path / str(number))
        folders.append(tmp_path / str(number))
    stacked = StackedAdapters.of([load_file(folder / "adapter_model.safetensors") for folder in folders], 8 / 4, CPU)
    assert len(stacked) == 3
    plain, context = FAMILIES[family]().eval(), [3, 1, 4, 1, 5, 9, 2, 6]
    together = next_log_probabilities(plain, stacked, context, [2, PUBLIC, 0, 1, 2])
    ids = torch.tensor([context])
    expected = [torch.log_softmax(FAMILIES[family]().eval()(input_ids=ids).logits[:, -1].double(), -1)]
    for folder in folders:
        one = PeftModel.from_pretrained(FAMILIES[family](), str(folder)).eval()
        expected.append(torch.log_softmax(one(input_ids=ids).logits[:, -1].double(), -1))
    torch.testing.assert_close(together, torch.cat([expected[i] for i in (3, 0, 1, 2, 3)]), atol=1e-5, rtol=0)
    assert not torch.allclose(together[0], together[1], atol=1e-3)
    # Nothing stays behind on the model.
    after = torch.log_softmax(plain(input_ids=ids).logits[:, -1].double(), -1)
    torch.testing.assert_close(after, expected[0], atol=1e-6, rtol=0)


def test_layers_that_see_rows_times_tokens_stay_apart_in_one_pass() -> None:
    """OPT's feed-forward layers: the public row is the plain model's, the other PEFT's own."""
    model = attach_lora(tiny("opt"), Lora(2, 4, 0.0, ("fc1", "fc2")), 0)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(std=0.3)
    adapter = {name.replace(".default", ""): value for name, value in trainable(model).items()}
    stacked, plain, context = StackedAdapters.of([adapter], 2.0, CPU), tiny("opt").eval(), [3, 1, 4, 1, 5]
    found = next_log_probabilities(plain, stacked, context, [PUBLIC, 0, PUBLIC])
    for row, expected in zip(found, (plain, model.eval(), plain), strict=True):
        logits = expected(input_ids=torch.tensor([context])).logits[0, -1].double()
        torch.testing.assert_close(row, torch.log_softmax(logits, -1), atol=1e-5, rtol=0)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


def test_a_shard_of_an_encoder_is_not_tuned(tmp_path: Path) -> None:
    tiny("bert-generation", vocab_size=300).save_pretrained(tmp_path / "base")
    load_tokenizer(base()).save_pretrained(tmp_path / "base")
    encoder = opened(Lora(2, 4, 0.0, ("query", "value")), str(tmp_path / "base"))
    with pytest.raises(ConfigError, match="is not causal"):
        tune_shard(encoder, ShardTuning(), records(), 0, "record", tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_a_shard_starts_as_a_run_with_its_seed_does(tmp_path: Path) -> None:
    """One road: ``Base.start`` makes the adapters of runs and of shards."""
    empty = Tokens([], padding=0, width=WIDTH)
    for seed in (0, 1):
        tune_shard(opened(), ShardTuning(seed=seed), empty, 0, "record", tmp_path / str(seed))
        written = load_file(shard_directory(tmp_path / str(seed), 0) / "adapter_model.safetensors")
        started = trainable(opened().start(seed))
        assert written
        assert all(torch.equal(written[name.replace(".default", "")], weight) for name, weight in started.items())


def test_a_shard_does_not_see_the_others(tmp_path: Path) -> None:
    """Shard 0 is bit for bit the same whatever shard 1 holds, and whichever comes first."""
    first = texts(8, 5)
    one = build(tmp_path / "one", [first, texts(8, 6)], models=2)
    other = build(tmp_path / "other", [first, texts(20, 7)], models=2)
    for name, tensor in load_file(shard_directory(one, 0) / "adapter_model.safetensors").items():
        assert torch.equal(tensor, load_file(shard_directory(other, 0) / "adapter_model.safetensors")[name])
    changed = load_file(shard_directory(one, 1) / "adapter_model.safetensors")
    against = load_file(shard_directory(other, 1) / "adapter_model.safetensors")
    assert any(not torch.equal(tensor, against[name]) for name, tensor in changed.items())


def test_an_empty_shard_is_the_public_model(tmp_path: Path) -> None:
    folder = build(tmp_path / "ensemble")
    model = load_base(base(), CPU)
    adapters = load_adapters(folder, read_manifest(folder), model, CPU)
    context = load_tokenizer(base())("the old cat")["input_ids"]
    public, tuned, empty = next_log_probabilities(model.eval(), adapters, context, [PUBLIC, 0, 2])
    assert torch.equal(public, empty)
    assert not torch.allclose(public, tuned, atol=1e-3)


def test_tuning_teaches(tmp_path: Path) -> None:
    """A sentence that the public model never saw becomes likelier, by a factor of e^2 at least."""
    folder = build(tmp_path / "ensemble", [["zebra zebra zebra."] * 40, []], models=2)
    model, tokenizer = load_base(base(), CPU).eval(), load_tokenizer(base())
    adapters = load_adapters(folder, read_manifest(folder), model, CPU)
    ids = tokenizer("zebra zebra zebra.")["input_ids"]
    each = [next_log_probabilities(model, adapters, ids[:end], [PUBLIC, 0])[:, ids[end]] for end in range(1, len(ids))]
    public, tuned = torch.stack(each).sum(0)
    assert tuned > public + 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("ensembles") / "whole")


def _loaded(folder: Path, model: Any = None) -> StackedAdapters:
    return load_adapters(folder, read_manifest(folder), model or load_base(base(), CPU), CPU)


def test_a_shard_without_adapter_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (shard_directory(folder, 1) / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"shard-001 has no adapter.*Fix"):
        _loaded(folder)
    shutil.rmtree(shard_directory(folder, 1))
    with pytest.raises(ConfigError, match="shard-001 has no adapter"):
        _loaded(folder)


def test_adapters_of_another_base_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the base that the ensemble was tuned on"):
        _loaded(whole, gpt2())
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    about = shard_directory(folder, 0) / "shard.json"
    about.write_text(about.read_text().replace('"base": "', '"base": "f'))
    with pytest.raises(ConfigError, match="tuned on another base"):
        _loaded(folder)


def test_vocabularies_that_differ_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    about = shard_directory(folder, 0) / "shard.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"vocabulary": 7}))
    with pytest.raises(ConfigError, match="vocabulary of 7"):
        _loaded(folder)


def test_shards_of_different_shape_or_scaling_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    file = shard_directory(folder, 1) / "adapter_model.safetensors"
    adapter = load_file(file)
    save_file(
        {key: value[:1] if "lora_A" in key else value[:, :1].contiguous() for key, value in adapter.items()}, file
    )
    with pytest.raises(ConfigError, match="other layers, rank or sizes"):
        _loaded(folder)
    save_file(adapter, file)
    config = shard_directory(folder, 1) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 64}))
    with pytest.raises(ConfigError, match="different LoRA scalings"):
        _loaded(folder)


def test_an_ensemble_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    tokens = tokenize(texts(4, 0), load_tokenizer(base()), WIDTH)
    tune_shard(opened(), ShardTuning(epochs=1), tokens, 0, "record", tmp_path / "half")
    with pytest.raises(ConfigError, match="holds no whole ensemble"):
        read_manifest(tmp_path / "half")
    with pytest.raises(ConfigError, match="holds no adapter"):
        StackedAdapters.of([], 1.0, CPU)


def test_files_are_closed_to_others(whole: Path) -> None:
    assert shard_directory(whole, 0).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("count", [1, 2, 8, 9, 16, 17])
@pytest.mark.parametrize("epochs", [1, 5, 10])
def test_a_shard_of_any_size_can_be_tuned(tmp_path: Path, count: int, epochs: int) -> None:
    """Whether there is an ensemble must not depend on how many records a shard has, or on what they say."""
    tokens = tokenize(["x"] * count, load_tokenizer(base()), WIDTH)
    tune_shard(opened(), ShardTuning(epochs=epochs), tokens, 0, "record", tmp_path)
    assert shard_directory(tmp_path, 0).exists()


def test_an_adapter_that_diverges_is_the_public_model(tmp_path: Path) -> None:
    tokens = tokenize(texts(8, 0), load_tokenizer(base()), WIDTH)
    tune_shard(opened(), ShardTuning(epochs=20, learning_rate=1e30), tokens, 0, "record", tmp_path)
    adapter = load_file(shard_directory(tmp_path, 0) / "adapter_model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in adapter.values())


def test_dropout_does_not_couple_shards(tmp_path: Path) -> None:
    """Shard 1 is the same after a shard 0 of another size, whatever the generator's state was."""
    adapters = []
    for count in (8, 9):
        torch.manual_seed(0)
        folder, lora = tmp_path / str(count), Lora(rank=2, alpha=4, dropout=0.3)
        for shard, held in enumerate((texts(count, 1), texts(6, 2))):
            tokens = tokenize(held, load_tokenizer(base()), WIDTH)
            tune_shard(opened(lora), ShardTuning(epochs=3), tokens, shard, "record", folder)
        adapters.append(load_file(shard_directory(folder, 1) / "adapter_model.safetensors"))
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())


@pytest.mark.parametrize("rslora", [False, True])
def test_an_ensemble_scales_as_peft_does(rslora: bool, tmp_path: Path) -> None:
    tokens, lora = (
        tokenize(texts(8, 1), load_tokenizer(base()), WIDTH),
        Lora(rank=4, alpha=8, dropout=0.0, rslora=rslora),
    )
    tune_shard(opened(lora), ShardTuning(epochs=3, learning_rate=0.05), tokens, 0, "record", tmp_path)
    write_manifest(tmp_path, manifest(**(PROTOCOL | {"models": 1})))
    model, context = load_base(base(), CPU), [3, 1, 4, 1, 5]
    stacked = load_adapters(tmp_path, read_manifest(tmp_path), model, CPU)
    found = next_log_probabilities(model, stacked, context, [0])
    peft = PeftModel.from_pretrained(load_base(base(), CPU), str(shard_directory(tmp_path, 0))).eval()
    expected = torch.log_softmax(peft(input_ids=torch.tensor([context])).logits[:, -1].double(), -1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank_pattern", {"c_attn": 4}), ("alpha_pattern", {"c_attn": 4}), ("init_lora_weights", "orthogonal")],
)
def test_adapters_that_an_ensemble_cannot_stack_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.{field}: .*not for ensembles"):
        tune_shard(opened(Lora(**{field: value})), ShardTuning(), records(), 0, "record", tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_the_schedule_is_torchs_where_torch_has_one() -> None:
    for steps in (11, 37, 375):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps, pct_start=0.1)
        for step in range(steps):
            assert one_cycle(step, steps) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            theirs.step() if step < steps - 1 else None
    assert [one_cycle(0, steps) for steps in (1, 5, 10)] == [1.0, 1.0, 1.0]


def test_a_linear_schedule_falls_to_0_after_the_last_step() -> None:
    assert [linear(step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert {"one_cycle": one_cycle, "linear": linear} == SCHEDULES
    assert ShardTuning().schedule == "one_cycle"


def test_a_shard_is_tuned_by_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setitem(SCHEDULES, "linear", lambda step, steps: seen.append((step, steps)) or 0.5)
    tokens = tokenize(texts(4, 0, ("zebra",)), load_tokenizer(base()), WIDTH)
    for schedule in ("one_cycle", "linear"):
        tuning = ShardTuning(epochs=1, batch_size=2, schedule=schedule)
        tune_shard(opened(), tuning, tokens, 0, "record", tmp_path / schedule)
        assert bool(seen) == (schedule == "linear")
    assert {steps for _, steps in seen} == {2}
