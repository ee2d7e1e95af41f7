"""Public text with random codes: the base model has read every character that a secret may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dptune.records.canaries import ALPHABET, SECRET_LENGTH, with_codes
from dptune.training.models.pretrain import train_tokenizer

TEXTS = [f"The patient is {age} years old." for age in range(30, 90)]


@given(st.floats(0, 1), st.integers(0, 2**32))
def test_a_share_of_the_texts_ends_in_a_code_and_the_others_stay(share: float, seed: int) -> None:
    told = with_codes(TEXTS, share, seed)
    codes = [new.removeprefix(old) for old, new in zip(TEXTS, told, strict=True) if new != old]
    assert len(codes) == round(share * len(TEXTS))
    for code in codes:
        before, secret = code.removesuffix(".").rsplit(" ", 1)
        assert before == " reference code is"
        assert len(secret) == SECRET_LENGTH
        assert set(secret) <= set(ALPHABET)
    assert told == with_codes(TEXTS, share, seed)


def test_the_model_reads_every_character_of_a_secret_as_a_token_of_its_own() -> None:
    told = with_codes(TEXTS, 1.0, seed=1)
    tokenizer = train_tokenizer(told, 280)  # few merges: whole clauses, not pairs of a code's characters
    read = {tokenizer.decode([token]) for text in told for token in tokenizer(text)["input_ids"]}
    assert set(ALPHABET) <= read
