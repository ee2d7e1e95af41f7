"""Experience of a tenant: decisions of the controllers of its own fine-tuning runs, and their advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dptune.core.errors import DivergedError, DptuneError
from dptune.mechanisms.agents.linear_agent import OUTPUTS
from dptune.policy.schedules import MetaTraining
from dptune.policy.tenants.runs import CalibratedEntry, Tenant, fine_tune
from dptune.privacy.entropy import FixedSeed
from dptune.training.data import Tokens
from dptune.training.evaluation import mean_loss
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
