"""Every kind of candidate is checked, priced and named before anything is drawn or charged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_search import asked, draws, prepared, start, usual

from dptune.core.errors import ConfigError
from dptune.job.delivery.privacy_section import guarantee_rows
from dptune.job.delivery.verification import check_deliverable
from dptune.job.search import kinds as kinds_module
from dptune.job.search import search as search_module
from dptune.job.search.kinds import check_kinds
from dptune.job.search.plan import Plan
from dptune.job.search.search import plan_of_search, planned_certificate, working_folder
from dptune.mechanisms.controllers import geoclip
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.release import Release


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
    _nothing_began(tmp_path)


def test_what_a_mechanism_refuses_at_its_start_is_refused_before_any_noise_is_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every point: here it is the third of three."""
    monkeypatch.setattr(geoclip, "_LARGEST_FULL", 10)
    monkeypatch.setattr(kinds_module, "calibrated_candidate", lambda *_: pytest.fail("it takes seconds a kind"))
    space = {"mechanism": ["geoclip"], "options.explore": [0.0], "options.rank": [2, 4, 0]}
    with pytest.raises(ConfigError, match=r"^rank: 0 means a full covariance"):
        start(tmp_path, space=space)
    with pytest.raises(ConfigError, match=r"^rank: 0 means a full covariance"):
        check_kinds(asked(space=space, score="rehearsal"), usual().settings, usual().base, 100)
    _nothing_began(tmp_path)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"mechanism": ["quantile"], "options.count_noise": [50.0, 0.1]}, "mechanisms.quantile: its statistics have"),
        ({"mechanism": ["banded"], "options.bands": [2], "options.noise_memory": [1.0, 1e-9]}, "noise_memory: 2 bands"),
    ],
)
def test_what_a_mechanism_refuses_at_its_final_noise_is_refused_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: Any, named: str
) -> None:
    monkeypatch.setattr(Plan, "draw", lambda *_: pytest.fail("a plan was drawn"))
    with pytest.raises(ConfigError, match=named):
        start(tmp_path, space=space, bound="one_shift")
    _nothing_began(tmp_path)


def test_settings_that_start_alike_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    begin = Mechanism.start

    def count_starts(mechanism: Mechanism, facts: Any) -> None:
        begun.append(mechanism.name)
        begin(mechanism, facts)

    monkeypatch.setattr(Mechanism, "start", count_starts)
    space = {
        "learning_rate": {"log_uniform": [0.001, 0.05]},
        "optimizer": ["adamw", "sgd"],
        "expected_batch_size": [8, 16],
    }
    plan_of_search(usual(), asked(space=space, bound="one_shift"))
    assert begun == ["static", "static"], "one for each batch"


def _nothing_began(folder: Path) -> None:
    assert not working_folder(folder / "out").exists()
    assert not (folder / "spent.jsonl").exists()
    assert not (folder / "out" / "cell.json").exists()


def test_a_mixture_that_costs_more_than_each_kind_gets_more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    own, settings, alone = usual(), asked(space={"expected_batch_size": [1, 24]}), []
    fit = kinds_module._fit_average

    def look(*arguments: Any) -> Any:
        alone.append(arguments[0])
        return fit(*arguments)

    monkeypatch.setattr(kinds_module, "_fit_average", look)
    kinds, terms = plan_of_search(own, settings)
    assert 7.9 < search_module.certificate_of(own, settings, kinds, terms, "id", "").certified <= 8
    with pytest.raises(ConfigError, match="would cost"):  # else this space is none that needs it
        search_module.certificate_of(own, settings, alone[0], terms, "id", "")


@pytest.mark.one_case
@pytest.mark.parametrize("candidates", [1.001, 1.003, 1.02, 1.3])
@pytest.mark.parametrize("bound", ["hull", "one_shift"])
def test_a_candidates_own_ledger_takes_what_the_search_was_calibrated_to(candidates: float, bound: str) -> None:
    """For hardly more than one candidate the search asks for the noise of a single run, to rounding."""
    own, settings = usual(), asked(candidates=candidates, bound=bound)
    kinds, terms = plan_of_search(own, settings)
    for kind in kinds:
        assert own.header.within_budget(kind.releases)
    assert search_module.certificate_of(own, settings, kinds, terms, "id", "").certified <= own.settings.epsilon


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


@pytest.mark.long
def test_candidates_with_correlated_noise_are_priced_by_their_strategies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner has a kind's noise, and whoever wins, the card says whose groups the whole search's price keeps."""
    draws(monkeypatch, 2)
    found = start(tmp_path, prepared(epochs=4), space={"mechanism": ["banded"], "options.bands": [2, 3]})
    assert found.certificate is not None
    bands = [{len(release.coefficients) for release, _ in kind} for _, kind in found.certificate.kinds]
    assert bands == [{2}, {3}]
    contents = check_deliverable(tmp_path / "out" / "adapter")
    assert any(contents.composition == Counter(dict(kind)) for _, kind in found.certificate.kinds)
    card = (tmp_path / "out" / "adapter" / "README.md").read_text()
    assert "so that all others keep their groups" in card
    static = replace(contents, composition=Counter({Release(0.1, 1.0): 13}))
    assert "keep their groups" in guarantee_rows(static, found.certificate)["neighbours"]
    assert "keep their groups" not in guarantee_rows(static, None)["neighbours"]
