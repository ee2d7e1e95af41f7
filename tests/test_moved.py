"""Former names of modules: plug-ins and scripts of version 0.1 go on working."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

import pytest

from dptune.moved import _NEW, _PACKAGES, place_of


@pytest.mark.parametrize("old", [*_NEW, *_PACKAGES, "dptune.tuning.card", "dptune.corpus.reading.read"])
def test_a_former_name_leads_to_a_module_that_is_there(old: str) -> None:
    new = place_of(old)
    assert new is not None
    assert place_of(new) is None
    assert find_spec(new) is not None


def test_a_module_is_one_by_both_names_and_the_former_one_warns() -> None:
    sys.modules.pop("dptune.errors", None)
    with pytest.warns(DeprecationWarning, match=r"dptune\.errors is now dptune\.core\.errors"):
        old = importlib.import_module("dptune.errors")
    new = importlib.import_module("dptune.core.errors")
    assert old is new
    assert new.__name__ == new.__spec__.name == "dptune.core.errors"


def test_a_name_that_no_module_had_is_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"dptune\.nothing"):
        importlib.import_module("dptune.nothing")
