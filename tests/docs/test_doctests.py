"""Examples in docstrings run and print what they show; each name on the pages of the Python API has one."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pages import ROOT

from tests.forked import forked

_ENTRY = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.M)
_MEMBERS = re.compile(r"members: \[(.*)\]")
#: Names on the pages of the Python API that have no example yet. Add one to a docstring and take its name out of here.
WITHOUT = {
    "dptune.training.crafted_canaries.CraftedCanaries",
    "dptune.audit.refutation.Refutation",
    "dptune.audit.refutation.refutation",
    "dptune.audit.refutation.run_certificate",
    "dptune.audit.games.scene.StepAudit",
    "dptune.audit.games.scene.StepScene",
    "dptune.audit.games.step.audit_step",
    "dptune.audit.verdict.Verdict",
    "dptune.audit.verdict.judged",
    "dptune.mechanisms.gradient_interfaces.Federation",
    "dptune.mechanisms.interfaces.Observation",
    "dptune.mechanisms.interfaces.Released",
    "dptune.mechanisms.interfaces.RunFacts",
    "dptune.mechanisms.interfaces.Statistics",
    "dptune.prediction.booking.write_booking",
    "dptune.prediction.deployment.Deployment",
    "dptune.prediction.deployment.deploy",
    "dptune.prediction.ensemble.Manifest",
    "dptune.prediction.ensemble.ShardTuning",
    "dptune.prediction.ensemble.read_manifest",
    "dptune.prediction.ensemble.tune_shard",
    "dptune.prediction.ensemble.write_manifest",
    "dptune.prediction.protocols.FixedMixture",
    "dptune.prediction.service.create_app",
    "dptune.privacy.certificate.SearchCertificate",
    "dptune.privacy.certificate.read_certificate",
    "dptune.training.tokens.encoding.tokens_of",
    "dptune.training.loop.train",
    "dptune.training.models.model.Lora",
    "dptune.training.models.model.ModelSource",
    "dptune.training.run.StepReport",
    "dptune.training.spec.RunSpec",
    "dptune.training.spec.TrainingPlan",
    "dptune.training.spec.header_of",
    "dptune.job.delivery.finished_adapter.FinishedAdapter",
    "dptune.job.delivery.finished_adapter.open_adapter",
    "dptune.job.run.Tuned",
    "dptune.job.sampling.Sampled",
    "dptune.job.sampling.sample",
    "dptune.job.suggest.Suggestion",
    "dptune.job.suggest.suggest",
    "dptune.job.delivery.verification.check_deliverable",
    "dptune.audit.whole_run.RunAudit",
    "dptune.audit.whole_run.audit_run",
}


def documented() -> Iterator[tuple[str, Any]]:
    """Name and object of every class and function on the pages of the Python API, protocols left out."""
    for page in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")):
        for name, options in _ENTRY.findall(page.read_text(encoding="utf-8") + "\n"):
            for full in _names(name, options):
                module, _, attribute = full.rpartition(".")
                found = getattr(import_module(module), attribute)
                if not getattr(found, "_is_protocol", False):
                    yield full, found


def _names(name: str, options: str) -> list[str]:
    """The names that one entry of a page stands for: itself, or the members of a module."""
    if find_spec(name.rpartition(".")[0]) is None or not _is_module(name):
        return [name]
    if chosen := _MEMBERS.search(options):
        return [f"{name}.{member.strip()}" for member in chosen[1].split(",")]
    own = [
        key for key, value in vars(import_module(name)).items()
        if not key.startswith("_") and inspect.isroutine(value) | inspect.isclass(value) and value.__module__ == name
    ]  # fmt: skip
    return [f"{name}.{key}" for key in own]


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


def test_each_public_name_has_an_example() -> None:
    names = dict(documented())
    assert len(names) > 90
    missing = {name for name, found in names.items() if ">>> " not in (found.__doc__ or "")}
    assert missing - WITHOUT == set(), "add an example to these docstrings"
    assert WITHOUT - missing == set(), "these have an example now, or are gone: take them out of WITHOUT"


def test_examples_print_what_they_show(tmp_path: Path) -> None:
    """In a process of its own, since examples register plug-ins, which later tests would find."""
    files = [path for path in sorted((ROOT / "dptune").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]

    def run() -> None:
        for path in files:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found = doctest.testmod(import_module(name))
            print(name, found.attempted, found.failed)

    status, output, errors = forked(run, tmp_path)
    assert status == 0, errors
    ran = re.findall(r"^dptune\S* (\d+) (\d+)$", output, re.M)
    assert len(ran) == len(files)
    assert all(int(attempted) > 0 and failed == "0" for attempted, failed in ran), output
