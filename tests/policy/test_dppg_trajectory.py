"""DP policy gradient equals its transcription: algorithms 2 and 3 of Rio et al. (2025) in plain loops.

Users are hostile (rewards that are no numbers or huge, empty slots), one update has no user at all, and in the middle
the process dies after a charge: the state comes back from what was saved, and the users of that update are skipped. The
learner computes in float64 here; local steps and releases are rounded to float32, as always.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from policy_helpers import INTERFACE, trajectories
from scipy.stats import ncx2
from transcriptions import Words, cut, norm, normals, rounded

from dptune.policy.environments.environment import Trajectories
from dptune.policy.environments.learner import PolicyLearner, PolicyState
from dptune.policy.method import Dppg
from dptune.policy.schedules import PolicyTraining
from dptune.policy.user_updates import noisy_means

USERS, STEPS, UPDATES, KILL, NOISE = 4, 6, 10, 5, 0.5
FEATURES, ACTIONS = INTERFACE.features, INTERFACE.actions
Vector = list[float]
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, cold moments": {"warm_moments": False, "entropy_weight": 0.0},
    "l2": {"algorithm": "l2", "step_size": 2.0, "step_every": 8, "trust": 0.5},
}


def users_of(number: int) -> Trajectories:
    """Trajectories of an update; users 1 to 3 are hostile in turn, and update 2 has nobody."""
    met = trajectories(USERS, STEPS, number)
    met = replace(met, features=met.features.double(), rewards=met.rewards.double())
    if number % 3 == 1:
        met.rewards[1, 2] = math.nan
        met.rewards[2] *= 1e6
    met.step_mask[3] &= number % 2 == 0
    met.step_mask[:] &= number != 2
    return met


class Transcription:
    """The run: parameters theta of a log-linear policy, w of a linear critic, and their last released updates."""

    def __init__(self, training: PolicyTraining, theta: Vector, w: Vector) -> None:
        self.training, self.theta, self.w = training, theta, w
        self.last: dict[str, Vector] = {}

    def update(self, number: int, met: Trajectories, entropy: Words) -> None:
        """Algorithm 2: every user's own update, clipped to S; their noisy mean moves policy and critic."""
        of_policy, of_critic = [], []
        for user in range(USERS):
            x, rewards = met.features[user].tolist(), met.rewards[user].tolist()
            mask, actions = met.step_mask[user].tolist(), met.actions[user].tolist()
            if not any(mask) or not all(map(math.isfinite, rewards)):
                of_policy.append([0.0] * len(self.theta))
                of_critic.append([0.0] * len(self.w))
                continue
            values = [self.value(self.w, row) * self.training.value_scale for row in x]
            gains = self.advantages(rewards, values, met.terminated[user], met.episode_ends[user], mask)
            returns = [(gain + value) / self.training.value_scale for gain, value in zip(gains, values, strict=False)]
            taken = [t for t in range(STEPS) if mask[t]]

            def policy(theta: Vector, rows: list[int], x: Any = x, a: Any = actions, gains: Any = gains) -> Vector:
                return self.policy_gradient(theta, [(x[t], a[t], gains[t]) for t in rows])

            def critic(w: Vector, rows: list[int], x: Any = x, returns: Any = returns) -> Vector:
                found = [0.0] * len(w)
                for t in rows:
                    error = self.value(w, x[t]) - returns[t]
                    found = [one + error * slope / len(rows) for one, slope in zip(found, [*x[t], 1.0], strict=True)]
                return found

            if self.training.algorithm == "l2":
                ascent = self.policy_gradient(self.theta, [(x[t], actions[t], gains[t]) for t in taken], entropy=0.0)
                of_policy.append([-one for one in ascent])
            else:
                rate, radius = self.training.learning_rate, self.training.radius
                of_policy.append(self.local(self.theta, policy, mask, number, rate, radius, "policy"))
            rate, radius = self.training.critic_learning_rate, self.training.critic_radius
            of_critic.append(self.local(self.w, critic, mask, number, rate, radius, "critic"))
        self.release(number, of_policy, of_critic, entropy)

    def release(self, number: int, of_policy: list[Vector], of_critic: list[Vector], entropy: Words) -> None:
        """(1 / K) (sum of the clipped updates + N(0, (z_block S)^2)), 1 / z_p^2 + 1 / z_v^2 = 1 / z^2, half each."""
        eta, radius = 1.0, self.training.radius
        multiplier = NOISE * math.sqrt(2.0)
        if self.training.algorithm == "l2":  # proposition 4.4, with z / K for z
            divided = self.training.step_divisor ** (number * USERS // self.training.step_every)
            eta = max(self.training.step_size / divided, self.training.least_step)
            q = ncx2.ppf(1 - self.training.miss, len(self.theta), (USERS / multiplier) ** 2)
            radius = USERS / (eta * multiplier) * math.sqrt(2 * self.training.trust / q)
        radii, means = (radius, self.training.critic_radius), []
        draws = cut(normals(entropy, len(self.theta) + len(self.w)), (len(self.theta), len(self.w)))
        for rows, ball, drawn in zip((of_policy, of_critic), radii, draws, strict=True):
            clipped = [[one / max(norm(row) / ball, 1.0) for one in row] for row in rows]
            sums = [math.fsum(column) for column in zip(*clipped, strict=True)]
            deviation = multiplier * ball
            noisy = [rounded(total + deviation * draw, deviation) for total, draw in zip(sums, drawn, strict=True)]
            means.append([total / USERS for total in noisy])
        self.radius = radius
        self.theta = [one + eta * mean for one, mean in zip(self.theta, means[0], strict=True)]
        self.w = [one + mean for one, mean in zip(self.w, means[1], strict=True)]
        self.last = {"policy": means[0], "critic": means[1]}

    def local(
        self, start: Vector, gradient: Any, mask: list[bool], number: int, rate: float, radius: float, name: str
    ) -> Vector:
        """Algorithm 3: Adam from the last release's moments (appendix C.2.3), back into the ball after every step."""
        own = list(start)
        last = self.last.get(name) if self.training.warm_moments else None
        m = [-one for one in last] if last else [0.0] * len(start)
        v, t = [one * one for one in m], 0
        generator = torch.Generator().manual_seed(number)  # the order of rows is public
        for _ in range(self.training.epochs):
            for rows in torch.randperm(STEPS, generator=generator).tensor_split(self.training.minibatches):
                t += 1
                taken = [row for row in rows.tolist() if mask[row]]
                g = gradient(own, taken) if taken else [0.0] * len(own)
                for j in range(len(own)):
                    m[j] = 0.9 * m[j] + 0.1 * g[j]
                    v[j] = 0.999 * v[j] + 0.001 * g[j] ** 2
                    own[j] -= rate * m[j] / (1 - 0.9**t) / (math.sqrt(v[j] / (1 - 0.999**t)) + 1e-8)
                delta = [one - before for one, before in zip(own, start, strict=True)]
                own = [b + one / max(norm(delta) / radius, 1.0) for b, one in zip(start, delta, strict=True)]
        return [one - before for one, before in zip(own, start, strict=True)]

    def policy_gradient(self, theta: Vector, rows: list[tuple[Vector, int, float]], entropy: Any = None) -> Vector:
        """Of the loss -mean(pi / pi_old A) - c H (remark 5.2): at pi = pi_old and c = 0, minus mean(psi A)."""
        weight = self.training.entropy_weight if entropy is None else entropy
        found = [0.0] * len(theta)
        for x, action, gain in rows:
            p, old = self.chances(theta, x), self.chances(self.theta, x)
            h = -math.fsum(one * math.log(one) for one in p)
            for b in range(ACTIONS):
                score = (1.0 if b == action else 0.0) - p[b]
                slope = p[action] / old[action] * gain * score - weight * p[b] * (math.log(p[b]) + h)
                for f in range(FEATURES):
                    found[f * ACTIONS + b] -= slope * x[f] / len(rows)
        return found

    def chances(self, theta: Vector, x: Vector) -> Vector:
        logits = [math.fsum(theta[f * ACTIONS + a] * x[f] for f in range(FEATURES)) for a in range(ACTIONS)]
        sizes = [math.exp(one - max(logits)) for one in logits]
        return [one / math.fsum(sizes) for one in sizes]

    def value(self, w: Vector, x: Vector) -> float:
        return math.fsum(one * value for one, value in zip(w, [*x, 1.0], strict=True))

    def advantages(self, rewards: Vector, values: Vector, terminal: Any, ends: Any, mask: list[bool]) -> Vector:
        """Generalised advantage estimation, by each user's own episodes."""
        found, running = [0.0] * STEPS, 0.0
        for t in reversed(range(STEPS)):
            error = rewards[t] + self.training.discount * (0.0 if terminal[t] else values[t + 1]) - values[t]
            decay = 0.0 if ends[t] else self.training.discount * self.training.decay
            running = error + decay * running if mask[t] else 0.0
            found[t] = running
        return found


@pytest.mark.parametrize("title", CASES)
def test_a_run_is_its_transcription(title: str) -> None:
    options = {"hidden": 0, "critic_hidden": 0, "epochs": 2, "learning_rate": 0.01, "value_scale": 2.0, "radius": 0.03}
    training = PolicyTraining(users=USERS, steps=STEPS, updates=UPDATES, **(options | CASES[title]))
    method = Dppg(noise_multiplier=NOISE)
    ours, theirs = Words(7), Words(7)
    learner = PolicyLearner(INTERFACE, method, training)
    begun = learner.start()
    state = PolicyState(begun.policy.double(), begun.critic.double())
    reference = Transcription(training, state.policy.tolist(), state.critic.tolist())
    for number in range(UPDATES):
        if number == KILL:  # charged, and lost with its process
            saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
            learner, state = PolicyLearner(INTERFACE, method, training), PolicyState.of(saved)
            continue
        met = users_of(number)
        radius, size = learner.radius(state, number, None)
        blocks, _ = learner.updates(state, met, number)
        state = learner.apply_release(
            state,
            blocks,
            radius,
            size,
            lambda updates, radii: noisy_means(updates, radii, method.multipliers, len(updates[0]), ours),
        )
        reference.update(number, met, theirs)
        assert radius == pytest.approx(reference.radius, rel=1e-9)
        assert state.policy.tolist() == pytest.approx(reference.theta, rel=0, abs=1e-6 * radius * size)
        assert state.critic.tolist() == pytest.approx(reference.w, rel=0, abs=1e-6 * training.critic_radius)
    assert norm(reference.theta) > 0
