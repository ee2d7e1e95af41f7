"""A setting is declared once, as a field of a dataclass, and is then behind every door under one name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
import yaml
from typer.main import get_command

from dptune.cli import app
from dptune.cli.console import flag
from dptune.core.declarations import Chance, Few, check, declared, problem_of
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora, ScheduleSettings, UpdateRule
from dptune.job.run_spec import schedule_of, training_plan
from dptune.job.search.space import SEARCHED
from dptune.job.settings import RENAMED, TuneSettings, rows_of
from tasks.settings.params import commented
from tests.forked import forked

ROOT = Path(__file__).parents[1]
SHARED = {**declared(ScheduleSettings), **declared(Lora)}


def print_doors() -> None:
    """Print what every door of a tree of dptune knows, as JSON; it imports the tree's modules, not this file's."""
    import flows  # noqa: F401
    from docs.generate.params_page import page
    from dptune.cli import app
    from dptune.core.declarations import declared
    from dptune.job.search.space import SEARCHED
    from dptune.job.settings import TuneSettings
    from flows.deployments import deployments

    commands: Any = get_command(app)
    forms = {one.name: one._parameter_openapi_schema.model_dump() for one in deployments()}
    found = {
        "library": list(declared(TuneSettings)),
        "tune": {one.name: one.help for one in commands.commands["tune"].params},
        "suggest": {one.name: one.help for one in commands.commands["suggest"].params},
        "space": SEARCHED,
        "form": {
            name: one["properties"]["training"]["properties"]
            for name, one in forms.items()
            if "training" in one["properties"]
        },
        "page": page(),
    }
    print(json.dumps(found))


def doors(tree: Path) -> dict[str, Any]:
    status, output, errors = forked(print_doors, tree, packages=tree)
    assert status == 0, errors
    return dict(json.loads(output.strip().splitlines()[-1]))


def test_commands_have_an_option_for_every_setting() -> None:
    commands: Any = get_command(app)
    for command, left_out in (
        ("tune", set()),
        ("suggest", {"task", "labels", "words", "eval_share", "telemetry", "called"}),
    ):
        found = {one.name: one for one in commands.commands[command].params}
        assert set(declared(TuneSettings)) - left_out <= set(found)
        assert not left_out & set(found)
        for name, one in declared(TuneSettings).items():
            if name in found:
                assert flag(name) in found[name].opts
                assert found[name].help.startswith(one.sentence)


def test_every_setting_has_one_sentence_and_bounds_or_choices() -> None:
    for name, one in declared(TuneSettings).items():
        assert re.fullmatch(r"[\"A-Z].*\.", one.sentence), name
        numbers = [kind for kind in one.choices if kind in (int, float)]
        assert not numbers or problem_of(one.kind, 1e301), f"{name} has no bounds"
        assert problem_of(one.kind, object()) or not numbers, name


def test_a_field_that_a_base_declares_keeps_its_bounds_where_its_default_differs() -> None:
    """``TuneSettings`` writes some fields of its bases again, for another default or for None."""
    own = declared(TuneSettings)
    for name, one in SHARED.items():
        assert own[name].choices == one.choices, name
        assert own[name].sentence == one.sentence, name
        for value in (-1, 0, 0.5, 1, 2, 3, 10**4, 10**8, 1e12, "x", True, 1e-9):
            assert bool(problem_of(own[name].kind, value)) == bool(problem_of(one.kind, value)), (name, value)


def test_the_comments_of_params_yaml_are_the_sentences_of_the_fields() -> None:
    """`python -m tasks.settings.params` writes them."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    assert commented(text) == text
    other = text.replace("Learning rate after warm-up.", "another text", 1)
    assert other != text
    assert commented(other) == text
    assert yaml.safe_load(commented(text)) == yaml.safe_load(text)


def test_the_rule_may_be_searched() -> None:
    assert {*declared(UpdateRule), "learning_rate", "expected_batch_size", "epochs", "warmup_steps"} <= set(SEARCHED)


def test_what_is_set_reaches_the_plan_of_a_run_and_its_card() -> None:
    given: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.5, "autocast": "bfloat16", "warmup_steps": 7}
    settings = TuneSettings.of(epsilon=1, checkpoint_every=3, dropout=0.25, **given)
    plan = training_plan(settings, schedule_of(settings, 1000, 10**6, 64))
    assert plan.rule == settings.rule == UpdateRule(optimizer="sgd", momentum=0.5, average="tail")
    assert (plan.autocast, plan.warmup_steps, plan.checkpoint_every) == ("bfloat16", 7, 3)
    assert settings.lora.dropout == 0.25
    assert rows_of(settings) == {
        **{name.replace("_", " "): value for name, value in given.items()},
        "LoRA dropout": 0.25,
    }
    left_open = TuneSettings(epsilon=1)
    assert training_plan(left_open, schedule_of(left_open, 1000, 10**6, 64)).warmup_steps == 10


@pytest.mark.parametrize("former", RENAMED)
def test_a_former_name_still_works_and_warns(former: str, caplog: pytest.LogCaptureFixture) -> None:
    assert getattr(TuneSettings.of(epsilon=1, **{former: 32}), RENAMED[former]) == 32
    assert f"{former} is the former name of {RENAMED[former]}" in caplog.text
    with pytest.raises(ConfigError, match=f"{former}: is the former name of {RENAMED[former]}"):
        TuneSettings.of(epsilon=1, **{former: 32, RENAMED[former]: 16})


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (Chance, [0.5], [0, 1, -1, float("nan"), float("inf"), "0.5", True, None]),
        (Few, [1, 10**6], [0, 1.0, 10**6 + 1, True]),
        (Few | None, [1, None], [0, "1"]),
        (bool, [True, False], [1, 0, "yes", None]),
        (Literal["a", "b"], ["a"], ["c", 1, None]),
        (Literal[True] | str, [True, "x"], [1, False]),
    ],
)
def test_values_are_checked_against_type_and_bounds(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [problem_of(kind, value) for value in right] == [""] * len(right)
    assert all(problem_of(kind, value) for value in wrong)


def test_a_check_names_field_value_and_a_fix_that_works() -> None:
    with pytest.raises(ConfigError) as caught:
        UpdateRule(momentum=1.5)
    assert str(caught.value) == (
        "momentum: 1.5 is not below 1. Fix: give a number above 0 and below 1, or leave it out."
    )
    check(UpdateRule(momentum=0.5))
    assert get_type_hints(UpdateRule)["momentum"] is float


def test_a_new_field_is_behind_every_door(tmp_path: Path) -> None:
    """A field that is planted on the update rule, in a copy of the tree, and nowhere else."""
    for part in ("dptune", "tasks", "flows"):
        shutil.copytree(ROOT / part, tmp_path / part)  # with what Python compiled, which it need not do again
    shutil.copytree(ROOT / "docs" / "generate", tmp_path / "docs" / "generate")
    for file in ("params.yaml", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    source = tmp_path / "dptune" / "core" / "settings.py"
    text = source.read_text(encoding="utf-8")
    text = text.replace(
        "        average_decay: decay", "        weight_decay: share that is planted.\n        average_decay: decay"
    )
    text = text.replace("    average_decay: Chance", "    weight_decay: Share = 0.25\n    average_decay: Chance")
    source.write_text(text, encoding="utf-8")
    found = doors(tmp_path)
    assert "weight_decay" in found["library"]
    assert "weight_decay" in found["space"]
    for command in ("tune", "suggest"):
        assert found[command]["weight_decay"] == "Share that is planted."
    assert set(found["form"]) == {"study", "experiment", "search"}
    for properties in found["form"].values():
        assert properties["weight_decay"]["description"] == "Share that is planted."
        assert (properties["weight_decay"]["minimum"], properties["weight_decay"]["default"]) == (0, 0.25)
    (row,) = (line for line in found["page"].splitlines() if "training.weight_decay" in line)
    assert "Share that is planted." in row
    assert "0 to 1" in row
