"""One run in two processes is the same run: the same sums, one noise, one ledger, and coins for every unit."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import adapted, close, each_record, gpt2, make_header, make_plan, records, release_lines, weights
from tiny_ranks import results, together

from dptune.core.errors import ConfigError
from dptune.core.settings import TrainedWeights
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import Entropy, FixedSeed, OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.training import ranks as ranks_module
from dptune.training import run as running
from dptune.training.crafted_canaries import CraftedCanaries
from dptune.training.loop import follow, train
from dptune.training.models.own_weights import groups_of, train_own
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.ranks import Ranks, join_ranks, own_device
from dptune.training.spec import RunSpec, TrainingPlan

pytestmark = pytest.mark.long

NOISE = 0.5
RLDP = {"interval": 2, "warmup": 2, "design": "AB", "batch_size": 2}
QUICK = {"static": {}, "quantile": {}, "dc_sgd_e": {}, "rldp": RLDP, "geoclip": {"rank": 4}}


@dataclass
class Case:
    """What both ranks are given, and what they note down."""

    directory: Path
    name: str = "static"
    options: dict[str, Any] = field(default_factory=dict)
    plan: TrainingPlan = field(default_factory=make_plan)
    seed: int | None = None
    canaries: int = 0
    absent: tuple[int, ...] = ()
    epsilon: float | None = None
    dies: tuple[int, int] | None = None
    record_seed: int = 0
    first_key: int = 0
    train: str = "lora"

    @property
    def entropy(self) -> Entropy:
        return OsEntropy() if self.seed is None else FixedSeed(self.seed)

    def units(self) -> PrivacyUnits:
        tokens = records()
        absent = np.isin(np.arange(len(tokens.rows)), self.absent)
        if self.name == "dp_lora_fed":
            return PrivacyUnits.clients(8, np.arange(len(tokens.rows)))
        units = PrivacyUnits.of("record", self.first_key + np.arange(len(tokens.rows)), 1, absent)
        return units.with_slots(np.zeros(self.canaries, dtype=bool))

    def mechanism(self, model: Any) -> Mechanism:
        noise = {} if self.name == "nonprivate" else {"noise_multiplier": NOISE}
        return build(self.name, {**noise, "pairs": len(groups_of(model)), **self.options})

    def model(self) -> Any:
        return adapted() if self.train == "lora" else train_own(gpt2(), TrainedWeights(train=self.train), 0)


class Watched(Ranks):
    """Notes the weights that every step starts from."""

    def copy(self, sent: Sequence[torch.Tensor]) -> None:
        super().copy(sent)
        self.seen.append(torch.cat([weight.detach().flatten() for weight in sent]))

    @property
    def seen(self) -> list[torch.Tensor]:
        return self.__dict__.setdefault("_seen", [])


class Noting:
    """Notes how many releases were on the disk whenever words were drawn; may kill its process at one of them."""

    def __init__(self, case: Case, kills_at: int | None) -> None:
        self.case, self.source, self.leaks = case, case.entropy, case.entropy.leaks
        self.kills_at, self.drawn = kills_at, []

    def words(self, count: int) -> NDArray[np.uint64]:
        self.drawn.append((release_lines(self.case.directory), count))
        if len(self.drawn) == self.kills_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source.words(count)


def spied(case: Case, ranks: Ranks) -> dict[str, Any]:
    """One rank's part of the run, and all that came of it."""
    noted: dict[str, Any] = {"batches": [], "gradients": [], "reports": []}
    draw, bring, apply = PrivacyUnits.draw, PrivacyUnits.bring, running._apply

    def drawing(self: PrivacyUnits, *args: Any) -> Any:
        batch = draw(self, *args)
        noted["batches"].append([int(record) for unit in batch for record in unit])
        return batch

    def bringing(self: PrivacyUnits, *args: Any) -> Any:
        batch = bring(self, *args)
        noted["batches"].append([int(record) for unit in batch for record in unit])
        return batch

    def applying(pairs: Any, gradients: list[torch.Tensor], *rest: Any) -> None:
        noted["gradients"].append(torch.cat(gradients))
        apply(pairs, gradients, *rest)

    PrivacyUnits.draw, PrivacyUnits.bring, running._apply = drawing, bringing, applying  # type: ignore[method-assign]
    try:
        return noted | run(case, Watched(ranks.rank, ranks.world), noted["reports"])
    finally:
        PrivacyUnits.draw, PrivacyUnits.bring, running._apply = draw, bring, apply  # type: ignore[method-assign]


def run(case: Case, ranks: Ranks, reports: list[Any]) -> dict[str, Any]:
    model, tokens, units = case.model(), records(seed=case.record_seed), case.units()
    mechanism, canaries = case.mechanism(model), None
    entropy = Noting(case, case.dies[1] if case.dies and case.dies[0] == ranks.rank else None)
    header = make_header(
        case.entropy, units, mechanism=mechanism.name, published_accountant=mechanism.published_accountant,
        epsilon=case.epsilon, train=case.train,
    )  # fmt: skip
    spec = RunSpec(model, tokens, units, mechanism, case.plan, header, public=records(4, seed=9))
    if ranks.rank:
        follow(spec, entropy, ranks)
    else:
        if case.canaries:
            canaries = CraftedCanaries(np.arange(case.canaries) % 2 == 0, np.zeros(case.canaries))
            spec = replace(spec, units=units.with_slots(canaries.included), auditor=canaries)
        close(train(spec, case.directory, entropy, reports.append, ranks))
    scores = canaries.scores if canaries else None
    return {"weights": weights(model), "starts": ranks.seen, "drawn": entropy.drawn, "scores": scores}


def work(ranks: Ranks, case: Case) -> dict[str, Any]:
    """``spied`` for the processes, which call it with the ranks first."""
    return spied(case, ranks)


def one_and_two(tmp_path: Path, case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run in this process, and in two."""
    one = spied(replace(case, directory=tmp_path / "one"), Ranks())
    return one, results(tmp_path / "ranks", work, replace(case, directory=tmp_path / "two"))


def assert_same_run(one: dict[str, Any], two: dict[str, Any], directory: Path) -> None:
    """To 1e-4 of what moved: rows of a micro-batch are rounded by their neighbours, in float32."""
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)
    first, second = (read_ledger(directory / name / "ledger.jsonl") for name in ("one", "two"))
    assert first.composition == second.composition
    assert [report.private["batch_units"] for report in two["reports"]] == [8.0] * len(one["reports"])
    for alone, among in zip(one["reports"], two["reports"], strict=True):
        assert among.knobs == pytest.approx(alone.knobs, rel=1e-4)
        assert among.private == pytest.approx(alone.private, rel=1e-4)


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_make_the_run_that_one_makes(tmp_path: Path, name: str) -> None:
    """All units enter, and rank 0 has the noise of the one: then everything must agree."""
    plan = make_plan(sample_rate=1.0, steps=7)
    case = Case(tmp_path, name, QUICK[name], plan, seed=3)
    one, (leader, follower) = one_and_two(tmp_path, case)
    assert_same_run(one, leader, tmp_path)
    assert [len(leader["batches"][0]), len(follower["batches"][0])] == [4, 4]
    assert follower["reports"] == follower["gradients"] == []


@pytest.mark.parametrize(("train", "name"), [("all", "static"), ("bias", "quantile")])
def test_own_weights_train_in_two_processes_as_in_one(tmp_path: Path, train: str, name: str) -> None:
    plan = make_plan(sample_rate=1.0, steps=3)
    one, (leader, follower) = one_and_two(tmp_path, Case(tmp_path, name, plan=plan, seed=3, train=train))
    assert_same_run(one, leader, tmp_path)
    moved = [(later - first).abs().min() for first, later in zip(one["starts"], one["starts"][1:], strict=False)]
    assert all(float(least) > 0 for least in moved)  # every weight got noise in each step
    assert all(map(torch.equal, leader["starts"], follower["starts"]))


def test_units_of_a_banded_run_come_in_their_own_rows_on_every_rank(tmp_path: Path) -> None:
    """At a rate of 1 / 2 two groups come whole, in turns: a rank that knows no turn would draw the others, too."""
    case = Case(tmp_path / "run", "banded", {"bands": 2}, make_plan(sample_rate=0.5, steps=6))
    leader, follower = results(tmp_path / "ranks", work, case)
    rows = [set(a) | set(b) for a, b in zip(leader["batches"], follower["batches"], strict=True)]
    assert rows[0] | rows[1] == set(range(8))
    assert not rows[0] & rows[1]
    assert rows == [rows[0], rows[1]] * 3
    contents = read_ledger(case.directory / "ledger.jsonl")
    assert contents.releases == 6
    assert {release.sample_rate for release in contents.composition} == {1.0}


def test_a_run_without_noise(tmp_path: Path) -> None:
    one, (leader, _) = one_and_two(tmp_path, Case(tmp_path, "nonprivate", plan=make_plan(sample_rate=1.0, steps=3)))
    assert_same_run(one, leader, tmp_path)


def test_a_run_of_clients(tmp_path: Path) -> None:
    """With next to no noise. Clients take their records in a random order, but all at once: that only rounds."""
    options = {"noise_multiplier": 1e-9, "clients": 8, "clients_per_round": 8.0}
    one, (leader, _) = one_and_two(
        tmp_path, Case(tmp_path, "dp_lora_fed", options, make_plan(sample_rate=1.0, steps=1))
    )
    largest = float(one["gradients"][0].abs().max())
    torch.testing.assert_close(leader["gradients"][0], one["gradients"][0], rtol=1e-3, atol=1e-5 * largest)
    assert leader["reports"][0].private == pytest.approx(one["reports"][0].private, rel=1e-4)
    assert leader["reports"][0].private["batch_units"] == 6, "two of the clients have no patient"


def test_crafted_canaries_are_units_of_rank_0(tmp_path: Path) -> None:
    case = Case(tmp_path, plan=make_plan(24, sample_rate=1.0, steps=3), seed=3, canaries=16)
    one, (leader, _) = one_and_two(tmp_path, case)
    np.testing.assert_allclose(leader["scores"], one["scores"], rtol=1e-3, atol=1e-3)
    assert leader["scores"][::2].mean() > leader["scores"][1::2].mean() + 1 / 3


def test_noise_is_added_once_and_both_ranks_hold_the_same_weights(tmp_path: Path) -> None:
    """No unit enters at a rate of 1e-12. Of 4 x 1024 normals the deviation errs by 1.1 %: 8 % are 7 sigma, a false
    alarm in 4e11; two noises would be 41 % more.
    """
    case = Case(tmp_path / "run", plan=make_plan(sample_rate=1e-12))
    leader, follower = results(tmp_path / "ranks", work, case)
    assert float(torch.cat(leader["gradients"]).double().std()) == pytest.approx(NOISE / 8e-12, rel=0.08)
    assert [report.private for report in leader["reports"]] == [{"batch_units": 0.0}] * 4
    assert read_ledger(case.directory / "ledger.jsonl").releases == 4
    assert len(leader["starts"]) == 4
    assert all(map(torch.equal, leader["starts"], follower["starts"]))
    assert not torch.equal(leader["starts"][0], leader["starts"][1])


def test_each_rank_tosses_the_coins_of_its_own_units_after_the_charge_and_only_rank_0_draws_noise(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path / "run", plan=make_plan(steps=12))
    leader, follower = results(tmp_path / "ranks", work, case)
    for ended, own in ((leader, {0, 1, 2, 3}), (follower, {4, 5, 6, 7})):
        assert set().union(*ended["batches"]) <= own
        assert len(ended["batches"]) == 12
        steps = [step for step, _ in ended["drawn"]]
        assert list(dict.fromkeys(steps)) == list(range(1, 13)), "in order, and never before the ledger holds the step"
    size = len(leader["gradients"][0])
    assert sum(count == size for _, count in leader["drawn"]) == 12
    assert max(count for _, count in follower["drawn"]) < size / 10
    sizes = [len(a) + len(b) for a, b in zip(leader["batches"], follower["batches"], strict=True)]
    assert [report.private["batch_units"] for report in leader["reports"]] == sizes


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(sample_rate=0.25, steps=12, sampler="balls_in_bins"),
        make_plan(steps=30, sampler="truncated_poisson", max_batch=4),
    ],
)
def test_rank_0_draws_bins_and_cut_batches_for_all_ranks(tmp_path: Path, plan: TrainingPlan) -> None:
    """Every unit once in every epoch, on the rank that has it; or over all ranks never more than four in a batch."""
    case = Case(tmp_path / "run", plan=plan)
    leader, *followers = results(tmp_path / "ranks", work, case, world=3)
    batches = [sorted(chain(*parts)) for parts in zip(*(one["batches"] for one in (leader, *followers)), strict=True)]
    assert set().union(*leader["batches"]) <= {0, 1}
    assert set().union(*followers[0]["batches"]) <= {2, 3, 4}
    if plan.sampler == "balls_in_bins":
        assert [sorted(chain(*batches[start : start + 4])) for start in (0, 4, 8)] == [list(range(8))] * 3
    else:
        assert max(map(len, batches)) == 4
        assert len(set(map(tuple, batches))) > 10
    assert [report.private["batch_units"] for report in leader["reports"]] == list(map(len, batches))
    assert read_ledger(case.directory / "ledger.jsonl").releases == plan.steps


@pytest.mark.parametrize("world", [2, 3])
def test_the_union_of_the_parts_is_a_poisson_sample(world: int) -> None:
    """8 frequencies and 28 pairs of 20 000 draws, each within 5 sigma of independent coins."""
    draws, rate, units = 20_000, 0.3, each_record(records())
    parts = [units.part(rank, world) for rank in range(world)]
    assert np.concatenate([np.concatenate(part.members) for part in parts]).tolist() == list(range(8))
    entered, coins = np.zeros((draws, 8)), FixedSeed(1)
    for row in entered:
        for part in parts:
            row[[int(records[0]) for records in part.draw(rate, coins)]] = 1
    joint = entered.T @ entered / draws
    expected = np.where(np.eye(8, dtype=bool), rate, rate**2)
    assert (np.abs(joint - expected) < 5 * np.sqrt(expected * (1 - expected) / draws)).all()


def test_a_rank_without_units_or_with_empty_ones_sends_zeros(tmp_path: Path) -> None:
    case = Case(tmp_path / "run", absent=(4, 5, 6, 7), plan=make_plan(steps=6))
    leader, follower = results(tmp_path / "ranks", work, case)
    assert follower["batches"] == [[]] * 6
    assert read_ledger(case.directory / "ledger.jsonl").releases == 6
    assert [report.private["batch_units"] for report in leader["reports"]] == list(map(len, leader["batches"]))
    lone = PrivacyUnits.of("patient", np.zeros(3, dtype=np.int64), 3)
    assert [len(lone.part(rank, 3)) for rank in range(3)] == [0, 0, 1]
    assert lone.part(0, 3).draw(0.5, OsEntropy()) == []


@pytest.mark.parametrize(("dying", "world", "later"), [(0, 2, 2), (1, 2, 1), (2, 3, 2)])
def test_a_rank_that_is_killed_ends_the_others_and_the_run_resumes(
    tmp_path: Path, dying: int, world: int, later: int
) -> None:
    """At its 6th draw of words: in the middle of a step that is charged."""
    case = Case(tmp_path / "run", plan=make_plan(steps=9), dies=(dying, 6))
    for rank, ended in enumerate(together(tmp_path / "killed", work, case, world=world)):
        if rank == dying:
            assert ended.exitcode == -signal.SIGKILL
        else:
            assert ended.error.startswith(f"LostRankError: rank {rank}: another rank ended"), ended
    charged = release_lines(case.directory)
    assert 3 <= charged < 9
    leader, *others = results(tmp_path / "resumed", work, replace(case, dies=None), world=later)
    contents = read_ledger(case.directory / "ledger.jsonl")
    assert contents.releases == contents.composition.total() == 9
    # A checkpoint every 2 steps: the charges after it stay, and their steps are lost.
    assert len(leader["gradients"]) == 9 - charged
    assert leader["reports"][0].step == 1 + 2 * ((charged - 1) // 2)
    assert all(
        torch.equal(start, other["starts"][step]) for other in others for step, start in enumerate(leader["starts"])
    )


def test_what_rank_0_refuses_ends_the_others(tmp_path: Path) -> None:
    leader, follower = together(tmp_path / "ranks", work, Case(tmp_path / "run", epsilon=0.1))
    assert leader.error.startswith("BudgetError")
    assert follower.error.startswith("LostRankError")
    assert release_lines(tmp_path / "run") == 0


DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "plan": (make_plan(), make_plan(steps=5)),
    "record_seed": (0, 1),
    "first_key": (0, 1),
    "seed": (None, 3),
    "options": ({}, {"max_grad_norm": 2.0}),
}
SAID = {"plan": "plan", "record_seed": "records", "first_key": "records", "seed": "entropy", "options": "mechanism"}


def disagree(ranks: Ranks, case: Case, what: str) -> dict[str, Any]:
    return spied(replace(case, **{what: DIFFERENCES[what][ranks.rank]}), ranks)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_were_given_different_runs_are_refused_before_a_charge(tmp_path: Path, what: str) -> None:
    for ended in together(tmp_path / "ranks", disagree, Case(tmp_path / "run"), what):
        assert ended.error.startswith(f"ConfigError: ranks: differ in {SAID[what]}"), ended
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert not (tmp_path / "run").exists()


def test_a_controller_that_reads_the_raw_batch_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path / "run", "rldp_published")
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"mechanisms\.rldp_published\.controller: reads raw .* one process"):
            spied(case, Ranks(rank, 2))
    assert not case.directory.exists()


def test_a_process_alone_uses_nothing_of_torchs_distributed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so makes the run that it made before there were ranks, bit for bit."""
    monkeypatch.setattr(ranks_module, "dist", None)
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert own_device() == "cpu"
    with join_ranks() as ranks:
        assert (ranks.rank, ranks.world) == (0, 1)
        after = [spied(Case(tmp_path / name, seed=1), ranks)["weights"] for name in ("a", "b")]
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
    whole = each_record(records())
    assert list(map(list, whole.part(0, 1).members)) == list(map(list, whole.members))
