"""Every kind of candidate is checked, priced and named before anything is drawn or charged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_search import asked, start, usual

from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.release import Release
from dptune.tuning.search import kinds as kinds_module
from dptune.tuning.search import search as search_module
from dptune.tuning.search.search import plan_of_search, planned_certificate, working_folder


def test_a_plug_in_of_any_kind_is_named_by_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mechanism, "plugins", property(lambda self: ("mine",) if self.name == "quantile" else ()))
    assert planned_certificate(usual(), asked(space={"mechanism": ["static", "quantile"]})).plugins == ("mine",)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"mechanism": ["geoclip"], "optimizer": ["adamw", "adam_bc"]}, "optimizer"),
        ([{"learning_rate": [0.01, 0.02]}, {"mechanism": ["rldp"], "options.move_noise": [False]}], "public"),
    ],
)
def test_what_a_runs_start_would_refuse_is_refused_before_anything_is_drawn(
    tmp_path: Path, space: Any, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, replace(usual(), public=None), space=space)
    assert caught.value.field == named
    assert not working_folder(tmp_path / "out").exists()
    assert not (tmp_path / "spent.jsonl").exists()
    assert not (tmp_path / "out" / "cell.json").exists()


def test_a_mixture_that_costs_more_than_each_kind_gets_more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    own, settings, alone = usual(), asked(space={"batch": [1, 24]}), []
    fit = kinds_module._fit_average

    def look(*arguments: Any) -> Any:
        alone.append(arguments[0])
        return fit(*arguments)

    monkeypatch.setattr(kinds_module, "_fit_average", look)
    kinds, terms = plan_of_search(own, settings)
    assert 7.9 < search_module.certificate_of(own, settings, kinds, terms, "id", "").certified <= 8
    with pytest.raises(ConfigError, match="would cost"):  # else this space is none that needs it
        search_module.certificate_of(own, settings, alone[0], terms, "id", "")


def test_a_range_that_decides_releases_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates would then release what no kind is priced for."""
    numbers = count(1)
    monkeypatch.setattr(kinds_module, "planned", lambda *_: Counter({Release(0.1, 1.0): next(numbers)}))
    with pytest.raises(ConfigError, match="decide what this mechanism releases"):
        plan_of_search(usual(), asked())


def test_a_search_above_its_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own, settings = usual(), asked()
    kinds, terms = plan_of_search(own, settings)
    monkeypatch.setattr(SearchCertificate, "certified", property(lambda self: self.epsilon * 1.01))
    with pytest.raises(ConfigError, match="would cost"):
        search_module.certificate_of(own, settings, kinds, terms, "id", "")
