"""A hyper-policy across tenants: DP policy gradient over complete fine-tuning runs (spec, section 6.5).

policy       = released parameters, as a hyper-policy on disk      # what a new tenant would start from
runs         = each tenant's own runs from it                      # K new tenants an update, each in one update
updates      = what each tenant computes from its own runs and its own held-out loss
mean         = release(updates, radius)                            # charged, clipped, noised: dptune.policy.learner
parameters  += mean

The user of DP policy gradient is a tenant here: a set of whole units, none of which is in two. Nothing need be
hidden from a tenant in its own trajectory, so that rewards are raw. What its controller *sees* are releases and public
data all the same, since that is all that it will see elsewhere (the asymmetry of section 6.5). The noise of those runs
protects their adapters, which nobody gets; it is in no price here, and so may come from a public stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from dptune.errors import ConfigError
from dptune.mechanisms.linear_agent import FEATURES, OUTPUTS, PARAMETERS, initial_parameters
from dptune.mechanisms.policy_file import TENANT, SavedPolicy
from dptune.policy.aggregate import projected
from dptune.policy.learner import updates_left
from dptune.policy.local import normalised
from dptune.policy.met import Met
from dptune.policy.method import NAME, PUBLISHED_ACCOUNTANT, Dppg
from dptune.policy.opening import digest_of, open_ledger, save_state
from dptune.policy.policies import Linear, Policy
from dptune.policy.tenants.experience import Experience, experience_of, experience_or_none
from dptune.policy.tenants.runs import Ready, Setting, Tenant, ready_for
from dptune.policy.tenants.schedule import MetaTraining
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader

#: The agent of ``dptune.mechanisms.linear_agent``, as DP policy gradient trains it.
POLICY = Policy(Linear(len(FEATURES), len(OUTPUTS)), len(OUTPUTS), continuous=True)
_REHEARSAL = -1  # number of a tenant that is public


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
    radius, count = _checked_radius(tenants, method, training), training.tenants
    with _open(setting, tenants, method, training, directory, entropy) as ledger:
        parameters, updates, state = _load(directory), training.updates, RunFolder(directory).state
        if ledger.releases < updates:
            _rehearse(setting, parameters, method, training)
        save_state(state, {"parameters": parameters}, ledger.releases)  # before anything is charged
        for number, release in updates_left(ledger, method, updates, entropy):
            found: list[Experience | None] = []
            with _start_from(setting, parameters, method, training) as ready:
                for tenant in tenants[number * count : (number + 1) * count]:
                    found.append(experience_or_none(ready, tenant, training))
                    on_tenant(number * count + len(found))
            (mean,) = release([meta_updates(parameters, found, radius)], [radius])
            parameters = parameters + mean
            save_state(state, {"parameters": parameters}, ledger.releases)
        leaks = ledger.header.price(ledger.composition).leaks
        label = f"{updates} updates of {count} tenants"
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


@contextmanager
def _start_from(setting: Setting, parameters: torch.Tensor, method: Dppg, training: MetaTraining) -> Iterator[Ready]:
    """The setting of a new tenant's run: its noise is calibrated to the budget that the hyper-policy leaves."""
    policy = _as_policy(parameters, "unfinished", "unfinished", method.planned(training.updates))
    with TemporaryDirectory(prefix="dptune-") as folder:
        policy.write(Path(folder))
        yield ready_for(setting, "rldp", {**setting.options, "agent": "linear", "init_from": folder})


def _rehearse(setting: Setting, parameters: torch.Tensor, method: Dppg, training: MetaTraining) -> None:
    """Make a public tenant's runs, so that a fault that all runs share raises, instead of giving zero updates."""
    rows = setting.public.rows
    tenant = Tenant(_REHEARSAL, setting.public, replace(setting.public, rows=rows[:1]))
    with _start_from(setting, parameters, method, training) as ready:
        if experience_of(ready, tenant, training) is None:
            raise ConfigError("interval", "a run ends before its controller acts", fix="lower interval or warmup")
