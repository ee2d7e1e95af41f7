"""Forms of the deployments: the file's values, refusals that name the field, and runs that say what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import BUDGET, write_params

from flows import deployments as module
from flows.common.form import ASK_FIRST, OVERRIDES, changes, file_values, path_of
from flows.common.pages import grid_words
from flows.deployments import _FLOWS, deployments, fields_of
from flows.experiment import experiment
from flows.ui import _PAGE_SETTINGS
from tasks.settings.params import load_settings

GRID = {"name": "faults", "mechanisms": ["static"], "epsilons": [1.0, 4.0], "seeds": [0, 1, 2], "epochs": 0.5}
GRID |= {"accounting": "certified", "telemetry": "research", "delta": 1e-5}


def at(content: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        content = content[key]
    return content


def served() -> dict[str, Any]:
    return {one.name: one for one in deployments()}


def test_every_field_shows_the_value_of_the_file(pipeline: Path) -> None:
    write_params({"experiment": {"epsilons": [1, 4]}, "policy": {"seeds": [7]}, "prediction": {"tokens": [512]}})
    content = yaml.safe_load(Path("params.yaml").read_text())
    found = served()
    assert set(found) == set(_FLOWS) == {"study", "experiment", "audit", "prediction", "search", "policy"}
    for name in found:
        fields = {field: path_of(name, field) for field in fields_of(name) if field not in (OVERRIDES, ASK_FIRST)}
        shown = {field: value for field, value in found[name].parameters.items() if field != ASK_FIRST}
        whole = {"training", "lora", "models"} if name != "prediction" else {"training", "lora"}
        own = {field: at(content, path) for field, path in fields.items() if field not in whole} | {OVERRIDES: {}}
        assert {field: value for field, value in shown.items() if field not in whole} == own
        schema = found[name]._parameter_openapi_schema
        assert set(schema.properties) - {ASK_FIRST} == set(shown), "and each is a field of the form"
        assert set(schema.required) == set(own)
        for field in (whole - {"models"}) & set(shown):
            entries = schema.properties[field]["properties"]
            assert set(entries) == set(shown[field])
            assert shown[field].items() >= {
                (k, v) for k, v in at(content, field).items() if k in entries and not isinstance(v, dict)
            }
            assert "epochs" not in entries or "epochs" not in shown, "one field for one setting"
            assert all(entry["description"] for entry in entries.values())
        assert all(entry["description"] for entry in schema.properties.values())


def test_registering_a_deployment_says_nothing_about_its_schedules(pipeline: Path) -> None:
    """Prefect replaces the schedules that the owner added by a list that is given, also by an empty one."""
    write_params()
    assert [name for name, one in served().items() if "schedules" in one.model_dump(exclude_unset=True)] == []


def test_a_form_takes_no_boolean_and_no_text_for_a_number(pipeline: Path) -> None:
    """The server checks what a page or a command gives against the form before there is a run."""
    from jsonschema import Draft202012Validator

    write_params()
    for name, deployment in served().items():
        assert deployment.enforce_parameter_schema
        form, given = Draft202012Validator(deployment._parameter_openapi_schema.model_dump()), deployment.parameters
        form.validate(given)
        for field, value in given.items():
            one = value[0] if isinstance(value, list) else value
            if isinstance(one, int | float) and not isinstance(one, bool):
                for bad in (True, str(one)):
                    wrong = given | {field: [bad] if isinstance(value, list) else bad}
                    assert not form.is_valid(wrong), f"{name}: {field}={wrong[field]!r}"


@pytest.mark.parametrize("given", [{"epsilons": [True]}, {"epsilons": ["8"]}, {"seeds": [True]}, {"seeds": ["1"]}])
def test_the_flow_itself_takes_none_either(given: dict[str, Any]) -> None:
    from prefect.exceptions import ParameterTypeError  # ``flows`` has to be imported before prefect

    with pytest.raises(ParameterTypeError, match=rf"{next(iter(given))}\.0: Input should be a valid"):
        experiment.validate_parameters(given)
    assert experiment.validate_parameters({"epsilons": [2], "seeds": [1]})["epsilons"] == [2.0]


def test_the_form_says_that_an_entrys_own_epsilons_stay(pipeline: Path) -> None:
    write_params()
    for name in ("study", "experiment"):
        said = served()[name]._parameter_openapi_schema.properties["epsilons"]["description"]
        assert "An entry of params.yaml with `epsilons` of its own keeps those" in " ".join(said.split())


def test_mechanisms_are_chosen_from_those_of_the_file(pipeline: Path) -> None:
    write_params({"mechanisms": {"mine": {"like": "static", "max_grad_norm": 0.2}}})
    offered = served()["study"]._parameter_openapi_schema.properties["mechanisms"]["items"]["enum"]
    assert offered == list(load_settings().mechanisms)
    assert "mine" in offered


def test_base_models_are_chosen_from_those_of_the_file_and_the_form_says_which_records_it_runs_on(
    pipeline: Path,
) -> None:
    from dptune.core.errors import ConfigError

    write_params({"experiment": {"models": {"other": {"source": "data/models/public"}}}})
    both = list(load_settings().experiment.models)
    for name in ("study", "experiment"):
        deployment = served()[name]
        assert deployment._parameter_openapi_schema.properties["models"]["items"]["enum"] == both
        assert deployment.parameters["models"] == both
        assert "Records: source synthetic, unit record." in str(deployment.description)
        whole = load_settings().experiment.models
        for chosen, left in ((["other"], ["other"]), (both[::-1], both), ([], both)):
            settings = load_settings(overrides=changes(name, {**GRID, "models": chosen, "overrides": {}}))
            assert settings.experiment.models == {one: whole[one] for one in left}
        with pytest.raises(ConfigError, match=r"experiment\.models: params\.yaml has no model 'lost'"):
            load_settings(overrides=changes(name, {**GRID, "models": ["lost"], "overrides": {}}))


def test_accounting_and_telemetry_are_chosen_from_lists_and_no_run_waits_unless_asked(pipeline: Path) -> None:
    write_params()
    for name in ("study", "experiment"):
        properties = served()[name]._parameter_openapi_schema.properties
        assert properties["accounting"]["enum"] == ["certified", "noise_only", "published"]
        assert properties["telemetry"]["enum"] == ["research", "private"]
        assert served()[name].parameters[ASK_FIRST] is False


def test_what_a_form_says_is_merged_over_the_file(pipeline: Path) -> None:
    before = Path("params.yaml").read_bytes()
    given = changes("study", {**GRID, "overrides": {"audit": {"shadows": 4}, "experiment": {"seeds": [9]}}})
    settings = load_settings(overrides=given)
    assert (settings.experiment.name, settings.experiment.epsilons) == ("faults", (1.0, 4.0))
    assert (settings.training.epochs, settings.audit.shadows) == (0.5, 4)
    assert settings.experiment.seeds == (9,), "overrides win"
    assert Path("params.yaml").read_bytes() == before


def test_the_files_own_values_change_nothing(pipeline: Path) -> None:
    write_params({"experiment": {"mechanisms": ["nonprivate", {"static": [1, 8]}]}})
    settings = load_settings()
    for name in _FLOWS:
        assert load_settings(overrides=changes(name, file_values(name, fields_of(name), settings))) == settings


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"epsilons": [1.0, 1.0]}, "experiment.epsilons"),
        ({"seeds": [3, 3]}, "experiment.seeds"),
        ({"overrides": {"audit": {"shadows": 1}}}, "audit.shadows"),
        ({"overrides": {"training": {"epoch": 3}}}, "training.epoch"),
        ({"overrides": {"data": {"synthetic": {"encounters": 60}}}}, "overrides.data"),
    ],
)
def test_a_refused_value_is_named_before_any_work(
    server: str, pipeline: Path, changed: dict[str, Any], field: str
) -> None:
    given = {**GRID, "epsilons": [BUDGET], "overrides": {}, **changed}
    before = {path: path.stat().st_mtime_ns for path in Path("data").rglob("*")}
    state = module.study_form(**given, return_state=True)
    assert state.is_failed()
    assert field in str(state.message)
    assert "Fix: " in str(state.message)
    assert {path: path.stat().st_mtime_ns for path in Path("data").rglob("*")} == before


def test_a_value_of_the_wrong_type_is_refused_before_the_flow_starts(server: str, pipeline: Path) -> None:
    state = module.study_form(**{**GRID, "epsilons": [-1.0], "overrides": {}}, return_state=True)
    assert state.is_failed()
    assert "epsilons" in str(state.message)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("faults", ["static", "rldp"], [1.0, 4.0], [0, 1, 2]), "faults: static, rldp at epsilon 1, 4; 3 seeds"),
        (("plain", ["nonprivate"], [], [0]), "plain: nonprivate; 1 seed"),
        (("many", list("abcdef"), [0.5], [0]), "many: a, b, c, d and 2 more at epsilon 0.5; 1 seed"),
    ],
)
def test_a_run_is_called_by_what_it_runs(given: Any, name: str) -> None:
    assert grid_words(*given) == name


def test_forms_follow_a_change_of_the_file(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params()
    shown: list[list[float]] = []

    class Enough(BaseException):
        pass

    def register() -> list[Any]:
        shown.append(load_settings().experiment.epsilons)  # type: ignore[arg-type]
        raise Enough

    steps = iter([lambda: None, lambda: write_params({"experiment": {"epsilons": [3]}})])
    monkeypatch.setattr(module, "deployments", register)
    monkeypatch.setattr(module.time, "sleep", lambda _: next(steps)())
    with pytest.raises(Enough):
        module._follow_file()
    assert shown == [(3.0,)]


def test_the_page_asks_the_port_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's own setting read back, for its names may change."""
    from prefect.settings.models.root import Settings

    for name, value in _PAGE_SETTINGS.items():
        monkeypatch.setenv(name, value)
    page = Settings().server.ui
    assert page.api_url == "/api"
    assert page.v2_enabled is False
