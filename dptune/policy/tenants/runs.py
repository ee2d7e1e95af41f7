"""Tenants, and a complete fine-tuning run on the records of one of them.

The ablation compares mechanisms on new tenants at equal certified epsilon.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD, Lora
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, calibrated, noise_options
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import Epsilons
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.training.data import Tokens
from dptune.training.evaluation import perplexity
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits, hash_keys
from dptune.training.run import StepReport
from dptune.training.spec import RunSpec, TrainingPlan, header_of

_HELD_OUT = 4  # on average, one in four of a tenant's units is held out


@dataclass(frozen=True)
class Tenant:
    """A holder of records, the user of DP policy gradient here. Private.

    Attributes:
        number: number of the tenant; negative for a public one.
        train: records to fine-tune on.
        held_out: records to measure the loss on.
        keys: (records,) own key of each record of ``train``, by which correlated noise deals it into a group; None for
            a tenant whose runs have independent noise alone.
    """

    number: int
    train: Tokens
    held_out: Tokens
    keys: NDArray[np.integer[Any]] | None = field(default=None, repr=False)

    @property
    def is_null(self) -> bool:
        """Whether the tenant lacks records to train on or to hold out, and so contributes nothing."""
        return not (self.train.rows and self.held_out.rows)


@dataclass(frozen=True)
class Setting:
    """Settings that all fine-tuning runs share. Public.

    Attributes:
        base: frozen base model, on its device.
        lora: shape of the adapters.
        public: public records, for controllers that follow the loss on them.
        plan: schedule of a run; its expected batch is replaced by sample rate times the number of the tenant's records.
        options: options of ``rldp`` other than its agent and the policy that it starts from, as in params.yaml.
        epsilon: certified budget of a run for one record, all that the run inherits included.
        delta: delta of every epsilon, those of tenants included.
        data: label of the data.
    """

    base: Any
    lora: Lora
    public: Tokens
    plan: TrainingPlan
    options: Mapping[str, Any]
    epsilon: float
    delta: float
    data: str = "unspecified"


def tenants_of(tokens: Tokens, keys: NDArray[np.int64], count: int) -> list[Tenant]:
    """Deal records out to ``count`` tenants, whole units by a public hash of their keys.

    The tenant of a unit, and whether it is among the quarter of the tenant's units that is held out, depend on its key
    alone. A unit that joins or leaves moves no other one.

    Args:
        keys: (records,) key of each record's unit, as ``PrivacyUnits.clients`` takes it.
        count: number of tenants.
    """

    def select(rows: NDArray[np.int64]) -> Tokens:
        return replace(tokens, rows=[tokens.rows[row] for row in rows])

    tenants = []
    for number, members in enumerate(PrivacyUnits.clients(count, keys).members):
        # The remainder of the hash chose the tenant, so the quotient must choose the held-out units: by the remainder
        # again, all units of some tenants would be held out, and none of others.
        held_out = hash_keys(keys[members]) // np.uint64(count) % np.uint64(_HELD_OUT) == 0
        trained = members[~held_out]
        tenants.append(Tenant(number, select(trained), select(members[held_out]), keys[trained]))
    return tenants


@dataclass(frozen=True)
class CalibratedEntry:
    """An entry of a mechanism whose noise is calibrated to the budget of a setting.

    Attributes:
        setting: settings of the runs.
        name: name of the entry.
        options: options of the entry, its noise multiplier included.
    """

    setting: Setting
    name: str
    options: dict[str, Any]

    def mechanism(self, **changes: Any) -> Mechanism:
        """Build a new mechanism with these options changed. Every run needs its own, because controllers have state."""
        return build(self.name, self.options | changes)


def calibrate_entry(setting: Setting, name: str, entry: Mapping[str, Any]) -> CalibratedEntry:
    """Give an entry the least noise that keeps a run, and all that it inherits, within the budget.

    Args:
        name: name of the entry.
        entry: options of the entry, without noise.

    Raises: ConfigError if no noise suffices.
    """
    pairs = len(lora_pairs(attach_lora(copy.deepcopy(setting.base), setting.lora, 0)))
    schedule = Schedule(setting.plan.sample_rate, setting.plan.steps, setting.delta)

    def with_noise(noise: float) -> Mechanism:
        return build(name, {**entry, "pairs": pairs, "noise_multiplier": noise})

    found = calibrated(with_noise, setting.epsilon, schedule, "certified").mechanism
    return CalibratedEntry(setting, name, {**entry, "pairs": pairs, **noise_options(found)})


def fine_tune(
    setting: Setting,
    tenant: Tenant,
    mechanism: Mechanism,
    epsilon: float | None,
    entropy: Entropy,
    seed: int,
    follow: Callable[[Any], Callable[[StepReport], None]] = lambda model: lambda report: None,
) -> tuple[Any, Epsilons]:
    """Fine-tune adapters on a tenant's training records, from start to end.

    Args:
        mechanism: a new mechanism of ``CalibratedEntry.mechanism``.
        epsilon: budget of the run, or None for a run whose adapter nobody gets.
        entropy: source of coins and noise.
        seed: seed of the adapters; public.
        follow: function that makes, from the model, the function to call after every step.

    Returns: the model, and the three epsilons of the run for one record.
    """
    count = len(tenant.train.rows)
    units = PrivacyUnits.records(count) if tenant.keys is None else PrivacyUnits.of(RECORD, tenant.keys, 1)
    header = header_of(mechanism, units, entropy, delta=setting.delta, epsilon=epsilon, data=setting.data)
    model = attach_lora(copy.deepcopy(setting.base), setting.lora, seed)
    plan = replace(setting.plan, expected_batch_size=setting.plan.sample_rate * count)
    spec = RunSpec(model, tenant.train, units, mechanism, plan, header, public=setting.public)
    with (
        TemporaryDirectory(prefix="dptune-") as folder,
        train(spec, Path(folder), entropy, follow(model)) as ledger,
    ):
        return model, ledger.header.price(ledger.composition)


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
