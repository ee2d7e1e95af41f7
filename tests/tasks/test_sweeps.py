"""A sweep becomes every combination of its values, once, or is refused in words."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.settings.strict import combinations

VALUES = st.lists(st.integers(), min_size=1, max_size=4, unique=True)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_every_combination_is_there_once(lists: dict[str, list[int]]) -> None:
    found = combinations(lists)
    assert len({tuple(one.items()) for one in found}) == len(found) == prod(map(len, lists.values()))
    assert all(list(one) == list(lists) and all(one[name] in lists[name] for name in one) for one in found)


@pytest.mark.parametrize(
    "lists", [None, [1], {"a": 1}, {"a": []}, {"a": [1], "b": ()}, dict.fromkeys("abcde", [0] * 9)]
)
def test_what_is_no_sweep_is_refused(lists: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a table|makes more than 10000"):
        combinations(lists)
