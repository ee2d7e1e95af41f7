"""Learned rewards: what the head learns, and that no user's text moves another's score."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from dptune.core.errors import ConfigError
from dptune.policy.language.reward import LearnedReward, learned_reward
from dptune.records.reading.record import Labelled, Record, Text
from dptune.training.models.model import ModelSource

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "plot", "the", "was", "old", "new"]
OTHERS = WORDS[4:]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A BERT of one layer and 16 positions, which has read nothing."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **shape)).save_pretrained(folder)
    return ModelSource(str(folder))


def texts(count: int = 100) -> list[Record]:
    """Texts of four words, of which the second decides the label."""
    found = []
    for row in range(count):
        one, two, three = (OTHERS[(row * factor + row // 7) % len(OTHERS)] for factor in (1, 3, 5))
        word, label = (("good", "yes"), ("bad", "no"))[(row // 3) % 2]
        found.append(Record(Labelled(f"{one} {word} {two} {three}", label), row, "labelled", row + 1))
    return found


@pytest.fixture(scope="module")
def reward(encoder: ModelSource) -> LearnedReward:
    return learned_reward(encoder, texts(), "yes", 12, CPU)


def test_the_head_learns_the_label_and_reads_prompt_and_continuation(reward: LearnedReward) -> None:
    assert reward.accuracy > 0.9  # of 20 texts that it was not trained on
    found = reward.scores(["the film", "the film", "good film", "bad film"], [" was good", " was bad", " old", " old"])
    assert found.dtype == torch.float32
    assert found.abs().max() <= 1
    assert found[0] > 0 > found[1]
    assert found[2] > found[3]


@pytest.mark.parametrize("other", ["", "good " * 30, "bad"])
def test_the_text_of_one_user_moves_no_other_users_score(reward: LearnedReward, other: str) -> None:
    """A user's score is the same to the last digit whatever the lengths of other users' texts are."""
    shapes: list[torch.Size] = []
    hook = reward.encoder.register_forward_pre_hook(
        lambda _module, _args, given: shapes.append(given["input_ids"].shape), with_kwargs=True
    )
    before = reward.scores(["the"] * 3, [" film was good", " plot", " old"])
    after = reward.scores(["the"] * 3, [" film was good", other, " old"])
    hook.remove()
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert shapes == [(3, 12)] * 2, "of one shape, whatever the texts are"
    assert after.isfinite().all(), "nor has a text without any token no score"


def test_one_who_leaves_moves_nobody_to_a_batch_of_another_shape(reward: LearnedReward) -> None:
    """Of 100 users 64 are one batch; another takes the place of each who leaves. No text fills its row."""
    given: list[torch.Tensor] = []
    hook = reward.encoder.register_forward_pre_hook(
        lambda _module, _args, named: given.append(named["attention_mask"]), with_kwargs=True
    )
    users = ["good " * (row % 20) + OTHERS[row % 6] for row in range(100)]
    before, after = reward.scores(users, [""] * 100), reward.scores([*users[1:], ""], [""] * 100)
    hook.remove()
    assert torch.equal(before[1:], after[:-1])
    assert {mask.shape for mask in given} == {(64, 12)}
    assert not any(mask[:, -1].any() for mask in given), "a batch without padding may run another kernel"
    assert all(mask.any(dim=1).all() for mask in given)


def test_a_score_is_twice_the_probability_minus_one_and_the_held_out_train_nothing(
    encoder: ModelSource, reward: LearnedReward
) -> None:
    spoilt = texts()
    for row in range(0, 100, 5):  # the held-out fifth
        content = spoilt[row].content
        assert isinstance(content, Labelled)
        label = {"yes": "no", "no": "yes"}[content.label]
        spoilt[row] = replace(spoilt[row], content=replace(content, label=label))
    other = learned_reward(encoder, spoilt, "yes", 12, CPU)
    assert torch.equal(other.weights, reward.weights)
    assert other.accuracy == pytest.approx(1 - reward.accuracy)
    ids = torch.tensor([[WORDS.index(word) for word in ("the", "film", "was", "good")]])
    state = reward.encoder(input_ids=ids).last_hidden_state[0].mean(0).double()
    chance = torch.sigmoid(state @ reward.weights[:-1] + reward.weights[-1])
    assert float(reward.scores(["the film"], [" was good"])) == pytest.approx(float(2 * chance - 1), abs=1e-5)


def test_a_head_is_not_trained_on_texts_that_teach_it_nothing(encoder: ModelSource) -> None:
    with pytest.raises(ConfigError, match=r"reward\.path: has 49 texts with a label of 49"):
        learned_reward(encoder, texts(49), "yes", 12, CPU)
    unlabelled = [*texts(99), Record(Text("the film"), 99, "labelled", 100)]
    with pytest.raises(ConfigError, match=r"reward\.path: has 99 texts with a label of 100"):
        learned_reward(encoder, unlabelled, "yes", 12, CPU)
    with pytest.raises(ConfigError, match=r"reward\.positive: '1' is the label of no texts; labels are no, yes"):
        learned_reward(encoder, texts(), "1", 12, CPU)


def test_an_encoder_that_cannot_be_had_or_reads_less_is_named(encoder: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.encoder: .* cannot be loaded as an encoder"):
        learned_reward(ModelSource(str(tmp_path)), texts(), "yes", 12, CPU)
    with pytest.raises(ConfigError, match=r"reward\.encoder: .* reads 16 tokens, and texts have up to 40"):
        learned_reward(encoder, texts(), "yes", 40, CPU)


@pytest.mark.parametrize("fault", ["not finite", "cannot read a text"])
def test_an_encoder_that_reads_nothing_is_refused_before_anything_is_charged(
    fault: str, encoder: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards that are no numbers make every update zero, which a rehearsal takes for an update."""

    def forward(_self: BertModel, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        if fault == "not finite":
            return SimpleNamespace(last_hidden_state=torch.full((*input_ids.shape, 32), math.inf))
        raise ValueError("You have to specify decoder_input_ids")

    monkeypatch.setattr(BertModel, "forward", forward)
    with pytest.raises(ConfigError, match=rf"reward\.encoder: .*{fault}"):
        learned_reward(encoder, texts(), "yes", 12, CPU)
