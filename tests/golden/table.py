"""The tables of golden figures and of defaults, and what is wrong where the code no longer gives them.

``figures.yaml`` holds the figures of each golden run, and the versions of the parts that they were made with;
``defaults.yaml`` the defaults of settings, which names leave out.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from dptune.core import settings
from dptune.core.declarations import defaults_of, plain
from dptune.core.plugins import is_outside
from dptune.core.settings import Lora, ShardTuning
from dptune.mechanisms.options import option_defaults
from dptune.mechanisms.registry import PARTS, part_version
from dptune.mechanisms.versions import SHARED
from dptune.policy.method import Dppg
from dptune.policy.schedules import PolicyTraining
from tasks.experiment.cells import Cell
from tasks.identity import ROOT
from tasks.settings.experiment import Audit, Model, Pretrain, Task, TrainingSettings
from tasks.settings.policy import Rlhf, Tenants
from tasks.settings.prediction import Prediction
from tests.golden.runs import RUNS, Figures

FIGURES, DEFAULTS = (Path(__file__).parent / name for name in ("figures.yaml", "defaults.yaml"))
#: Another machine's sums differ in the last bits of float32; one per cent more noise differs by far more.
TOLERANCE = 2e-4
#: Results that have one version for all that makes them, and its module.
RESULTS = {
    "attacks": "tasks.audit.attacks",
    "policy gradient": "tasks.policy.gradient",
    "policy audit": "tasks.policy.audit",
    "rlhf": "tasks.policy.rlhf",
    "tenants": "tasks.policy.tenants",
    "ensembles": "tasks.prediction.ensembles",
    "pretrain": "dptune.training.models.pretrain",
    "scores": "tasks.prediction.scores",
}
#: Sections whose settings are left out of names at their defaults, and the parts whose versions a new default raises:
#: of everything that a section's settings name.
SECTIONS: dict[Any, tuple[str, ...]] = {
    Cell: ("loop",),
    Model: ("loop", "ensembles"),
    Lora: ("loop", "ensembles", "rlhf", "tenants"),
    TrainingSettings: ("loop",),
    Task: ("loop",),
    Audit: ("attacks",),
    PolicyTraining: ("policy gradient",),
    Dppg: ("policy gradient",),
    Rlhf: ("rlhf",),
    Tenants: ("tenants",),
    ShardTuning: ("ensembles",),
    Prediction: ("scores",),
    Pretrain: ("pretrain",),
}
_RECORD = "run `python -m tests.golden` and commit its tables with the change"


def own_parts() -> dict[str, type]:
    """Every registered clipper, noise and controller of dptune itself, by names such as "clipper flat"."""
    return {
        f"{kind} {name}": cls
        for kind, registry in PARTS.items()
        for name, cls in registry.items()
        if not is_outside(registry.module_of(name))
    }


def versions() -> dict[str, int]:
    """The present version of every part and result."""
    kinds = {part: part_version(*part.split(" ")) for part in own_parts()}
    shared = {part: int(module.VERSION) for part, module in SHARED.items()}
    results = {name: int(import_module(module).VERSION) for name, module in RESULTS.items()}
    return dict(sorted((shared | settings.VERSIONS | kinds | results).items()))


def place_of(part: str) -> str:
    """The file in which a part's version is raised, and how it is called there."""
    if part in settings.VERSIONS:
        return f'VERSIONS["{part}"] in dptune/core/settings.py'
    if part in own_parts():
        cls = own_parts()[part]
        return f"{cls.__name__}.VERSION in {Path(inspect.getfile(cls)).relative_to(ROOT)}"
    module = SHARED[part] if part in SHARED else import_module(RESULTS[part])
    return f"VERSION in {Path(str(module.__file__)).relative_to(ROOT)}"


def rounded(figures: Figures) -> Figures:
    """Figures with six digits, as the table has them."""
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def moved(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """The figures that differ by more than another machine's rounding: "sum of radii: 1 -> 1.01"."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, math.nan), now.get(name, math.nan)
        if old != new and not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-7):
            found.append(f"{name}: {old:g} -> {new:g}")
    return found


def problem_of_run(name: str, table: Mapping[str, Any], figures: Figures) -> str:
    """What is wrong with a golden run that gives ``figures`` now, and what to do; empty if nothing is."""
    if name not in table["runs"]:
        return f"golden run {name!r} is not in figures.yaml: {_RECORD}"
    if not (found := moved(table["runs"][name], figures)):
        return ""
    present, uses = versions(), RUNS[name].uses
    raised = {part for part in uses if table["versions"].get(part) != present[part]}
    if raised and raised >= {*uses} & {*RESULTS}:  # of two results that share code, both have moved
        return f"golden run {name!r} has moved with a raised version: {_RECORD}"
    places = "; ".join(f"{part}: {place_of(part)}" for part in uses)
    both = f", or not of every result ({', '.join(uses)})" if raised else ""
    return (
        f"golden run {name!r} has moved ({', '.join(found)}), and no version of a part that it uses was raised{both}. "
        "Finished runs would pass for what this code makes. If the change is meant, raise by 1 the version of the part "
        f"that you changed ({places}), then {_RECORD}"
    )


def present_defaults() -> dict[str, dict[str, Any]]:
    """The default of every setting that has one: by the class of a section, and by the name of a part."""
    found = {kind.__name__: _as_json(defaults_of(kind)) for kind in SECTIONS}
    parts = {part: _as_json(option_defaults(cls)) for part, cls in own_parts().items()}
    return found | {part: defaults for part, defaults in sorted(parts.items()) if defaults}


def _as_json(defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: plain(value) for name, value in defaults.items() if value is not MISSING}
    return dict(json.loads(json.dumps(kept)))


def problems_of_defaults(table: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each default that changed though no version was raised, and for each that the table lacks."""
    by_class = {kind.__name__: parts for kind, parts in SECTIONS.items()}
    recorded, now = table["versions"], versions()
    for section in sorted(table["defaults"].keys() | present.keys()):
        old, new = table["defaults"].get(section, {}), present.get(section, {})
        parts = by_class.get(section, (section,))
        for name in sorted(old.keys() | new.keys()):
            if name not in old:
                yield f"{section}.{name} is new: {_RECORD}"
            elif name not in new or json.dumps(old[name]) != json.dumps(new[name]):
                unraised = [part for part in parts if part in now and now[part] == recorded.get(part)]
                what = f"{section}.{name} was {old[name]!r} and {f'is {new[name]!r}' if name in new else 'is gone'}"
                places = " and ".join(map(place_of, unraised))
                fix = f"raise {places} by 1, then {_RECORD}" if unraised else _RECORD
                why = "names leave defaults out, so that finished runs would pass for runs of the new one"
                yield f"{what}: {why}: {fix}"


def read() -> dict[str, Any]:
    """Both tables: versions, runs and defaults."""
    figures = yaml.safe_load(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {"versions": {}, "runs": {}}
    defaults = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8")) if DEFAULTS.exists() else {}
    return {**figures, "defaults": defaults}


def write(runs: Mapping[str, Figures], defaults: Mapping[str, Any]) -> None:
    """Write both tables with the present versions."""
    FIGURES.write_text(_yaml({"versions": versions(), "runs": dict(runs)}), encoding="utf-8")
    DEFAULTS.write_text(_yaml(dict(defaults)), encoding="utf-8")


def _yaml(content: dict[str, Any]) -> str:
    return "# Written by `python -m tests.golden`; docs/howto/extending.md says when.\n" + yaml.safe_dump(
        content, sort_keys=False, width=119, default_flow_style=None
    )
