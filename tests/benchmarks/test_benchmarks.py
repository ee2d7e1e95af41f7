"""The benchmarks run, peers compute what we compute, and no figure appears that was not measured.

No ratio is asserted: machines differ, and neighbours.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import cells, gpu, projection, report, speed
from benchmarks.measure import Deadline, Effort, Line, Results, Stopwatch, machine, measure, peak_memory
from benchmarks.shapes import Setting, Shape
from benchmarks.steps import ENTRIES, MECHANISM_LINES, STEPS, Contender, clipped_gradients, disagreement
from dptune.mechanisms.registry import MECHANISMS

# Of Opacus, whose first layer has no input to differentiate.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

CPU = torch.device("cpu")
TINY = Setting(Shape("tiny GPT-2", batch=4, tokens=16, physical=2), CPU)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder, verbosity = tmp_path_factory.mktemp("gpu"), transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        gpu.main(["--dry-run", "--shape", "8x24", "--output", str(folder)])
    transformers.logging.set_verbosity(verbosity)
    return Results.read([folder / "gpu.json"])


@pytest.mark.long
def test_the_dry_run_measures_every_line(dry_run: Results) -> None:
    measured = {(line.table, line.shape, line.contender) for line in dry_run.lines if line.seconds or line.failed}
    shapes = [f"tiny {kind} 8x24" for kind in ("GPT-2 float32", "GPT-2 bfloat16", "Llama bfloat16")]
    steps = {("steps", shape, one.name) for shape in shapes for one in (*STEPS, gpu.POISSON)}
    mechanisms = {("mechanisms", shapes[0], name) for name in ENTRIES}
    assert measured == steps | mechanisms | {("cells", shapes[0], name) for name in (cells.APART, cells.TOGETHER)}


def test_every_line_has_figures(dry_run: Results) -> None:
    pytest.importorskip("opacus")
    assert {line.contender: line.failed for line in dry_run.lines if line.failed} == {}


def test_every_mechanism_is_measured() -> None:
    """But for dp_lora_fed, whose step is a round of local training."""
    assert {one.name for one in MECHANISM_LINES} == set(MECHANISMS) - {"dp_lora_fed"} | {"rldp_ab"}


@pytest.mark.parametrize("model", ["tiny GPT-2", "tiny Llama", "default"])
def test_clipped_gradients_agree(model: str) -> None:
    pytest.importorskip("opacus")
    gradients = clipped_gradients(Setting(Shape(model, batch=4, tokens=16, physical=2), CPU))
    assert set(gradients) == {"dptune static", "Opacus hooks", "Opacus ghost"}
    assert gradients["dptune static"].norm() > 0
    assert disagreement(gradients) < 1e-3


def test_without_opacus_its_lines_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.steps.importlib.util.find_spec", lambda name: None)
    results = Results(tmp_path / "results.json", {})
    measure("steps", TINY, STEPS, Effort(rounds=1, steps=1, memory=0), results, Deadline(5))
    assert {line.contender: line.failed for line in results.lines if line.failed} == {
        "Opacus hooks": "opacus is not installed",
        "Opacus ghost": "opacus is not installed",
    }
    speed.check_peers(TINY, results)
    assert results.notes == {}


def test_a_line_without_figures_shows_the_reason_and_no_number() -> None:
    results = Results(None, machine(CPU))
    for name, seconds, failed in [("plain", [1.0, 2.0], ""), ("ours", [1.5, 2.0], ""), ("other", [], "cannot")]:
        line = results.line("steps", TINY, name, "plain")
        line.seconds, line.failed = seconds, failed
    text = report.tables(results)
    assert "| plain | 1 | 1500 |" in text
    assert "| ours | **1.25** (1.00 to 1.50) | 1750 |" in text
    assert "| other | cannot |  |  |  |  |" in text


def test_a_round_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", machine(CPU))
    measure("steps", TINY, STEPS, Effort(rounds=1, steps=1), results, Deadline(0))
    assert not any(line.seconds for line in results.lines)
    assert "not enough time" in report.tables(results)
    assert "not enough time" in json.loads((tmp_path / "results.json").read_text())["lines"][0]["failed"]


def test_a_failure_of_ours_is_not_hidden() -> None:
    def fails(*_: object) -> dict[str, float]:
        raise ValueError("broken")

    plain = STEPS[0]
    for foreign in (True, False):
        results = Results(None, {})
        contenders = [plain, Contender("broken", fails, foreign=foreign)]
        if foreign:
            measure("steps", TINY, contenders, Effort(1, steps=1, memory=0), results, Deadline(5))
            assert results.lines[1].failed == "ValueError: broken"
        else:
            with pytest.raises(ValueError, match="broken"):
                measure("steps", TINY, contenders, Effort(1, steps=1, memory=0), results, Deadline(5))


def test_several_files_are_one_table_and_the_later_line_counts(tmp_path: Path) -> None:
    for name, seconds in [("a", 1.0), ("b", 2.0)]:
        results = Results(tmp_path / name, machine(CPU))
        results.line("steps", TINY, "plain", "plain").seconds = [seconds]
        results.line("steps", TINY, name, "plain").seconds = [seconds]
        results.save()
    merged = Results.read([tmp_path / "a", tmp_path / "b"])
    assert [(line.contender, line.seconds) for line in merged.lines] == [("plain", [2.0]), ("a", [1.0]), ("b", [2.0])]


def test_two_machines_are_not_one_table(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Results(tmp_path / name, machine(CPU) | {"kind": name}).save()
    with pytest.raises(SystemExit, match="different machines"):
        Results.read([tmp_path / "a", tmp_path / "b"])


def test_the_readme_has_a_place_for_both_and_keeps_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    original = (Path(report.__file__).parent / "README.md").read_text(encoding="utf-8")
    readme.write_text(original, encoding="utf-8")
    results = Results(None, machine(CPU))
    for name in ("plain", "dptune static"):
        results.line("steps", TINY, name, "plain").seconds = [1.0, 1.0]
    for section in ("speed", "gpu"):
        report.write_readme(results, section, readme)
        report.write_readme(results, section, readme)
        assert (tmp_path / f"{section}.png").stat().st_size > 0
    text = readme.read_text(encoding="utf-8")
    assert text.count("tiny GPT-2 float32 4x16") == 2
    assert text.split("<!-- gpu: end -->")[1] == original.split("<!-- gpu: end -->")[1]


def test_the_stopwatch_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 16.0])
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(now))
    watch = Stopwatch(CPU, warmup=2, steps=3)
    for _ in range(5):
        watch()
    assert watch.seconds == 2.0


def test_no_name_of_the_host_is_told() -> None:
    import platform

    assert platform.node() not in json.dumps(machine(CPU)) or not platform.node()


def test_cells_are_whole_runs_and_a_failing_one_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(rate > 0 for rate in cells.cells_per_hour(TINY, steps=2, warmup=1))
    monkeypatch.setattr(cells, "train_together", lambda base, runs: [MemoryError()] * len(runs))
    with pytest.raises(MemoryError):
        cells.cells_per_hour(TINY, steps=2, warmup=1)


@pytest.mark.long
def test_memory_is_that_of_a_process_of_its_own() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not tell")
    memory = peak_memory(Setting(Shape("default", batch=8, tokens=64, physical=8), CPU), STEPS[0])
    assert memory is not None
    assert 1 < memory < 2000


def line(shape: str, contender: str, seconds: float, batch: int) -> Line:
    return Line("steps", shape, batch, contender, "plain", [seconds])


def test_a_projection_says_of_each_line_how_it_is_known(tmp_path: Path) -> None:
    lines = [
        line("GPT-2-small bfloat16 16x128", "dptune static", 0.016, 16),
        line("GPT-2-small bfloat16 16x128", "plain", 0.001, 16),
        line("Llama-3.2-1B bfloat16 16x128", "dptune static", 0.16, 16),
    ]
    results = Results(tmp_path / "gpu.json", machine(CPU), {}, lines)
    found = {
        what.split(",")[1].strip().split(":")[0]: (hours, how)
        for what, hours, how in projection.rows(projection.measured(results))
        if "grid" in what
    }
    assert list(found) == list(projection.PARAMETERS)
    # 400 runs of 3 epochs of 73,271 records of 1 ms, four times as wide.
    assert found["GPT-2-small"][0] == pytest.approx(400 * 3 * 73_271 * 0.001 * 4 / 3600)
    assert found["Mistral-7B"][0] == pytest.approx(found["Llama-3.2-1B"][0] * 7.24 / 1.24)
    assert "parameters" in found["Mistral-7B"][1]
    assert "parameters" not in found["GPT-2-small"][1]
    text = projection.table(results)
    assert text.count("| measured |") == 2  # the plain step is no private one
    assert text.count("| computed") == len(found) + 2
