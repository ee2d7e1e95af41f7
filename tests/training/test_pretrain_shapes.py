"""Public models of both shapes: trained on free text, loaded as any checkpoint is, and useful to what tunes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from dptune.core.errors import ConfigError
from dptune.core.settings import Pretraining
from dptune.training.data import Tokens
from dptune.training.models.classifier import empty_classifier, head_names, load_classifier, load_classifier_config
from dptune.training.models.model import ModelSource, load_base, load_tokenizer
from dptune.training.models.pretrain import _model, _rows, masked_losses, pretrain, train_tokenizer
from tasks.settings.experiment import Pretrain

TEXTS = [f"The river {number} runs through the old town, and the town of {number} is red." for number in range(60)]
SMALL = {"vocabulary": 400, "layers": 1, "width": 16, "heads": 2, "max_length": 24, "batch_size": 8, "epochs": 8}


def plan(shape: str) -> Pretraining:
    return Pretraining(shape=shape, merges="words", learning_rate=0.02, **SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["gpt2", "roberta"])
def test_a_model_of_free_text_learns_and_loads(shape: str, tmp_path: Path) -> None:
    figures = pretrain(TEXTS, TEXTS[:8], plan(shape), tmp_path)
    assert figures["validation_perplexity"] < 60, "a uniform guess among 400 tokens has 400"
    source = ModelSource(str(tmp_path))
    tokenizer = load_tokenizer(source)
    text = "The river, unseen: £5!"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    if shape == "gpt2":
        load_base(source, torch.device("cpu"))
        return
    with pytest.raises(ConfigError, match="is an encoder"):
        load_base(source, torch.device("cpu"))
    config = load_classifier_config(source, ["no", "yes"], tokenizer.pad_token_id)
    head = head_names(source, empty_classifier(source, config))
    assert head == ("classifier",)
    load_classifier(source, config, head, torch.device("cpu"))


def test_rows_of_free_text_follow_one_another() -> None:
    for shape, around in (("gpt2", 1), ("roberta", 2)):
        tokenizer = train_tokenizer(TEXTS, 400, "words", shape)
        rows = _rows(TEXTS, tokenizer, plan(shape)).rows
        assert max(map(len, rows)) <= 24
        inner = [row[around - 1 : -1] for row in rows]
        whole = tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
        assert np.concatenate(inner)[: len(whole)].tolist() == whole
        assert sum(map(len, inner)) == sum(
            len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS
        )


def test_the_roberta_puts_its_special_tokens_around_a_text_and_a_pair() -> None:
    tokenizer = train_tokenizer(TEXTS, 400, "words", "roberta")
    ids = tokenizer("the town")["input_ids"]
    assert (ids[0], ids[-1], tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 2, 1, 4)
    assert tokenizer("the town</s></s>is red")["input_ids"] == tokenizer("the town", "is red")["input_ids"]


def test_masked_losses_are_those_of_transformers_at_the_chosen_tokens_alone() -> None:
    torch.manual_seed(0)
    model = _model(plan("roberta"), 400).eval()
    tokens = Tokens([np.array([0, 7, 8, 9, 10, 2], dtype=np.int32), np.array([0, 11, 12, 2], dtype=np.int32)], 1, 8)
    ids, mask = tokens.batch(np.arange(2), torch.device("cpu"))
    draws = torch.Generator().manual_seed(3)
    found = masked_losses(model, ids, mask, mask_token=4, draws=draws)
    again = torch.Generator().manual_seed(3)
    chance, fate = torch.rand(ids.shape, generator=again), torch.rand(ids.shape, generator=again)
    other = torch.randint(5, 400, ids.shape, generator=again)
    chosen = (chance < 0.15) & (ids >= 5) & (mask != 0)
    assert chosen.any(), "another seed"
    seen = torch.where(chosen & (fate < 0.8), 4, torch.where(chosen & (fate >= 0.9), other, ids))
    for row in range(2):
        labels = ids[row : row + 1].masked_fill(~chosen[row : row + 1], -100)
        there = (mask[row : row + 1] != 0).long()
        expected = model(input_ids=seen[row : row + 1], attention_mask=there, labels=labels).loss
        expected = 0.0 if math.isnan(expected.item()) else expected.item()
        assert found[row].item() == pytest.approx(expected, rel=1e-5)


def test_it_is_saved_as_a_masked_language_model(tmp_path: Path) -> None:
    pretrain(TEXTS[:10], TEXTS[:4], Pretraining(shape="roberta", merges="words", **SMALL | {"epochs": 1}), tmp_path)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 26
    ids = tokenizer("a " * 60, truncation=True, max_length=24, return_tensors="pt")
    assert model(**ids).logits.shape == (1, 24, len(tokenizer))


def test_settings_that_do_not_go_together_are_refused() -> None:
    sizes = {"encounters": 50, "validation_encounters": 10, "data_seed": 1, "codes": 0.1}
    with pytest.raises(ConfigError, match="path: is missing"):
        Pretrain(source="wikitext", merges="words", **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="merges: over sentences"):
        Pretrain(source="wikitext", path="w.zip", **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="merges: over sentences"):
        Pretrain(shape="roberta", **sizes)  # type: ignore[arg-type]
