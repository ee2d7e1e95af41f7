"""Runs whose noise moves, whole: the filter PF.1 to PF.9 end to end, and the budgets that end a run early."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import adapted, close, each_record, make_header, make_plan, records, release_lines

from dptune.mechanisms.agents.sac import SoftActorCritic
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Knobs, Observation
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.planning import Calibrated, Schedule, calibrated, planned
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import gdp_clt_epsilon
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.calibration import calibrate
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.training.loop import train
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import StepReport
from dptune.training.spec import RunSpec

torch.set_num_threads(1)

RATE, STEPS, EPSILON, PAIRS = 0.25, 12, 3.0, 2
SCHEDULE = Schedule(RATE, STEPS, 1e-5)
#: An agent that acts at every step.
BUSY = {"pairs": PAIRS, "interval": 1, "warmup": 0, "rounds": 1, "batch_size": 2}


@dataclass
class Greedy(Constant):
    """Behaves at the first step, then asks for its own share of the starting noise whatever it was given."""

    share: float = 0.5
    noise_range: tuple[float, float] = (0.5, 2.0)  # type: ignore[assignment]
    behaves: bool = True
    given: list[float] = field(default_factory=list)

    @property
    def adaptive(self) -> bool:
        return True

    def knobs(self, initial: Knobs) -> Knobs:
        return replace(initial, noise_multiplier=initial.noise_multiplier * (1.0 if self.behaves else self.share))

    def observe(self, observation: Observation) -> None:
        self.behaves = False
        assert observation.released.deviations == (observation.released.knobs.noise_multiplier,) * PAIRS
        self.given.append(observation.released.knobs.noise_multiplier)


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def moving(**options: Any) -> Calibrated:
    """RLDP with a moving sigma, as planned for the budget."""
    entry = BUSY | {"move_noise": True} | options
    return calibrated(lambda noise: build("rldp", entry | {"noise_multiplier": noise}), EPSILON, SCHEDULE, "certified")


def greedy(controller: Greedy) -> Calibrated:
    """The same plan, with a controller that would break it."""
    plan = moving()
    noise = plan.mechanism.effective_noise_multiplier(plan.mechanism.knobs())
    return Calibrated(Mechanism("greedy", Flat(), Gaussian(noise), controller, "gdp_clt", PAIRS), plan.renyi_filter)


def header(plan: Calibrated, **changes: Any) -> RunHeader:
    values = {"mechanism": plan.mechanism.name, "epsilon": EPSILON, "renyi_filter": plan.renyi_filter}
    values["plugins"] = plan.mechanism.plugins
    return make_header(**values | changes)


def run(directory: Path, plan: Calibrated, **options: Any) -> tuple[Ledger, list[StepReport]]:
    """One process' worth of the run, from a fresh model."""
    model, tokens, reports = adapted(), records(), []
    stop = options.pop("stop", None)

    def on_step(report: StepReport) -> None:
        reports.append(report)
        if report.step == stop:
            raise Killed

    schedule = make_plan(sample_rate=RATE, steps=STEPS, checkpoint_every=options.pop("checkpoint_every", 2))
    first_line = options.pop("header", None) or header(plan)
    public = records(4, seed=9)
    spec = RunSpec(model, tokens, each_record(tokens), plan.mechanism, schedule, first_line, public=public)
    return close(train(spec, directory, OsEntropy(), on_step)), reports


def noises(directory: Path) -> list[float]:
    """The charged multipliers in their order, read from the file without the library."""
    lines = map(json.loads, (directory / "ledger.jsonl").read_text().splitlines())
    return [line["noise_multiplier"] / line["sensitivity"] for line in lines if line["kind"] == "release"]


def releases_of(directory: Path) -> list[Release]:
    """What was charged, in order."""
    lines = map(json.loads, (directory / "ledger.jsonl").read_text().splitlines())
    kept = [
        {key: line[key] for key in line.keys() - {"kind", "step", "chain"}}
        for line in lines
        if line["kind"] == "release"
    ]
    return [Release.from_dict(line) for line in kept]


def filter_of(plan: Calibrated) -> RenyiFilter:
    assert plan.renyi_filter is not None
    return plan.renyi_filter


def reserve(plan: Calibrated, releases: int) -> float:
    quietest = plan.mechanism.release(replace(plan.mechanism.knobs(), noise_multiplier=1.0), RATE)
    most = plan.mechanism.most_noise() * quietest.sensitivity
    return (STEPS - releases) * filter_of(plan).cost(replace(quietest, noise_multiplier=most))


@pytest.mark.parametrize("design", ["A", "AB"])
def test_a_moving_sigma_never_passes_the_budget_and_makes_every_planned_release(tmp_path: Path, design: str) -> None:
    plan = moving(design=design)
    keeper = filter_of(plan)
    left = [keeper.budget - reserve(plan, number) for number in range(STEPS + 1)]
    ledger, reports = run(tmp_path, plan)
    assert ledger.releases == len(reports) == STEPS
    assert len(set(noises(tmp_path))) > STEPS // 2
    spent = [keeper.spent(Counter(releases_of(tmp_path)[:number])) for number in range(STEPS + 1)]
    assert all(amount <= limit * (1 + 1e-9) for amount, limit in zip(spent, left, strict=True))
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.header.renyi_filter == keeper
    assert contents.composition == ledger.composition
    assert contents.epsilons.certified == pytest.approx(EPSILON, rel=1e-6)
    assert contents.epsilons.certified <= EPSILON


@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_greedy_controller_is_raised_and_still_makes_every_planned_release(tmp_path: Path, share: float) -> None:
    """Whether it keeps to its own range or not; what is charged is what was drawn."""
    controller = Greedy(share)
    plan = greedy(controller)
    start = plan.mechanism.noise.noise_multiplier
    ledger, _ = run(tmp_path, plan)
    charged = noises(tmp_path)
    assert charged == pytest.approx(controller.given, rel=1e-12)
    assert ledger.releases == STEPS
    assert filter_of(plan).admits(ledger.composition)
    assert filter_of(plan).spent(ledger.composition) > 0.99 * filter_of(plan).budget
    assert charged[0] == pytest.approx(start)
    assert min(charged[1:3]) < 0.9 * start
    assert charged[-1] == pytest.approx(2 * start, rel=1e-6) == max(charged)
    assert read_ledger(tmp_path / "ledger.jsonl").epsilons.certified <= EPSILON


def test_a_controller_that_wants_more_noise_gets_it(tmp_path: Path) -> None:
    plan = greedy(Greedy(share=1.7))
    start = plan.mechanism.noise.noise_multiplier
    run(tmp_path, plan)
    assert noises(tmp_path) == pytest.approx([start] + [1.7 * start] * (STEPS - 1))


def test_a_controller_that_is_greedy_from_the_start_never_starts(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        run(tmp_path, greedy(Greedy(behaves=False)))
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_killed_run_keeps_its_charges_within_the_filter(tmp_path: Path, opened: list[Ledger], stop: int) -> None:
    with pytest.raises(Killed):
        run(tmp_path, greedy(Greedy()), stop=stop)
    for ledger in opened:
        ledger.close()
    before = noises(tmp_path)
    assert len(before) == stop
    plan = greedy(Greedy())
    ledger, _ = run(tmp_path, plan)
    assert noises(tmp_path)[:stop] == before
    assert ledger.releases == STEPS
    assert filter_of(plan).admits(ledger.composition)


def test_a_killed_agent_goes_on_behind_its_filter(tmp_path: Path, opened: list[Ledger]) -> None:
    with pytest.raises(Killed):
        run(tmp_path, moving(), stop=7)
    for ledger in opened:
        ledger.close()
    before = noises(tmp_path)
    plan = moving()
    _, reports = run(tmp_path, plan)
    assert [report.step for report in reports] == [7, 8, 9, 10, 11]
    # The checkpoint is of step 6: its agent asks for the same noise again.
    assert noises(tmp_path)[7] == pytest.approx(before[6])
    assert filter_of(plan).admits(read_ledger(tmp_path / "ledger.jsonl").composition)


def test_pf8_empty_batches_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivacyUnits, "draw", lambda *_: [])
    plan = greedy(Greedy(share=1.0))
    ledger, _ = run(tmp_path, plan)
    assert ledger.composition == planned(plan.mechanism, SCHEDULE)
    assert filter_of(plan).spent(ledger.composition) == pytest.approx(filter_of(plan).budget, rel=1e-6)


def test_pf9_the_filter_is_charged_the_joint_multiplier(tmp_path: Path) -> None:
    """RLDP's sigma is that of one pair."""
    plan = moving()
    ledger, reports = run(tmp_path, plan)
    sigmas = [report.knobs["noise_multiplier"] / PAIRS**0.5 for report in reports]
    assert noises(tmp_path) == pytest.approx(sigmas, rel=1e-12)
    costs = [
        filter_of(plan).cost(replace(next(iter(ledger.composition)), noise_multiplier=1.0, sensitivity=1 / z))
        for z in sigmas
    ]
    assert filter_of(plan).spent(ledger.composition) == pytest.approx(sum(costs), rel=1e-9)


# Under other accountings a moving noise has no filter; the budget alone ends the run.


def published(steps: int = STEPS) -> Calibrated:
    """RLDP as published, with the noise that the paper's accountant asks for."""

    def epsilon_of(noise: float) -> float:
        return gdp_clt_epsilon(planned(built(noise), replace(SCHEDULE, steps=steps)), 1e-5)

    def built(noise: float) -> Mechanism:
        return build("rldp_published", BUSY | {"noise_multiplier": noise})

    return Calibrated(built(calibrate(epsilon_of, EPSILON)))


def always(monkeypatch: pytest.MonkeyPatch, action: float) -> None:
    monkeypatch.setattr(SoftActorCritic, "act", lambda *_: torch.full((PAIRS + 1,), action))


@pytest.mark.parametrize(("action", "whole"), [(-5.0, False), (0.0, True), (5.0, True)])
def test_rldp_as_published_ends_when_its_budget_does_and_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: float, whole: bool
) -> None:
    """An agent that always lowers sigma uses the budget up early; one that raises it makes every release."""
    always(monkeypatch, action)
    plan = published()
    ledger, reports = run(tmp_path, plan, header=header(plan, accounting="published"))
    assert (ledger.releases == STEPS) == whole
    assert STEPS // 2 < ledger.releases == len(reports)
    composition = read_ledger(tmp_path / "ledger.jsonl").composition
    assert gdp_clt_epsilon(composition, 1e-5) <= EPSILON
    assert all(release.leaks for release in composition)


def test_pf3_a_refusal_is_decided_without_reading_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed with its budget used up ends at once, although drawing a batch would now fail."""
    always(monkeypatch, -5.0)
    plan = published()
    ledger, _ = run(tmp_path, plan, header=header(plan, accounting="published"))

    def draw(*_: Any) -> Any:
        raise AssertionError("data were read")

    monkeypatch.setattr(PrivacyUnits, "draw", draw)
    again, reports = run(tmp_path, published(), header=header(plan, accounting="published"))
    assert (again.releases, reports) == (ledger.releases, [])


def test_a_run_that_ended_early_is_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last steps are paid for: a crash behind them must not cost them, or the whole run."""
    always(monkeypatch, -5.0)
    plan = published()
    ledger, reports = run(tmp_path, plan, header=header(plan, accounting="published"), checkpoint_every=1000)
    assert len(reports) == ledger.releases < STEPS
    again, more = run(tmp_path, published(), header=header(plan, accounting="published"), checkpoint_every=1000)
    assert (again.releases, more) == (ledger.releases, [])


def test_a_first_release_over_the_budget_is_an_error(tmp_path: Path) -> None:
    plan = published(steps=STEPS // 2)
    with pytest.raises(BudgetError):
        run(tmp_path, plan, header=header(plan, accounting="published"))
    assert release_lines(tmp_path) == 0
