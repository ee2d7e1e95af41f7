"""Ablation of the hyper-policy: mechanisms compared on new tenants at equal certified epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.policy.tenants.runs import CalibratedEntry, Setting, Tenant, calibrate_entry, fine_tune
from dptune.privacy.entropy import OsEntropy
from dptune.training.evaluation import perplexity


@dataclass(frozen=True)
class Outcome:
    """Figures of a run of the ablation. Private: perplexities on held-out records are raw figures of a tenant.

    Attributes:
        label: label of the entry.
        tenant: number of the tenant.
        seed: seed of adapters and exploration.
        epsilon_certified: certified epsilon of the run, all that it inherits included.
        noise_multiplier: noise multiplier that keeps it within the budget.
        held_out_perplexity: perplexity on the tenant's held-out records. Private.
        held_out_before: the same for the base model. Private.
        public_perplexity: perplexity on public records.
    """

    label: str
    tenant: int
    seed: int
    epsilon_certified: float
    noise_multiplier: float
    held_out_perplexity: float
    held_out_before: float
    public_perplexity: float


def ablation_entries(options: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Make the entries to compare, by label.

    All have ``rldp``'s clipper. Its controller does nothing ("static"), acts at random ("random"), learns from released
    gradients ("A") or from released statistics too ("A+B"), or is the linear agent before ("untrained") and after
    ("DPPG-meta") training over tenants.

    Args:
        options: options of ``rldp`` that the entries share.
        folder: folder of the trained hyper-policy.
    """
    start = {key: options[key] for key in ("pair_radius",) if key in options}
    rldp = {"like": "rldp", **options}
    return {
        "static": {"like": "rldp", "controller": "constant", **start},
        "random": {**rldp, "policy": "random"},
        "A": rldp,
        "A+B": {**rldp, "design": "AB"},
        "untrained": {**rldp, "agent": "linear"},
        "DPPG-meta": {**rldp, "agent": "linear", "init_from": str(folder)},
    }


def ablate(
    setting: Setting,
    tenants: Sequence[Tenant],
    entries: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run every entry on every tenant with every seed, all at the same total certified epsilon.

    Args:
        tenants: tenants on whom no hyper-policy was trained. Private.
        entries: entries by label, as ``ablation_entries`` makes them.
        on_outcome: called with every outcome.

    Raises: ConfigError if an entry cannot meet the budget, or a tenant has no record to train on or to hold out.
    """
    outcomes = []
    calibrated = [calibrate_entry(setting, label, entry) for label, entry in entries.items()]
    for tenant in tenants:
        if tenant.is_null:
            raise ConfigError("tenants", f"tenant {tenant.number} has too few records", fix="use fewer tenants")
        for seed in seeds:
            for entry in calibrated:
                outcomes.append(_run(entry, tenant, seed))
                on_outcome(outcomes[-1])
    return outcomes


def _run(entry: CalibratedEntry, tenant: Tenant, seed: int) -> Outcome:
    setting, rows = entry.setting, 2 * entry.setting.plan.physical_batch_size
    changes = {} if entry.options.get("controller") == "constant" else {"seed": seed}
    mechanism = entry.mechanism(**changes)
    model, prices = fine_tune(setting, tenant, mechanism, setting.epsilon, OsEntropy(), seed)
    return Outcome(
        label=entry.name,
        tenant=tenant.number,
        seed=seed,
        epsilon_certified=prices.certified,
        noise_multiplier=mechanism.noise.noise_multiplier,
        held_out_perplexity=perplexity(model, tenant.held_out, rows),
        held_out_before=perplexity(setting.base, tenant.held_out, rows),
        public_perplexity=perplexity(model, setting.public, rows),
    )
