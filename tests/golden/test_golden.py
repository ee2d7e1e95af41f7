"""Golden runs: a number that moves, or a default that changes, fails unless the version of its part was raised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from dptune.core import settings
from dptune.mechanisms.agents import linear_agent
from dptune.mechanisms.registry import MECHANISMS
from dptune.privacy import accountants
from dptune.privacy.accounting import renyi_filter
from dptune.training import optimizers, privacy_units, run, run_start
from dptune.training.spec import TrainingPlan
from dptune.training.tokens import encoding
from tests.golden import runs, table
from tests.golden.runs import RUNS

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_run_gives_its_figures(name: str) -> None:
    assert table.problem_of_run(name, table.read(), RUNS[name].figures()) == ""


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("mechanism", "training"))])
def test_the_rounding_of_another_machine_moves_no_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient and every weight is off by up to 1e-7 of itself, as float32 rounds."""
    gradients, model, rng = runs.PairGradients, runs._tiny_gpt2, torch.Generator().manual_seed(1)

    def off(values: torch.Tensor) -> torch.Tensor:
        return values * (1 + 1e-7 * (2 * torch.rand(values.shape, generator=rng) - 1))

    def model_off() -> Any:
        made = model()
        for weight in made.parameters():
            weight.data = off(weight.data)
        return made

    monkeypatch.setattr(runs, "_tiny_gpt2", model_off)
    monkeypatch.setattr(runs, "PairGradients", lambda pairs, *more: gradients([off(one) for one in pairs], *more))
    assert table.moved(table.read()["runs"][name], RUNS[name].figures()) == []


def test_every_default_that_names_leave_out_is_the_recorded_one() -> None:
    assert list(table.problems_of_defaults(table.read(), table.present_defaults())) == []


def test_the_figures_were_made_with_the_present_versions() -> None:
    assert table.read()["versions"] == table.versions(), "run `python -m tests.golden` and commit its tables"
    assert set(table.read()["runs"]) == set(RUNS)


def test_every_part_has_a_golden_run_and_a_version_of_its_own() -> None:
    used = {part for golden in RUNS.values() for part in golden.uses}
    assert used >= {*table.own_parts(), *settings.VERSIONS, *table.SHARED, *table.RESULTS}
    rules = [f"optimizer {one}" for one in get_args(settings.Optimizer)]
    assert {*rules, "average ema", "average tail"} == {*settings.VERSIONS}
    for part, cls in table.own_parts().items():
        assert "VERSION" in vars(cls), f"{part}: give {cls.__name__} a VERSION = 1 of its own"
    for part, version in table.versions().items():
        assert isinstance(version, int), part
        assert version >= 1, part
        assert "VERSION" in table.place_of(part)


def _more_noise(cls: Any) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for name in ("add", "add_row"):
            if hasattr(cls, name):
                real = getattr(cls, name)
                patch.setattr(cls, name, lambda self, sums, scales, noise, *more, real=real, **named: real(
                    self, sums, scales, 1.01 * noise, *more, **named))  # fmt: skip

    return plant


def _larger_sum(cls: Any) -> Plant:
    real = cls.clipped_sum
    return lambda patch: patch.setattr(
        cls, "clipped_sum", lambda self, *given: [1.01 * one for one in real(self, *given)]
    )


def _other_knobs(cls: Any) -> Plant:
    real = cls.knobs

    def knobs(self: Any, initial: Any) -> Any:
        found = real(self, initial)
        return replace(found, noise_multiplier=1.01 * found.noise_multiplier + 0.001)

    return lambda patch: patch.setattr(cls, "knobs", knobs)


def _scaled(module: Any, name: str) -> Plant:
    real = getattr(module, name)
    return lambda patch: patch.setattr(module, name, lambda *given, **named: 1.01 * real(*given, **named))


def _published(accountant: str) -> Plant:
    real = accountants.PUBLISHED_ACCOUNTANTS[accountant]
    return lambda patch: patch.setitem(
        accountants.PUBLISHED_ACCOUNTANTS, accountant, lambda *given: 1.01 * real(*given)
    )


def _more_momentum(patch: pytest.MonkeyPatch) -> None:
    real = run_start.make_optimizer
    patch.setattr(
        run_start, "make_optimizer", lambda rule, *more: real(replace(rule, momentum=1.01 * rule.momentum), *more)
    )


def _longer_steps(made: Any) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = made.step

        def step(self: Any, *given: Any) -> Any:
            for group in self.param_groups:
                group["lr"] *= 1.01
            return real(self, *given)

        patch.setattr(made, "step", step)

    return plant


def _more_variance(patch: pytest.MonkeyPatch) -> None:
    real = run.tell_noise
    patch.setattr(run, "tell_noise", lambda *given: real(*given[:-1], given[-1] / 1.005))


def _skipped_average(patch: pytest.MonkeyPatch) -> None:
    real = run.average_weights

    def skipping(rule: Any, optimizer: Any, weights: Any, row: int, first: int) -> None:
        if row != 4:
            real(rule, optimizer, weights, row, first)

    patch.setattr(run, "average_weights", skipping)


def _larger_rate(patch: pytest.MonkeyPatch) -> None:
    real = privacy_units.poisson_sample
    patch.setattr(privacy_units, "poisson_sample", lambda entropy, units, rate: real(entropy, units, 1.01 * rate))


def _plants() -> dict[str, tuple[str, Plant]]:
    """A small change of each part, and the golden run that must notice it."""
    found: dict[str, tuple[str, Plant]] = {}
    changed = {"clipper": _larger_sum, "noise": _more_noise, "controller": _other_knobs}
    for part, cls in table.own_parts().items():
        kind, _, name = part.partition(" ")
        run_of = next(mechanism for mechanism in MECHANISMS if MECHANISMS[mechanism].parts[kind] == name)
        if part != "noise none":
            found[part] = (f"mechanism {run_of}", changed[kind](cls))
    for name, optimizer in optimizers.OPTIMIZERS.items():
        golden = "training" if name == "adamw" else f"training by {name}"
        found[f"optimizer {name}"] = (golden, _longer_steps(optimizer.made))
    found |= {f"accountant {name}": ("accountant", _published(name)) for name in accountants.PUBLISHED_ACCOUNTANTS}
    rate = TrainingPlan.learning_rate_at
    return found | {
        "accountant": ("accountant", _scaled(accountants, "pld_epsilon")),
        "calibration": ("budget of static, certified", _scaled(accountants, "pld_epsilon")),
        "filter": ("budget of rldp, behind a filter", _scaled(renyi_filter, "renyi_cost")),
        "sampler": ("sampler", _larger_rate),
        "loop": ("training", lambda patch: patch.setattr(
            TrainingPlan, "learning_rate_at", lambda self, *given: 1.01 * rate(self, *given))),
        "end of a text": ("tokens", lambda patch: patch.setattr(encoding, "_with_end", lambda ids, tokenizer: ids)),
        "prompts in the loss": ("tokens", lambda patch: patch.setattr(encoding, "_common_prefix", lambda *given: 0)),
        "agent linear": ("mechanism rldp, agent linear", lambda patch: patch.setattr(linear_agent, "_START", 0.51)),
        "betas of adamw": ("training", lambda patch: patch.setattr(optimizers, "_BETAS", (0.91, 0.999))),
        "betas of adam_bc": ("training by adam_bc", lambda patch: patch.setattr(optimizers, "_BETAS", (0.91, 0.999))),
        "noise of adam_bc": ("training by adam_bc", _more_variance),
        "momentum of sgd": ("training by sgd", _more_momentum),
        "average ema": ("training to a moving average", _skipped_average),
        "average tail": ("training to the mean of the tail", _skipped_average),
    }  # fmt: skip


PLANTS = _plants()


@pytest.mark.one_case
@pytest.mark.parametrize("plant", PLANTS)
def test_one_per_cent_more_is_noticed_and_the_sentence_says_what_to_raise(
    plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = PLANTS[plant]
    change(monkeypatch)
    problem = table.problem_of_run(name, table.read(), RUNS[name].figures())
    assert "has moved" in problem
    assert "raise by 1 the version of the part that you changed" in problem
    assert "VERSION" in problem


def test_no_plant_is_missing() -> None:
    assert {*table.own_parts(), *settings.VERSIONS, *table.SHARED} - {"noise none"} <= {*PLANTS}


def test_a_raised_version_asks_for_new_figures_and_rounding_is_no_change() -> None:
    known, figures = table.read(), table.read()["runs"]["mechanism quantile"]
    other = figures | {"sum of radii": 1.01 * figures["sum of radii"]}
    older = known | {"versions": known["versions"] | {"controller quantile": 0}}
    assert "no version" in table.problem_of_run("mechanism quantile", known, other)
    assert "with a raised version: run `python -m tests.golden`" in table.problem_of_run(
        "mechanism quantile", older, other
    )
    rounded = {name: value * (1 + 1e-5) for name, value in figures.items()}
    assert table.problem_of_run("mechanism quantile", known, rounded) == ""


def test_of_two_results_that_share_code_both_are_raised() -> None:
    name, known = "means of language and tenants", table.read()
    other = {key: 1.01 * value for key, value in known["runs"][name].items()}
    for raised, words in ((("rlhf",), "no version"), (("rlhf", "tenants"), "with a raised version")):
        older = known | {"versions": known["versions"] | dict.fromkeys(raised, 0)}
        assert words in table.problem_of_run(name, older, other)


def test_a_changed_default_names_what_to_raise_and_a_new_one_is_only_recorded() -> None:
    known, present = table.read(), table.present_defaults()
    other, new = copy.deepcopy(present), copy.deepcopy(present)
    other["controller quantile"]["target"] = 0.6
    (sentence,) = table.problems_of_defaults(known, other)
    assert "controller quantile.target was 0.5 and is 0.6" in sentence
    assert "raise Quantile.VERSION in dptune/mechanisms/controllers/quantile.py by 1" in sentence
    other = copy.deepcopy(present)
    other["Lora"]["alpha"] = 8
    del other["Task"]["beams"]
    of_lora, of_task = table.problems_of_defaults(known, other)
    assert "Lora.alpha was 16 and is 8" in of_lora
    ensembles = {"ensembles": table.versions()["ensembles"] - 1}  # raised already; the others are not
    of_lora, _ = table.problems_of_defaults(known | {"versions": known["versions"] | ensembles}, other)
    places = [f"VERSION in {file}" for file in ("dptune/core/settings.py", "tasks/policy/rlhf.py")]
    assert f"raise {' and '.join(places)} and VERSION in tasks/policy/tenants.py by 1" in of_lora
    assert "Task.beams was 1 and is gone" in of_task
    new["Lora"]["another"] = None
    (sentence,) = table.problems_of_defaults(known, new)
    assert "raise" not in sentence
