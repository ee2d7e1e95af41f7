"""One cell, from its specification to its result; killed anywhere, it ends with exactly its plan."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_pipeline import BUDGET, STEPS, UNITS, figures, mode, nonprivate, read_json, run_stages, static

from dptune.core import settings
from dptune.core.errors import ConfigError, DataError, DivergedError, DptuneError
from dptune.core.files import locked
from dptune.job.result import RunResult
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.calibration import sampling
from dptune.privacy.entropy import FIXED_SEED_LEAK, FixedSeed
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import spending_of
from dptune.records.parquet_file import read_records
from dptune.training import evaluation
from dptune.training import run as running
from dptune.training.data import Tokens, plain_ids, with_context
from dptune.training.evaluation import perplexity
from dptune.training.models.model import ModelSource, load_base, load_tokenizer
from tasks.experiment import cell_training, finetune, quality
from tasks.experiment import preparation as job
from tasks.experiment.cell_training import check_converged
from tasks.experiment.cells import Cell, digests
from tasks.experiment.finetune import main, run_cell
from tasks.paths import EVAL, RUNS, TOKENS, TRAIN, planted_secrets
from tasks.report.claims import GUARANTEE
from tasks.stage import run_stage

KEYS = {
    "code",
    "label", "model", "model_about", "mechanism", "budget_epsilon", "seed", "unit", "units", "delta", "accounting",
    "telemetry",
    "guarantee", "data", "public_data", "synthetic", "noise_multiplier", "sample_rate", "releases", "planned_releases",
    "epsilon_published", "epsilon_noise_only", "epsilon_certified", "leaks", "before", "after", "history", "pairs",
    "knobs", "seconds", "crafted", "loss_groups", "adapter_sha256", "agent", "learning",
    "device", "together", "set_aside", "task",
}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three records: the tiny pipeline has too few for groups of ten."""
    monkeypatch.setattr(evaluation, "_LEAST_IN_A_GROUP", 3)


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for every noisy value that was made."""
    made: list[int] = []
    real = Mechanism.privatise

    def privatise(self: Mechanism, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Mechanism, "privatise", privatise)
    return made


def check_finished(cell: Cell, result: dict[str, Any], steps: int = STEPS) -> None:
    """Ledger, result file and returned result say the same; nothing of the run's making is left."""
    contents = read_ledger(cell.directory / "ledger.jsonl")
    assert contents.complete
    assert contents.releases == result["releases"] == steps
    for name, value in (
        ("epsilon_published", contents.epsilons.published),
        ("epsilon_noise_only", contents.epsilons.noise_only),
        ("epsilon_certified", contents.epsilons.certified),
    ):
        assert float(result[name]) == value
    assert set(result) == KEYS
    assert read_json(cell.directory / "result.json") == json.loads(json.dumps(result))
    names = {path.name for path in cell.directory.iterdir()} - {"cell.json", "booking.json", "mlflow_run", "lock"}
    assert names == {"ledger.jsonl", "result.json", "adapter", "history.jsonl", "knobs.jsonl", "curves.png"}


@pytest.mark.usefixtures("pipeline")
def test_the_curves_are_a_picture() -> None:
    result = {
        "label": "x",
        "model": "small",
        "mechanism": "static",
        "synthetic": True,
        "history": [{"releases": 2, "public_perplexity": 3.0}],
    }
    cell_training.draw_curves([result], Path("curves.png"))
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_private_cell_keeps_its_budget_and_says_so(pipeline: Path, noisy: list[int]) -> None:
    cell = static()
    result = run_cell(cell, "cpu")
    check_finished(cell, result)
    assert len(noisy) == STEPS
    assert 0.9 * BUDGET < result["epsilon_certified"] <= cell.epsilon == result["budget_epsilon"] == BUDGET
    assert result["epsilon_published"] < result["epsilon_certified"] == result["epsilon_noise_only"]
    assert result["leaks"] == []
    assert result["units"] == UNITS
    assert result["sample_rate"] == 16 / UNITS
    assert result["synthetic"] is True
    assert "SYNTHETIC" in result["data"]
    assert result["telemetry"] == "research"
    assert result["guarantee"] == GUARANTEE["research"]
    assert "NOT the curves" in result["guarantee"]
    assert set(result["before"]) == set(result["after"]) == {"public_perplexity", "eval_perplexity"}
    for name, groups in result["loss_groups"].items():
        losses, counts = (sum(column) for column in zip(*groups, strict=True))
        assert math.exp(losses / counts) == pytest.approx(result["after"][name])
    assert set(result["loss_groups"]) == set(result["after"])
    assert [point["releases"] for point in result["history"]] == [0, 2, 4]
    assert result["history"][0]["epsilon_certified"] == 0
    assert result["history"][1]["epsilon_certified"] < result["history"][2]["epsilon_certified"]
    assert result["history"][-1]["epsilon_certified"] == result["epsilon_certified"]
    header = read_ledger(cell.directory / "ledger.jsonl").header
    assert (header.unit, header.units, header.telemetry, header.delta) == ("record", UNITS, "research", 1e-5)
    assert "SYNTHETIC" in header.data
    assert {oct(mode(cell.directory / name)) for name in ("ledger.jsonl", "result.json")} == {"0o600"}
    assert mode(cell.directory) == 0o700


def test_curves_end_where_a_run_ends_that_used_its_budget_up_early(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a controller's run does that lowers the noise; its last releases once had no point."""
    real = running.Run.begin

    def begin(self: running.Run) -> Any:
        if self.ledger.releases < STEPS - 1:
            return real(self)
        self.save()
        return None

    monkeypatch.setattr(running.Run, "begin", begin)
    result = run_cell(static(), "cpu")
    assert result["releases"] == STEPS - 1
    assert [point["releases"] for point in result["history"]] == [0, 2, 3]
    assert result["history"][-1]["epsilon_certified"] == result["epsilon_certified"]


def test_the_adapter_loads_with_peft_and_is_what_was_measured(pipeline: Path) -> None:
    cell = nonprivate()
    result = run_cell(cell, "cpu")
    check_finished(cell, result)
    assert result["epsilon_certified"] == result["epsilon_published"] == "inf"
    assert result["guarantee"].startswith("No guarantee: ")
    assert result["budget_epsilon"] is None
    base = ModelSource(cell.model.source)
    loaded = PeftModel.from_pretrained(load_base(base, torch.device("cpu")), str(cell.directory / "adapter"))
    assert not list((cell.directory / "adapter").glob("*.bin"))
    tokens = job.corpus_of(cell, EVAL, load_tokenizer(base)).tokens
    assert perplexity(loaded, tokens, 32) == pytest.approx(result["after"]["eval_perplexity"], rel=1e-5)
    assert result["after"]["eval_perplexity"] != result["before"]["eval_perplexity"]


def test_a_checkpoint_that_a_killed_process_left_half_written_is_removed(pipeline: Path) -> None:
    cell = static()
    cell.directory.mkdir(parents=True)
    torn = cell.directory / ".checkpoint.safetensors.15530.partial"
    torn.write_bytes(b"half")
    run_cell(cell, "cpu")
    assert not torn.exists()


def test_a_finished_cell_is_not_run_again(pipeline: Path, noisy: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = static()
    first = run_cell(cell, "cpu")
    before = {path: path.read_bytes() for path in cell.directory.rglob("*") if path.is_file()}
    monkeypatch.setattr(cell_training, "prepare", lambda *_: pytest.fail("prepared again"))
    assert run_cell(cell, "cpu") == json.loads(json.dumps(first))
    assert len(noisy) == STEPS
    assert {path: path.read_bytes() for path in cell.directory.rglob("*") if path.is_file()} == before


CRASHES: dict[str, tuple[Any, str, int]] = {
    "before the first step": (cell_training, "train", 1),
    "before the first charge": (Ledger, "charge", 1),
    "before the third charge": (Ledger, "charge", 3),
    "after a charge, before its noise": (Mechanism, "privatise", 3),
    "in an optimiser step": (running, "_apply", 3),
    "at the checkpoint before all charges": (running, "save_checkpoint", 1),
    "at the first checkpoint of a step": (running, "save_checkpoint", 2),
    "at the last checkpoint": (running, "save_checkpoint", 3),
    "when the weights are checked": (running, "assert_trained", 1),
    "when the adapter is saved": (cell_training, "write_adapter", 1),
    "when the ledger is priced": (cell_training, "result_of", 1),
    "when the result is written": (RunResult, "write", 1),
    "when the curves are drawn": (cell_training, "draw_curves", 1),
    "before the last line": (Ledger, "finish", 1),
    "after the last line": (finetune, "publish", 1),
}


def crash(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Let the ``call``-th call of owner.name raise, once."""
    real, calls = getattr(owner, name), []

    def once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, once)


@pytest.mark.one_case(
    "after a charge, before its noise",
    "in an optimiser step",
    "at the checkpoint before all charges",
    "when the adapter is saved",
    "before the last line",
)
@pytest.mark.parametrize(("owner", "name", "call"), CRASHES.values(), ids=CRASHES.keys())
def test_a_crash_anywhere_is_mended_by_running_again(
    pipeline: Path,
    noisy: list[int],
    opened: list[Ledger],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
) -> None:
    cell, ledger = static(), static().directory / "ledger.jsonl"
    crash(monkeypatch, owner, name, call)
    with pytest.raises(Killed):
        run_cell(cell, "cpu")
    for one in opened:
        one.close()
    charged = read_ledger(ledger).releases if ledger.exists() else 0
    assert charged >= len(noisy)
    result = run_cell(cell, "cpu")
    assert len(noisy) <= STEPS
    check_finished(cell, result)
    assert result["epsilon_certified"] <= BUDGET


def test_crashes_in_a_row_never_release_more_than_the_plan(
    pipeline: Path, noisy: list[int], opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static({"training": {"epochs": 0.8}})
    steps = 9
    for place in ((Mechanism, "privatise", 2), (running, "_apply", 1), (running, "save_checkpoint", 2)):
        with monkeypatch.context() as patch:
            crash(patch, *place)
            with pytest.raises(Killed):
                run_cell(cell, "cpu")
        for one in opened:
            one.close()
        assert read_ledger(cell.directory / "ledger.jsonl").releases >= len(noisy)
    check_finished(cell, run_cell(cell, "cpu"), steps)
    assert len(noisy) <= steps


def test_a_budget_spent_before_any_checkpoint_is_said_clearly(
    pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights exist and none may be made: running again cannot mend it, so it is the user's error."""
    cell = static({"training": {"checkpoint_every": 50}})
    with monkeypatch.context() as patch:
        crash(patch, running, "save_checkpoint", 2)
        with pytest.raises(Killed):
            run_cell(cell, "cpu")
    for one in opened:
        one.close()
    with pytest.raises(DptuneError, match="Fix: "):
        run_cell(cell, "cpu")
    assert read_ledger(cell.directory / "ledger.jsonl").releases == STEPS
    assert not (cell.directory / "adapter").exists()


def test_a_torn_last_line_is_mended_and_a_torn_middle_refused(
    pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static()
    ledger = cell.directory / "ledger.jsonl"
    with monkeypatch.context() as patch:
        crash(patch, running, "_apply", 3)
        with pytest.raises(Killed):
            run_cell(cell, "cpu")
    for one in opened:
        one.close()
    whole = ledger.read_bytes()
    ledger.write_bytes(whole.replace(b'"step":1', b'"step":7'))
    with pytest.raises(DptuneError, match=r"ledger\.jsonl, line 3"):
        run_cell(cell, "cpu")
    ledger.write_bytes(whole + b'{"kind":"rel')
    check_finished(cell, run_cell(cell, "cpu"))


def test_a_patient_is_the_unit_end_to_end(pipeline: Path) -> None:
    change = {"data": {"unit": "patient"}, "training": {"records_per_unit": 2}}
    run_stages(change, pretrained=False)
    cell = static(change)
    result = run_cell(cell, "cpu")
    patients = len(set(read_records(TRAIN).unit))
    assert patients < len(read_records(TRAIN).record)
    assert (result["unit"], result["units"]) == ("patient", patients)
    assert result["sample_rate"] == 16 / patients
    assert read_ledger(cell.directory / "ledger.jsonl").header.unit == "patient"
    assert result["epsilon_certified"] <= BUDGET
    check_finished(cell, result, sampling(patients, 16, 0.35)[1])


def test_published_accounting_keeps_the_papers_budget_and_shows_the_price(pipeline: Path) -> None:
    cell = static({"experiment": {"accounting": "published"}})
    result = run_cell(cell, "cpu")
    check_finished(cell, result)
    assert 0.9 * BUDGET < result["epsilon_published"] <= BUDGET < result["epsilon_certified"]
    assert result["accounting"] == "published"
    sound = static()
    assert sound.directory != cell.directory
    assert run_cell(sound, "cpu")["noise_multiplier"] > result["noise_multiplier"]


def test_a_multiplier_in_the_entry_is_not_calibrated_but_still_kept_within_the_budget(pipeline: Path) -> None:
    enough = static({"mechanisms": {"static": {"noise_multiplier": 6.0}}, "experiment": {"mechanisms": ["static"]}})
    # ``takes_noise`` is about the entry's noise, so the cell keeps its budget.
    result = run_cell(enough, "cpu")
    assert result["noise_multiplier"] == 6.0
    assert result["epsilon_certified"] < BUDGET
    little = static({"mechanisms": {"static": {"noise_multiplier": 0.5}}})
    with pytest.raises(DptuneError, match="budget"):
        run_cell(little, "cpu")
    assert not (little.directory / "ledger.jsonl").exists()
    free = static({"mechanisms": {"static": {"noise_multiplier": 0.5, "epsilons": []}}})
    assert free.epsilon is None, "an empty list takes the budget away"


def test_a_fixed_seed_is_refused_under_certified_accounting(pipeline: Path) -> None:
    with pytest.raises(ConfigError, match="certified is refused"):
        run_cell(static(), "cpu", entropy=FixedSeed(1))
    cell = static({"experiment": {"accounting": "published"}})
    result = run_cell(cell, "cpu", entropy=FixedSeed(1))
    assert result["epsilon_certified"] == "inf"
    assert result["leaks"] == [FIXED_SEED_LEAK]


ALLOWED = {
    "crafted", "together",
    "units", "delta", "seed", "budget_epsilon", "noise_multiplier", "sample_rate", "releases",
    "epsilon_published", "epsilon_noise_only", "epsilon_certified", "before.public_perplexity",
    "after.public_perplexity", "history.public_perplexity", "history.step", "history.releases",
    "history.epsilon_published", "history.epsilon_noise_only", "history.epsilon_certified",
    "planned_releases", "knobs.releases", "knobs.noise_multiplier", "knobs.radius_0", "loss_groups.public_perplexity",
}  # fmt: skip


def test_private_telemetry_writes_nothing_computed_from_private_records(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured: list[int] = []
    raw: list[float] = []
    real_perplexity, real_train = quality.MEASURES["perplexity"], cell_training.train

    def spy(model: Any, tokens: Any, *args: Any, **kwargs: Any) -> float:
        measured.append(len(tokens.rows))
        return float(real_perplexity(model, tokens, *args, **kwargs))

    def spy_in_groups(model: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        measured.append(len(tokens.rows))
        return evaluation.perplexity_in_groups(model, tokens, *args, **kwargs)

    def train(spec: Any, directory: Any, entropy: Any, on_step: Callable[..., None], ranks: Any) -> Any:
        def observe(report: running.StepReport) -> None:
            # A figure of few digits, such as a share of 0.2, may stand in a file as a part of another figure.
            raw.extend(value for value in report.private.values() if len(repr(value)) > 8)
            on_step(report)

        return real_train(spec, directory, entropy, observe, ranks)

    monkeypatch.setitem(quality.MEASURES, "perplexity", spy)
    monkeypatch.setattr(cell_training, "perplexity_in_groups", spy_in_groups)
    monkeypatch.setattr(cell_training, "train", train)
    cell = static({"experiment": {"telemetry": "private"}, "training": {"max_length": 32, "evaluate_records": 1000}})
    result = run_cell(cell, "cpu")
    check_finished(cell, result)
    assert set(measured) == {20}, "only the public validation set is measured"
    assert len(raw) >= STEPS
    written = figures(result)
    assert set(written) <= ALLOWED
    text = "".join(path.read_text() for path in cell.directory.glob("*.json*"))
    assert not [value for value in raw if repr(value) in text]
    assert result["guarantee"] == GUARANTEE["private"]
    assert set(result["loss_groups"]) == {"public_perplexity"}
    assert read_ledger(cell.directory / "ledger.jsonl").header.telemetry == "private"
    points = [json.loads(line) for line in (cell.directory / "history.jsonl").read_text().splitlines()]
    assert all(set(point) <= {key.removeprefix("history.") for key in ALLOWED} for point in points)
    assert "were cut" not in caplog.text, "how many private records are long is a private figure"


def test_held_out_records_without_a_token_that_counts_end_no_cell(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a cell ends can be seen by people who see no figure of held-out records; so it is for ``dptune tune``."""
    real = cell_training.prepare

    def prepare(*given: Any) -> Any:
        prepared = real(*given)
        rows = [with_context(plain_ids(row), np.zeros(len(row), bool)) for row in prepared.evaluation.rows]
        return replace(prepared, evaluation=replace(prepared.evaluation, rows=rows))

    monkeypatch.setattr(cell_training, "prepare", prepare)
    cell = static()
    result = run_cell(cell, "cpu")
    check_finished(cell, result)
    assert cell.telemetry == "research"
    for measured in (result["before"], result["after"], *result["history"]):
        assert [name for name in measured if "perplexity" in name] == ["public_perplexity"]


@pytest.mark.parametrize(("most", "expected"), [(4, [0, 3, 6, 9]), (10, list(range(10))), (99, list(range(10)))])
def test_final_figures_take_records_from_all_over_the_file(most: int, expected: list[int]) -> None:
    tokens = Tokens([np.array([number], dtype=np.int32) for number in range(10)], padding=0, width=3)
    assert [int(row[0]) for row in quality.spread(tokens, most).rows] == expected
    assert quality.spread(tokens, None).rows == tokens.rows


def test_private_telemetry_is_refused_where_it_cannot_hold(pipeline: Path) -> None:
    """Without noise, whatever is measured of the model is as private as the records."""
    cell = nonprivate({"experiment": {"telemetry": "private"}})
    with pytest.raises(
        ConfigError,
        match=r"experiment\.telemetry: private cannot hold for nonprivate: gradients without noise \(small\.nonprivate",
    ):
        run_cell(cell, "cpu")
    seeded = static({"experiment": {"telemetry": "private", "accounting": "published"}})
    with pytest.raises(ConfigError, match=r"experiment\.telemetry"):
        run_cell(seeded, "cpu", entropy=FixedSeed(1))
    assert not list(RUNS.rglob("ledger.jsonl"))


def test_a_cell_whose_inputs_changed_is_refused(pipeline: Path) -> None:
    cell = static()
    EVAL.write_bytes(EVAL.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"cell\.inputs"):
        run_cell(cell, "cpu")
    assert not (cell.directory / "ledger.jsonl").exists()


def test_a_missing_input_is_named(pipeline: Path) -> None:
    cell = static()
    TRAIN.unlink()
    with pytest.raises((DataError, FileNotFoundError), match=r"train\.parquet"):
        run_cell(cell, "cpu")


def test_a_model_that_is_not_there_is_named(pipeline: Path) -> None:
    cell = static()
    missing = cell.model_copy(update={"model": cell.model.model_copy(update={"source": "data/models/none"})})
    missing = missing.model_copy(update={"inputs": digests(missing.model, missing.options)})
    with pytest.raises(ConfigError, match="data/models/none"):
        run_cell(missing, "cpu")


def ended_with(cell: Cell, capsys: pytest.CaptureFixture[str], device: str = "cpu") -> tuple[Any, str]:
    """Status and last line of a cell's own process, but for the process."""
    cell.directory.mkdir(parents=True, exist_ok=True)
    (path := cell.directory / "cell.json").write_text(cell.model_dump_json())
    with pytest.raises(SystemExit) as ended:
        run_stage(lambda: main([path], device=device))
    return ended.value.code, capsys.readouterr().err.strip().splitlines()[-1]


def test_a_layer_that_no_model_has_is_refused_before_anything_is_tokenised(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = static({"lora": {"target_modules": ["nosuch"]}})
    status, said = ended_with(cell, capsys)
    assert status == 2
    assert re.match(r"error: lora\.target_modules: no layer is called 'nosuch'\. Fix: name .*c_attn", said)
    assert not TOKENS.exists() or not any(TOKENS.iterdir())
    assert not (cell.directory / "ledger.jsonl").exists()


def test_a_device_that_is_not_there_is_named(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = ended_with(static(), capsys, device="cuda:99")
    assert status == 2
    assert re.match(r"error: device: 'cuda:99' cannot be used .* Fix: use cpu", said)


def test_a_folder_without_a_model_is_named(pipeline: Path) -> None:
    with pytest.raises(ConfigError, match=r"experiment\.models: '/etc' is not a model's folder"):
        static({"experiment": {"models": {"small": {"source": "/etc"}}}})


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"label": 1}'])
def test_a_bad_specification_ends_with_a_message(
    pipeline: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("cell.json")
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        run_stage(lambda: main([path]))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cell.json: is not a cell")
    assert "Traceback" not in error


def test_no_secret_reaches_the_cell_the_output_or_a_log(
    pipeline: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    cell = static()
    run_cell(cell, "cpu")
    captured = capfd.readouterr()
    texts = [text for path in (TRAIN, EVAL) for text in read_records(path).text.to_pylist() if text]
    secrets = [canary["secret"] for group in ("extraction", "audit") for canary in read_json(planted_secrets())[group]]
    places = {str(path): path.read_bytes() for path in cell.directory.rglob("*") if path.is_file()}
    places |= {"out": captured.out.encode(), "err": captured.err.encode(), "log": caplog.text.encode()}
    for name, content in places.items():
        assert not [word for word in (*secrets, *texts) if word.encode() in content], name


def test_a_cell_that_diverges_leaves_no_result(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that no setting allows; what was charged is counted as an unfinished run's."""
    for module in (settings, settings):
        monkeypatch.setattr(module, "check", lambda *_: None)
    cell = static()
    cell = cell.model_copy(update={"training": replace(cell.training, learning_rate=1e30)})
    with pytest.raises(DivergedError, match=r"(not finite|diverged).*Fix: lower training\.learning_rate"):
        run_cell(cell, "cpu")
    assert not (cell.directory / "result.json").exists()
    assert not read_ledger(cell.directory / "ledger.jsonl").complete
    spent = spending_of(cell.directory)
    assert spent is not None
    assert 0 < spent.epsilon <= BUDGET


def test_a_cell_that_diverged_fails_and_says_so() -> None:
    check_converged({"public_perplexity": 7.0, "eval_perplexity": math.inf}, "small.static.seed0")
    for worth in (math.inf, math.nan):
        with pytest.raises(DivergedError, match=r"^small.static.seed0: the run diverged: perplexity .*Fix: lower"):
            check_converged({"public_perplexity": worth}, "small.static.seed0")


def test_another_flow_waits_for_a_cell_under_way_and_finds_it_done(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static()
    run_cell(cell, "cpu")
    ledger = (cell.directory / "ledger.jsonl").read_bytes()
    with ExitStack() as first:
        first.enter_context(locked(cell.directory / "lock"))
        with pytest.raises(DptuneError, match="another process works on it"):
            finetune.run_cells([cell], "cpu")

        def waiting(path: Path, *, wait: bool = False) -> Any:
            assert wait
            first.close()  # the other process ends while this one waits
            return locked(path, wait=wait)

        monkeypatch.setattr(finetune, "locked", waiting)
        finetune.run_cells([cell], "cpu", wait=True)
    assert (cell.directory / "ledger.jsonl").read_bytes() == ledger
