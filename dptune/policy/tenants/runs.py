"""Tenants, and one complete fine-tuning run on the records of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, calibrated
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import Epsilons
from dptune.privacy.entropy import Entropy
from dptune.training.data import PrivacyUnits, Tokens, hash_keys
from dptune.training.loop import train
from dptune.training.model import Lora, attach_lora
from dptune.training.per_sample import lora_pairs
from dptune.training.run import StepReport
from dptune.training.spec import RunSpec, TrainingPlan, header_of

_HELD_OUT = 4  # one in so many of a tenant's units, on average


@dataclass(frozen=True)
class Tenant:
    """A shard of records. Private. One without records to train or to look at is a null tenant."""

    number: int
    train: Tokens
    held_out: Tokens

    @property
    def is_null(self) -> bool:
        """Whether it contributes nothing."""
        return not (self.train.rows and self.held_out.rows)


@dataclass(frozen=True)
class Setting:
    """The settings that all fine-tuning runs share. Public.

    Attributes:
        base: the frozen model, on its device.
        public: public records, for controllers that follow the loss on them.
        plan: the schedule; its expected batch is replaced by each tenant's own, sample rate times records.
        options: of ``rldp`` besides agent and start, an entry as in params.yaml.
        epsilon: certified budget of a run for one record, all that it inherits included.
        delta: of every epsilon, the tenants' too.
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

    Where a unit goes, and whether it is among the quarter of a tenant's units that is held out, depends on its key
    alone: nobody else moves with it, in their own tenant or another.

    Args:
        keys: (records,) the own key of each record's unit, as ``PrivacyUnits.clients`` takes it.
    """

    def chosen(rows: NDArray[np.int64]) -> Tokens:
        return replace(tokens, rows=[tokens.rows[row] for row in rows])

    found = []
    for number, members in enumerate(PrivacyUnits.clients(count, keys).members):
        # What the remainder, which chose the tenant, leaves of the hash.
        held_out = hash_keys(keys[members]) // np.uint64(count) % np.uint64(_HELD_OUT) == 0
        found.append(Tenant(number, chosen(members[~held_out]), chosen(members[held_out])))
    return found


@dataclass(frozen=True)
class Ready:
    """A setting with a calibrated entry."""

    setting: Setting
    name: str
    entry: dict[str, Any]

    def mechanism(self, **options: Any) -> Mechanism:
        """Build a new mechanism. Every run needs its own, for a controller keeps state."""
        return build(self.name, self.entry | options)


def ready_for(setting: Setting, name: str, entry: Mapping[str, Any]) -> Ready:
    """The entry with the least noise that keeps a run, and all that it inherits, within the budget."""
    pairs = len(lora_pairs(attach_lora(copy.deepcopy(setting.base), setting.lora, 0)))
    schedule = Schedule(setting.plan.sample_rate, setting.plan.steps, setting.delta)

    def with_noise(noise: float) -> Mechanism:
        return build(name, {**entry, "pairs": pairs, "noise_multiplier": noise})

    found = calibrated(with_noise, setting.epsilon, schedule, "certified").mechanism
    return Ready(setting, name, {**entry, "pairs": pairs, "noise_multiplier": found.noise.noise_multiplier})


def fine_tune(
    setting: Setting,
    tenant: Tenant,
    mechanism: Mechanism,
    epsilon: float | None,
    entropy: Entropy,
    seed: int,
    follow: Callable[[Any], Callable[[StepReport], None]] = lambda model: lambda report: None,
) -> tuple[Any, Epsilons]:
    """One complete fine-tuning run on a tenant's training records: the model, and what it cost one record.

    Args:
        epsilon: the budget, or None if nobody gets the adapter.
        entropy: source of coins and noise.
        seed: seed of the adapters; public.
        follow: makes, from the model, the function to call after every step.
    """
    count = len(tenant.train.rows)
    units = PrivacyUnits.of("record", np.arange(count), 1)
    header = header_of(mechanism, units, entropy, delta=setting.delta, epsilon=epsilon, data=setting.data)
    model = attach_lora(copy.deepcopy(setting.base), setting.lora, seed)
    plan = replace(setting.plan, expected_batch_size=setting.plan.sample_rate * count)
    spec = RunSpec(model, tenant.train, units, mechanism, plan, header, public=setting.public)
    with (
        TemporaryDirectory(prefix="dptune-") as folder,
        train(spec, Path(folder), entropy, follow(model)) as ledger,
    ):
        return model, ledger.header.price(ledger.composition)
