"""Numbers in settings: true is not 1, and "8" is not 8, wherever a number is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_pipeline import merge, repository_params, write_params

from dptune.core.errors import ConfigError
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.mechanisms.options import option_names
from dptune.mechanisms.registry import MECHANISMS, build, takes_noise
from tasks.settings.mechanisms import _holds_text, _refuse_texts
from tasks.settings.params import Settings, load_settings
from tasks.settings.policy import rlhf_of, tenants_of

#: Options of library parts, which the library checks: it takes texts too, for a command line has nothing else. Those of
#: mechanisms are refused all the same, but as options of their entry.
OPTIONS = (("mechanisms",), ("experiment", "mechanisms"), ("search", "space"), ("policy", "studies"))


def entries(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number and boolean of nested plain data by its path."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from entries(item, (*path, key))
    elif isinstance(value, int | float):
        yield path, value


def changed(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(content)
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


FILE = merge(
    repository_params(),
    {"audit": {"seed": 0}, "policy": {"rlhf": {"epsilons": [2], "users": [32]}}, "search": {"most": 40}},
)


def test_no_number_of_the_file_takes_a_boolean_or_a_text_and_no_boolean_a_number() -> None:
    Settings.model_validate(FILE)
    numbers = booleans = 0
    for path, value in entries(FILE):
        if any(path[: len(own)] == own for own in OPTIONS):
            continue
        booleans += isinstance(value, bool)
        numbers += not isinstance(value, bool)
        for other in (1, "yes") if isinstance(value, bool) else (True, str(value)):
            with pytest.raises(ValidationError) as refused:
                Settings.model_validate(changed(FILE, path, other))
            assert refused.value.errors()[0]["loc"][: len(path)] == path
    assert numbers > 80
    assert booleans > 4


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"experiment": {"epsilons": [True]}}, r"experiment\.epsilons\.0: True is not a number"),
        ({"experiment": {"epsilons": [2, "8"]}}, r"experiment\.epsilons\.1: '8' is not a number"),
        ({"experiment": {"seeds": [False]}}, r"experiment\.seeds\.0: False is not a whole number"),
        ({"experiment": {"epsilons": [b"8"]}}, r"experiment\.epsilons\.0: b'8' is not a number"),
        ({"lora": {"rank_pattern": {"c_attn": True}}}, r"lora\.rank_pattern\.c_attn: True is not a whole number"),
        ({"prediction": {"epsilons": [True]}}, r"prediction\.epsilons\.0: True is not a number"),
        (
            {"experiment": {"mechanisms": [{"static": [True]}], "epsilons": [1]}},
            r"mechanisms\.static: epsilons: \[1, True\]: True is not a num",
        ),
        ({"experiment": {"mechanisms": [{"static": ["1"]}]}}, r"mechanisms\.static: epsilons: .*: '1' is not a num"),
        (
            {"mechanisms": {"static": {"epsilons": [True]}}},
            r"mechanisms\.static: epsilons: \[True\]: True is not a num",
        ),
        ({"mechanisms": {"static": {"epsilons": ["1"]}}}, r"mechanisms\.static: epsilons: \['1'\]: '1' is not a num"),
        ({"mechanisms": {"static": {"learning_rate": True}}}, r"mechanisms\.static: learning_rate: True is not "),
        ({"mechanisms": {"static": {"momentum": "0.5"}}}, r"mechanisms\.static: momentum: '0.5' is not a number"),
        ({"mechanisms": {"static": {"max_grad_norm": True}}}, r"mechanisms\.static: max_grad_norm: True is not a n"),
        ({"mechanisms": {"rldp": {"interval": "8"}}}, r"mechanisms\.rldp: interval: '8' is not a number.*without quot"),
        ({"mechanisms": {"rldp": {"interval": b"8"}}}, r"mechanisms\.rldp: interval: b'8' is not a number"),
        ({"mechanisms": {"rldp": {"move_noise": "true"}}}, r"mechanisms\.rldp: move_noise: 'true' is neither true n"),
        ({"mechanisms": {"static": {"pairs": "2"}}}, r"mechanisms\.static: pairs: '2' is not a number"),
        ({"mechanisms": {"static": {"noise_multiplier": "1"}}}, r"mechanisms\.static: noise_multiplier: '1' is not"),
        ({"mechanisms": {"static": {"on_model": {"small": {"max_grad_norm": "2"}}}}}, r"static: max_grad_norm: '2' is"),
        (
            {"mechanisms": {"static": {"sweep": {"max_grad_norm": ["2"]}}}},
            r"mechanisms\.static_\S+: max_grad_norm: '2'",
        ),
        ({"search": {"epsilon": True}}, r"search\.epsilon: True is not a number"),
        ({"search": {"score": {"on": "train", "clip": True}}}, r"search\.score\.clip: True is not a positive number"),
        ({"policy": {"studies": {"riverswim": {"runs": {"l2": {"epsilon": True}}}}}}, r"epsilon: True is not a number"),
    ],
)
def test_the_refusal_names_the_entry(over: dict[str, Any], said: str, empty: Path) -> None:
    write_params(over)
    with pytest.raises(ConfigError, match=said):
        load_settings()


def test_no_option_of_any_mechanism_takes_a_text_for_a_number() -> None:
    """Nor for true or false. What an option means as a text stays one: "auto", or the name of a part."""
    tried = 0
    for label, registered in MECHANISMS.items():
        entry = {"noise_multiplier": 1.0} if takes_noise(label, {}) else {}
        made = build(label, entry)
        for part in (made.clipper, made.noise, made.controller):
            for option in option_names(type(part)):
                value = getattr(part, option)
                if isinstance(value, str) or value is None:
                    _refuse_texts({option: value}, made)
                    continue
                wrong = [*map(str, value)] if isinstance(value, tuple) else str(value)
                _refuse_texts({option: value, **registered.options}, made)
                if wrong:
                    with pytest.raises(ConfigError, match=rf"^{option}: .*write it without quotes"):
                        _refuse_texts({option: wrong}, made)
                    tried += 1
    assert tried > 100
    assert _holds_text([0.5, "0.25"]), "one text among numbers is a slip too"
    assert not _holds_text([0.5, 0.25])


@pytest.mark.parametrize("value", [np.bool_(True), b"8", bytearray(b"8"), Decimal(8), None, [8]])
def test_a_number_is_a_real_number(value: Any) -> None:
    for path in (("experiment", "epsilons", 0), ("experiment", "seeds", 0), ("training", "max_length")):
        for number in (np.float64(8), np.int64(8), 8, 8.0):
            Settings.model_validate(changed(FILE, path, number))
        with pytest.raises(ValidationError, match=r"valid (number|integer)"):
            Settings.model_validate(changed(FILE, path, value))


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    """DVC may write 10000 as 1e4, which stays a whole number."""
    made = Settings.model_validate(changed(FILE, ("data", "synthetic", "encounters"), 1e4))
    assert made.data.synthetic.encounters == 10_000
    with pytest.raises(ValidationError, match="valid integer"):
        Settings.model_validate(changed(FILE, ("data", "synthetic", "encounters"), 100.5))


@pytest.mark.parametrize("option", ["epsilons=true", "epsilons=[true]", "epsilons='2'", "delta=true", "nonprivate=1"])
def test_options_of_commands_are_read_alike(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{name}.*(is not a number|neither true nor false)"):
        rlhf_of([option])
    if name == "delta":
        with pytest.raises(ConfigError, match=r"delta: True is not a number"):
            tenants_of([option])


@pytest.mark.parametrize("value", [True, "2"])
def test_the_library_reads_them_alike(value: Any) -> None:
    for name in ("epsilon", "delta", "expected_batch_size", "epochs", "learning_rate", "rank", "seed", "momentum"):
        with pytest.raises(ConfigError, match=rf"^{name}: "):
            TuneSettings.of(**{"epsilon": 2, name: value})
    for name in ("candidates", "most", "together"):
        given = {"space": {"batch": [8, 16]}, "candidates": 3, name: value}
        with pytest.raises(ConfigError, match=rf"^search\.{name}: "):
            SearchSettings.of(given)
