"""The attack on a step of own weights: a sound one passes; halved noise and a norm without its cross term are found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from dptune.audit.games.layer_step import LayerModel
from dptune.cli import app
from dptune.mechanisms.mechanism import Mechanism
from dptune.training.gradients import layer_kinds

#: Little noise, so that a longer gradient shows in few trials.
NOISE = 0.3


def audited(*more: str) -> tuple[int, dict[str, Any]]:
    given = ["audit", "static", "--train", "all", "--trials", "2000", "--set", f"noise_multiplier={NOISE}", "--json"]
    done = CliRunner().invoke(app, [*given, *more])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.long
def test_a_sound_step_is_not_accused_and_shows_most_of_what_is_certified() -> None:
    code, found = audited()
    assert code == 0
    assert 0.8 / NOISE < found["mu_audited"] <= 1 / NOISE


@pytest.mark.long
def test_halved_noise_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    privatise = Mechanism.privatise

    def halved(self: Mechanism, batches: Any, zeros: Any, knobs: Any, *rest: Any) -> Any:
        return privatise(self, batches, zeros, replace(knobs, noise_multiplier=NOISE / 2), *rest)

    monkeypatch.setattr(Mechanism, "privatise", halved)
    code, found = audited()
    assert code == 1
    assert found["mu_audited"] > 1.5 / NOISE


def test_the_attacked_text_is_longer_than_a_norm_without_the_cross_term_says(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LayerModel()
    (whole,) = (part.norms()[0].norm() for part in own.batches(own.scenes[0], True))
    without_cross_term(monkeypatch)
    (cut,) = (part.norms()[0].norm() for part in own.batches(own.scenes[0], True))
    assert 0.83 < float(cut / whole) < 0.85


@pytest.mark.long
def test_a_forgotten_cross_term_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cross_term(monkeypatch)
    code, found = audited()
    assert code == 1
    assert found["mu_audited"] > 1.05 / NOISE


def without_cross_term(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = layer_kinds._inner
    monkeypatch.setattr(layer_kinds, "_inner", lambda one, other: inner(one, other) * (one is other))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["adaclip"], "mechanism: adaclip clips by more than norms"),
        (["rldp"], "mechanism: rldp moves each LoRA pair"),
        (["banded", "--set", "bands=4"], "bands: banded has 4, and steps of own weights are attacked one at a time"),
        (["static", "--whole-run"], "--train: all is for single steps"),
        (["dppg"], "--train: all is for single steps of a mechanism that trains"),
        (["tests.audit.loops:sound"], "--train: all: MODULE:FUNCTION is audited on one batch"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_attacked_so_is_refused(given: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["audit", *given, "--train", "all"])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
