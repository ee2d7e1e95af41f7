"""Scene and result of an audit of the private step."""

from __future__ import annotations

from dataclasses import dataclass

from dptune.audit.epsilon_bounds import epsilon_from_errors, mu_from_errors
from dptune.privacy.release import Release


@dataclass(frozen=True)
class StepScene:
    """The attacker's batch: gradients that are multiples of one fixed direction.

    Attributes:
        name: name of the scene in the report.
        others: multiples of the samples that are always in the batch.
        sample: multiple of the sample that is in or out.
        loss: loss of that sample; the others' losses and the public loss are 1.
        apart: whether the sample is in a micro-batch of its own.
    """

    name: str
    others: tuple[float, ...]
    sample: float
    loss: float = 1.0
    apart: bool = False


@dataclass(frozen=True)
class StepAudit:
    """The result of an audit; each bound holds by itself at ``confidence``.

    Attributes:
        scene: name of the scene among ``step.SCENES`` that did best in the pilot trials.
        trials: number of trials in each of the two worlds, those that chose the attack included.
        steps: number of steps composed in one trial.
        sample_rate: probability with which the sample, if in the data, enters a batch.
        release: release that the ledger of a run must be charged for each audited step.
        mu_errors, epsilon_errors: (missed, members, false alarms, others) of the two attacks that were counted.
        fault: what was seen to break a precondition of the price, with certainty; None if nothing was.
    """

    scene: str
    trials: int
    confidence: float
    steps: int
    sample_rate: float
    delta: float
    release: Release
    mu_errors: tuple[int, int, int, int]
    epsilon_errors: tuple[int, int, int, int]
    fault: str | None = None

    @property
    def mu_audited(self) -> float:
        """Lower bound on mu if the releases are Gaussian DP; else the mu of the Gaussian through the attack's point."""
        return mu_from_errors(*self.mu_errors, self.confidence)

    @property
    def epsilon_audited(self) -> float:
        """Lower bound on epsilon at ``delta``, for any mechanism; at most about log(trials)."""
        return epsilon_from_errors(*self.epsilon_errors, self.delta, self.confidence)

    def to_dict(self) -> dict[str, str | int | float]:
        """The figures that users read, in plain JSON types."""
        names = ("scene", "trials", "confidence", "steps", "sample_rate", "delta", "mu_audited", "epsilon_audited")
        return {name: getattr(self, name) for name in names}
