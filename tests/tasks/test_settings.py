"""params.yaml: a bad entry is an error that names it, and a profile is applied whole or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from invented_benchmarks import write_benchmarks
from tiny_pipeline import ROOT, apply_profile, merge, params, repository_params, write_params
from typer.testing import CliRunner

from dptune.core.errors import ConfigError
from tasks.profile import main as print_profile
from tasks.profile import members
from tasks.settings.params import load_settings
from tasks.settings.params import merge as merge_settings
from tasks.settings.strict import load_yaml

ALL_PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))
PAPER = ROOT / "profiles" / "paper.yaml"


@pytest.fixture
def here(empty: Path) -> Path:
    (empty / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    return empty


def test_the_repositorys_file_is_valid() -> None:
    settings = load_settings(ROOT / "params.yaml")
    assert settings.data.source == "synthetic"
    assert settings.experiment.telemetry == "research"
    assert settings.experiment.accounting == "certified"
    assert {"nonprivate", "static"} <= set(settings.experiment.mechanisms)


def test_the_tiny_pipelines_file_is_valid(empty: Path) -> None:
    write_params()
    assert load_settings().experiment.name == "tiny"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown section": ({"trainign": {}}, "trainign"),
    "unknown key": ({"training": {"batch": 16}}, "training.batch"),
    "unknown nested key": ({"data": {"synthetic": {"encountres": 100}}}, "data.synthetic.encountres"),
    "length penalty without beams": ({"task": {"length_penalty": 0.8}}, "length_penalty: is for beams"),
    "unknown source": ({"data": {"source": "mimic"}}, "data.source"),
    "unknown unit": ({"data": {"unit": "hospital"}}, "data.unit"),
    "too few encounters": ({"data": {"synthetic": {"encounters": 3}}}, "data.synthetic.encounters"),
    "negative canaries": ({"canaries": {"audit": -1}}, "canaries.audit"),
    "word for a number": ({"training": {"epochs": "many"}}, "training.epochs"),
    "fraction for a count": ({"training": {"checkpoint_every": 2.5}}, "training.checkpoint_every"),
    "zero batch": ({"training": {"expected_batch_size": 0}}, "training.expected_batch_size"),
    "infinite learning rate": ({"training": {"learning_rate": float("inf")}}, "training.learning_rate"),
    "unknown autocast": ({"training": {"autocast": "float16"}}, "training.autocast"),
    "section that is a number": ({"lora": 8}, "lora"),
    "section that is empty": ({"lora": None}, "lora"),
    "dropout of one": ({"lora": {"dropout": 1.0}}, "lora.dropout"),
    "rank of nothing": ({"lora": {"rank_pattern": {"c_attn": 0}}}, "lora.rank_pattern.c_attn"),
    "no start": ({"lora": {"init_lora_weights": False}}, "lora.init_lora_weights"),
    "a layer without a name": ({"lora": {"target_modules": ""}}, "lora.target_modules"),
    "epsilon zero": ({"experiment": {"epsilons": [2, 0]}}, "experiment.epsilons.1"),
    "epsilon negative": ({"experiment": {"epsilons": [-1]}}, "experiment.epsilons.0"),
    "epsilon infinite": ({"experiment": {"epsilons": [float("inf")]}}, "experiment.epsilons.0"),
    "epsilon not a number": ({"experiment": {"epsilons": [float("nan")]}}, "epsilons.0: nan is not a number"),
    "epsilons no list": ({"experiment": {"epsilons": 2}}, "experiment.epsilons"),
    "no epsilon": ({"experiment": {"epsilons": []}}, "experiment.epsilons"),
    "delta one": ({"experiment": {"delta": 1}}, "experiment.delta"),
    "no seed": ({"experiment": {"seeds": []}}, "experiment.seeds"),
    "a seed twice": ({"experiment": {"seeds": [0, 0]}}, "experiment.seeds: 0 is given twice"),
    "an epsilon twice": ({"experiment": {"epsilons": [2, 2.0]}}, "experiment.epsilons: 2.0 is given twice"),
    "a policy's seed twice": ({"policy": {"seeds": [1, 1]}}, "policy.seeds: 1 is given twice"),
    "a folder for a source": ({"data": {"source": "/etc"}}, "data.source"),
    "an empty path": ({"data": {"source": "table", "path": ""}}, "data.path: is an empty text"),
    "no folder to start from": ({"mechanisms": {"rldp": {"init_from": ""}}}, "mechanisms.rldp: init_from: is an empty"),
    "no mechanism": ({"experiment": {"mechanisms": []}}, "experiment.mechanisms"),
    "no device": ({"experiment": {"devices": []}}, "experiment.devices"),
    "mechanism without entry": ({"experiment": {"mechanisms": ["absent"]}}, "absent"),
    "leaking mechanism, certified": (
        {"mechanisms": {"leaky": {"like": "rldp_published"}}, "experiment": {"mechanisms": ["leaky"]}},
        "mechanisms.leaky",
    ),
    "entry with an unknown accounting": ({"mechanisms": {"static": {"accounting": "rdp"}}}, "accounting"),
    "an entry's epsilon twice": ({"mechanisms": {"static": {"epsilons": [1, 1.0]}}}, "mechanisms.static: epsilons"),
    "an entry's epsilon of 0": ({"mechanisms": {"static": {"epsilons": [0]}}}, "mechanisms.static: epsilons"),
    "an entry's epsilons, empty": ({"mechanisms": {"static": {"epsilons": []}}}, "mechanisms.static: epsilons"),
    "an entry's epsilons, no list": ({"mechanisms": {"static": {"epsilons": 2}}}, "mechanisms.static: epsilons"),
    "epsilons without noise": ({"mechanisms": {"nonprivate": {"epsilons": [1]}}}, "mechanisms.nonprivate: epsilons"),
    "entry like nothing known": ({"mechanisms": {"mine": {"like": "magic"}}}, "mechanisms.mine.like"),
    "sweep that is no table": ({"mechanisms": {"static": {"sweep": [1]}}}, "mechanisms.static.sweep"),
    "unregistered mechanism": ({"mechanisms": {"mine": {}}}, "mechanisms.mine"),
    "unknown part": ({"mechanisms": {"static": {"clipper": "soft"}}}, "mechanisms.static.clipper"),
    "unknown option": ({"mechanisms": {"static": {"max_norm": 1}}}, "max_norm"),
    "option no number": ({"mechanisms": {"static": {"max_grad_norm": "one"}}}, "max_grad_norm"),
    "option out of range": ({"mechanisms": {"static": {"max_grad_norm": -1.0}}}, "max_grad_norm"),
    "mechanism no table": ({"mechanisms": {"static": None}}, "mechanisms.static"),
    "unknown accounting": ({"experiment": {"accounting": "rdp"}}, "experiment.accounting"),
    "unknown telemetry": ({"experiment": {"telemetry": "none"}}, "experiment.telemetry"),
    "zero cells on a device": ({"experiment": {"cells_per_device": 0}}, "experiment.cells_per_device"),
    "negative retries": ({"experiment": {"retries": -1}}, "experiment.retries"),
    "model without source": ({"experiment": {"models": {"big": {"revision": "main"}}}}, "experiment.models.big.source"),
    "model name with a slash": (
        {"experiment": {"models": {"../big": {"source": "data/models/public"}}}},
        "experiment.models",
    ),
    "unknown dtype": (
        {"experiment": {"models": {"big": {"source": "x", "dtype": "int8"}}}},
        "experiment.models.big.dtype",
    ),
}


@pytest.mark.parametrize(("change", "named"), BAD.values(), ids=BAD.keys())
def test_a_bad_entry_is_named(empty: Path, change: dict[str, Any], named: str) -> None:
    write_params(change)
    with pytest.raises(ConfigError, match="Fix: ") as caught:
        load_settings()
    assert named in str(caught.value)
    assert "params.yaml" in str(caught.value)


def test_every_bad_entry_is_named_at_once(empty: Path) -> None:
    write_params({"training": {"epochs": 0}, "lora": {"rank": 0}, "data": {"unit": "x"}})
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert all(name in str(caught.value) for name in ("training.epochs", "lora.rank", "data.unit"))


@pytest.mark.parametrize("section", sorted({*repository_params()} - {"plugins"}))
def test_a_missing_section_is_named(empty: Path, section: str) -> None:
    content = params()
    del content[section]
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert f"{section}: " in str(caught.value)


@pytest.mark.parametrize("entry", ["lora.dropout", "pretrain.width", "pretrain.codes", "prediction.tuning.epochs"])
def test_a_missing_entry_is_named_though_the_library_has_a_default(empty: Path, entry: str) -> None:
    content = params()
    *sections, name = entry.split(".")
    section = content
    for part in sections:
        section = section[part]
    del section[name]
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=rf"{entry}: is missing"):
        load_settings()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"data: [1, 2", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        (b"", "no table"),
        (b"- 1\n- 2\n", "no table"),
        (b"just words", "no table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(empty: Path, content: bytes, reason: str) -> None:
    Path("params.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        load_settings()


def test_a_missing_file_and_a_folder_are_refused(empty: Path) -> None:
    with pytest.raises(ConfigError, match=r"params\.yaml: cannot be read"):
        load_settings()
    Path("params.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"params\.yaml: cannot be read"):
        load_settings()


def test_overrides_go_over_the_file_section_by_section(empty: Path) -> None:
    write_params()
    before = load_settings()
    after = load_settings(overrides={"experiment": {"epsilons": [4]}, "training": {"epochs": 3}})
    assert after.experiment.epsilons == (4.0,)
    assert after.training.epochs == 3
    assert after.training.learning_rate == before.training.learning_rate
    assert load_settings() == before


@pytest.mark.parametrize("overrides", [{"experiment": {"epsilons": [-4]}}, {"nonsense": 1}, {"training": "x"}])
def test_a_bad_override_is_refused(empty: Path, overrides: dict[str, Any]) -> None:
    write_params()
    with pytest.raises(ConfigError):
        load_settings(overrides=overrides)


def test_the_path_variable_wins_over_the_file(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file.csv").write_text("text\nA visit.\n")
    write_params({"data": {"source": "table", "path": "file.csv"}})
    assert load_settings().data.uci_path == Path("file.csv")
    monkeypatch.setenv("DPTUNE_UCI_PATH", "/given.csv")
    assert load_settings().data.uci_path == Path("/given.csv")


tables = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers(), max_size=3),
    max_leaves=8,
)


@given(base=tables, over=tables)
def test_merging_changes_neither_side(base: dict[str, Any], over: dict[str, Any]) -> None:
    before = (repr(base), repr(over))
    merged = merge_settings(base, over)
    assert merged == merge(base, over)
    assert merge_settings(merged, over) == merged
    assert (repr(base), repr(over)) == before


def test_the_paper_profile_validates_and_keeps_the_comments(here: Path) -> None:
    original = Path("params.yaml").read_text()
    apply_profile(PAPER)
    text = Path("params.yaml").read_text()
    settings = load_settings()
    assert settings.experiment.name == "paper"
    assert settings.data.source == "uci"
    assert settings.experiment.epsilons == (0.5, 2, 4, 5, 8)
    assert settings.training.autocast == "bfloat16"
    assert set(settings.experiment.models) == {"gpt2", "llama-1b", "llama-3b", "mistral-7b"}
    assert all(len(model.revision or "") == 40 for model in settings.experiment.models.values())
    assert settings.pretrain == load_settings(ROOT / "params.yaml").pretrain
    comments = {line.split("#", 1)[1].strip() for line in original.splitlines() if "#" in line}
    assert {comment for comment in comments if comment not in text} == set()


def test_a_profile_over_its_own_result_changes_nothing(here: Path) -> None:
    apply_profile(PAPER)
    once = Path("params.yaml").read_bytes()
    apply_profile(PAPER)
    assert Path("params.yaml").read_bytes() == once


@pytest.mark.parametrize(
    "profile",
    [
        "training: {epochs: -1}",
        "unknown: 1",
        "experiment: {epsilons: [0]}",
        "training: [1, 2",
        "- a\n- b\n",
        "words",
        "training:\n",
        "\xff".encode("latin-1"),
    ],
)
def test_a_bad_profile_leaves_the_file_as_it_was(here: Path, profile: str | bytes) -> None:
    before = Path("params.yaml").read_bytes()
    Path("bad.yaml").write_bytes(profile if isinstance(profile, bytes) else profile.encode())
    with pytest.raises(ConfigError):
        apply_profile(Path("bad.yaml"))
    assert Path("params.yaml").read_bytes() == before
    assert sorted(path.name for path in here.iterdir()) == ["bad.yaml", "params.yaml"]


def test_a_profile_says_all_of_a_mechanism_that_it_names(here: Path) -> None:
    """A rate that was tuned for the default corpus must not reach a study that names the mechanism without one."""
    Path("mine.yaml").write_text("mechanisms:\n  quantile: {target: 0.6}\n")
    before = load_settings().mechanisms
    assert "learning_rate" in before["quantile"]
    apply_profile(Path("mine.yaml"))
    after = load_settings().mechanisms
    assert after["quantile"] == {"target": 0.6}
    assert after["static"] == before["static"]


def test_an_empty_profile_changes_no_value(here: Path) -> None:
    before = load_settings()
    Path("empty.yaml").write_text("# nothing\n")
    try:
        apply_profile(Path("empty.yaml"))
    except ConfigError:
        assert Path("params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()
    assert load_settings() == before


def test_a_missing_profile_is_named(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        apply_profile(Path("nowhere.yaml"))


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented files where the profiles of benchmarks look for the published ones."""
    write_benchmarks(tmp_path / "benchmarks", monkeypatch)


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("profile", [one for one in ALL_PROFILES if members(one) == (one,)], ids=lambda path: path.stem)
def test_every_ready_made_study_is_valid(here: Path, profile: Path) -> None:
    """DVC lays it over params.yaml value by value, so that mechanisms and models are the profile's alone."""
    said = yaml.safe_load(profile.read_text())
    apply_profile(profile)
    settings = load_settings()
    assert settings.experiment.mechanisms
    assert settings.experiment.epsilons
    merged = merge(repository_params(), said)
    merged["mechanisms"].update(said.get("mechanisms", {}))
    merged["experiment"]["models"] = said.get("experiment", {}).get(
        "models", repository_params()["experiment"]["models"]
    )
    assert settings == load_settings(write(merged))


def write(content: dict[str, Any]) -> Path:
    """A parameter file of this content."""
    path = Path("merged.yaml")
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.usefixtures("benchmarks")
def test_the_options_of_a_profile_are_words_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dvc exp run $(python -m tasks.profile FILE)` hands each of them on as one, or is refused with another way."""
    shell = typer.Typer()
    shell.command()(print_profile)
    monkeypatch.chdir(ROOT)
    refused = []
    for profile in ALL_PROFILES:
        done = CliRunner().invoke(shell, [str(profile)])
        if isinstance(done.exception, ConfigError):
            assert f"make repro PROFILE={profile}" in str(done.exception)
            refused.append(profile.stem)
        else:
            assert [one for one in done.stdout.splitlines() if len(one.split()) != 1] == []
    assert refused == ["bench-small", "bench-sst2-rates", "bench-sst2-small"]  # three studies; a template, label words


def test_a_file_may_name_several_profiles() -> None:
    """They are ready-made studies that lie beside it."""
    small = ROOT / "profiles" / "bench-small.yaml"
    assert [one.stem for one in members(small)] == ["bench-sst2-small", "bench-wikitext-small", "bench-e2e-small"]
    assert set(members(small)) < set(ALL_PROFILES)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("profiles: a.yaml", "is not a list of files"),
        ("profiles: []", "is not a list of files"),
        ("profiles: [1]", "is not a list of files"),
        ("profiles: [a.yaml, ./a.yaml]", "names a file twice"),
        ("profiles: [several.yaml]", "names several.yaml, which is itself a list"),
        ("{profiles: [a.yaml], training: {epochs: 1}}", "stands beside 'training'"),
    ],
)
def test_a_wrong_list_of_profiles_is_named(tmp_path: Path, said: str, problem: str) -> None:
    file = tmp_path / "several.yaml"
    file.write_text(said)
    with pytest.raises(ConfigError, match=rf"several\.yaml: profiles: {problem}.*Fix: "):
        members(file)


def test_values_of_a_profile_reach_the_file_as_they_are(here: Path) -> None:
    over = {
        "data": {"source": "table", "path": "it's, {odd}: [x]\\.csv", "options": {"template": "{age}: {note}"}},
        "mechanisms": {"static": {"max_grad_norm": 1e-05}, "mine": {"like": "static", "accounting": "published"}},
        "experiment": {"name": "null", "epsilons": [1, 0.5], "devices": ["cuda:0"]},
        "training": {"autocast": None, "gradient_checkpointing": True},
    }
    Path(over["data"]["path"]).write_text("age,note\n1,well\n")
    Path("mine.yaml").write_text(yaml.safe_dump(over))
    apply_profile(Path("mine.yaml"))
    found = load_yaml(Path("params.yaml").read_text())
    wanted = merge(repository_params(), over)
    wanted["mechanisms"].update(over["mechanisms"])
    assert found == wanted


def test_a_number_as_dvc_writes_it_is_a_number() -> None:
    assert load_yaml("[1e-05, 1E5, -2e+3, 1.0e-5, 1e, e5]") == [1e-05, 1e5, -2e3, 1e-05, "1e", "e5"]


def test_what_yaml_1_2_takes_for_a_text_is_one() -> None:
    """DVC writes a profile's label "NO" without quotes, and PyYAML alone reads false."""
    texts = ["NO", "yes", "on", "010", "1:30", "1:30.5", "-190:20:30.15", "2026-11-29", "1.5.2", "."]
    assert load_yaml(f"[{', '.join(texts)}]") == texts
    values = [True, False, 0, -12, 3, 1000, 31, None, math.inf]
    assert load_yaml("[true, False, 0, -12, +3, 1_000, 0x1f, ~, .inf]") == values


def test_a_number_with_a_point_and_an_exponent_needs_no_sign() -> None:
    """PyYAML alone reads these numbers as texts, which settings refuse."""
    assert load_yaml("[1.5e3, 2.5E4, 1.e3, .5e1, -1.5e3, +.5e-1]") == [1500.0, 25000.0, 1000.0, 5.0, -1500.0, 0.05]
    assert load_yaml("[1_000.5, -2., +.5, .25, -.inf]") == [1000.5, -2.0, 0.5, 0.25, -math.inf]
    assert load_yaml("[., .e1, 1.5e, 1.2.3e4, v1.5e3, 1.5e3x]") == [".", ".e1", "1.5e", "1.2.3e4", "v1.5e3", "1.5e3x"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"training": {"epochs": "many"}}, r"training\.epochs: 'many' is not a number \(line \d+\)\. Fix: correct"),
        ({"training": {"epochs": -1}}, r"training\.epochs: -1 is below 1e-06 \(line \d+\)"),
        ({"nosuch": 1}, r"nosuch: there is no such entry \(line \d+\)"),
        ({"experiment": {"telemetry": "loud"}}, r"telemetry: 'loud' is not 'research' or 'private' \(line \d+\)"),
        ({"experiment": {"devices": ["tpu"]}}, r"experiment\.devices\.0: 'tpu' is not of the form"),
        ({"lora": {"ranks": 8}}, r"lora\.ranks: there is no such entry \(line \d+\)"),
        ({"lora": {"rank": 0}}, r"lora\.rank: 0 is below 1 \(line \d+\)"),
        (
            {"lora": {"init_lora_weights": "pissa"}},
            r"init_lora_weights: 'pissa' changes the frozen.*line \d+.*use true",
        ),
        ({"lora": {"alpha_pattern": {"(": 4}}}, r"lora\.alpha_pattern: '\(' is not the name of a layer .*line \d+"),
        ({"pretrain": {"heads": 3}}, r"pretrain\.heads: 3 do not divide the width of 16 \(line \d+\)"),
        ({"prediction": {"tuning": {"learning_rate": 11}}}, r"prediction\.tuning\.learning_rate: 11 is above 10 \(li"),
        ({"mechanisms": {"static": {"radius": 1}}}, r"radius: .* has no such option\. Fix: use one of .*pairs\.$"),
    ],
)
def test_an_error_has_entry_value_line_and_one_fix_in_plain_words(
    empty: Path, change: dict[str, Any], said: str
) -> None:
    write_params(change)
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings()
    message = str(caught.value)
    assert message.count("Fix: ") == 1
    assert not any(word in message for word in ("Input should", "Value error", "type=", "constrained"))


def test_the_line_is_that_of_the_entry(empty: Path) -> None:
    write_params({"training": {"epochs": "many"}})
    lines = Path("params.yaml").read_text().splitlines()
    with pytest.raises(ConfigError) as caught:
        load_settings()
    number = int(str(caught.value).partition("(line ")[2].partition(")")[0])
    assert lines[number - 1].strip() == "epochs: many"


def test_a_profile_that_is_no_yaml_is_refused_in_one_line(empty: Path) -> None:
    write_params({})
    before = Path("params.yaml").read_bytes()
    Path("notes.md").write_text("# Notes\n\nOne thing: another: a third.\n")
    with pytest.raises(ConfigError) as caught:
        apply_profile(Path("notes.md"))
    assert str(caught.value).startswith("notes.md: cannot be read (line 3: ")
    assert len(str(caught.value).splitlines()) == 1
    assert Path("params.yaml").read_bytes() == before
