"""Somebody else's step: a sound one is not accused, each planted error is, and what is no step is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from dptune.audit.games.outside_step import StepClaim, audit_outside_step, scenes_of
from dptune.audit.games.scene import StepAudit
from dptune.audit.verdict import Verdict, certificate, judged
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.mechanisms.interfaces import RunFacts
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed

MODULE = "somebodys_loop"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same noise in every run: a sound step is accused with chance 1e-4."""
    loops.coins.bit_generator.state = np.random.default_rng(1).bit_generator.state
    torch.manual_seed(1)


def audited(step: Callable[..., Any], trials: int = 3000, **options: Any) -> tuple[StepAudit, Verdict]:
    claim = StepClaim(noise_multiplier=1.0, **{"parameters": 128, **options})
    found = audit_outside_step(step, claim, trials=trials, confidence=0.95, delta=1e-5, entropy=FixedSeed(1))
    return found, judged(found, certificate(Counter([claim.release]), 1e-5), 1e-4)


@pytest.mark.one_case("sound-options0", "sound_units-options5")
@pytest.mark.parametrize(("step", "options"), loops.SOUND, ids=lambda one: getattr(one, "__name__", None))
def test_a_sound_step_is_not_accused_and_nearly_reaches_its_mu(step: Callable[..., Any], options: Any) -> None:
    """A mu below 0.6 of 1 would be an audit without power."""
    found, verdict = audited(step, **options)
    assert verdict.accusation is None
    assert found.mu_audited > 0.6


@pytest.mark.one_case(
    "clip of outliers alone", "noise scaled by the batch", "clip of each micro-batch", "realised batch as divisor"
)
@pytest.mark.parametrize(
    "error", [pytest.param(one, marks=pytest.mark.long if "bfloat16" in one else ()) for one in loops.PLANTED]
)
def test_a_planted_error_is_accused(error: str) -> None:
    step, options = loops.PLANTED[error]
    # The squares that vanish in bfloat16 are those of many columns.
    wide = {"parameters": 512} if step is loops.bf16_norm_underflow else {}
    _, verdict = audited(step, 4000, **options, **wide)
    assert verdict.accusation is not None


def test_noise_that_is_used_twice_is_a_fault_by_itself() -> None:
    found, verdict = audited(loops.NoiseReused(), 500)
    assert found.fault is not None
    assert "the noise is used twice" in str(verdict.accusation)
    assert audited(loops.clipped_sum_alone, 500)[0].fault is not None  # there is none


def test_a_unit_is_in_one_world_alone_and_its_records_lie_where_they_should() -> None:
    claim = StepClaim(noise_multiplier=1.0, micro_batches=2, unit_records=3, records=10, parameters=8)
    scenes = {scene.name: scene for scene in scenes_of(claim)}
    for name, places in (("alone", [0, 3]), ("alone, spread over micro-batches", [1, 2])):
        gradients, units = scenes[name].batches[True]
        assert [int((own == 0).sum()) for own in units] == places
        assert [len(one) for one in gradients] == [len(own) for own in units]
        assert sum(map(len, gradients)) == 10
        assert all(
            np.linalg.norm(one[own == 0], axis=1).min(initial=9.0) > 1
            for one, own in zip(gradients, units, strict=True)
        )
        rest, others = scenes[name].batches[False]
        assert sum(map(len, rest)) == 7
        assert not any((own == 0).any() for own in others)
    (zeroed,) = (scene for scene in scenes_of(StepClaim(noise_multiplier=1, absent="zeroed")) if scene.name == "alone")
    assert len(zeroed.batches[False][0]) == len(zeroed.batches[True][0]) == 16
    assert not zeroed.batches[False][0].any()


def test_a_step_that_writes_into_its_batch_is_given_a_copy() -> None:
    def writes(gradients: loops.Rows) -> loops.Rows:
        released = loops.sound(gradients)
        gradients[:] = 0
        return released

    assert audited(writes, 1000)[0].mu_audited > 0.4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("noise_multiplier", 0.0),
        ("max_grad_norm", 1e300),
        ("records", 1),
        ("records", 10_000),
        ("parameters", 1),
        ("absent", "gone"),
        ("unit_records", 1001),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="parameters" if value == 10_000 else option):
        StepClaim(**{"noise_multiplier": 1.0, option: value})


# dptune's own step, and Opacus'.


class Dense:
    """Gradients (``dptune.mechanisms.gradient_interfaces.Gradients``) of one block of parameters."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = torch.from_numpy(rows).double()

    def norms(self) -> torch.Tensor:
        return self.rows.norm(dim=1, keepdim=True)

    def losses(self) -> torch.Tensor:
        return torch.ones(len(self.rows), dtype=torch.float64)

    def tokens(self) -> torch.Tensor:
        return self.losses()

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        return [(factors.double() * self.rows).sum(dim=0)]

    def matrix(self) -> torch.Tensor:
        return self.rows


def dptune_step(parameters: int) -> Callable[[Any], NDArray[Any]]:
    mechanism = build("static", {"noise_multiplier": 1.0})
    mechanism.start(RunFacts((parameters,), torch.device("cpu"), 1.0, 0.1, 2, None, 1e-5))
    noise = FixedSeed(2)

    def step(gradients: Any) -> NDArray[Any]:
        parts = [Dense(one) for one in (gradients if isinstance(gradients, list) else [gradients]) if len(one)]
        zeros = [torch.zeros(parameters, dtype=torch.float64)]
        released = mechanism.privatise(parts, zeros, mechanism.knobs(), 16.0, noise)
        return torch.cat([one.flatten() for one in released.blocks]).numpy()

    return step


@pytest.mark.one_case
@pytest.mark.parametrize("parts", [1, 2])
def test_the_step_of_dptune_is_not_accused(parts: int) -> None:
    found, verdict = audited(dptune_step(128), 1500, micro_batches=parts)
    assert verdict.accusation is None
    assert found.mu_audited > 0.4


def opacus_loops() -> Any:
    return pytest.importorskip("opacus", reason="Opacus is not installed") and __import__("opacus_loops")


STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hooks": ({}, {}),
    "functorch": ({"mode": "functorch"}, {}),
    "ghost": ({"mode": "ghost"}, {}),
    "without Poisson": ({"poisson": False}, {"absent": "zeroed"}),
    "accumulated": ({}, {"micro_batches": 2}),
    "accumulated ghost": ({"mode": "ghost"}, {"micro_batches": 2}),
}


@pytest.mark.parametrize("kind", ["hooks", *(pytest.param(kind, marks=pytest.mark.long) for kind in [*STEPS][1:])])
def test_the_step_of_opacus_is_not_accused(kind: str) -> None:
    made, options = STEPS[kind]
    found, verdict = audited(opacus_loops().opacus_step(**made), 700, parameters=1024, **options)
    assert verdict.accusation is None
    assert found.mu_audited > 0.2


@pytest.mark.long
def test_the_step_of_opacus_with_less_noise_than_claimed_is_accused() -> None:
    assert audited(opacus_loops().opacus_step(noise=0.5), 1000, parameters=1024)[1].accusation is not None


@pytest.mark.long
def test_ghost_clipping_with_a_loss_that_is_a_mean_is_accused() -> None:
    """Opacus then takes one loss for that of each record, and clips nothing as it should."""
    module = opacus_loops()
    step = module.opacus_step("ghost", criterion=module.MeanAlone())
    assert audited(step, 500, parameters=1024)[1].accusation is not None


@pytest.mark.long
@pytest.mark.parametrize(("package", "step"), [("transformers", "trainer_step"), ("trl", "sft_step")])
def test_the_step_of_a_trainer_is_not_accused(package: str, step: str, tmp_path: Path) -> None:
    module = opacus_loops()
    pytest.importorskip(package, reason=f"{package} is not installed")
    found, verdict = audited(getattr(module, step)(tmp_path), 600, parameters=1024)
    assert verdict.accusation is None
    assert found.mu_audited > 0.2


# The command.

CODE = """
import numpy as np
noise = np.random.default_rng()

def step(gradients):
    print("a step speaks")
    clipped = gradients / np.maximum(1, np.linalg.norm(gradients, axis=1, keepdims=True))
    return clipped.sum(axis=0) + noise.normal(size=gradients.shape[1])

def unclipped(gradients):
    return gradients.sum(axis=0) + noise.normal(size=gradients.shape[1])

def short(gradients):
    return step(gradients)[:-1]

def nothing(gradients):
    pass

def no_number(gradients):
    return step(gradients) / (len(gradients) and np.nan or 1)

def fails(gradients):
    raise ValueError("no batch today.")

def ends(gradients):
    raise SystemExit(3)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "broken_loop.py").write_text("import nothing_like_this\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def command(name: str, *options: str) -> Result:
    given = ("--trials", "500", "--set", "parameters=32", "--false-alarms", "1e-4")
    return CliRunner().invoke(app, ["audit", name, *given, *options])


def test_the_command_prints_bounds_and_what_could_be_refuted(folder: Path) -> None:
    done = command(f"{MODULE}:step", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)  # what the step prints is elsewhere
    assert found["function"] == f"{MODULE}:step"
    assert found["mu_claimed"] == found["noise_multiplier"] == found["max_grad_norm"] == 1
    assert not any("certified" in key for key in found), "a claim is no certificate"
    assert "is refuted in 19 of 20 audits" in found["power"]
    assert "a step speaks" in done.stderr
    assert "--whole-run: True" in command(f"{MODULE}:step", "--whole-run").stderr
    assert "Not accused" in command(f"{MODULE}:step").stdout


#: A fifth of the claimed noise: of 25 audits with 500 trials two miss it.
NOT_FIVE = ("--set", "noise_multiplier=5", "--trials", "2000")


def test_the_command_accuses_with_status_1(folder: Path) -> None:
    for name, options in ((f"{MODULE}:unclipped", ()), (f"{MODULE}:step", NOT_FIVE)):
        done = command(name, *options)
        assert done.exit_code == 1
        assert "Accused: the attack shows mu >=" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no_such_loop:step", (), "module no_such_loop cannot be imported (ModuleNotFoundError: No module"),
        ("broken_loop:step", (), "broken_loop cannot be imported (ModuleNotFoundError at broken_loop.py, line "),
        (f"{MODULE}:stop", (), f"module {MODULE} has no stop. Fix: write a name that the module defines"),
        (f"{MODULE}:number", (), "is a int, which cannot be called"),
        (
            f"{MODULE}:",
            (),
            "is not of the form MODULE:NAME. Fix: write the module as in `import`, a colon, and the name",
        ),
        (f"{MODULE}.step", (), f"colon, and the name in it: {MODULE}:step"),
        (f"a.{MODULE}.step", (), f"colon, and the name in it: a.{MODULE}:step"),
        (f"{MODULE}:short", (), "returned an array of shape (31,) instead of 32 numbers on a batch of"),
        (f"{MODULE}:nothing", (), "returned a NoneType instead of 32 numbers"),
        (f"{MODULE}:no_number", (), "returned nan on a batch of 1"),
        (f"{MODULE}:fails", (), "raised ValueError on a batch of 1"),
        (f"{MODULE}:ends", (), "raised SystemExit on a batch of 1"),
        (f"{MODULE}:step", ("--set", "clip=2"), "clip: a step of your own has no such option. Fix: use one of noise_"),
        (f"{MODULE}:step", ("--set", "noise_multiplier=0"), "noise_multiplier: 0.0 is not above 0"),
        (f"{MODULE}:step", ("--steps", "2"), "--steps: 2: MODULE:FUNCTION is audited on one batch"),
        (f"{MODULE}:step", ("--sample-rate", "0.5"), "leave it out; `dptune audit-draw` tests how batches are drawn"),
        (f"{MODULE}:step", ("--trials", "5"), "trials: 5 is below 500"),
    ],
)
def test_what_is_no_step_is_refused_in_the_last_line(
    folder: Path, name: str, options: tuple[str, ...], words: str
) -> None:
    done = command(name, *options)
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]
    assert words in last
    assert ". Fix: " in last
