"""Training of a hyper-policy over tenants, by DP policy gradient.

A hyper-policy is an agent of ``rldp``, which sets clip radii and weights of LoRA pairs during a run. It learns here
from many tenants' runs, so that a new tenant's run can start from it.

policy       = released parameters, as a hyper-policy on disk      # a new tenant would start from it
runs         = each tenant's own runs from it                      # K new tenants an update, each in one update
updates      = what each tenant computes from its own runs and its own held-out loss
mean         = release(updates, radius)                            # charged, clipped, with noise: ``user_updates``
parameters  += mean

The user of DP policy gradient is a tenant here: a set of whole units, each of which belongs to one tenant. A tenant's
rewards are raw, because they stay with the tenant. Its controller still sees only releases and public data, since a new
tenant's controller will see no more. The noise of these runs would protect their adapters, but
nobody gets those; it counts in no epsilon, and may come from a public stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from dptune.core.errors import ConfigError, DivergedError, DptuneError
from dptune.mechanisms.agents.linear_agent import FEATURES, OUTPUTS, PARAMETERS, initial_parameters
from dptune.mechanisms.agents.policy_file import TENANT, SavedPolicy
from dptune.policy.method import NAME, PUBLISHED_ACCOUNTANT, Dppg
from dptune.policy.policies import Linear, Policy
from dptune.policy.run_files import UserRegister, open_ledger, save_state
from dptune.policy.schedules import MetaTraining
from dptune.policy.tenants.runs import CalibratedEntry, Setting, Tenant, calibrate_entry, fine_tune
from dptune.policy.user_updates import normalise_advantages, project_to_ball, updates_left
from dptune.privacy.entropy import Entropy, FixedSeed
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens
from dptune.training.evaluation import mean_loss
from dptune.training.models.weight_files import read_tensors
from dptune.training.run import StepReport
from dptune.training.spec import TrainingPlan


@dataclass(frozen=True)
class Experience:
    """Decisions of a tenant's runs with their advantages; a row is one LoRA pair at one decision of one run. Private.

    Attributes:
        features: (rows, 8) features of the pair that the agent saw.
        actions: (rows, 2) actions of the agent on that pair.
        gains: (rows,) advantages of the decisions, in nats a token of held-out loss.
    """

    features: torch.Tensor
    actions: torch.Tensor
    gains: torch.Tensor


def experience_or_none(entry: CalibratedEntry, tenant: Tenant, training: MetaTraining) -> Experience | None:
    """Compute a tenant's experience; None if it is null or a run fails. Private.

    A failure that its records may have caused is not raised: an error would tell of those records.

    Raises: DptuneError for a fault of the settings or of the disk, which no record can cause.
    """
    if tenant.held_out.without_loss == len(tenant.held_out.rows):
        return None  # no held-out record has a loss, so there is no utility
    try:
        return experience_of(entry, tenant, training)
    except DivergedError:
        return None  # the noise of these runs is not secret, so whether they diverge depends on records
    except DptuneError:
        raise
    except Exception:
        return None


def experience_of(entry: CalibratedEntry, tenant: Tenant, training: MetaTraining) -> Experience | None:
    """Make a tenant's runs and compute its experience; None if it is null or a controller never acted. Private.

    The return of a decision is the fall of the held-out loss from then to the end of the run; its advantage is the
    return minus the mean return of the other runs' decision at the same time. Runs share adapters, coins and noise, so
    they differ by their decisions alone. (The baseline of the spec, a run's own mean, would mostly measure how
    early a decision was: more loss is left to fall after an early one.)
    """
    if tenant.is_null:
        return None
    watches = [_watch_run(entry, tenant, training, run) for run in range(training.runs)]
    if not all(watch.decisions for watch in watches):
        return None
    utilities = torch.tensor([watch.utilities for watch in watches])
    to_go = utilities[:, -1:] - utilities[:, :-1]
    gains = to_go - (to_go.sum(dim=0) - to_go) / (len(watches) - 1)
    states = torch.stack([state for watch in watches for state, _ in watch.decisions])
    actions = torch.stack([action.view(len(OUTPUTS), -1).T for watch in watches for _, action in watch.decisions])
    return Experience(states.flatten(0, 1), actions.flatten(0, 1), gains.flatten().repeat_interleave(states.shape[1]))


def _watch_run(entry: CalibratedEntry, tenant: Tenant, training: MetaTraining, run: int) -> _Watch:
    """Make run number ``run`` of a tenant, and record its decisions and utilities."""
    public = abs(tenant.number), int(tenant.number < 0)
    exploration, noise = np.random.SeedSequence([training.seed, *public]).generate_state(training.runs + 1)[[run, -1]]
    mechanism = entry.mechanism(seed=int(exploration))
    watch = _Watch(mechanism.controller, tenant.held_out, entry.setting.plan)
    model, _ = fine_tune(
        entry.setting, tenant, mechanism, None, FixedSeed(int(noise)), int(noise), lambda model: watch.follow(model)
    )
    watch.utilities.append(watch.utility(model))
    return watch


@dataclass
class _Watch:
    """Record of a tenant's run. Private.

    Attributes:
        controller: the run's controller, whose decisions are recorded.
        held_out: the tenant's held-out records.
        plan: schedule of the run.
        decisions: (features, actions) of each decision.
        utilities: utility of the model at each decision, and at the end of the run.
    """

    controller: Any
    held_out: Tokens
    plan: TrainingPlan
    decisions: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    utilities: list[float] = field(default_factory=list)

    def utility(self, model: Any) -> float:
        """Utility of a model: minus its mean loss on the held-out records, in nats a token. Private."""
        return -mean_loss(model, self.held_out, 2 * self.plan.physical_batch_size)

    def follow(self, model: Any) -> Callable[[StepReport], None]:
        """Make the function to call after every step of the run, which records a new decision and the utility then.

        A decision after the last step is left out, because it moves nothing.
        """

        def note(report: StepReport) -> None:
            decision = self.controller.decision
            last = self.decisions[-1] if self.decisions else None
            if decision is None or report.releases == self.plan.steps or (last and last[0] is decision[0]):
                return
            self.decisions.append(decision)
            self.utilities.append(self.utility(model))

        return note


#: The agent of ``dptune.mechanisms.agents.linear_agent``, as DP policy gradient trains it.
POLICY = Policy(Linear(len(FEATURES), len(OUTPUTS)), len(OUTPUTS), continuous=True)
_REHEARSAL = -1  # number of the public tenant that ``_rehearse`` makes


def meta_train(
    setting: Setting,
    tenants: Sequence[Tenant],
    method: Dppg,
    training: MetaTraining,
    directory: Path,
    entropy: Entropy,
    on_tenant: Callable[[int], None] = lambda count: None,
) -> SavedPolicy:
    """Train the linear agent of ``rldp`` over tenants, or resume the training in ``directory``.

    Guarantee: the training is (certified epsilon, delta)-DP for one tenant whose slot becomes empty, whatever the
    number of updates, since each tenant is in one. The parameters after every update are a function of public values
    and of the releases in the ledger, each of which was charged before it was made. A tenant is a fixed set of records
    that is used in no other training. For the guarantee of one record of a tenant see ``SavedPolicy.price``. Private:
    ``tenants``, and the updates that they compute. Public: all else.

    Args:
        tenants: tenants, the first K of whom are in the first update, and so on; tenants beyond the last update are not
            used.
        method: noise of the updates; its critic must be "none".
        directory: receives ledger.jsonl, state.safetensors and at the end controller/, for ``init_from``.
        entropy: source of the noise on the updates.
        on_tenant: called with the number of tenants used so far.

    Returns: the trained hyper-policy.

    Raises: ConfigError, also for a fault that every tenant's run would have (a run on public records is tried first);
        UserReuseError if a tenant occurs twice; LedgerError if the training is finished, was started with another
        schedule, or its files are damaged.
    """
    radius, count = _checked_radius(tenants, method, training), training.tenants
    with _open(setting, tenants, method, training, directory, entropy) as ledger:
        parameters, updates, state = _load(directory), training.updates, RunFolder(directory).state
        if ledger.releases < updates:
            _rehearse(setting, parameters, method, training)
        # An unwritable disk must fail before anything is charged.
        save_state(state, {"parameters": parameters}, ledger.releases)
        for number, release in updates_left(ledger, method, updates, count, entropy):
            experiences: list[Experience | None] = []
            with _start_from(setting, parameters, method, training) as entry:
                for tenant in tenants[number * count : (number + 1) * count]:
                    experiences.append(experience_or_none(entry, tenant, training))
                    on_tenant(number * count + len(experiences))
            (mean,) = release([meta_updates(parameters, experiences, radius)], [radius])
            parameters = parameters + mean
            save_state(state, {"parameters": parameters}, ledger.releases)
        leaks = ledger.header.price(ledger.composition).leaks
        label = f"{updates} updates of {count} tenants"
        policy = _as_policy(parameters, label, ledger.header.run_id, ledger.composition, leaks)
        policy.write(RunFolder(directory).controller)
        ledger.finish()
    return policy


def _checked_radius(tenants: Sequence[Tenant], method: Dppg, training: MetaTraining) -> float:
    """Clip radius of the tenants' updates, after a check of method and tenants. Raises: ConfigError, UserReuseError."""
    if method.critic != "none":
        raise ConfigError(
            "critic", f"is {method.critic}, but the baseline of a tenant's run is its other runs", fix="use none"
        )
    if not method.noise_multiplier:
        raise ConfigError(
            "noise_multiplier", "0 protects no tenant, so no run may start from the result", fix="use 4, say"
        )
    needed = training.tenants * training.updates
    if len(tenants) < needed:
        raise ConfigError(
            "updates", f"need {needed} tenants, and there are {len(tenants)}", fix="lower tenants or updates"
        )
    # Check all tenants before anything is charged, those of a process that died included.
    UserRegister().admit(tuple(tenant.number for tenant in tenants[:needed]))
    return training.clip_radius(method.noise_multiplier, PARAMETERS)


def _open(
    setting: Setting, tenants: Sequence[Tenant], method: Dppg, training: MetaTraining, directory: Path, entropy: Entropy
) -> Ledger:
    """Start the ledger, or resume it under the same schedule; with another K, some tenants would be in two updates."""
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
    # A tenant's number is public: a hash deals the units into groups, and the number is the group's.
    order = [tenant.number for tenant in tenants]
    schedule = {"method": asdict(method), "training": asdict(training), "order": order}
    return open_ledger(directory, header, method.planned(training.updates), schedule, entropy)


def _load(directory: Path) -> torch.Tensor:
    """Parameters that the training in ``directory`` saved last, or the initial ones."""
    file = RunFolder(directory).state
    return read_tensors(file)["parameters"] if file.exists() else initial_parameters()


def _as_policy(
    parameters: torch.Tensor, label: str, run_id: str, releases: Composition, leaks: tuple[str, ...] = ()
) -> SavedPolicy:
    """Make a hyper-policy of the parameters, which says what its training released."""
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


def meta_updates(parameters: torch.Tensor, experiences: Sequence[Experience | None], radius: float) -> torch.Tensor:
    """Compute each tenant's policy gradient from its own experience, clipped to ``radius``. Private.

    It is the mean over t of grad log pi(a_t | x_t) A_t (algorithm 2), with advantages normalised within the tenant.
    (Local Adam steps move all parameters by about the same amount, and so spend the radius on parameters that matter
    little.)

    Args:
        parameters: (18,) released parameters of the agent.
        experiences: experience of each tenant, or None for a tenant without one.

    Returns: (tenants, 18) float64; a row is exactly zero for a tenant without experience or with a gradient that is not
        finite.
    """
    example = next((experience for experience in experiences if experience is not None), None)
    if example is None:
        return torch.zeros(len(experiences), PARAMETERS, dtype=torch.float64)
    empty = Experience(*(torch.zeros_like(part) for part in vars(example).values()))
    rows = [experience or empty for experience in experiences]
    features, actions, gains = (torch.stack([getattr(row, name) for row in rows]) for name in vars(example))
    row_mask = torch.tensor([experience is not None for experience in experiences])[:, None].expand(gains.shape)
    own = parameters.repeat(len(experiences), 1).requires_grad_()
    logs = POLICY.log_probability(own, features, actions)
    objective = (logs * normalise_advantages(gains, row_mask) * row_mask).mean(dim=1).sum()
    (gradients,) = torch.autograd.grad(objective, own)
    return project_to_ball(gradients, radius)


@contextmanager
def _start_from(
    setting: Setting, parameters: torch.Tensor, method: Dppg, training: MetaTraining
) -> Iterator[CalibratedEntry]:
    """Context with the entry of a tenant's run that starts from these parameters.

    Its noise is calibrated to the budget that the hyper-policy leaves, as in a new tenant's run.
    """
    policy = _as_policy(parameters, "unfinished", "unfinished", method.planned(training.updates))
    with TemporaryDirectory(prefix="dptune-") as folder:
        policy.write(Path(folder))
        yield calibrate_entry(setting, "rldp", {**setting.options, "agent": "linear", "init_from": folder})


def _rehearse(setting: Setting, parameters: torch.Tensor, method: Dppg, training: MetaTraining) -> None:
    """Make the runs of a tenant with public records, so that a fault that all runs share raises an error.

    In the tenants' own runs the fault would be caught, and give updates of zero.
    """
    rows = setting.public.rows
    tenant = Tenant(_REHEARSAL, setting.public, replace(setting.public, rows=rows[:1]))
    with _start_from(setting, parameters, method, training) as entry:
        if experience_of(entry, tenant, training) is None:
            raise ConfigError("interval", "a run ends before its controller acts", fix="lower interval or warmup")
