"""Decoding writes what a loop over tokens would write, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny_models import adapted
from tiny_tokenizers import CHATML, learned_pieces, tokenizer

from dptune.core.errors import ConfigError
from dptune.generation.decoding import Continuation, Decoding, continuations, decode, seeded

PROMPTS = ["a", "abc ab", "h: 123", "d"]


def greedy(model: Any, words: Any, prompt: str, steps: int) -> str:
    """The likeliest token each time, one prompt at a time, without a cache."""
    ids = list(words(prompt)["input_ids"])
    start = len(ids)
    for _ in range(steps):
        token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == words.eos_token_id:
            break
        ids.append(token)
    return str(words.decode(ids[start:], skip_special_tokens=True)).strip()


def model() -> Any:
    return adapted("gpt2", randomised=True).eval()


def test_greedy_equals_a_loop_whatever_the_batch() -> None:
    own, words = model(), tokenizer()
    expected = [greedy(own, words, prompt, 8) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    for rows in (1, 3, 4):
        assert decode(own, words, PROMPTS, Decoding(max_new_tokens=8), rows) == expected


def test_beams_find_a_likelier_text_than_greed() -> None:
    own, words = model(), tokenizer()

    def likelihood(prompt: str, decoding: Decoding) -> float:
        ids = torch.tensor([words(prompt)["input_ids"]])
        options = {"num_beams": decoding.beams, "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
        found = own.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        logits = own(input_ids=found).logits.log_softmax(-1)[0, :-1].gather(1, found[0, 1:, None])
        return float(logits[ids.shape[1] - 1 :].sum())

    gains = [likelihood(one, Decoding(beams=5)) - likelihood(one, Decoding()) for one in PROMPTS]
    assert min(gains) > -1e-4
    assert (
        decode(own, words, PROMPTS, Decoding(beams=5, max_new_tokens=6))
        != decode(own, words, PROMPTS, Decoding(max_new_tokens=6))
        or max(gains) < 1e-4
    )


def test_draws_follow_their_seed_and_leave_torchs_alone() -> None:
    own, words = model(), tokenizer()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        decode(own, words, PROMPTS, Decoding(sample=True, seed=seed, temperature=5.0, max_new_tokens=8))
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again
    assert first != other
    cold = decode(own, words, PROMPTS, Decoding(sample=True, temperature=1e-4, max_new_tokens=8))
    assert cold == decode(own, words, PROMPTS, Decoding(max_new_tokens=8))


def test_an_output_ends_at_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    own, words = model(), tokenizer()
    ids = words("ab")["input_ids"]
    end, letter = words.eos_token_id, words("c")["input_ids"][0]
    monkeypatch.setattr(own, "generate", lambda input_ids, **_: torch.tensor([[*input_ids[0], letter, end, letter]]))
    assert decode(own, words, ["ab"], Decoding(max_new_tokens=4)) == ["c"]
    assert len(ids) == 2


def test_an_answer_in_a_chat_ends_where_its_template_ends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own, words, seen = model(), tokenizer(begins=True, template=CHATML), []
    asked = "<s>user:ab<e><s>assistant:"
    letter, end, own_end = words.convert_tokens_to_ids(["c", "<e>", "d"])
    own.get_base_model().generation_config.eos_token_id = [own_end, words.eos_token_id]

    def write(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((input_ids[0].tolist(), options["eos_token_id"]))
        return torch.tensor([[*input_ids[0], letter, end, letter]])

    monkeypatch.setattr(own, "generate", write)
    assert decode(own, words, [asked], Decoding(max_new_tokens=4), ends=[end]) == ["c"]
    assert seen == [(words(asked, add_special_tokens=False)["input_ids"], [words.eos_token_id, end, own_end])]
    own.get_base_model().generation_config.eos_token_id = own_end
    decode(own, words, ["ab"], Decoding(max_new_tokens=4))
    assert seen[1][1] == [words.eos_token_id], "a text ends where texts ended in training"


def test_a_prompt_that_ends_in_a_separator_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2E's published form separates by the end-of-text token, which must not be taken for an end of the prompt."""
    own, words, seen = model(), tokenizer(), []
    monkeypatch.setattr(own, "generate", lambda input_ids, **_: seen.append(input_ids) or input_ids)
    decode(own, words, ["ab<end>"], Decoding(max_new_tokens=4))
    assert seen[0][0, -1] == words.eos_token_id


def test_draws_have_the_models_own_chances() -> None:
    """Chi-square of 6,000 first tokens at temperature 1; false alarms: 1 in a million."""
    own, words, count = model(), tokenizer(), 6000
    start = words("abc")["input_ids"]
    chances = own(input_ids=torch.tensor([start])).logits[0, -1].double().softmax(-1).detach().numpy()
    known = (token for token in range(len(words)) if token not in words.all_special_ids)
    letters = {words.decode([token]): token for token in known if words.decode([token]).strip()}
    with seeded(Decoding(sample=True)):
        found = continuations(own, words, [start] * count, Decoding(max_new_tokens=1, sample=True), rows=1000)
    drawn = [letters[one.text.strip()] for one in found if one.text.strip() in letters]
    tokens = np.array(sorted(letters.values()))
    seen = np.array([drawn.count(token) for token in tokens])
    expected = chances[tokens] * count
    frequent = expected >= 5
    rest = [count - seen[frequent].sum()], [count - expected[frequent].sum()]
    both = [np.append(some[frequent], others) for some, others in zip((seen, expected), rest, strict=True)]
    assert chisquare(*both).pvalue > 1e-6


def test_defaults_of_a_checkpoint_decide_nothing() -> None:
    own, words = model(), tokenizer()
    wanted = Decoding(max_new_tokens=8), Decoding(max_new_tokens=8, sample=True, seed=3)
    before = [decode(own, words, PROMPTS, one) for one in wanted]
    defaults = own.get_base_model().generation_config
    defaults.repetition_penalty, defaults.min_length, defaults.suppress_tokens = 9.0, 20, [5, 6, 7, 8]
    assert [decode(own, words, PROMPTS, one) for one in wanted] == before
    assert own.get_base_model().generation_config is defaults


@pytest.mark.parametrize("spaced", [False, True])
def test_a_continuation_keeps_its_spaces(spaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and completion together are the text that the model wrote, whatever a tokenizer does at beginnings."""
    own, words = model(), learned_pieces(spaced)
    end, written = words.eos_token_id, words("ab cd ab")["input_ids"]
    prompt = words("ab")["input_ids"]
    assert written[: len(prompt)] == prompt
    rest = written[len(prompt) :]
    for rows, ended in (([*prompt, *rest, end, end], True), ([*prompt, *rest], False)):
        monkeypatch.setattr(own, "generate", lambda rows=rows, **_: torch.tensor([rows]))
        (found,) = continuations(own, words, [prompt], Decoding(max_new_tokens=len(rest)))
        assert found == Continuation(" cd ab", len(rest), ended)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"beams": 0}, "below 1"),
        ({"max_new_tokens": 0}, "below 1"),
        ({"temperature": 0.0, "sample": True}, "not positive"),
        ({"top_p": 1.5, "sample": True}, "is not a share"),
        ({"seed": -1, "sample": True}, "is not in"),
        ({"temperature": 0.5}, "for sampling"),
        ({"seed": 5}, "decoding.seed: is for sampling. Fix: set sample"),
        ({"length_penalty": 0.8}, "decoding.length_penalty: is for beams. Fix: set beams above 1"),
        ({"length_penalty": 0.8, "sample": True}, "is for beams"),
        ({"sample": True, "beams": 2}, "does not go with 2 beams"),
    ],
)
def test_refused_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Decoding(**options)


def test_defaults_that_are_given_are_not_refused() -> None:
    assert Decoding(beams=1, length_penalty=1.0, sample=False, temperature=1.0, top_p=1.0, seed=0) == Decoding()


def test_prompts_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="beside a prompt of 6 tokens is more than the model's 32"):
        decode(model(), tokenizer(), PROMPTS, Decoding(max_new_tokens=27))
    with pytest.raises(ConfigError, match="one without a token"):
        decode(model(), tokenizer(), ["a", ""], Decoding())
    with pytest.raises(ConfigError, match=r"has one of 40 tokens, and the model reads 32\. Fix: shorten it"):
        decode(model(), tokenizer(), ["a", "a" * 40], Decoding(max_new_tokens=1))


def test_signatures() -> None:
    assert Decoding().signature == "greedy, at most 64 tokens"
    assert Decoding(beams=5, length_penalty=0.8, no_repeat_ngram=4).signature == (
        "5 beams, length penalty 0.8, at most 64 tokens, no 4 tokens twice"
    )
    assert "seed 3" in Decoding(sample=True, seed=3).signature
