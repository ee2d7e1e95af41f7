"""Truncated Poisson batches and balls in bins: their laws, runs that draw by them, and what a kill leaves of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, chisquare
from tiny_models import adapted, each_record, gpt2, make_header, make_plan, records

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.mechanisms.planning import Schedule, calibrated, planned
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import epsilons
from dptune.privacy.entropy import FixedSeed, OsEntropy, poisson_sample
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, encode, read_ledger, seal
from dptune.privacy.release import Release
from dptune.privacy.samplers.sampler import Sampler
from dptune.privacy.samplers.sampler_bounds import advised_batch
from dptune.training.checkpoints import CheckpointError, progress_of
from dptune.training.data import Bins, check_kept, keys_of, truncated_sample
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.shared_pass import shared_copy, train_together
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec, TrainingPlan

BINS, EPOCHS, UNITS = 4, 3, 8
ANY_KEY = st.integers(-(2**63), 2**63 - 1)
#: Chance with which each test of a law fails although the law holds. Seeds are fixed: it was decided once.
FALSE_ALARM = 1e-6


def bins_plan(**changes: Any) -> TrainingPlan:
    values = {"sample_rate": 1 / BINS, "steps": BINS * EPOCHS, "sampler": "balls_in_bins", "checkpoint_every": 3}
    return make_plan(UNITS, **(values | changes))


def cut_plan(**changes: Any) -> TrainingPlan:
    return make_plan(UNITS, **({"sampler": "truncated_poisson", "max_batch": 5} | changes))


def spec_of(plan: TrainingPlan, name: str = "static", units: PrivacyUnits | None = None, **more: Any) -> RunSpec:
    model, tokens = adapted(), records(UNITS)
    noise = {} if name == "nonprivate" else {"noise_multiplier": 1.0}
    mechanism = build(name, {**noise, "pairs": len(lora_pairs(model)), **more})
    units = units or each_record(tokens)
    header = make_header(None, units, mechanism=name, published_accountant=mechanism.published_accountant)
    return RunSpec(model, tokens, units, mechanism, plan, header, public=records(4, seed=9))


# ------------------------------------------------------------------------------------------------------- the laws


def test_bins_are_even_and_new_in_every_epoch() -> None:
    """900 units in 6 bins: sizes, and pairs of bins of one unit in two epochs, by chi-square, each at 1e-6."""
    bins = Bins.toss(6, np.arange(900), FixedSeed(3))
    epochs = np.stack([bins.of_epoch(epoch) for epoch in range(20)])
    assert chisquare(np.bincount(epochs.ravel(), minlength=6)).pvalue > FALSE_ALARM
    pairs = np.zeros((6, 6))
    for one, other in itertools.pairwise(epochs):
        np.add.at(pairs, (one, other), 1)
    assert chi2_contingency(pairs).pvalue > FALSE_ALARM


def test_units_of_one_key_choose_bins_independently() -> None:
    """Records with the same content: two of them share a bin of 4 in a quarter of 4,000 epochs; chi-square at 1e-6."""
    bins = Bins.toss(4, np.array([7, 7, 7]), FixedSeed(4))
    chosen = np.stack([bins.of_epoch(epoch) for epoch in range(4000)])
    for one, other in itertools.combinations(range(3), 2):
        together = int((chosen[:, one] == chosen[:, other]).sum())
        assert chisquare([together, 4000 - together], [1000, 3000]).pvalue > FALSE_ALARM


def test_every_unit_is_in_one_batch_of_every_epoch() -> None:
    bins = Bins.toss(5, np.arange(40) // 3, OsEntropy())
    for epoch in range(4):
        batches = [bins.batch(5 * epoch + number) for number in range(5)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(40))
        assert all((np.diff(batch) > 0).all() for batch in batches)


@given(keys=st.lists(ANY_KEY, min_size=2, max_size=30), who=st.integers(0, 29), newcomer=st.none() | ANY_KEY)
def test_a_unit_that_leaves_or_is_swapped_moves_nobody_of_another_key(
    keys: list[int], who: int, newcomer: int | None
) -> None:
    who %= len(keys)
    others = keys[:who] + keys[who + 1 :] + ([] if newcomer is None else [newcomer])
    before, after = (Bins(7, np.array(own, dtype=np.int64), b"s" * 32) for own in (keys, others))
    for epoch in (0, 5):
        bins = [
            dict(Counter(zip(own.keys.tolist(), own.of_epoch(epoch).tolist(), strict=True))) for own in (before, after)
        ]
        for found, other in (bins, bins[::-1]):
            assert all(
                other.get(pair) == count for pair, count in found.items() if pair[0] not in (keys[who], newcomer)
            )


def test_a_cut_batch_is_a_random_part_of_the_drawn_units() -> None:
    """6 units at rate 0.5, cut to 3: the law of each of the 42 possible batches, exactly; chi-square at 1e-6."""
    draws, source = 40_000, FixedSeed(5)
    found = Counter(tuple(truncated_sample(source, 6, 0.5, 3).tolist()) for _ in range(draws))
    chance: Counter[tuple[int, ...]] = Counter()
    for size in range(7):
        for drawn in itertools.combinations(range(6), size):
            kept = list(itertools.combinations(drawn, min(3, size)))
            for batch in kept:
                chance[batch] += 0.5**6 / len(kept)  # type: ignore[assignment]
    assert len(chance) == 42
    expected = np.array([draws * chance[batch] for batch in chance])
    assert chisquare([found[batch] for batch in chance], expected).pvalue > FALSE_ALARM


def test_a_batch_that_fits_is_the_poisson_sample() -> None:
    for seed in range(20):
        sample = poisson_sample(FixedSeed(seed), 100, 0.1)
        assert truncated_sample(FixedSeed(seed), 100, 0.1, len(sample)).tolist() == sample.tolist()
        assert len(truncated_sample(FixedSeed(seed), 100, 0.1, max(1, len(sample) - 1))) == max(1, len(sample) - 1)


# ------------------------------------------------------------------------------------------------- runs by them


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Numbers of the units of each batch that was drawn, in order."""
    found: list[list[int]] = []
    real = PrivacyUnits.bring

    def bring(self: PrivacyUnits, numbers: NDArray[np.int64], entropy: Any) -> Any:
        found.append(numbers.tolist())
        batch = real(self, numbers, entropy)
        assert [unit.tolist() for unit in batch] == [[number] for number in numbers]
        return batch

    monkeypatch.setattr(PrivacyUnits, "bring", bring)
    return found


@pytest.mark.parametrize("name", ["static", "quantile", "adaclip", "dc_sgd_p", "rldp", "dp_lora", "nonprivate"])
def test_a_run_by_bins_is_charged_for_its_epochs(tmp_path: Path, batches: list[list[int]], name: str) -> None:
    """Also where radii move: what they are clipped to follows earlier releases, and the noise over it stays."""
    more = {"interval": 2, "warmup": 1, "batch_size": 2} if name == "rldp" else {}
    spec = spec_of(bins_plan(), name, **more)
    expected = planned(spec.mechanism, Schedule(1 / BINS, BINS * EPOCHS, 1e-5, spec.plan.law))
    train(spec, tmp_path, OsEntropy()).close()
    for epoch in range(EPOCHS):
        drawn = batches[BINS * epoch : BINS * (epoch + 1)]
        assert sorted(itertools.chain(*drawn)) == list(range(UNITS))
    assert len({str(batches[BINS * epoch : BINS * (epoch + 1)]) for epoch in range(EPOCHS)}) > 1
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert {release.sampler for release in contents.composition} == {Sampler("balls_in_bins", batches=BINS)}
    certified = contents.epsilons.certified
    assert (
        math.isinf(certified)
        if name == "nonprivate"
        else certified == pytest.approx(epsilons(expected, 1e-5).certified)
    )
    assert progress_of(tmp_path / "checkpoint.safetensors").bins == "", "nothing is drawn any more"


def test_a_run_by_truncated_poisson_never_exceeds_its_largest_batch(tmp_path: Path, batches: list[list[int]]) -> None:
    plan = cut_plan(max_batch=4, steps=40)
    train(spec_of(plan), tmp_path, OsEntropy()).close()
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == 40
    assert max(sizes) == 4, "three in four batches of eight units at rate 0.5 hold four or more"
    (release,) = read_ledger(tmp_path / "ledger.jsonl").composition
    assert release.sampler == Sampler("truncated_poisson", units=UNITS, max_batch=4)


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("row", [0, 2, 5, 6, 10])
def test_a_killed_run_goes_on_with_the_same_bins(
    tmp_path: Path, opened: list[Ledger], batches: list[list[int]], monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """Killed once a row is charged and its batch drawn: of each epoch every unit still enters one batch alone."""
    real = PrivacyUnits.bring

    def bring(*args: Any) -> Any:
        found = real(*args)
        if len(batches) == row + 1:
            raise Killed
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PrivacyUnits, "bring", bring)
        with pytest.raises(Killed):
            train(spec_of(bins_plan()), tmp_path, OsEntropy())
    for ledger in opened:
        ledger.close()
    train(spec_of(bins_plan()), tmp_path, OsEntropy()).close()
    assert len(batches) == BINS * EPOCHS, "the killed row was charged and is not drawn again"
    for epoch in range(EPOCHS):
        assert sorted(itertools.chain(*batches[BINS * epoch : BINS * (epoch + 1)])) == list(range(UNITS))


def stop_after(step: int) -> Any:
    def on_step(report: Any) -> None:
        if report.step == step:
            raise Killed

    return on_step


def killed(folder: Path, opened: list[Ledger], plan: TrainingPlan, step: int = 4) -> None:
    with pytest.raises(Killed):
        train(spec_of(plan), folder, OsEntropy(), stop_after(step))
    for ledger in opened:
        ledger.close()


def test_without_its_secret_a_run_by_bins_does_not_go_on(tmp_path: Path, opened: list[Ledger]) -> None:
    killed(tmp_path, opened, bins_plan())
    checkpoint, before = tmp_path / "checkpoint.safetensors", (tmp_path / "ledger.jsonl").read_bytes()
    check_kept(progress_of(checkpoint).bins)
    assert progress_of(checkpoint).bins not in repr(progress_of(checkpoint))
    assert checkpoint.stat().st_mode & 0o777 == 0o600
    kept = checkpoint.read_bytes()
    secret = progress_of(checkpoint).bins.encode()
    damaged = secret[:1].translate(bytes.maketrans(b"0123456789abcdef", b"123456789abcdef0")) + secret[1:]
    for content, problem in (
        (kept.replace(secret, damaged), "the secret of its bins is not whole"),
        (kept.replace(b'"bins\\": \\"' + secret, b'"bins\\": \\"'.ljust(9 + len(secret))), "damaged"),
        (None, "is missing, with the secret of the run's bins, and by other bins a unit could enter an epoch twice"),
    ):
        if content is None:
            checkpoint.unlink()
        else:
            assert content != kept
            checkpoint.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{problem}.*Fix: "):
            train(spec_of(bins_plan()), tmp_path, OsEntropy())
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    checkpoint.write_bytes(kept)
    train(spec_of(bins_plan()), tmp_path, OsEntropy()).close()


@pytest.mark.parametrize("begun", ["bins", "poisson"])
def test_no_run_goes_on_by_another_sampler(tmp_path: Path, opened: list[Ledger], begun: str) -> None:
    plans = {"bins": bins_plan(), "poisson": bins_plan(sampler="poisson")}
    killed(tmp_path, opened, plans.pop(begun))
    (other,) = plans.values()
    with pytest.raises((LedgerError, CheckpointError), match=r"one run has one sampler|does not hold the secret"):
        train(spec_of(other), tmp_path, OsEntropy())
    assert len(read_ledger(tmp_path / "ledger.jsonl").composition) == 1


def test_runs_together_each_have_bins_of_their_own(tmp_path: Path, batches: list[list[int]]) -> None:
    base, tokens, runs = gpt2(), records(UNITS), []
    for number, plan in enumerate([bins_plan(), bins_plan(), make_plan(UNITS, steps=12), cut_plan(steps=12)]):
        model = attach_lora(shared_copy(base), Lora(rank=4, alpha=8, dropout=0.0), init_seed=number)
        units = each_record(tokens)
        mechanism = build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))})
        spec = RunSpec(model, tokens, units, mechanism, plan, make_header(None, units))
        runs.append(open_run(spec, tmp_path / str(number), OsEntropy()))
    assert train_together(base, runs) == [None] * 4
    for run in runs:
        run.ledger.close()
    first, second = (batches[start::3] for start in (0, 1))  # the third of them is Poisson's, which brings by itself
    assert first != second
    for own in (first, second):
        for epoch in range(EPOCHS):
            assert sorted(itertools.chain(*own[BINS * epoch : BINS * (epoch + 1)])) == list(range(UNITS))


def test_an_auditors_slots_have_bins_of_their_own(tmp_path: Path) -> None:
    units = each_record(records(UNITS)).with_slots(np.array([True, False, True]))
    keys = keys_of(units)
    assert len(set(keys.tolist())) == len(units) == UNITS + 3
    parts = [units.part(rank, 2) for rank in range(2)]
    bins = Bins.toss(3, keys, OsEntropy())
    for row in range(6):
        whole = [unit.tolist() for unit in units.bring(bins.batch(row), OsEntropy())]
        split = [unit.tolist() for part in parts for unit in part.bring(bins.batch(row), OsEntropy())]
        assert sorted(split) == sorted(whole)
        assert all(unit[0] != -2 for unit in whole), "a slot that its coin left empty brings nothing"


# ------------------------------------------------------------------------------------- the price, and what is refused


@pytest.mark.parametrize("name", ["balls_in_bins", "truncated_poisson"])
def test_calibrated_runs_keep_the_budget_at_every_release(tmp_path: Path, name: str) -> None:
    """The ledger's epsilon rises with its releases, is never above the budget, and ends at what was calibrated."""
    rate, steps, units = 0.125, 24, 800
    most = advised_batch(units, rate, steps, 1e-5) if name == "truncated_poisson" else None
    plan = make_plan(units, sample_rate=rate, steps=steps, sampler=name, max_batch=most)
    schedule = Schedule(rate, steps, 1e-5, plan.law)
    found = calibrated(lambda noise: build("static", {"noise_multiplier": noise}), 2.0, schedule, "certified")
    releases = planned(found.mechanism, schedule)
    ((release, _),) = releases.items()
    header = make_header(None, epsilon=2.0, units=units)
    spent = []
    with Ledger.open(tmp_path / "ledger.jsonl", header, releases) as ledger:
        for _ in range(steps):
            ledger.charge(release)
            spent.append(ledger.contents.epsilons.certified)
        assert not ledger.admits(release)
    assert all(one <= other * (1 + 1e-3) for one, other in itertools.pairwise(spent))
    assert max(spent) <= 2.0
    assert spent[-1] == pytest.approx(2.0, rel=1e-3)
    assert spent[-1] == read_ledger(tmp_path / "ledger.jsonl").epsilons.certified
    whole = [epsilons(Counter({release: 8 * epoch}), 1e-5).certified for epoch in (1, 2, 3)]
    if name == "balls_in_bins":
        assert spent == [whole[row // 8] for row in range(steps)], "an epoch counts from its first batch on"


def test_a_ledger_holds_one_sampler(tmp_path: Path) -> None:
    poisson, cut = Release(0.25, 1.0), Release(0.25, 1.0, sampler=Sampler("truncated_poisson", units=80, max_batch=60))
    bins = Release(0.25, 1.0, sampler=Sampler("balls_in_bins", batches=4))
    fewer = Release(0.125, 1.0, sampler=Sampler("truncated_poisson", units=80, max_batch=60))
    for first, then, problem in (
        (
            poisson,
            bins,
            r"is drawn by balls_in_bins \(batches 4\), and the row before by poisson: one run has one sampler",
        ),
        (bins, poisson, "is drawn by poisson, and the row before by balls_in_bins"),
        (
            cut,
            replace(cut, sampler=Sampler("truncated_poisson", units=80, max_batch=61)),
            r"is drawn by .*max_batch 61",
        ),
        (cut, fewer, "has sample rate 0.125, and the row before 0.25"),
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        with Ledger.open(path, make_header(units=80), Counter()) as ledger:
            ledger.charge(first)
            with pytest.raises(LedgerError, match=f"the next release {problem}.*Fix: "):
                ledger.charge(then)
            chain = ledger.chain
        line, _ = seal(encode({"kind": "release", "step": 1, **then.to_dict()}), chain)
        path.write_bytes(path.read_bytes() + line)
        with pytest.raises(LedgerError, match=f"line 3: {problem}"):
            read_ledger(path)


def refusals() -> Iterator[tuple[TrainingPlan, str, dict[str, Any], str]]:
    noise = "independent Gaussian noise that never moves"
    for name, more in (
        ("banded", {"bands": 2, "given": (1.0, 0.5)}),
        ("rldp", {"interval": 2, "warmup": 1, "batch_size": 2, "move_noise": True}),
        ("laplace", {}),
    ):
        yield bins_plan(), name, more, f"sampler: balls_in_bins does not go with {name}: it is priced for {noise}"
        yield cut_plan(), name, more, f"sampler: truncated_poisson does not go with {name}"
    yield bins_plan(steps=10), "static", {}, "epochs: 2.5 is not a whole number.*Fix: use 3"
    yield bins_plan(sample_rate=0.3), "static", {}, "expected_batch_size: balls_in_bins needs a whole number of batches"
    yield cut_plan(max_batch=None), "static", {}, "max_batch: is missing"
    yield cut_plan(max_batch=3), "static", {}, "max_batch: 3 is below the expected batch of 4"
    yield make_plan(UNITS, max_batch=5), "static", {}, "max_batch: does not go with sampler poisson"
    yield make_plan(UNITS, sampler="shuffle"), "static", {}, "sampler: 'shuffle' is a sampler that no training draws"


@pytest.mark.parametrize(("plan", "name", "more", "problem"), list(refusals()))
def test_what_has_no_proof_is_refused_before_anything_is_charged(
    tmp_path: Path, plan: TrainingPlan, name: str, more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(spec_of(plan, name, **more), tmp_path, OsEntropy())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_bins_need_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="units: have no keys of their own, by which balls_in_bins"):
        train(spec_of(bins_plan(), units=PrivacyUnits.records(UNITS)), tmp_path, OsEntropy())


@pytest.mark.parametrize("units", [8, 79, 81])
def test_a_cut_is_priced_for_the_units_of_the_run(tmp_path: Path, units: int) -> None:
    """The chance of a cut hangs on them, and the first line of the ledger says how many there are."""
    path, header = tmp_path / "ledger.jsonl", make_header(units=80)
    release = Release(0.25, 1.0, sampler=Sampler("truncated_poisson", units=units, max_batch=60))
    problem = f"is priced for {units} units, and the run has 80"
    with Ledger.open(path, header, Counter()) as ledger:
        with pytest.raises(LedgerError, match=problem):
            ledger.charge(release)
        chain = ledger.chain
    line, _ = seal(encode({"kind": "release", "step": 0, **release.to_dict()}), chain)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(LedgerError, match=f"line 2: {problem}"):
        read_ledger(path)
