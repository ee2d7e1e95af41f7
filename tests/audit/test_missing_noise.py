"""Noise that is missing, too little, shared or used again in any block of a step is a fault, also off the gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dptune.audit.games import noise_check
from dptune.audit.games.layer_step import LayerModel
from dptune.audit.games.noise_check import noise_fault
from dptune.audit.games.run_twin import audit_twin
from dptune.audit.games.step import audit_step
from dptune.cli import app
from dptune.mechanisms.interfaces import Released, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.banded import BandedGaussian
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.planning import Schedule
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import Entropy, FixedSeed, OsEntropy

torch.set_num_threads(1)

Blocks = list[torch.Tensor]
#: A fault: turns the noise of a step, block by block, into what is added; it may keep what it saw.
Fault = Callable[[Blocks, list[Blocks]], Blocks]
SIZES = (2, 5, 5, 40)


@dataclass(frozen=True)
class Planted(Gaussian):
    """Gaussian noise with a fault."""

    fault: Fault = lambda noise, before: noise
    family: str = field(default="gaussian", init=False)
    before: list[Blocks] = field(default_factory=list, init=False, compare=False)

    def add(self, sums: Blocks, scales: Sequence[float], noise_multiplier: float, entropy: Entropy) -> Blocks:
        noisy = super().add(sums, [1.0] * len(sums), noise_multiplier, entropy)
        noise = self.fault([one.double() - total for one, total in zip(noisy, sums, strict=True)], self.before)
        self.before.append(noise)
        return [(total + s * one).float() for total, one, s in zip(sums, noise, scales, strict=True)]


def times(block: int, factor: float, part: slice = slice(None)) -> Fault:
    def spoil(noise: Blocks, _: list[Blocks]) -> Blocks:
        noise[block][part] *= factor
        return noise

    return spoil


def in_turn(noise: Blocks, before: list[Blocks]) -> Blocks:
    """No step in two has noise, and the others have so much more that all have the charged size on average."""
    return [one * (1e-6 if len(before) % 2 else 2**0.5) for one in noise]


def around(noise: Blocks, before: list[Blocks]) -> Blocks:
    noise[3][len(before) % SIZES[3]] *= 1e-6
    return noise


def same(block: int, other: int, sign: float = 1.0) -> Fault:
    return lambda noise, _: [sign * noise[other] if at == block else one for at, one in enumerate(noise)]


def kept(block: int, every: int) -> Fault:
    """The noise of one block is drawn in so many steps once for all, and then used again in turn."""

    def spoil(noise: Blocks, before: list[Blocks]) -> Blocks:
        if len(before) >= every:
            noise[block] = before[-every][block]
        return noise

    return spoil


FAULTS: dict[str, Fault] = {
    **{f"no noise on block {block + 1}": times(block, 0.0) for block in range(len(SIZES))},
    **{f"half the noise on block {block + 1}": times(block, 0.5) for block in range(len(SIZES))},
    "no noise on half of a block": times(3, 0.0, slice(0, None, 2)),
    "no noise on one coordinate": times(1, 0.0, slice(0, 1)),
    "no noise in every other step, and more in the others": in_turn,
    "no noise on one coordinate after the other": around,
    "two blocks share noise": same(2, 1),
    "two blocks share noise, turned": same(2, 1, -1.0),
    "one number for a whole block": lambda noise, _: [*noise[:3], noise[3][:1].expand(SIZES[3])],
    "noise drawn once": kept(0, 1),
    "seven noises in turn": kept(1, 7),
    "noise of a hundred steps in turn": kept(3, 100),
}


def fault_of(mechanism: Mechanism, sizes: Sequence[int] = SIZES, entropy: Entropy | None = None) -> str | None:
    started = copy.deepcopy(mechanism)
    started.start(RunFacts(tuple(sizes), torch.device("cpu"), 1.0, 0.1, 1000, None, 1e-5))
    zeros = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    return noise_fault(started, started.knobs(), [], zeros, entropy or OsEntropy())


def static(pairs: int = len(SIZES)) -> Mechanism:
    return build("static", {"noise_multiplier": 1.3, "max_grad_norm": 0.7, "pairs": pairs})


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_accused_by_the_block(name: str) -> None:
    said = fault_of(replace(static(), noise=Planted(1.3, fault=FAULTS[name])))
    assert said is not None
    assert said.startswith(f"block {name[-1]} of 4 " if name[-1].isdigit() else "block")
    assert said.endswith("(300 steps; the chance of a false alarm is below 1e-06)")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_accused_20_times_of_20(name: str) -> None:
    assert all(fault_of(replace(static(), noise=Planted(1.3, fault=FAULTS[name]))) for _ in range(20))


def test_a_fault_in_the_noise_of_random_old_steps_is_accused() -> None:
    chosen = iter(torch.randint(4, (300,), generator=torch.Generator().manual_seed(0)).tolist())
    pool: Fault = lambda noise, before: noise if len(before) < 4 else before[next(chosen)]  # noqa: E731
    assert fault_of(replace(static(), noise=Planted(1.3, fault=pool))) is not None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("static", {}),
        ("plrvo", {}),
        ("laplace", {}),
        ("per_pair", {}),
        ("quantile", {}),
        ("rldp", {}),
        ("banded", {"bands": 4}),
    ],
)
def test_sound_noise_is_not_accused(name: str, options: dict[str, Any]) -> None:
    assert fault_of(build(name, {"noise_multiplier": 2.0, "pairs": 4} | options), (3, 3, 3, 3)) is None


def test_sound_noise_is_accused_at_the_stated_rate_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of 0.05 in place of 1e-6, and 40 runs of each step: 23 of 200 are then accused with chance 2e-4."""
    monkeypatch.setattr(noise_check, "NOISE_ALARMS", 0.05)
    monkeypatch.setattr(noise_check, "_NOISE_STEPS", 40)
    for mechanism in (static(), build("plrvo", {"noise_multiplier": 2.0, "pairs": 4})):
        assert sum(fault_of(mechanism) is not None for _ in range(200)) <= 22


def test_correlated_noise_is_heard_through_its_strategy() -> None:
    class Quiet(BandedGaussian):
        family = "gaussian"

        def add_row(self, sums: Any, scales: Any, *rest: Any) -> Any:
            return super().add_row(sums, [scales[0], scales[1] / 2], *rest)

    banded = build("banded", {"noise_multiplier": 1.0, "bands": 4, "pairs": 2})
    quiet = Quiet(1.0, bands=4, given=banded.noise.correlated.coefficients)  # type: ignore[union-attr]
    said = fault_of(replace(banded, noise=quiet), (8, 8))
    assert said is not None
    assert said.startswith("block 2 of 2 comes back with 0.")


def test_a_gradient_that_is_not_made_of_the_noisy_blocks_is_accused() -> None:
    class Leaks(Mechanism):
        def privatise(self, batches: Any, zeros: Any, *rest: Any, **named: Any) -> Released:
            return replace(super().privatise(batches, zeros, *rest, **named), gradient=[one.float() for one in zeros])

    said = fault_of(Leaks(**vars(static())))
    assert said is not None
    assert "is not made of its noisy blocks alone" in said


@pytest.mark.parametrize("layer", [pytest.param(at, marks=[] if at == 2 else pytest.mark.slow) for at in range(9)])
def test_a_step_of_own_weights_without_noise_on_any_layer_is_accused(layer: int) -> None:
    """Layer 2 is the first layer norm, where the attacked text has next to no gradient."""
    own = LayerModel()
    broken = replace(own.mechanism("static", {"noise_multiplier": 1.0}), noise=Planted(1.0, fault=times(layer, 0.0)))
    said = audit_step(
        broken, trials=500, confidence=0.95, delta=1e-5, entropy=FixedSeed(0), scenes=own.scenes, own=own
    ).fault
    assert said is not None
    assert said.startswith(f"{own.groups[layer].name} comes back with 0 times the noise that it is charged for (")


def test_the_command_and_the_twin_accuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Gaussian.add

    def quiet(self: Gaussian, sums: Blocks, scales: Sequence[float], *rest: Any) -> Blocks:
        return add(self, sums, [*scales[:-1], 0.6 * scales[-1]], *rest)

    monkeypatch.setattr(Gaussian, "add", quiet)
    done = CliRunner().invoke(app, ["audit", "static", "--trials", "500", "--set", "pairs=6"])
    assert done.exit_code == 1
    assert "Accused: block 6 of 6 comes back with 0." in " ".join(done.output.split())
    found = audit_twin(build("static", {"noise_multiplier": 1.0, "pairs": 6}), Schedule(0.3, 4, 1e-5), games=500)
    assert found.accusation is not None
    assert found.accusation.startswith("block 6 of 6")
