"""Hyper-policy over tenants: trains ``rldp``'s linear agent over simulated tenants, and compares it on new ones.

python -m tasks.policy.tenants [--set NAME=VALUE]...

It needs data/models (`dvc repro pretrain`). `make policy PROFILE=profiles/policy.yaml` runs the settings for results.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.core.declarations import names_nothing, part_of, plain
from dptune.core.digits import at_most
from dptune.core.errors import DataError
from dptune.core.files import jsonable, locked, private_directory, read_json, sha256, write_json
from dptune.core.settings import UpdateRule
from dptune.mechanisms.versions import versions_of
from dptune.privacy.run_folder import RunFolder, set_aside, spending_of
from tasks.paths import DATA, PUBLIC_MODEL, PUBLIC_NARRATIVES
from tasks.settings.policy import Tenants, tenants_of
from tasks.settings.strict import as_json
from tasks.stage import run_command

if TYPE_CHECKING:
    from dptune.policy.tenants.runs import Outcome, Setting, Tenant
    from dptune.training.spec import TrainingPlan

#: Version of these results, part of their names. Raise it when a change moves their figures: tests/golden says when.
VERSION = 1
_log = logging.getLogger(__name__)
TENANTS = DATA / "policy" / "tenants"
_SETTINGS, _STATIC = "settings.json", "static"


def run_tenants(settings: Tenants, directory: Path = TENANTS, device: str = "cpu") -> dict[str, Any]:
    """Train over tenants, run the ablation on new ones, and write results.json, controller/ and ledger.jsonl.

    As long as settings, version and model stay the same, a training that was cut off resumes where its ledger ends,
    and one that is finished is only read: trained again, it would use the same tenants a second time.

    Returns: what results.json says. Its perplexities on held-out records are raw figures of (simulated) tenants.
    """
    from dptune.core.progress import Meter
    from dptune.policy.tenants.runs import ablate, ablation_entries

    private_directory(directory.parent)
    with locked(directory.parent / f"{directory.name}.lock"):
        if _is_finished(private_directory(directory), settings):
            return read_json(RunFolder(directory).results)
        setting, tenants = _make_setting(settings, device)
        old, new = tenants[: -settings.new_tenants], tenants[-settings.new_tenants :]
        start = time.monotonic()
        about = _train(settings, setting, old, directory)
        middle = time.monotonic()
        entries = ablation_entries(settings.options, RunFolder(directory).controller)
        rows: list[Outcome] = []

        def note(outcome: Outcome) -> None:
            rows.append(outcome)
            meter.update(len(rows))

        with Meter("ablation", total=len(entries) * len(new) * len(settings.seeds), unit="runs", keep=True) as meter:
            ablate(setting, new, entries, settings.seeds, note)
        results = {
            "data": setting.data,
            "settings": as_json(settings),
            **about,
            "rows": [_plain(row) for row in rows],
            "summary": summary_of(rows),
            "seconds": {"training": round(middle - start, 1), "ablation": round(time.monotonic() - middle, 1)},
        }
        write_json(RunFolder(directory).results, results)
    return results


def _is_finished(directory: Path, settings: Tenants) -> bool:
    """Whether the folder holds the results of these settings, version and model; if not, make it ready for the work.

    An unfinished run of the same settings is left as it is. A run of others is set aside with its ledger.
    """
    content, file = {"settings": plain(settings), **_inputs()}, directory / _SETTINGS
    if file.exists() and _as_named_now(read_json(file)) == content:
        return RunFolder(directory).results.exists()
    if spending_of(directory):
        earlier, spending = set_aside(directory)
        _log.warning("an earlier run, of other settings or another version, was moved to %s: %s", earlier, spending)
        private_directory(directory)
    folder = RunFolder(directory)
    for path in (file, folder.results, folder.state, folder.ledger):  # left by a process that died before any charge
        path.unlink(missing_ok=True)
    shutil.rmtree(folder.controller, ignore_errors=True)
    write_json(file, content)
    return False


def _as_named_now(content: dict[str, Any]) -> dict[str, Any]:
    """The content without settings that move no number, which earlier versions named, as ``physical_batch_size``."""
    nameless, settings = names_nothing(Tenants), content.get("settings", {})
    return {**content, "settings": {name: value for name, value in settings.items() if name not in nameless}}


def _inputs() -> dict[str, Any]:
    """Inputs besides the settings that decide the results: versions, base model and shape of adapters, as JSON types.

    Raises: DataError if the public model is missing.
    """
    from tasks.settings.params import load_settings

    if not PUBLIC_MODEL.is_dir():
        raise DataError(
            "is missing", fix="run `python -m tasks.corpus.pretrain --always`, which makes it", file=PUBLIC_MODEL
        )
    model = [*sorted(path for path in PUBLIC_MODEL.iterdir() if path.is_file()), PUBLIC_NARRATIVES]
    used = versions_of("rldp", {}, UpdateRule()) | versions_of("rldp", {"controller": "constant"}, UpdateRule())
    raised = {part: version for part, version in used.items() if version != 1}
    return ({"parts": raised} if raised else {}) | {
        "version": VERSION,
        "model": [sha256(path) for path in model],
        "lora": plain(load_settings().lora),
    }


def _train(settings: Tenants, setting: Setting, tenants: Sequence[Tenant], directory: Path) -> dict[str, Any]:
    """Train the hyper-policy, unless its ledger is complete. Returns: its weights and epsilons, as JSON types."""
    from dptune.core.progress import Meter
    from dptune.mechanisms.agents.linear_agent import FEATURES, OUTPUTS, PARAMETERS
    from dptune.mechanisms.agents.policy_file import SavedPolicy
    from dptune.policy.method import Dppg
    from dptune.policy.schedules import MetaTraining
    from dptune.policy.tenants.training import meta_train
    from dptune.privacy.accountants import epsilons
    from dptune.privacy.entropy import OsEntropy
    from dptune.privacy.ledger_file import is_complete, read_ledger

    method = Dppg(noise_multiplier=settings.noise_multiplier, critic="none")
    training = part_of(MetaTraining, settings)
    ledger = RunFolder(directory).ledger
    if not is_complete(ledger):
        with Meter("training", total=training.tenants * training.updates, unit="tenants", keep=True) as meter:
            meta_train(setting, tenants, method, training, directory, OsEntropy(), meter.update)
    policy = SavedPolicy.read(str(RunFolder(directory).controller))
    weights, deviations = policy.tensors["policy.parameters"].split([len(FEATURES) * len(OUTPUTS), len(OUTPUTS)])
    return {
        "epsilon_tenant": read_ledger(ledger).epsilons.certified,
        "epsilon_record": epsilons(policy.price, settings.delta).certified,
        "clip_radius": training.clip_radius(method.noise_multiplier, PARAMETERS),
        "features": list(FEATURES),
        "outputs": list(OUTPUTS),
        "weights": weights.view(len(FEATURES), len(OUTPUTS)).tolist(),
        "log_deviations": deviations.tolist(),
    }


def _make_setting(settings: Tenants, device: str) -> tuple[Setting, list[Tenant]]:
    """Load the public model, and deal a synthetic cohort to tenants: those to train on first, then new ones."""
    import torch

    from dptune.policy.tenants.runs import Setting, tenants_of
    from dptune.records.diabetes.narratives import write_narratives
    from dptune.records.diabetes.sources import acquire_synthetic
    from dptune.records.parquet_file import read_records
    from dptune.training.data import tokenize
    from dptune.training.models.model import ModelSource, load_base, load_tokenizer
    from tasks.settings.params import load_settings

    count = settings.tenants * settings.updates + settings.new_tenants
    with TemporaryDirectory(prefix="dptune-") as folder:
        cohort = acquire_synthetic(Path(folder), count * settings.records_per_tenant, settings.cohort_seed)
        narratives = Path(folder) / "narratives.parquet"
        write_narratives(cohort.table, cohort.ids_mapping, cohort.manifest, narratives)
        records = read_records(narratives)
    base = ModelSource(str(PUBLIC_MODEL))
    tokenizer = load_tokenizer(base)
    public = read_records(PUBLIC_NARRATIVES).text.to_pylist()[: settings.public_records]
    setting = Setting(
        base=load_base(base, torch.device(device)),
        lora=load_settings().lora,
        public=tokenize(public, tokenizer, settings.max_length),
        plan=_plan_of(settings),
        options=settings.options,
        epsilon=settings.epsilon,
        delta=settings.delta,
        data=str(records.about["label"]),
    )
    tokens = tokenize(records.texts("policy.tenants"), tokenizer, settings.max_length)
    return setting, tenants_of(tokens, records.unit, count)


def _plan_of(settings: Tenants) -> TrainingPlan:
    """The plan of a tenant's run: Poisson batches, whose expected size each tenant fills in."""
    from dptune.training.spec import TrainingPlan

    poisson = {"sampler": "poisson", "max_batch": None}
    return part_of(TrainingPlan, settings, expected_batch_size=0.0, rule=UpdateRule(), **poisson)


def summary_of(rows: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Summarise the ablation, a row for each label, best first.

    ``gain_over_static`` is how far the held-out perplexity lies below that of "static" on the same tenant and seed: its
    mean, with the standard error over tenants (None for a single tenant).
    """
    static = {(row.tenant, row.seed): row.held_out_perplexity for row in rows if row.label == _STATIC}
    summary: list[dict[str, Any]] = []
    for label in dict.fromkeys(row.label for row in rows):
        runs = [row for row in rows if row.label == label]
        tenants: dict[int, list[float]] = {}
        for row in runs:
            tenants.setdefault(row.tenant, []).append(static[row.tenant, row.seed] - row.held_out_perplexity)
        gains = [fmean(values) for values in tenants.values()]
        summary.append(
            {
                "label": label,
                "runs": len(runs),
                "epsilon_certified": max(row.epsilon_certified for row in runs),
                "noise_multiplier": runs[0].noise_multiplier,
                "before": fmean(row.held_out_before for row in runs),
                "held_out_perplexity": fmean(row.held_out_perplexity for row in runs),
                "public_perplexity": fmean(row.public_perplexity for row in runs),
                "gain_over_static": fmean(gains),
                "gain_standard_error": stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None,
            }
        )
    return sorted(summary, key=lambda line: float(line["held_out_perplexity"]))


def _plain(row: Outcome) -> dict[str, Any]:
    names = {"label": row.label}
    return names | jsonable({key: value for key, value in asdict(row).items() if key not in names})


def main(
    change: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of policy.tenants; repeatable")
    ] = None,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Train over simulated tenants, and compare on new ones."""
    _print_results(run_tenants(tenants_of(change or []), device=device), print)


def _print_results(results: dict[str, Any], say: Callable[[str], None]) -> None:
    say(f"{results['data']}")
    tenant, record = at_most(results["epsilon_tenant"], 4), at_most(results["epsilon_record"], 4)
    say(f"hyper-policy: epsilon {tenant} a tenant, {record} a record")
    say(f"{'':>10}  epsilon  held-out  public  below static")
    for line in results["summary"]:
        error = line["gain_standard_error"]
        say(
            f"{line['label']:>10}  {at_most(line['epsilon_certified'], 5):>7}  {line['held_out_perplexity']:8.4f}  "
            f"{line['public_perplexity']:6.3f}  {line['gain_over_static']:+.4f}"
            + ("" if error is None else f" +- {error:.4f}")
        )


if __name__ == "__main__":
    run_command(main)
