"""Settings that went wrong: hundreds of slips of the keyboard, each accepted as sensible or refused by name."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import ROOT

from dptune.core.errors import ConfigError
from tasks.settings.params import Settings, load_settings
from tasks.settings.strict import load_yaml

MUTATIONS = 150
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 7, 2**31, 2**63, int(1e30), 1e30, 1e308, 1e-308, -0.0, float("nan"), float("inf"), True, None),
    *("", "a\0b", "/etc", "é" * 3000, "1e9", "auto", "cuda:99", ["cuda:99"], [0, 0], [2, 2.0]),
    *([], [[]], ["nosuch"], [-1], [None], {}, {"x": 1}, {1: {2: [3]}}),
)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all entries."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(content)
    at = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return made


def explains(error: ConfigError) -> None:
    assert "Fix: " in str(error)


def loaded(file: Path, text: str) -> Settings | None:
    """The settings, or None if they were refused with a message that says how to go on."""
    file.write_text(text, encoding="utf-8")
    try:
        return load_settings(file)
    except ConfigError as error:
        explains(error)
        return None


def test_no_entry_of_the_file_gives_a_traceback(tmp_path: Path) -> None:
    """Seed 20. What is accepted can be computed with: seeds and counts fit the libraries that take them."""
    content, coins = yaml.safe_load((ROOT / "params.yaml").read_text()), random.Random(20)
    every, refused = places(content), 0
    for _ in range(MUTATIONS):
        place, value = coins.choice(every), coins.choice(VALUES)
        settings = loaded(
            tmp_path / "params.yaml",
            yaml.dump(changed(content, place, value), Dumper=yaml.CSafeDumper, allow_unicode=True),
        )
        if settings is None:
            refused += 1
            continue
        seeds = (*settings.experiment.seeds, settings.data.split_seed, settings.pretrain.data_seed, settings.audit.seed)
        assert all(0 <= seed < 2**31 for seed in seeds), (place, value)
        assert settings.pretrain.width % settings.pretrain.heads == 0, (place, value)
        assert settings.training.learning_rate <= 10, (place, value)
        assert str(settings.data.path) != ".", (place, value)
        for chosen in (settings.experiment.seeds, settings.experiment.epsilons, settings.policy.seeds):
            assert len(set(chosen)) == len(chosen), (place, value)
    assert refused > MUTATIONS // 2


def test_no_key_is_taken_twice(tmp_path: Path) -> None:
    """Seed 21: any key of the file, repeated after itself, is refused with its line."""
    lines, coins = (ROOT / "params.yaml").read_text().splitlines(), random.Random(21)
    keyed = [
        number
        for number, line in enumerate(lines)
        if ":" in line.partition("#")[0] and not line.lstrip().startswith("#")
    ]
    for number in (coins.choice(keyed) for _ in range(80)):
        line = lines[number]
        key = line.partition(":")[0]
        indent = len(key) - len(key.lstrip())
        after = next(
            (n for n in range(number + 1, len(lines)) if lines[n].strip() and not lines[n].lstrip().startswith("#")
             and len(lines[n]) - len(lines[n].lstrip()) <= indent),
            len(lines),
        )  # fmt: skip
        (tmp_path / "params.yaml").write_text("\n".join([*lines[:after], f"{key}: 1", *lines[after:]]))
        with pytest.raises(ConfigError, match=rf"line {after + 1}: the key '{key.strip()}' is given twice"):
            load_settings(tmp_path / "params.yaml")


def test_no_damaged_text_gives_a_traceback(tmp_path: Path) -> None:
    """Seed 22: bytes removed, repeated or replaced."""
    whole, coins = (ROOT / "params.yaml").read_bytes(), random.Random(22)
    for _ in range(80):
        start = coins.randrange(len(whole))
        end = start + coins.choice((1, 3, 40))
        middle = coins.choice(
            (b"", whole[start:end] * 2, b"\0", b"\xff", b"{[", b": ", b"&a *a", b"!!python/none ", b"\t")
        )
        file = tmp_path / "params.yaml"
        file.write_bytes(whole[:start] + middle + whole[end:])
        try:
            load_settings(file)
        except ConfigError as error:
            explains(error)


@pytest.mark.parametrize(
    "text",
    ["[" * 5000 + "]" * 5000, "{a: " * 5000 + "1" + "}" * 5000, "a: " + "9" * 10_000, "a: \0", "a: *b", "a: !!x 1"],
)
def test_yaml_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        load_yaml(text)
