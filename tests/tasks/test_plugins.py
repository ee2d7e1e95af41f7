"""Parts and sources from outside dptune: they train, are priced honestly, and are named in ledger and cell."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mechanism_steps import RATE, batch_of, observed, privatised, shift, started
from tiny_pipeline import ROOT, cells, write_params
from typer.testing import CliRunner

from dptune.audit.text import membership as own_scores_module
from dptune.audit.text.membership import own_scores
from dptune.cli import app
from dptune.core import plugins
from dptune.core.errors import ConfigError, DataError
from dptune.core.files import sha256
from dptune.mechanisms import registry
from dptune.mechanisms.descriptions import describe_options, describe_parts
from dptune.mechanisms.registry import CLIPPERS, MECHANISMS, build, takes_noise
from dptune.privacy.accountants import PUBLISHED_ACCOUNTANTS, epsilons, gdp_clt_epsilon, published_epsilon
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.records import catalogue
from dptune.records.parquet_file import read_records
from dptune.records.splits import keys_of
from dptune.training.loop import train
from tasks.audit import attacks as audit
from tasks.corpus.acquire import acquire
from tasks.corpus.verbalize import verbalize
from tasks.experiment.cell_list import renamed_runs
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.experiment.preparation import prepare, shared_inputs
from tasks.paths import NARRATIVES
from tasks.settings.params import load_settings

Write = Callable[[str, str], str]

PARTS = '''
from dataclasses import dataclass
import torch
from dptune.mechanisms.clippers.clipping import ByNorm
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import AdditiveNoise, Knobs
from dptune.mechanisms.noises.gaussian import rounded_sums, standard_normal
from dptune.mechanisms.registry import clipper, controller, mechanism, noise

@clipper("tight")
@dataclass(frozen=True)
class Tight(ByNorm):
    """g * C / (C + ||g||)."""
    def factors(self, norms, radius):
        return radius / (radius + norms)

@controller("shrinking")
@dataclass
class Shrinking(Constant):
    """Multiplies the radius after every release.

    Attributes:
        factor: by which.
    """
    factor: float = 0.5
    _releases: int = 0
    def knobs(self, initial):
        return Knobs((initial.radii[0] * self.factor**self._releases,), initial.noise_multiplier)
    def observe(self, observation):
        self._releases = observation.releases
    def state_dict(self):
        return {"releases": self._releases}
    def load_state_dict(self, state):
        self._releases = state["releases"]

@noise("normal")
@dataclass(frozen=True)
class Normal(AdditiveNoise):
    """Gaussian noise, written again.

    Attributes:
        noise_multiplier: deviation over the radius.
    """
    noise_multiplier: float
    family = "gaussian"
    def deviation(self, noise_multiplier):
        return noise_multiplier
    def add(self, sums, scales, noise_multiplier, entropy):
        sizes = [total.numel() for total in sums]
        normals = standard_normal(entropy, sum(sizes), sums[0].device).split(sizes)
        deviations = [noise_multiplier * scale for scale in scales]
        return rounded_sums(sums, normals, deviations, deviations)

@noise("secretive")
@dataclass(frozen=True)
class Secretive(Normal):
    """Says nothing of itself."""
    family = AdditiveNoise.family

mechanism("own", clipper="tight", noise="normal", controller="shrinking", clips="the whole gradient, smoothly")
'''


def _forget_imports() -> None:
    """As a new process would: an edit counts from the next import on."""
    plugins._IMPORTED.clear()
    plugins._distributions.cache_clear()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module that can be imported for the length of the test, and forget what it registers."""
    folder, written = tmp_path / "their code", []
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    len(CLIPPERS)  # dptune's own are to stay
    tables: list[Any] = [*registry.PARTS.values(), MECHANISMS]
    before = [(dict(table._values), dict(table._modules)) for table in tables]
    sources, scores = dict(catalogue.SOURCES), dict(own_scores_module._SCORES)

    def module(name: str, code: str) -> str:
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(code, encoding="utf-8")
        written.append(name)
        _forget_imports()
        return name

    yield module
    for table, (values, modules) in zip(tables, before, strict=True):
        table._values, table._modules = values, modules
    for table, values in ((catalogue.SOURCES, sources), (own_scores_module._SCORES, scores)):
        table.clear()
        table.update(values)
    for name in written:
        sys.modules.pop(name, None)
        sys.modules.pop(name.partition(".")[0], None)
    _forget_imports()


@pytest.fixture
def parts(write: Write) -> str:
    name = write("their_parts", PARTS)
    plugins.load([name])
    return name


def own_cell(**changes: Any) -> Cell:
    change = {"plugins": ["their_parts"], "mechanisms": {"own": {}}, "experiment": {"mechanisms": ["own"]}}
    (cell,) = cells(change, changes)
    return cell


def test_a_clipper_a_controller_and_a_noise_from_outside_train_a_cell_within_its_budget(
    pipeline: Path, write: Write
) -> None:
    write("their_parts", PARTS)
    cell = own_cell()
    assert cell.plugins == ("their_parts",)
    result = run_cell(cell, "cpu")
    assert result["leaks"] == []
    assert 0 < float(result["epsilon_certified"]) <= cell.epsilon
    radii = [row["radius_0"] for row in result["knobs"]]
    assert radii == pytest.approx([0.5**step for step in range(len(radii))])
    (named,) = read_ledger(cell.directory / "ledger.jsonl").header.plugins
    assert re.fullmatch(r"their_parts sha256:[0-9a-f]{16}", named)
    assert named in result["guarantee"]
    verified = CliRunner().invoke(app, ["verify", str(cell.directory / "ledger.jsonl")])
    assert f"Made with plug-in {named}" in verified.stdout


def test_a_cell_brings_the_code_of_its_mechanism_along(pipeline: Path, write: Write) -> None:
    """Other processes get the cell alone."""
    write("their_parts", PARTS)
    written = own_cell().model_dump_json()
    for name in ("own", "tight"):
        for table in (MECHANISMS, CLIPPERS):
            table._values.pop(name, None)
    del sys.modules["their_parts"]
    read = Cell.model_validate_json(written)
    assert build(read.mechanism, {"noise_multiplier": 1.0}).name == "own"


def test_an_edit_of_a_plug_in_moves_its_cells_and_no_others(pipeline: Path, write: Write) -> None:
    change = {"mechanisms": {"own": {}}, "experiment": {"mechanisms": ["static", "own"]}}
    without = {cell.mechanism: cell.directory for cell in cells()}
    write("their_parts", PARTS)
    before = {cell.mechanism: cell.directory for cell in cells(change, {"plugins": ["their_parts"]})}
    write("their_parts", PARTS + "\n# edited\n")
    after = {cell.mechanism: cell.directory for cell in cells(change, {"plugins": ["their_parts"]})}
    assert before["own"] != after["own"]
    assert without["static"] == before["static"] == after["static"]


def test_runs_of_another_plug_in_stop_no_cell_and_none_of_their_code_runs(pipeline: Path, write: Write) -> None:
    write("their_parts", PARTS)
    cell = own_cell()
    for module, code in (("gone", None), ("other_parts", PARTS)):
        earlier = cell.directory.with_name(f"{cell.label}-{module.ljust(8, 'x')[:8]}")
        earlier.mkdir(parents=True)
        if code:
            write(module, code)
        (earlier / "cell.json").write_text(cell.model_copy(update={"plugins": (module,)}).model_dump_json())
        (earlier / "ledger.jsonl").write_text('{"kind":"run"}\n')
        assert own_cell().directory == cell.directory
        assert list(renamed_runs([cell])) == []
        assert module not in sys.modules, "it would register other parts under the same names"


def test_a_run_does_not_go_on_with_other_code(pipeline: Path, write: Write) -> None:
    write("their_parts", PARTS)
    cell = own_cell()
    write("their_parts", PARTS + "\n# edited\n")
    with pytest.raises(ConfigError, match="plugins: changed"):
        run_cell(cell, "cpu")
    assert not (cell.directory / "ledger.jsonl").exists()


def test_a_header_that_does_not_name_its_plug_ins_is_refused(pipeline: Path, write: Write) -> None:
    write("their_parts", PARTS)
    cell = own_cell()
    spec = prepare(cell, shared_inputs(cell, torch.device("cpu")), OsEntropy()).spec
    header = replace(spec.header, plugins=())
    with pytest.raises(ConfigError, match=r"header\.plugins"):
        train(replace(spec, header=header), cell.directory, OsEntropy())


def test_a_ledger_without_plug_ins_says_nothing_of_them_and_one_with_them_reads_back() -> None:
    header = RunHeader("static", "gdp_clt", "certified", None, 1e-5, "record", 8)
    assert "plugins" not in header.to_dict()
    named = replace(header, plugins=("their_parts 1.0 sha256:0123",))
    for one in (header, named):
        assert RunHeader.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(ConfigError, match="not a list of names"):
        RunHeader.from_dict(named.to_dict() | {"plugins": "their_parts"})


SCORE = """
from dptune.audit.text.membership import score

@score("relative")
def relative(adapted, public):
    return (public - adapted) / (public + 1)
"""


def test_a_score_of_ones_own_stands_beside_the_others_in_an_audit(pipeline: Path, write: Write) -> None:
    plugins.load([write("their_score", SCORE)])
    (cell,) = cells({"experiment": {"mechanisms": ["nonprivate"]}})
    run_cell(cell, "cpu")
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    settings = load_settings().audit.model_copy(update={"step_trials": 0, "generations": 10})
    key = audit.audit_key(cell.directory, settings)
    found = audit.audit_cell(cell.directory, settings, "cpu")
    assert 0 <= found["membership"]["relative"]["auc"] <= 1
    write("their_score", SCORE + "# edited")
    assert audit.audit_key(cell.directory, settings) != key


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("public[:-1]", "not one finite number"),
        ("public * float('nan')", "not one finite"),
        ("None", "not one finite number"),
        ("nosuch", "NameError"),
        ("exit(0)", "SystemExit"),
        ("__import__('torch').ones(3).to('meta')", "failed"),
    ],
)
def test_a_score_that_is_none_is_named(write: Write, made: str, problem: str) -> None:
    plugins.load([write("their_score", SCORE.replace("(public - adapted) / (public + 1)", made))])
    with pytest.raises(DataError, match=f"their_score: score 'relative' .*{problem}"):
        own_scores(np.ones(3), np.ones(3))


def test_noise_that_names_a_proven_family_is_the_same_noise(parts: str) -> None:
    own, ours = started("static", noise="normal"), started("static")
    batch = [batch_of(torch.ones(3, 8))]
    assert own.release(own.knobs(), RATE) == ours.release(ours.knobs(), RATE)
    for mine, theirs in zip(privatised(own, batch).blocks, privatised(ours, batch).blocks, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("accountant", PUBLISHED_ACCOUNTANTS)
def test_noise_that_names_no_family_is_priced_infinite(parts: str, accountant: str) -> None:
    mechanism = started("static", noise="secretive", noise_multiplier=100.0)
    release = mechanism.release(mechanism.knobs(), RATE)
    prices = epsilons(Counter({release: 1}), 1e-5, published_accountant=accountant)
    assert (prices.published, prices.noise_only, prices.certified) == (math.inf,) * 3
    assert any("no bound is known" in leak for leak in prices.leaks)
    released = privatised(mechanism, [batch_of(torch.ones(3, 8))])
    assert released.deviations == (100.0,) * 3, "it is added all the same"
    assert type(release).from_dict(release.to_dict()) == release


def test_noise_that_names_no_family_has_no_multiplier_to_calibrate_and_runs_without_a_budget(
    pipeline: Path, write: Write
) -> None:
    write("their_parts", PARTS)
    cell = own_cell(mechanisms={"own": {"noise": "secretive", "noise_multiplier": 2.0}})
    assert not takes_noise("own", cell.options)
    assert cell.epsilon is None
    assert run_cell(cell, "cpu")["epsilon_certified"] == "inf"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('family = "gaussian"', 'family = "token"'), "unknown family 'token'"),
        (('family = "gaussian"', 'family = "laplace"'), "unknown family 'laplace'"),
        (("return noise_multiplier\n", "return noise_multiplier / 2\n"), "is called Gaussian, with deviation 0.5"),
        (('family = "gaussian"', 'family = "laplace_mixture"'), "does not go with its law None"),
    ],
)
def test_noise_cannot_name_what_the_accountants_do_not_know(
    write: Write, change: tuple[str, str], problem: str
) -> None:
    plugins.load([write("their_parts", PARTS.replace(*change))])
    with pytest.raises(ConfigError, match=problem):
        started("own")


def test_noise_that_overrides_what_is_added_must_name_its_family_again(write: Write) -> None:
    derived = """
@noise("uniform")
@dataclass(frozen=True)
class Uniform(Normal):
    def add(self, sums, scales, noise_multiplier, entropy):
        return [total.float() for total in sums]
"""
    plugins.load([write("their_parts", PARTS + derived)])
    with pytest.raises(ConfigError, match="Uniform draws its own noise and inherits the family 'gaussian'"):
        started("static", noise="uniform")


PLAIN = """
from dataclasses import dataclass
from dptune.mechanisms.interfaces import AdditiveNoise
from dptune.mechanisms.registry import noise

@noise("plain")
@dataclass(frozen=True)
class Plain(AdditiveNoise):
    noise_multiplier: float
    def deviation(self, noise_multiplier):
        return noise_multiplier
    def add(self, sums, scales, noise_multiplier, entropy):
        return [total.float() + noise_multiplier * scale for total, scale in zip(sums, scales)]
"""


@pytest.mark.parametrize("said", ["", '    family = "unproven"\n'])
def test_noise_of_ones_own_that_says_nothing_of_a_family_is_unproven(write: Write, said: str) -> None:
    plugins.load([write("plain_noise", PLAIN + said)])
    mechanism = started("static", noise="plain", noise_multiplier=2.0)
    release = mechanism.release(mechanism.knobs(), RATE)
    assert (release.noise, epsilons(Counter({release: 1}), 1e-5).certified) == ("unproven", math.inf)
    assert not takes_noise("static", {"noise": "plain"}), "no multiplier has a price, so none is calibrated"
    released = privatised(mechanism, [batch_of(torch.zeros(3, 8))])
    assert all((block == 2.0).all() for block in released.blocks), "it is added all the same"


def test_noise_that_a_controller_moves_without_saying_so_is_adaptive(write: Write) -> None:
    still, moves = "factor**self._releases,), initial.noise_multiplier)", "factor,), 1.0 + self._releases)"
    assert still in PARTS
    plugins.load([write("their_parts", PARTS.replace(still, moves))])
    mechanism = started("own", noise_multiplier=1.0)
    first = mechanism.release(mechanism.knobs(), RATE)
    assert not first.adaptive
    mechanism.controller.observe(observed(privatised(mechanism, [batch_of(torch.ones(2, 8))], 1), 1))
    second = mechanism.release(mechanism.knobs(), RATE)
    assert second.adaptive
    assert math.isinf(epsilons(Counter([first, second]), 1e-5).certified)


@pytest.mark.parametrize("units", [1, 4])
def test_the_controller_and_clipper_keep_their_bound_together(parts: str, units: int) -> None:
    mechanism = started("own")
    for step in range(1, 4):
        mechanism.controller.observe(observed(privatised(mechanism, [batch_of(torch.ones(2, 8))], step), step))
        rest = torch.full((units, 8), 1e-3)
        alone, joined = [batch_of(rest)], [batch_of(torch.cat([rest, torch.full((1, 8), 1e30)]))]
        assert 0.99 < shift(mechanism, alone, joined) <= 1


def test_parts_are_listed_with_their_options_and_where_they_are_from(parts: str) -> None:
    listed = {(part.kind, part.name): part for part in describe_parts()}
    found = listed["controller", "shrinking"]
    assert (found.summary, found.module) == ("Multiplies the radius after every release.", "their_parts")
    assert ("factor", "0.5", "By which.") in found.options
    assert {"max_grad_norm", "noise_multiplier", "factor", "pairs"} == {row[0] for row in describe_options("own")}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; sys.exit(0)", r"'bad' cannot be imported \(SystemExit: 0"),
        ("import nosuch", r"'bad' cannot be imported \(ModuleNotFoundError: No module named 'nosuch'"),
        ("1/0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        (
            "from dptune.mechanisms.registry import clipper\n@clipper('x')\nclass X: pass",
            "lacks by_norm_alone, clipped_sum",
        ),
        (
            "from dptune.mechanisms.registry import clipper\nfrom dptune.mechanisms.interfaces import Clipper\n"
            "@clipper('x')\nclass X(Clipper): pass",
            r"clipper 'x' \(bad\.X\) lacks clipped_sum, empty, initial_radii, restore, scales, sensitivity",
        ),
        (
            "from dptune.mechanisms.clippers.clipping import Flat\nfrom dptune.mechanisms.registry import clipper\n"
            "@clipper('flat')\nclass X(Flat): pass",
            r"'flat' is registered by dptune\.mechanisms\.clippers\.clipping and by bad",
        ),
        ("x = 1", "'bad' registers nothing, so it adds nothing to dptune"),
        (
            "from dptune.records.catalogue import source\n@source('uci')\ndef x(): yield ''",
            "'uci' of bad already exists",
        ),
    ],
)
def test_a_module_that_cannot_be_used_is_named_with_the_reason(write: Write, code: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plugins.load([write("bad", code)])
    assert CLIPPERS["flat"].__module__ == "dptune.mechanisms.clippers.clipping"
    assert "x" not in CLIPPERS


def test_a_plug_in_that_is_missing_is_an_error_of_params(empty: Path) -> None:
    write_params({"plugins": ["nosuch_plugin"]})
    with pytest.raises(ConfigError, match=r"plugins: 'nosuch_plugin' cannot be imported") as caught:
        load_settings()
    assert caught.value.field == "params.yaml"


def test_an_installed_package_is_found_by_its_entry_points(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("installed.parts", PARTS)
    info = tmp_path / "site" / "their_package-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[dptune.mechanisms]\nparts = installed.parts\n")
    (info / "RECORD").write_text("installed/parts.py,,\n")
    (info / "top_level.txt").write_text("installed\n")
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setattr(registry, "_loaded", False)
    assert "own" in MECHANISMS
    (named,) = build("own", {"noise_multiplier": 1.0}).plugins
    assert named.startswith("installed 1.2 sha256:")
    (info / "entry_points.txt").write_text("[dptune.mechanisms]\nparts = installed.nosuch\n")
    monkeypatch.setattr(registry, "_loaded", False)
    with pytest.raises(ConfigError, match="mend or uninstall their-package"):
        list(MECHANISMS)


def test_the_digest_is_of_the_code_that_was_imported(parts: str) -> None:
    """A file that is edited while a run goes on is not the code that runs."""
    file = Path(str(sys.modules[parts].__file__))
    before = sha256(file)
    file.write_text(f"{PARTS}\n# edited\n")
    assert sha256(file) != before
    (named,) = build("own", {"noise_multiplier": 1.0}).plugins
    imported = hashlib.sha256(f"{file.name} {before}\n".encode()).hexdigest()
    assert named == f"{parts} sha256:{imported[:16]}"


def test_a_plug_in_that_is_loaded_again_has_another_digest(parts: str) -> None:
    module = sys.modules[parts]
    file = Path(str(module.__file__))
    before = plugins.plugins_of([parts])
    importlib.reload(module)
    assert plugins.plugins_of([parts]) == before
    file.write_text(f"{PARTS}\n# edited\n")
    importlib.reload(module)
    both = plugins.plugins_of([parts])
    file.write_text(PARTS)
    importlib.reload(module)
    assert len({before, both, plugins.plugins_of([parts])}) == 3


def test_a_digest_covers_all_files_of_a_package(write: Write) -> None:
    write("package.parts", PARTS)
    helper = write("package.helper", "x = 1")
    plugins.load(["package.parts"])
    first = build("own", {"noise_multiplier": 1.0}).plugins
    write(helper, "x = 2")
    assert build("own", {"noise_multiplier": 1.0}).plugins != first


DERIVED = """
from dataclasses import dataclass
from dptune.mechanisms.registry import clipper
from their_parts import Tight

@clipper("tighter")
@dataclass(frozen=True)
class Tighter(Tight):
    '''g * C / (C + 2 ||g||).'''
    def factors(self, norms, radius):
        return super().factors(2 * norms, radius) / 2
"""


@pytest.mark.usefixtures("parts")
def test_what_a_part_inherits_is_named_too(write: Write) -> None:
    plugins.load([write("derived_parts", DERIVED)])
    options = {"clipper": "tighter", "noise": "gaussian", "controller": "constant", "noise_multiplier": 1.0}
    named = [name.partition(" ")[0] for name in build("tighter_static", options).plugins]
    assert named == ["derived_parts", "their_parts"]
    assert registry.plugin_modules("tighter_static", options) == ("derived_parts", "their_parts")


SOURCE = """
from dptune.records.catalogue import source

@source("counted")
def counted(count: int, word: str = "letter"):
    for number in range(count):
        yield f"{word}  number\\n{number}"

@source("silent")
def silent():
    yield "first"
    yield " "

@source("failing")
def failing():
    raise OSError("no such host")
    yield
"""


def test_texts_of_a_source_become_records(pipeline: Path, write: Write) -> None:
    write("their_source", SOURCE)
    write_params({"plugins": ["their_source"], "data": {"source": "counted", "options": {"count": 12}}})
    acquire()
    verbalize()
    records = read_records(NARRATIVES)
    assert records.text.to_pylist() == [f"letter number {number}" for number in range(12)]
    assert re.fullmatch(r"source counted of their_source sha256:\w{16}", records.about["label"])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"source": "counted", "path": "x.txt", "options": {"count": 12}},
            r"data\.path: .* is a function",
        ),
        ({"source": "counted"}, r"data\.options: source 'counted' does not take them"),
        ({"source": "counted", "options": {"count": 12, "words": 1}}, r"data\.options.*parameters are count, word"),
        ({"source": "nosuch"}, r"data\.source: unknown source 'nosuch'.*counted"),
        ({"source": "counted", "options": {"count": 12}, "unit": "patient"}, "has no column 'patient'"),
        ({"source": "synthetic", "options": {"count": 12}}, r"data\.options: source synthetic takes none"),
    ],
)
def test_what_a_source_does_not_take_is_named(pipeline: Path, write: Write, data: dict[str, Any], problem: str) -> None:
    write("their_source", SOURCE)
    write_params({"plugins": ["their_source"], "data": data})
    with pytest.raises(ConfigError, match=problem):
        load_settings()


ROWS = """
from dptune.records.catalogue import source

@source("visits", rows=True)
def visits(count: int, text: str = "text"):
    for number in range(count):
        yield {"patient": number % 20, text: f"visit {number}"} if text else f"visit {number}"

@source("asked", rows=True)
def asked(count: int):
    for number in range(count):
        yield {"prompt": f"{number} + 1?", "completion": f" {number + 1}"}
"""
BY_PATIENT = {"source": "visits", "options": {"count": 40}, "unit": "patient"}


def acquired(data: dict[str, Any]) -> Any:
    no_texts = {"canaries": {"extraction": 0, "audit": 0}, "audit": {"records": 0}}
    write_params({"plugins": ["their_rows"], "data": data}, no_texts)
    acquire()
    verbalize()
    return read_records(NARRATIVES)


def test_rows_of_a_source_become_records_with_any_column_as_the_unit(pipeline: Path, write: Write) -> None:
    write("their_rows", ROWS)
    records = acquired(BY_PATIENT)
    assert records.text.to_pylist() == [f"visit {number}" for number in range(40)]
    assert len(set(records.unit.tolist())) == 20
    assert re.fullmatch(r"source visits of their_rows sha256:\w{16}", records.about["label"])
    assert acquired({"source": "asked", "options": {"count": 12}}).about["form"] == "pair"


def test_one_row_that_leaves_a_source_moves_no_other_to_another_side(pipeline: Path, write: Write) -> None:
    write("their_rows", ROWS)
    keys = [keys_of(acquired(BY_PATIENT | {"unit": "record", "options": {"count": n}}), "record") for n in (40, 39)]
    assert keys[0].tolist()[:39] == keys[1].tolist()
    assert min(keys[0]) > 40, "a hash of the content, not the row"


@pytest.mark.parametrize(
    ("options", "unit", "problem"),
    [
        ({"count": 40}, "doctor", "column 'doctor': this column does not exist"),
        ({"count": 0}, "record", "holds no records"),
        ({"count": 12, "text": "note"}, "record", "has no column text, prompt and completion, or messages"),
        ({"count": 12, "text": ""}, "record", "row 1: the row is a str"),
    ],
)
def test_rows_that_cannot_be_read_are_refused_before_any_stage(
    empty: Path, write: Write, options: dict[str, Any], unit: str, problem: str
) -> None:
    write("their_rows", ROWS)
    write_params({"plugins": ["their_rows"], "data": {"source": "visits", "options": options, "unit": unit}})
    with pytest.raises(ConfigError, match=problem):
        load_settings()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"source": "failing"}, r"source 'failing' failed \(OSError at line \d+ of their_source\.py\)"),
        ({"source": "counted", "options": {"count": 3}}, "has 3 texts, and needs at least 10"),
        ({"source": "counted", "options": {"count": 0}}, "has 0 texts"),
        ({"source": "counted", "options": {"count": 12, "word": "\udcff"}}, "row 1: a record is not a text"),
        ({"source": "silent"}, "row 2: a record is not a text"),
    ],
)
def test_a_source_that_fails_leaves_what_was_there(
    pipeline: Path, write: Write, data: dict[str, Any], problem: str
) -> None:
    before = {path: path.read_bytes() for path in Path("data/raw").iterdir()}
    write("their_source", SOURCE)
    write_params({"plugins": ["their_source"], "data": data})
    with pytest.raises(DataError, match=problem):
        acquire()
    assert {path: path.read_bytes() for path in Path("data/raw").iterdir()} == before


PRICE = ["account", "own", "--set", "noise_multiplier=1", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", "100"]


@pytest.mark.parametrize("named", ["option", "variable"])
def test_the_command_line_takes_plug_ins_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, named: str
) -> None:
    write("elsewhere", SCORE)
    (tmp_path / "beside.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    if named == "variable":
        monkeypatch.setenv("DPTUNE_PLUGINS", "elsewhere, beside")
    chosen = ["--plugin", "beside"] if named == "option" else []
    priced = CliRunner().invoke(app, [*chosen, *PRICE, "--json"])
    assert json.loads(priced.stdout)["epsilon_certified"] < 1
    listed = CliRunner().invoke(app, [*chosen, "mechanisms", "--parts"]).stdout
    assert "controller shrinking (plug-in beside): Multiplies the radius after every release.\n" in listed
    assert "    factor (0.5): By which.\n" in listed
    assert "own: Clips the whole gradient, smoothly; adds" in CliRunner().invoke(app, [*chosen, "mechanisms"]).stdout


@pytest.mark.parametrize(
    "arguments", [["--plugin", "nosuch", *PRICE], ["--plugin", "json", *PRICE], ["mechanisms", "static", "--parts"]]
)
def test_the_command_line_says_what_is_wrong(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert re.search(r"error: --(plugin|parts): .* Fix: .*\.$", result.stderr.strip().splitlines()[-1])


def test_the_examples_of_the_documentation_run(write: Write, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "plugins.md").read_text(encoding="utf-8")
    example, falling, exact, letters, visits, relative = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len([line for line in example.splitlines() if line]) <= 20
    plugins.load(
        [write("my_parts", example), write("my_source", letters), write("my_rows", visits), write("my_score", relative)]
    )
    plugins.load([write("my_schedule", falling), write("my_claim", exact)])
    releases = Counter({Release(0.01, 1.0): 1000})
    claimed, usual = (
        published_epsilon(started(name).published_accountant, releases, 1e-5) for name in ("exact", "smooth")
    )
    assert claimed == epsilons(releases, 1e-5).certified
    assert usual == gdp_clt_epsilon(releases, 1e-5) < claimed, "a plug-in that claims nothing has the central limit's"
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page.partition("paper claims")[2], re.M)))
    assert set(PUBLISHED_ACCOUNTANTS) <= set(named)
    assert MECHANISMS["falling"].verdict == "Sound if my_schedule, a plug-in, keeps its word"
    moved = started("falling", max_grad_norm=0.5)
    assert moved.knobs().radii == (0.5,)
    moved.controller.observe(SimpleNamespace(releases=100))
    assert moved.knobs().radii == pytest.approx((0.05,))
    again = started("falling", max_grad_norm=0.5)
    again.controller.load_state_dict(moved.controller.state_dict())
    assert again.knobs() == moved.knobs()
    mechanism = started("smooth", max_grad_norm=0.5)
    assert shift(mechanism, [], [batch_of(torch.full((1, 8), 1e30))]) == pytest.approx(1.0, abs=1e-6)
    assert own_scores(np.array([1.0, 2.0]), np.ones(2))["relative"].tolist() == [0.0, -0.5]
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"letter {number}")
    file = catalogue.find_source("letters").acquire(
        tmp_path, catalogue.SourceSettings(options={"folder": str(tmp_path)})
    )
    assert file.read_text().split("\n\n")[:2] == ["letter 0", "letter 1"]
    with closing(sqlite3.connect(tmp_path / "visits.sqlite")) as database, database:
        database.execute("create table visits (patient, text)")
        database.executemany("insert into visits values (?, ?)", [(n % 5, f"visit {n}") for n in range(10)])
    given = catalogue.SourceSettings(unit="patient", options={"file": str(tmp_path / "visits.sqlite")})
    assert catalogue.find_source("visits").look(given) == "text"
    units = read_records(catalogue.find_source("visits").acquire(tmp_path, given)).unit
    assert len(set(units.tolist())) == 5
