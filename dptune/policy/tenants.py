"""A hyper-policy across tenants: DP policy gradient over complete fine-tuning runs (spec, section 6.5).

policy       = released parameters, as a hyper-policy on disk      # what a new tenant would start from
runs         = each tenant's own runs from it                      # K new tenants an update, each in one update
updates      = clip(what each tenant computes from its own runs and its own held-out loss)
ledger.charge(method.release(number))                              # on disk before the noisy value exists
parameters  += mean of the updates + noise

The user of DP policy gradient is a tenant here: a set of whole units, none of which is in two. Nothing need be
hidden from a tenant in its own trajectory, so that rewards are raw. What its controller *sees* are releases and public
data all the same, since that is all that it will see elsewhere (the asymmetry of section 6.5). The noise of those runs
protects their adapters, which nobody gets; it is in no price here, and so may come from a public stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dptune.errors import ConfigError, DptuneError
from dptune.mechanisms.linear_agent import FEATURES, OUTPUTS, PARAMETERS, initial_parameters
from dptune.mechanisms.policy_file import TENANT, SavedPolicy
from dptune.policy.aggregate import noisy_means, projected
from dptune.policy.local import normalised
from dptune.policy.method import NAME, PUBLISHED_ACCOUNTANT, Dppg
from dptune.policy.opening import digest_of, open_ledger, save_state
from dptune.policy.policies import Linear, Policy
from dptune.policy.rollout import Met
from dptune.policy.tenant_runs import Ready, Setting, Tenant, fine_tune, ready_for
from dptune.policy.trust_region import Update, l2_radius
from dptune.privacy.entropy import Entropy, FixedSeed
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens
from dptune.training.evaluation import mean_loss
from dptune.training.run import StepReport
from dptune.training.spec import TrainingPlan

#: The agent of ``dptune.mechanisms.linear_agent``, as DP policy gradient trains it.
POLICY = Policy(Linear(len(FEATURES), len(OUTPUTS)), len(OUTPUTS), continuous=True)
_REHEARSAL = -1  # number of a tenant that is public


@dataclass(frozen=True, kw_only=True)
class MetaTraining:
    """The public schedule of training over tenants.

    Attributes:
        tenants: K, tenants an update.
        updates: releases to make; needs tenants times updates tenants.
        runs: number of runs of each tenant, which differ only in exploration; a run's baseline is the others' mean.
        trust, miss: the noisy update leaves ||step||^2 / 2 <= trust with a probability of miss at most.
        seed: seed of exploration, adapters and the runs' own noise; public.
    """

    tenants: int = 32
    updates: int = 4
    runs: int = 2
    trust: float = 0.5
    miss: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tenants", "updates"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        if self.runs < 2:
            raise ConfigError("runs", f"{self.runs} leaves a run without a baseline", fix="use 2 or more")

    def radius(self, method: Dppg) -> float:
        """S, the clip radius of a tenant's update (proposition 4.4). Raises: ConfigError without noise."""
        update = Update(1.0, method.noise_multiplier, PARAMETERS, self.tenants)
        return l2_radius(update, self.trust, self.miss)


@dataclass(frozen=True)
class Experience:
    """The experience that a tenant learns from; a row is one pair at one decision of one run. Private.

    Attributes:
        features: (rows, 8).
        actions: (rows, 2).
        gains: (rows,) advantages.
    """

    features: torch.Tensor
    actions: torch.Tensor
    gains: torch.Tensor


def meta_train(
    setting: Setting,
    tenants: Sequence[Tenant],
    method: Dppg,
    training: MetaTraining,
    directory: Path,
    entropy: Entropy,
    on_tenant: Callable[[int], None] = lambda done: None,
) -> SavedPolicy:
    """Train the linear agent of ``rldp`` over tenants, resuming what ``directory`` holds of it.

    Guarantee: the parameters after every update are a function of the releases that the ledger lists, charged before
    they were made: (certified, delta)-DP for one tenant, whose slot is zeroed, whatever the number of updates, since
    each tenant is in one. For one record of a tenant see ``SavedPolicy.price``. A tenant is a fixed set of records, and
    is used in no other training. Private: ``tenants`` and what each computes. Public: everything else.

    Args:
        tenants: the first K are met by the first update, and so on; whoever is left over is not met.
        method: noise, with critic none.
        directory: receives ledger.jsonl, state.safetensors and at last controller/, for ``init_from``.
        entropy: source of the noise on the updates.
        on_tenant: called with the number of tenants met so far.

    Raises: ConfigError, also for what would fail in every tenant's run: public records rehearse one first.
        UserReuseError if a tenant comes twice; LedgerError if the training is finished, was started with another
        schedule, or its files are damaged.
    """
    radius = _checked_radius(tenants, method, training)
    with _open(setting, tenants, method, training, directory, entropy) as ledger:
        parameters, updates, state = _load(directory), training.updates, RunFolder(directory).state
        if ledger.releases < updates:
            _rehearse(setting, parameters, method, training)
        save_state(state, {"parameters": parameters}, ledger.releases)  # before anything is charged
        # Charged updates that were lost with their process are not made again: their tenants have been met.
        for number in range(ledger.releases, updates):
            group = tenants[number * training.tenants : (number + 1) * training.tenants]
            parameters = _updated(setting, group, parameters, radius, method, training, ledger, entropy, on_tenant)
            save_state(state, {"parameters": parameters}, ledger.releases)
        leaks = ledger.header.price(ledger.composition).leaks
        label = f"{updates} updates of {training.tenants} tenants"
        policy = _as_policy(parameters, label, ledger.header.run_id, ledger.composition, leaks)
        policy.write(RunFolder(directory).controller)
        ledger.finish()
    return policy


def _checked_radius(tenants: Sequence[Tenant], method: Dppg, training: MetaTraining) -> float:
    if method.critic != "none":
        raise ConfigError(
            "critic", f"is {method.critic}, and a tenant's runs are each other's baseline", fix="use none"
        )
    if not method.noise_multiplier:
        raise ConfigError("noise_multiplier", "0 hides no tenant, and nobody could start from it", fix="use 4, say")
    needed = training.tenants * training.updates
    if len(tenants) < needed:
        raise ConfigError("updates", f"need {needed} tenants, and there are {len(tenants)}", fix="lower them")
    # All of them, before anything is charged; also those whom a process that died had met.
    Met().admit(tuple(tenant.number for tenant in tenants[:needed]))
    return training.radius(method)


def _open(
    setting: Setting, tenants: Sequence[Tenant], method: Dppg, training: MetaTraining, directory: Path, entropy: Entropy
) -> Ledger:
    """Start the ledger, or resume it with the very same schedule: with another K, tenants would be met again."""
    header = RunHeader(
        mechanism=NAME,
        published_accountant=PUBLISHED_ACCOUNTANT,
        accounting="certified",
        epsilon=None,
        delta=setting.delta,
        unit=TENANT,
        units=len(tenants),
        data=setting.data,
        leaks=entropy.leaks,
    )
    order = digest_of([tenant.number for tenant in tenants])
    schedule = {"method": asdict(method), "training": asdict(training), "order": order}
    return open_ledger(directory, header, method.planned(training.updates), schedule, entropy)


def _load(directory: Path) -> torch.Tensor:
    file = RunFolder(directory).state
    return load_file(file)["parameters"] if file.exists() else initial_parameters()


def _as_policy(
    parameters: torch.Tensor, label: str, run_id: str, releases: Composition, leaks: tuple[str, ...] = ()
) -> SavedPolicy:
    return SavedPolicy(
        label=label,
        run_id=run_id,
        unit=TENANT,
        tensors={"policy.parameters": parameters},
        features=len(FEATURES),
        features_seen=0,
        releases=Counter(releases),
        leaks=leaks,
        options={"agent": "linear"},
    )


def _updated(
    setting: Setting,
    group: Sequence[Tenant],
    parameters: torch.Tensor,
    radius: float,
    method: Dppg,
    training: MetaTraining,
    ledger: Ledger,
    entropy: Entropy,
    on_tenant: Callable[[int], None],
) -> torch.Tensor:
    """Make one update, which publishes nothing of the group but the noisy mean."""
    number, found = ledger.releases, []
    with TemporaryDirectory(prefix="dptune-") as folder:
        ready = _start_from(setting, parameters, method, training, Path(folder))
        for place, tenant in enumerate(group, start=1):
            found.append(_experience_or_none(ready, tenant, training))
            on_tenant(number * training.tenants + place)
    updates = meta_updates(parameters, found, radius)
    ledger.charge(method.release(number))
    (mean,) = noisy_means([updates], [radius], method.multipliers, entropy)
    return parameters + mean


def meta_updates(parameters: torch.Tensor, found: Sequence[Experience | None], radius: float) -> torch.Tensor:
    """(tenants, 18) float64: each tenant's policy gradient of its own experience, clipped to ``radius``. Private.

    Algorithm 2's mean_t grad log pi(a_t | x_t) A_t, the advantages at the tenant's own deviation 1. A row is exactly
    zero where there is no experience, or a gradient that is not finite. (Local Adam steps move all parameters alike,
    and so spend the radius on those that matter little.)
    """
    some = next((one for one in found if one is not None), None)
    if some is None:
        return torch.zeros(len(found), PARAMETERS, dtype=torch.float64)
    nothing = Experience(*(torch.zeros_like(part) for part in vars(some).values()))
    filled = [one or nothing for one in found]
    features, actions, gains = (torch.stack([getattr(one, name) for one in filled]) for name in vars(some))
    taken = torch.tensor([one is not None for one in found])[:, None].expand(gains.shape)
    own = parameters.repeat(len(found), 1).requires_grad_()
    logs = POLICY.log_probability(own, features, actions)
    (gradients,) = torch.autograd.grad((logs * normalised(gains, taken) * taken).mean(dim=1).sum(), own)
    return projected(gradients, radius)


def _start_from(
    setting: Setting, parameters: torch.Tensor, method: Dppg, training: MetaTraining, folder: Path
) -> Ready:
    """The setting of a new tenant's run: its noise is calibrated to the budget that the hyper-policy leaves."""
    _as_policy(parameters, "unfinished", "unfinished", method.planned(training.updates)).write(folder)
    return ready_for(setting, "rldp", {**setting.options, "agent": "linear", "init_from": str(folder)})


def _rehearse(setting: Setting, parameters: torch.Tensor, method: Dppg, training: MetaTraining) -> None:
    """Make a public tenant's runs, so that a fault that all runs share raises, instead of giving zero updates."""
    rows = setting.public.rows
    tenant = Tenant(_REHEARSAL, setting.public, replace(setting.public, rows=rows[:1]))
    with TemporaryDirectory(prefix="dptune-") as folder:
        ready = _start_from(setting, parameters, method, training, Path(folder))
        if experience_of(ready, tenant, training) is None:
            raise ConfigError("interval", "a run ends before its controller acts", fix="lower interval or warmup")


def _experience_or_none(ready: Ready, tenant: Tenant, training: MetaTraining) -> Experience | None:
    """The experience of a tenant, or None if a run fails: the failure may depend on records, so it stays private."""
    try:
        return experience_of(ready, tenant, training)
    except DptuneError:
        raise  # of settings or of the disk; no record decides it
    except Exception:
        return None


def experience_of(ready: Ready, tenant: Tenant, training: MetaTraining) -> Experience | None:
    """Of a tenant's runs; None if it is null or its controller never acted. Private.

    The utility of an action is what the held-out loss fell from then to the end of the run. Runs share adapters, coins
    and noise, so that what they differ in is due to actions; the spec's baseline, a run's own mean, would mostly tell
    early actions, after which more is left to gain, from late ones.
    """
    if tenant.is_null:
        return None
    watches = [_watched(ready, tenant, training, run) for run in range(training.runs)]
    if not all(watch.decisions for watch in watches):
        return None
    utilities = torch.tensor([watch.utilities for watch in watches])
    to_go = utilities[:, -1:] - utilities[:, :-1]
    gains = to_go - (to_go.sum(dim=0) - to_go) / (len(watches) - 1)
    states = torch.stack([state for watch in watches for state, _ in watch.decisions])
    actions = torch.stack([action.view(len(OUTPUTS), -1).T for watch in watches for _, action in watch.decisions])
    return Experience(states.flatten(0, 1), actions.flatten(0, 1), gains.flatten().repeat_interleave(states.shape[1]))


def _watched(ready: Ready, tenant: Tenant, training: MetaTraining, run: int) -> _Watch:
    public = abs(tenant.number), int(tenant.number < 0)
    exploration, noise = np.random.SeedSequence([training.seed, *public]).generate_state(training.runs + 1)[[run, -1]]
    mechanism = ready.mechanism(seed=int(exploration))
    watch = _Watch(mechanism.controller, tenant.held_out, ready.setting.plan)
    model, _ = fine_tune(
        ready.setting, tenant, mechanism, None, FixedSeed(int(noise)), int(noise), lambda model: watch.follow(model)
    )
    watch.utilities.append(watch.utility(model))
    return watch


@dataclass
class _Watch:
    """The decisions and utilities of one run of a tenant. Private."""

    controller: Any
    held_out: Tokens
    plan: TrainingPlan
    decisions: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    utilities: list[float] = field(default_factory=list)

    def utility(self, model: Any) -> float:
        """The utility of a model: minus the raw held-out loss."""
        return -mean_loss(model, self.held_out, 2 * self.plan.physical_batch_size)

    def follow(self, model: Any) -> Callable[[StepReport], None]:
        """Note every decision, and the utility of the model that it found; not the last, which moves nothing."""

        def note(report: StepReport) -> None:
            latest = self.controller.decision
            known = self.decisions[-1] if self.decisions else None
            if latest is None or report.releases == self.plan.steps or (known and known[0] is latest[0]):
                return
            self.decisions.append(latest)
            self.utilities.append(self.utility(model))

        return note
