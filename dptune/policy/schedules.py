"""Schedules of policy runs, all public: in an environment, on prompts, on tenants; and the radii of a trust region.

It imports no torch, so that settings can be checked without it. The radii keep a noisy update inside a trust region. An
update moves the policy by ``step_size * (g + noise)``, where ||g|| <= ``radius`` and the noise is normal with a
standard deviation of ``noise_multiplier * radius / users`` in every coordinate. The radii cost no privacy: they depend
on public figures alone, if the Fisher matrix that ``kl_radius`` needs is a public one. Source: propositions 4.4 to 4.7
of Rio, Barlier and Colin 2025, who have one user in each update; for K users their z becomes z / K, because the mean
divides the noise by K and the clip radius stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from scipy.stats import chi2, ncx2

from dptune.core.declarations import Chance, Few, LearningRate, NotNegative, Positive, Seed
from dptune.core.errors import ConfigError

_LEAST_NOISE = 1e-3


@dataclass(frozen=True)
class Update:
    """Public figures of an update.

    Attributes:
        step_size: eta, factor that multiplies the noisy mean.
        noise_multiplier: z, standard deviation of the noise on the *sum*, in units of the clip radius.
        dimension: d, number of the policy's parameters.
        users: K, number of users in each update.
    """

    step_size: float
    noise_multiplier: float
    dimension: int
    users: int = 1

    def __post_init__(self) -> None:
        for name in ("step_size", "dimension", "users"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(name, f"{value} is not positive", fix="use a positive number")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigError("noise_multiplier", f"{self.noise_multiplier} is negative", fix="use 0 or more")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on the mean, in units of the clip radius."""
        return self.noise_multiplier / self.users


def l2_radius(update: Update, trust: float, miss: float) -> float:
    """The largest clip radius S with P[||step||^2 / 2 <= ``trust``] >= 1 - ``miss``, exactly (proposition 4.4).

    ||step||^2 / (eta z S / K)^2 is noncentral chi-square with d degrees of freedom and a noncentrality of at most
    (K / z)^2, which is reached when all users' gradients are equal and clipped.

    Args:
        trust: alpha, half the squared l2 norm that bounds the trust region.
        miss: beta, probability with which a step may leave the region.

    Raises: ConfigError for a ``trust`` that is not positive, or a ``miss`` outside (0, 1).
    """
    _check(trust, miss)
    if update.noise < _LEAST_NOISE:  # scipy cannot compute this quantile; use ||g + noise|| <= ||g|| + ||noise||
        spread = update.noise * math.sqrt(float(chi2.ppf(1 - miss, update.dimension)))
        return math.sqrt(2 * trust) / (update.step_size * (1 + spread))
    quantile = float(ncx2.ppf(1 - miss, update.dimension, update.noise**-2))
    return math.sqrt(2 * trust / quantile) / (update.step_size * update.noise)


def kl_radius(update: Update, trust: float, miss: float, *, largest: float, trace: float) -> float:
    """A clip radius with P[step^T F step / 2 <= ``trust``] >= 1 - ``miss`` (equation 7, by Markov's inequality).

    The last line of proposition 4.7 promises this of step^T F step, without the half. For that, halve ``trust``.

    Args:
        trust: alpha, bound on the KL divergence (to second order) that defines the trust region.
        miss: beta, probability with which a step may leave the region.
        largest, trace: largest eigenvalue and trace of the Fisher matrix F at the old policy. Must be public.

    Raises: ConfigError for figures out of range.
    """
    _check(trust, miss)
    for name, value in (("largest", largest), ("trace", trace)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(name, f"{value} is not positive", fix="add a regulariser to the diagonal of F")
    return math.sqrt(2 * trust * miss / (largest + update.noise**2 * trace)) / update.step_size


def _check(trust: float, miss: float) -> None:
    if not (math.isfinite(trust) and trust > 0):
        raise ConfigError("trust", f"{trust} is not positive", fix="use the alpha of the trust region")
    if not 0 < miss < 1:
        raise ConfigError("miss", f"{miss} is not in (0, 1)", fix="use the chance of leaving the region, 0.1 say")


@dataclass(frozen=True, kw_only=True)
class PolicyTraining:
    """Public schedule of a run. Defaults are the paper's for classical control (its table 3).

    Attributes:
        algorithm: "ppo" (deep DPPG: local PPO steps), or one policy gradient step whose clip radius keeps it in a trust
            region: "l2" (DPPG-L2) or "kl" (DPPG-KL, with the Fisher matrix of public simulated users).
        users: K, number of users in each update.
        steps: T, number of steps of each user.
        updates: number of updates, each of which is one release.
        hidden: units in each of the policy's two layers; 0 is a linear policy.
        form: form of a linear policy, see ``dptune.policy.policies.Linear``.
        discount, decay: gamma, and lambda of the advantages.
        learning_rate, epochs, minibatches: settings of the local steps (ppo); the critic shares the last two.
        radius: S, clip radius of the policy's update (ppo).
        entropy_weight: weight of the policy's entropy in the local loss.
        warm_moments: start every user's Adam from the last released update (appendix C.2.3), else from zero.
        critic_hidden: units in each of the critic's two layers; 0 is a linear critic.
        critic_radius: clip radius of the critic's update.
        critic_learning_rate: learning rate of the critic's local steps.
        value_scale: factor that multiplies the critic's output; about the size of returns.
        step_size, step_every, step_divisor, least_step: eta of l2 and kl: starts at ``step_size``, is divided by
            ``step_divisor`` after every ``step_every`` users, and is at least ``least_step`` (the paper's table 2).
        trust, miss: alpha, bound of the trust region, and beta, probability with which a step may leave it (l2, kl).
        fisher_episodes, fisher_regulariser: number of episodes and regulariser of the public Fisher matrix (kl).
        continuing: let episodes span updates, as public code does; a user is then in two updates, and the run ends with
            an error.
        evaluate_every, evaluate_episodes: number of updates between points of the curve, and of simulated episodes for
            each point.
        seed: seed of initial parameters and of simulated users; public.

    Raises: ConfigError naming the setting that is out of range.
    """

    algorithm: Literal["ppo", "l2", "kl"] = "ppo"
    users: int = 8
    steps: int = 64
    updates: int = 100
    hidden: int = 64
    form: Literal["outer", "additive"] = "outer"
    discount: float = 0.99
    decay: float = 0.85
    learning_rate: float = 7.26e-4
    epochs: int = 8
    minibatches: int = 2
    radius: float = 0.05
    entropy_weight: float = 0.36
    warm_moments: bool = True
    critic_hidden: int = 64
    critic_radius: float = 0.3
    critic_learning_rate: float = 7.26e-4
    value_scale: float = 1.0
    step_size: float = 12.0
    step_every: int = 50
    step_divisor: float = 5.0
    least_step: float = 0.06
    trust: float = 3.5
    miss: float = 0.4
    fisher_episodes: int = 25
    fisher_regulariser: float = 1e-3
    continuing: bool = False
    evaluate_every: int = 10
    evaluate_episodes: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in _POSITIVE:
            if not _LEAST <= getattr(self, name) <= _MOST:
                problem = f"{getattr(self, name)} is not in [{_LEAST:g}, {_MOST:g}]"
                raise ConfigError(name, problem, fix="use its default")
        if self.algorithm == "ppo" and self.users == 1:
            problem = "1 is too few for ppo: noise of z clip radii in every direction hides one user's update"
            raise ConfigError("users", problem, fix="use 8 or more, or algorithm l2 or kl")

    def step_size_at(self, number: int) -> float:
        """Step size eta of update ``number`` for l2 and kl. Public: it depends on the number of users so far alone."""
        return max(self.step_size / self.step_divisor ** (number * self.users // self.step_every), self.least_step)


_LEAST, _MOST = 1e-9, 1e9
_COUNTS = (
    *("users", "steps", "updates", "epochs", "minibatches"),
    *("step_every", "fisher_episodes", "evaluate_every", "evaluate_episodes"),
)
_POSITIVE = (
    *("learning_rate", "radius", "critic_radius", "critic_learning_rate", "value_scale"),
    *("step_size", "step_divisor", "least_step", "trust", "fisher_regulariser"),
)


@dataclass(frozen=True, kw_only=True)
class BanditSettings:
    """What runs share that differ in their number of users and their seed. Public.

    Attributes:
        updates: number of updates, each of which is one release.
        prompt_tokens: number of tokens to which every prompt is cut or padded, so that no text changes a shape.
        new_tokens: largest number of tokens of a continuation.
        kl_weight: beta, weight of the mean log-ratio to the base in the reward.
        learning_rate: learning rate of the local Adam steps.
        epochs: number of a user's local steps, each on the whole continuation.
        radius: S, clip radius of a user's update; None takes the radius that ``trust`` and ``miss`` allow.
        trust, miss: a noisy step leaves the region ||step||^2 / 2 <= ``trust`` with probability ``miss`` at most.
        server_step: factor that multiplies the released mean.
        prompt_weight: weight of the likelihood of the user's own prompt in the local loss (PPO-ptx, Ouyang et al. 2022,
            with private text). It makes the model memorise prompts as fast as ``radius`` allows, which audits need.
        evaluate_every: number of updates between points of the curve.

    Raises: ConfigError naming the setting that is out of range.
    """

    updates: Few = 24
    prompt_tokens: Few = 32
    new_tokens: Few = 24
    kl_weight: NotNegative = 0.2
    learning_rate: LearningRate = 1e-2
    epochs: Few = 2
    radius: Positive | None = None
    trust: Positive = 0.2
    miss: Chance = 0.1
    server_step: Positive = 1.0
    prompt_weight: NotNegative = 0.0
    evaluate_every: Few = 6

    def __post_init__(self) -> None:
        for name in ("updates", "prompt_tokens", "new_tokens", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in ("learning_rate", "server_step", *(("radius",) if self.radius is not None else ())):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")
        for name in ("kl_weight", "prompt_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is negative", fix="use 0 or more")


@dataclass(frozen=True, kw_only=True)
class Bandit(BanditSettings):
    """Public schedule of a run: a contextual bandit, because a user takes one action, a whole continuation.

    Attributes:
        users: K, number of prompts in each update.
        seed: seed of initial adapters and of all samples; public.

    Raises: ConfigError naming the setting that is out of range.
    """

    users: Few = 128
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.users < 1:
            raise ConfigError("users", f"{self.users} is not positive", fix="use 1 or more")

    def clip_radius(self, noise_multiplier: float, dimension: int) -> float:
        """Clip radius S: ``radius``, or the largest that keeps a noisy step in the trust region (proposition 4.4).

        Args:
            dimension: number of trained parameters.
        """
        if self.radius is not None:
            return self.radius
        if not noise_multiplier:  # the limit of ``l2_radius`` for vanishing noise
            return math.sqrt(2 * self.trust) / self.server_step
        return l2_radius(Update(self.server_step, noise_multiplier, dimension, self.users), self.trust, self.miss)


@dataclass(frozen=True, kw_only=True)
class MetaTraining:
    """Public schedule of training a hyper-policy over tenants.

    Attributes:
        tenants: K, number of tenants in each update.
        updates: number of updates, each of which is one release; they need ``tenants * updates`` tenants.
        runs: number of runs of each tenant, which differ in exploration only; a run's baseline is the others' mean.
        trust, miss: a noisy step leaves the region ||step||^2 / 2 <= ``trust`` with probability ``miss`` at most.
        seed: seed of exploration, adapters and the runs' own noise; public.

    Raises: ConfigError naming the setting that is out of range.
    """

    tenants: Few = 32
    updates: Few = 4
    runs: Annotated[Few, Ge(2)] = 2
    trust: Positive = 0.5
    miss: Chance = 0.1
    seed: Seed = 0

    def __post_init__(self) -> None:
        for name in ("tenants", "updates"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        if self.runs < 2:
            raise ConfigError("runs", f"{self.runs} leaves a run without a baseline", fix="use 2 or more")

    def clip_radius(self, noise_multiplier: float, dimension: int) -> float:
        """Clip radius S of a tenant's update (proposition 4.4).

        Args:
            dimension: number of trained parameters.
        """
        return l2_radius(Update(1.0, noise_multiplier, dimension, self.tenants), self.trust, self.miss)
