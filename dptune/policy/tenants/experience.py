"""What a tenant lives through: its own fine-tuning runs, their decisions, and what each of them gained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dptune.errors import DivergedError, DptuneError
from dptune.mechanisms.linear_agent import OUTPUTS
from dptune.policy.tenants.runs import Ready, Tenant, fine_tune
from dptune.policy.tenants.schedule import MetaTraining
from dptune.privacy.entropy import FixedSeed
from dptune.training.data import Tokens
from dptune.training.evaluation import mean_loss
from dptune.training.run import StepReport
from dptune.training.spec import TrainingPlan


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


def experience_or_none(ready: Ready, tenant: Tenant, training: MetaTraining) -> Experience | None:
    """The experience of a tenant, or None if a run fails: the failure may depend on records, so it stays private."""
    if tenant.held_out.without_loss == len(tenant.held_out.rows):
        return None  # no utility could be computed
    try:
        return experience_of(ready, tenant, training)
    except DivergedError:
        return None  # without noise that is secret, records decide it
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
