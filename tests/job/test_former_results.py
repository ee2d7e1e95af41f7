"""result.json of tune and search: what is written reads back, and files of versions before read as the present ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import DataError
from dptune.core.files import DamagedFileError, write_json
from dptune.job.delivery.card import card_text
from dptune.job.result import HELD_OUT, PUBLIC, RunResult
from dptune.job.run import tuned_of

_BASE = {"base": "tiny", "loaded_by": "AutoModelForCausalLM", "revision": None, "settings": {"mechanism": "static"}}
_PAIRS = {"accuracy": [0.25, 0.5], "f1": [0.2, 0.4], "calibration_error": [0.3, 0.2], "loss": [0.7, 0.6]}
_SCORES = _PAIRS | {"largest_class": [0.75, 0.75]}
_CLASSIFIER = _BASE | {"labels": ["0", "1"], "perplexity": {}, "releases": 3}
#: Files as earlier versions wrote them, by what wrote them.
FORMER: dict[str, dict[str, Any]] = {
    "texts": _BASE | {"perplexity": {HELD_OUT: [9.5, "inf"], PUBLIC: [8.5, 7.5]}, "releases": 6, "restarts": 2},
    "head": _CLASSIFIER | {"scores": {PUBLIC: _SCORES}, "template": "{a}"},
    "words": _CLASSIFIER
    | {"scores": {HELD_OUT: _SCORES}, "template": "{text} new"}
    | {"words": {"0": "cat", "1": "dog"}},
    "search": _BASE | {"perplexity": {PUBLIC: [8.5, 7.5]}, "search": {"on": "held_out", "score": 0.5}},
    "before loaded_by": {"base": "tiny", "revision": None, "perplexity": {}, "settings": {}},
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMER)
def test_a_file_of_a_version_before_reads_and_is_written_in_the_present_form(kind: str, tmp_path: Path) -> None:
    former = FORMER[kind]
    write_json(tmp_path / "result.json", former)
    found = RunResult.read(tmp_path / "result.json")
    tuned = tuned_of(None, None, tmp_path)  # type: ignore[arg-type]
    for shown, written in ((tuned.perplexity, former["perplexity"]), (tuned.scores, former.get("scores", {}))):
        assert json.loads(json.dumps(shown, default=list)) == json.loads(
            json.dumps(written).replace('"inf"', "Infinity")
        )
    assert tuned.restarts == former.get("restarts", 0)
    assert (found.task == "classify") == ("scores" in former)
    for name in ("base", "settings", "releases", "labels", "template", "words", "search", "loaded_by"):
        assert name not in former or getattr(found, name) == former[name], name
    found.write(tmp_path / "result.json")
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o600
    assert not {"perplexity", "scores"} & json.loads((tmp_path / "result.json").read_text()).keys()
    assert RunResult.read(tmp_path / "result.json") == found


def test_the_card_of_a_former_file_shows_public_figures_only() -> None:
    card = card_text("", RunResult.of(FORMER["texts"]), 1.0)
    assert "- public records: 8.5 before, 7.5 after" in card
    assert "9.5" not in card
    card = card_text("", RunResult.of(FORMER["head"]), 1.0)
    assert "accuracy 0.25 before, 0.5 after; F1 0.2 before" in card
    assert "a constant answer has accuracy 0.75" in card
    card = card_text("", RunResult.of(FORMER["words"]), 1.0)
    assert 'It is put into the template "{text} new"' in card
    assert "Not shown" in card


def test_what_a_run_lacks_is_absent_from_its_file() -> None:
    written = RunResult({}, {"public_perplexity": math.nan}, base="tiny").to_dict()
    assert written == {
        "before": {},
        "after": {"public_perplexity": "nan"},
        "base": "tiny",
        **dict.fromkeys(("epsilon_published", "epsilon_noise_only", "epsilon_certified"), "inf"),
    }


def test_a_missing_or_wrong_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no after"):
        RunResult.of({"base": "tiny", "before": {}})
    write_json(tmp_path / "result.json", {"base": "tiny", "before": {}, "after": [1]})
    with pytest.raises(DamagedFileError, match=r"result\.json: .*Fix: restore"):
        RunResult.read(tmp_path / "result.json")
    write_json(tmp_path / "result.json", {"base": "tiny", "perplexity": {"other records": [1, 2]}})
    with pytest.raises(DamagedFileError, match="lacks 'other records'"):
        RunResult.read(tmp_path / "result.json")
