"""Hyper-policy across tenants: train ``rldp``'s linear agent over simulated tenants, and compare it on new ones.

python -m tasks.policy.tenants [--size small|large] [--set NAME=VALUE]...

It needs data/models (`dvc repro pretrain`).
"""

from __future__ import annotations

import json
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

from dptune.errors import DataError
from dptune.files import jsonable, locked, private_directory, sha256, write_json
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import set_aside, spending_of
from tasks.identity import code_digest
from tasks.paths import DATA, PUBLIC_MODEL, PUBLIC_VALIDATION
from tasks.settings.tenants import Size, Tenants, settings_from
from tasks.stage import run_command

if TYPE_CHECKING:
    from dptune.policy.tenants.ablation import Outcome
    from dptune.policy.tenants.runs import Setting, Tenant

_log = logging.getLogger(__name__)
TENANTS = DATA / "policy" / "tenants"
_SETTINGS, _STATIC = "settings.json", "static"


def run_tenants(settings: Tenants, directory: Path = TENANTS, device: str = "cpu") -> dict[str, Any]:
    """Train over tenants, run the ablation on new ones, and write results.json, controller/ and ledger.jsonl.

    Unless settings, code or model changed, a training that was cut off goes on where its ledger ends, and what is
    finished is not done again: it would meet the same tenants a second time.

    Returns: what results.json says. Its perplexities on held-out records are raw figures of (simulated) tenants.
    """
    from dptune.policy.tenants.ablation import ablate, ablation_entries
    from dptune.progress import Meter

    private_directory(directory.parent)
    with locked(directory.parent / f"{directory.name}.lock"):
        if _finished(private_directory(directory), settings):
            return dict(json.loads(RunFolder(directory).results.read_text(encoding="utf-8")))
        setting, tenants = _prepared(settings, device)
        trained, new = tenants[: -settings.new_tenants], tenants[-settings.new_tenants :]
        started = time.monotonic()
        about = _trained(settings, setting, trained, directory)
        between = time.monotonic()
        entries = ablation_entries(settings.options, RunFolder(directory).controller)
        rows: list[Outcome] = []

        def note(outcome: Outcome) -> None:
            rows.append(outcome)
            meter.update(len(rows))

        with Meter("ablation", total=len(entries) * len(new) * len(settings.seeds), unit="runs", keep=True) as meter:
            ablate(setting, new, entries, settings.seeds, note)
        results = {
            "data": setting.data,
            "settings": settings.model_dump(mode="json"),
            **about,
            "rows": [_plain(row) for row in rows],
            "summary": summary_of(rows),
            "seconds": {"training": round(between - started, 1), "ablation": round(time.monotonic() - between, 1)},
        }
        write_json(RunFolder(directory).results, results)
    return results


def _finished(directory: Path, settings: Tenants) -> bool:
    """Whether this very work is done. An unfinished one is left as it is; any other is set aside, ledger and all."""
    told, file = {"settings": settings.model_dump(mode="json"), **_inputs()}, directory / _SETTINGS
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) == told:
        return RunFolder(directory).results.exists()
    if spending_of(directory):
        kept, spent = set_aside(directory)
        _log.warning("an earlier run, of other settings or code, lies in %s now: %s", kept, spent)
        private_directory(directory)
    folder = RunFolder(directory)
    for left in (file, folder.results, folder.state, folder.ledger):  # of a process that died in between
        left.unlink(missing_ok=True)
    shutil.rmtree(folder.controller, ignore_errors=True)
    write_json(file, told)
    return False


def _inputs() -> dict[str, Any]:
    """What else decides the results."""
    from tasks.settings.params import load_settings

    if not PUBLIC_MODEL.is_dir():
        raise DataError("is missing", fix="run `dvc repro pretrain`, which makes it", file=PUBLIC_MODEL)
    model = [*sorted(path for path in PUBLIC_MODEL.iterdir() if path.is_file()), PUBLIC_VALIDATION]
    return {
        "code": code_digest("policy.tenants"),
        "model": [sha256(path) for path in model],
        "lora": load_settings().lora.model_dump(mode="json"),
    }


def _trained(settings: Tenants, setting: Setting, tenants: Sequence[Tenant], directory: Path) -> dict[str, Any]:
    """Train unless that is done; what the policy is and costs."""
    from dptune.mechanisms.linear_agent import FEATURES, OUTPUTS
    from dptune.mechanisms.policy_file import SavedPolicy
    from dptune.policy.method import Dppg
    from dptune.policy.tenants.schedule import MetaTraining
    from dptune.policy.tenants.training import meta_train
    from dptune.privacy.accountants import epsilons
    from dptune.privacy.entropy import OsEntropy
    from dptune.privacy.ledger_file import is_complete, read_ledger
    from dptune.progress import Meter

    method = Dppg(noise_multiplier=settings.noise_multiplier, critic="none")
    shared = ("tenants", "updates", "runs", "trust", "miss", "seed")
    training = MetaTraining(**{name: getattr(settings, name) for name in shared})
    ledger = RunFolder(directory).ledger
    if not is_complete(ledger):
        with Meter("training", total=training.tenants * training.updates, unit="tenants", keep=True) as meter:
            meta_train(setting, tenants, method, training, directory, OsEntropy(), meter.update)
    policy = SavedPolicy.read(str(RunFolder(directory).controller))
    weights, deviations = policy.tensors["policy.parameters"].split([len(FEATURES) * len(OUTPUTS), len(OUTPUTS)])
    return {
        "epsilon_tenant": read_ledger(ledger).epsilons.certified,
        "epsilon_record": epsilons(policy.price, settings.delta).certified,
        "clip_radius": training.radius(method),
        "features": list(FEATURES),
        "outputs": list(OUTPUTS),
        "weights": weights.view(len(FEATURES), len(OUTPUTS)).tolist(),
        "log_deviations": deviations.tolist(),
    }


def _prepared(settings: Tenants, device: str) -> tuple[Setting, list[Tenant]]:
    """The public model and the cohort, dealt out: tenants to train on, then new ones."""
    import torch

    from dptune.corpus.narratives import write_narratives
    from dptune.corpus.records import read_records
    from dptune.corpus.sources import acquire_synthetic
    from dptune.policy.tenants.runs import Setting, tenants_of
    from dptune.training.data import tokenize
    from dptune.training.model import Lora, ModelSource, load_base, load_tokenizer
    from dptune.training.spec import TrainingPlan
    from tasks.settings.params import load_settings

    count = settings.tenants * settings.updates + settings.new_tenants
    with TemporaryDirectory(prefix="dptune-") as folder:
        made = acquire_synthetic(Path(folder), count * settings.records_per_tenant, settings.cohort_seed)
        narratives = Path(folder) / "narratives.parquet"
        write_narratives(made.table, made.ids_mapping, made.manifest, narratives)
        records = read_records(narratives)
    base = ModelSource(str(PUBLIC_MODEL))
    tokenizer = load_tokenizer(base)
    public = read_records(PUBLIC_VALIDATION).text.to_pylist()[: settings.public_records]
    plan = TrainingPlan(
        sample_rate=settings.sample_rate,
        expected_batch_size=0.0,  # each tenant's own
        steps=settings.steps,
        learning_rate=settings.fine_tuning_rate,
        warmup_steps=settings.warmup_steps,
        physical_batch_size=settings.physical_batch_size,
        checkpoint_every=settings.steps,
    )
    setting = Setting(
        base=load_base(base, torch.device(device)),
        lora=Lora(**load_settings().lora.model_dump()),
        public=tokenize(public, tokenizer, settings.max_length),
        plan=plan,
        options=settings.options,
        epsilon=settings.epsilon,
        delta=settings.delta,
        data=str(records.about["label"]),
    )
    tokens = tokenize(records.texts("policy.tenants"), tokenizer, settings.max_length)
    return setting, tenants_of(tokens, records.unit, count)


def summary_of(rows: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One line a label, best first: mean held-out perplexity, and how far below static's on the same tenant and seed,
    with the standard error over tenants.
    """
    static = {(row.tenant, row.seed): row.held_out_perplexity for row in rows if row.label == _STATIC}
    found: list[dict[str, Any]] = []
    for label in dict.fromkeys(row.label for row in rows):
        mine = [row for row in rows if row.label == label]
        tenants: dict[int, list[float]] = {}
        for row in mine:
            tenants.setdefault(row.tenant, []).append(static[row.tenant, row.seed] - row.held_out_perplexity)
        gains = [fmean(some) for some in tenants.values()]
        found.append(
            {
                "label": label,
                "runs": len(mine),
                "epsilon_certified": max(row.epsilon_certified for row in mine),
                "noise_multiplier": mine[0].noise_multiplier,
                "before": fmean(row.held_out_before for row in mine),
                "held_out_perplexity": fmean(row.held_out_perplexity for row in mine),
                "public_perplexity": fmean(row.public_perplexity for row in mine),
                "gain_over_static": fmean(gains),
                "gain_standard_error": stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None,
            }
        )
    return sorted(found, key=lambda line: float(line["held_out_perplexity"]))


def _plain(row: Outcome) -> dict[str, Any]:
    names = {"label": row.label}
    return names | jsonable({key: value for key, value in asdict(row).items() if key not in names})


def main(
    size: Annotated[Size, typer.Option()] = "small",
    change: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE, of the settings")] = None,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Train over simulated tenants, and compare on new ones."""
    _show(run_tenants(settings_from(size, change or []), device=device), print)


def _show(results: dict[str, Any], tell: Callable[[str], None]) -> None:
    tell(f"{results['data']}")
    tell(f"hyper-policy: epsilon {results['epsilon_tenant']:.3f} a tenant, {results['epsilon_record']:.3f} a record")
    tell(f"{'':>10}  epsilon  held-out  public  below static")
    for line in results["summary"]:
        error = line["gain_standard_error"]
        tell(
            f"{line['label']:>10}  {line['epsilon_certified']:7.4f}  {line['held_out_perplexity']:8.4f}  "
            f"{line['public_perplexity']:6.3f}  {line['gain_over_static']:+.4f}"
            + ("" if error is None else f" +- {error:.4f}")
        )


if __name__ == "__main__":
    run_command(main)
