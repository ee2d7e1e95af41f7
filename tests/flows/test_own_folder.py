"""Where a flow's lists lie: another setting of a study has another folder, and no audit takes a study's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import prepare_environment, write_params

from dptune.core.files import write_text
from flows.common.form import audit_folder_of, folder_of
from tasks.paths import DATA, EXPERIMENT, REPORTS
from tasks.settings.params import Settings

#: A change of each section that a study reads.
READ: dict[str, Any] = {
    "plugins": ["dptune.mechanisms.controllers.quantile"],
    "data": {"unit": "patient"},
    "task": {"max_new_tokens": 30},
    "canaries": {"extraction": 5},
    "pretrain": {"epochs": 2},
    "lora": {"rank": 3},
    "training": {"epochs": 0.5},
    "mechanisms": {"static": {"max_grad_norm": 0.7}},
    "experiment": {"seeds": [5]},
    "audit": {"generations": 21},
}
#: Sections of other flows, whose results lie elsewhere.
ELSEWHERE = {"policy", "prediction", "search"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a params.yaml alone."""
    prepare_environment(monkeypatch, tmp_path)
    write_params()
    return tmp_path


@pytest.mark.parametrize("section", sorted(set(Settings.model_fields) - ELSEWHERE))
def test_a_study_with_another_value_in_a_section_has_a_folder_of_its_own(file: Path, section: str) -> None:
    assert folder_of({}) == DATA
    assert folder_of({section: READ[section]}).parent == REPORTS


def test_an_audit_leaves_the_list_of_a_study_alone(file: Path) -> None:
    over = {"audit": {"generations": 21}}
    study = folder_of(over)
    write_text(study / EXPERIMENT.name, "the study's")
    assert audit_folder_of(over) == study, "the workspace has no list yet"
    write_text(EXPERIMENT, "the workspace's")
    own = audit_folder_of(over)
    assert (study / EXPERIMENT.name).read_text() == "the study's"
    assert (own / EXPERIMENT.name).read_text() == EXPERIMENT.read_text() == "the workspace's"
    assert own.parent == REPORTS
    write_text(EXPERIMENT, "renewed")
    assert audit_folder_of(over) == own
    assert (own / EXPERIMENT.name).read_text() == "renewed", "the list of the last experiment"


def test_an_audit_without_settings_of_its_own_lies_beside_what_it_attacks(file: Path) -> None:
    over = {"training": {"epochs": 0.5}}
    write_text(EXPERIMENT, "the workspace's")
    write_text(folder_of(over) / EXPERIMENT.name, "the study's")
    assert audit_folder_of(over) == folder_of(over)
    assert (folder_of(over) / EXPERIMENT.name).read_text() == "the study's"
    assert audit_folder_of({}) == DATA
    assert EXPERIMENT.read_text() == "the workspace's"
    both = audit_folder_of(over | {"audit": {"generations": 21}})
    assert (both / EXPERIMENT.name).read_text() == "the study's"
