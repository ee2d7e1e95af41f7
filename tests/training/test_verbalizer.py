"""Label words: the classifier's logits are the causal model's own, and only adapters train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.training.gradients.parameter_groups import PairModules, trained_blocks
from dptune.training.losses import is_classifier, model_losses
from dptune.training.models.causal import plain_tokens
from dptune.training.models.classifier import declares_mean, load_verbalizer, word_tokens
from dptune.training.models.model import ModelSource, attach_lora, load_base
from dptune.training.models.pretrain import train_tokenizer

TEXTS = [f"The film was {word} and long." for word in ("good", "bad", "fine", "poor") for _ in range(20)]
CPU = torch.device("cpu")


class Ids:
    """A tokenizer that takes numbers for words."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(part) for part in text.split()]}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], ModelSource]:
    def save(family: str) -> ModelSource:
        FAMILIES[family]().save_pretrained(tmp_path / family)
        return ModelSource(str(tmp_path / family))

    return save


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_logits_and_losses_are_those_of_the_words(saved: Callable[[str], ModelSource], family: str) -> None:
    source = saved(family)
    causal = load_base(source, CPU).eval()
    model = load_verbalizer(source, ["no", "yes"], ["3", "7"], Ids(), CPU)
    assert is_classifier(model)
    ids = plain_tokens(causal)[3:8][None]
    expected = causal(input_ids=ids).logits[0, -1, [3, 7]]
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    assert torch.allclose(found, expected, atol=1e-5)
    row = torch.cat([ids, torch.tensor([[1, 0]])], dim=1)  # the label yes, and padding
    mask = torch.tensor([[2] * ids.shape[1] + [1, 0]])
    loss = model_losses(model, row, mask)
    assert float(loss) == pytest.approx(float(-torch.log_softmax(expected, 0)[1]), rel=1e-5)


def test_words_read_the_last_token_whatever_the_checkpoint_declares(saved: Callable[[str], ModelSource]) -> None:
    """A causal model may declare a mean for a text's vector; the word is what it predicts next."""
    source = saved("llama")
    folder = Path(source.location)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]')
    assert declares_mean(source)
    model = load_verbalizer(source, ["no", "yes"], ["3", "7"], Ids(), CPU)
    ids = plain_tokens(load_base(source, CPU))[3:8][None]
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape == (1, 2)


def test_adapters_alone_train(saved: Callable[[str], ModelSource]) -> None:
    model = attach_lora(load_verbalizer(saved("gpt2"), ["no", "yes"], ["3", "7"], Ids(), CPU), Lora(rank=2), 0)
    assert all(isinstance(block, PairModules) for block in trained_blocks(model))
    assert not any("score" in name for name, weight in model.named_parameters() if weight.requires_grad)


def test_a_word_of_two_tokens_is_refused_with_the_word() -> None:
    tokenizer = train_tokenizer(TEXTS, 300, "words")
    assert len(word_tokens([" good", " bad"], tokenizer)) == 2
    with pytest.raises(ConfigError, match=r"' terrible' is \d tokens"):
        word_tokens([" good", " terrible"], tokenizer)
    with pytest.raises(ConfigError, match="two of the words are the same token"):
        word_tokens(["7", "7"], Ids())


def test_a_family_that_does_more_to_its_logits_is_refused(
    saved: Callable[[str], ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("gpt2")

    def scaled(base: ModelSource, device: torch.device) -> Any:
        model = load_base(base, device)
        forward = model.forward

        def twice(*arguments: Any, **options: Any) -> Any:
            found = forward(*arguments, **options)
            found.logits = 2 * found.logits
            return found

        model.forward = twice
        return model

    monkeypatch.setattr("dptune.training.models.classifier.load_base", scaled)
    with pytest.raises(ConfigError, match="does more to its logits"):
        load_verbalizer(source, ["no", "yes"], ["3", "7"], Ids(), CPU)
