"""The ablation: mechanisms compared on new tenants at equal certified epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.errors import ConfigError
from dptune.policy.tenants.runs import Ready, Setting, Tenant, fine_tune, ready_for
from dptune.privacy.entropy import OsEntropy
from dptune.training.evaluation import perplexity


@dataclass(frozen=True)
class Outcome:
    """One run of the ablation. ``held_out_perplexity`` and ``held_out_before`` are raw figures of private records."""

    label: str
    tenant: int
    seed: int
    epsilon_certified: float
    noise_multiplier: float
    held_out_perplexity: float
    held_out_before: float
    public_perplexity: float


def ablation_entries(options: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The entries to compare: ``rldp``'s clipper with a controller that does nothing, acts at random, learns from
    released gradients (A) or statistics too (A+B), and the linear agent before and after training over tenants.
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

    Raises: ConfigError if an entry cannot meet the budget, or a tenant is null.
    """
    found = []
    ready = {label: ready_for(setting, label, entry) for label, entry in entries.items()}
    for tenant in tenants:
        if tenant.is_null:
            raise ConfigError("tenants", f"tenant {tenant.number} has too few records", fix="use fewer tenants")
        for seed in seeds:
            for one in ready.values():
                found.append(_outcome(one, tenant, seed))
                on_outcome(found[-1])
    return found


def _outcome(ready: Ready, tenant: Tenant, seed: int) -> Outcome:
    setting, rows = ready.setting, 2 * ready.setting.plan.physical_batch_size
    options = {} if ready.entry.get("controller") == "constant" else {"seed": seed}
    mechanism = ready.mechanism(**options)
    model, prices = fine_tune(setting, tenant, mechanism, setting.epsilon, OsEntropy(), seed)
    return Outcome(
        label=ready.name,
        tenant=tenant.number,
        seed=seed,
        epsilon_certified=prices.certified,
        noise_multiplier=mechanism.noise.noise_multiplier,
        held_out_perplexity=perplexity(model, tenant.held_out, rows),
        held_out_before=perplexity(setting.base, tenant.held_out, rows),
        public_perplexity=perplexity(model, setting.public, rows),
    )
