"""Samples against secrets: similarity as a plain loop has it, the published filter, reproducible sampling."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from audit_models import LENGTH, RECORD, SECRET, gpt2, memorised, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from dptune.audit.text.extraction import GRAMS, PROMPT, compare, instruction, jaccard, recites, sample_endings
from dptune.audit.text.likelihood import Passage
from dptune.core.errors import ConfigError
from dptune.records.canaries import ALPHABET, suffix

TEXTS = st.lists(st.text("AB1", max_size=12), max_size=6)


def naive(one: str, other: str, n: int) -> float:
    first = {one[start : start + n] for start in range(len(one) - n + 1)}
    second = {other[start : start + n] for start in range(len(other) - n + 1)}
    return len(first & second) / len(first | second) if first | second else 0.0


@given(one=TEXTS, other=TEXTS, n=st.sampled_from(GRAMS))
def test_jaccard_is_the_plain_loop(one: list[str], other: list[str], n: int) -> None:
    table = jaccard(one, other, n)
    assert table.shape == (len(one), len(other))
    assert table.tolist() == [[pytest.approx(naive(a, b, n)) for b in other] for a in one]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (SECRET, SECRET, [1, 1, 1, 1]),
        ("ABCDE", "12345", [0, 0, 0, 0]),
        ("AB", "BA", [1, 0, 0, 0]),
        ("ABC", "ABC", [1, 1, 1, 0]),
        ("AAAA", "AAAAAAAA", [1, 1, 1, 1]),
        ("ABCD", "BCDE", [3 / 5, 2 / 4, 1 / 3, 0]),
    ],
)
def test_jaccard_by_hand(one: str, other: str, expected: list[float]) -> None:
    assert [float(jaccard([one], [other], n)[0, 0]) for n in GRAMS] == pytest.approx(expected)


def test_the_published_filter() -> None:
    good = ["A", "0", "ABC123", SECRET]
    bad = ["", "abc", "A B", "A-B", "ABCDEFGHIJK", "Ä", "A\n", " A", "٣"]
    result = compare([*good, *bad], [SECRET])
    assert (result.generated, result.valid) == (13, 4)


def test_secrets_are_counted_and_not_samples() -> None:
    secrets = ["AAAAAAAAA1", "AAAAAAAAA2", "AAAAAAAAA3"]
    samples = ["AAAAAAAAA1", "AAAAAAAAA1", "AAAAAAAAA3", "AAAAAAAAA", "AAAAAAAAA22"]
    assert compare(samples, secrets).verbatim == 2


def test_mean_and_deviation_are_over_all_pairs() -> None:
    samples, secrets = ["ABCD", "BCD", "ZZZ", "abc"], ["ABCDE", "ZABCD"]
    result = compare(samples, secrets)
    for n in GRAMS:
        pairs = [naive(one, other, n) for one in samples[:3] for other in secrets]
        assert result.jaccard[n] == pytest.approx(np.mean(pairs))
        assert result.jaccard_deviation[n] == pytest.approx(np.std(pairs))


def test_random_samples_are_at_chance_and_a_secret_is_above() -> None:
    generator = np.random.default_rng(0)
    drawn = ["".join(generator.choice(list(ALPHABET), size=size)) for size in generator.integers(1, 11, size=2010)]
    result, secrets = compare(drawn[10:], drawn[:10]), [SECRET]
    for n in (1, 2):
        assert result.jaccard[n] == pytest.approx(result.jaccard_chance[n], rel=0.1)
        assert compare([SECRET], secrets).jaccard[n] > compare([SECRET], secrets).jaccard_chance[n]


def test_chance_is_that_of_strings_as_long_as_the_samples() -> None:
    """One character hits one of ten different ones of 36, and is then one of ten in common."""
    result = compare(["A"] * 2000, ["ABCDEFGHIJ"])
    assert result.jaccard[1] == pytest.approx(1 / 10)
    assert result.jaccard_chance[1] == pytest.approx(10 / 36 / 10, rel=0.2)
    assert [result.jaccard_chance[n] for n in (2, 3, 4)] == [0, 0, 0]


def test_without_a_valid_sample_there_is_nothing_in_common() -> None:
    for samples in ([], ["no", "secret_id"]):
        result = compare(samples, [SECRET])
        assert (result.generated, result.valid, result.verbatim) == (len(samples), 0, 0)
        assert set(result.jaccard.values()) == set(result.jaccard_deviation.values()) == {0.0}
        assert result.jaccard_chance[1] > 0


def test_without_a_secret_nothing_can_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"canaries\.extraction"):
        compare(["ABC"], [])


def test_a_comparison_is_reproducible_plain_json() -> None:
    many = [SECRET] * 50
    assert compare(many, [SECRET], seed=3) == compare(many, [SECRET], seed=3) != compare(many, [SECRET], seed=4)
    flat = compare([SECRET, "ABC"], [SECRET]).to_dict()
    assert json.loads(json.dumps(flat)) == flat
    assert (flat["jaccard_4"], flat["jaccard_4_deviation"], flat["verbatim"]) == (0.5, 0.5, 1)
    assert len(flat) == 3 + 3 * len(GRAMS)


def sampled(count: int = 7, *, rows: int = 3, seed: int = 1, model: Any = None, **options: Passage) -> list[str]:
    return sample_endings(model or gpt2(), tokenizer(), count, rows=rows, seed=seed, **options)


def test_the_prompt_is_what_precedes_a_planted_secret() -> None:
    assert suffix(SECRET).startswith(PROMPT + SECRET)


def test_the_instruction_has_the_parts_of_the_papers_prompt_in_its_order() -> None:
    """Section 6 of RLDP's paper; the narrative's opening sentence is dropped, and samples follow the equals sign."""
    prompt = instruction("The patient has the following profile. race is Other. gender is Male.")
    asked, empty, profile, second, start = prompt.prompt.split("\n")
    assert "secret_id=<value>" in asked
    assert (empty, second) == ("", "")
    assert profile == "Patient profile: race is Other. gender is Male."
    assert (start, prompt.ending) == ("secret_id=", "")
    assert sampled(prompt=Passage(prompt.prompt[-20:], ""))


def test_a_context_longer_than_the_model_reads_is_continued_from_its_end() -> None:
    """A small vocabulary makes more tokens of a public text than the model has positions."""
    long = RECORD * 40 + PROMPT
    ids = tokenizer()(long, add_special_tokens=False)["input_ids"]
    assert len(ids) > LENGTH
    kept = tokenizer().decode(ids[-(LENGTH - 10) :])
    assert sampled(prompt=Passage(long, "")) == sampled(prompt=Passage(kept, ""))


@pytest.mark.parametrize(("count", "rows"), [(1, 4), (7, 3), (6, 3)])
def test_samples_have_the_published_length_and_temperature(
    monkeypatch: pytest.MonkeyPatch, count: int, rows: int
) -> None:
    model, calls = gpt2(), []
    generate = model.generate

    def watched(**options: Any) -> torch.Tensor:
        sequences = generate(**options)
        calls.append((*sequences.shape, options))
        return sequences

    monkeypatch.setattr(model, "generate", watched)
    assert len(sampled(count, rows=rows, model=model)) == count
    assert sum(height for height, _, _ in calls) == count
    assert max(height for height, _, _ in calls) <= rows
    assert max(width for _, width, _ in calls) == len(tokenizer()(PROMPT)["input_ids"]) + 10
    for _, _, options in calls:
        published = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 50}
        assert published.items() <= options.items()


def test_a_sample_ends_before_the_full_stop_and_has_no_blanks_around_it() -> None:
    texts = sampled(60, rows=60)
    assert all("." not in text and text == text.strip() for text in texts)
    assert len(set(texts)) > 50


def test_samples_depend_on_their_seed_and_on_nothing_else() -> None:
    model = gpt2()
    first = sampled(model=model)
    torch.manual_seed(99)
    assert sampled(model=model) == first
    assert sampled(model=model, seed=2) != first


def test_sampling_leaves_the_global_generator_alone() -> None:
    model = gpt2()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sampled(model=model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_memorised_secret_is_given_away() -> None:
    samples = sampled(20, rows=20, model=memorised(), prompt=Passage(RECORD + PROMPT, ""))
    assert compare(samples, [SECRET, "A" * 10]).verbatim == 1
    assert compare(sampled(20, rows=20), [SECRET]).verbatim == 0


def test_a_memorised_secret_is_recited_and_no_other() -> None:
    planted = Passage(RECORD, suffix(SECRET))
    assert recites(memorised(), tokenizer(), planted, SECRET)
    assert not recites(memorised(), tokenizer(), Passage(RECORD, suffix("A" * 10)), "A" * 10)
    assert not recites(gpt2(), tokenizer(), planted, SECRET)


@pytest.mark.parametrize("count", [0, -1])
def test_no_samples_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=r"audit\.generations"):
        sampled(count)
