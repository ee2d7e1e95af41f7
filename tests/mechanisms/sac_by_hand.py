"""One round of Soft Actor-Critic by hand: equations 22 to 27 of RLDP (rldp.md, section 3.6), Adam written out.

Readings of what the paper leaves open; the names O7 to O14 are the specification's, the others were chosen here:

- O7: the replay holds states; a state is encoded anew at each use, by the encoder as it is then. The actor's step comes
  after the critics', so its z is that of the encoder which the critics' step has just moved.
- O8: the critics' loss trains the encoder, at the critics' rate; the actor's gradient stops at z.
- O9: no target encoder: z' comes from the online encoder, before this round moves it. The target y has no gradient.
- O11: a critic is Linear, ReLU, Linear: one hidden layer of 128. O12: Huber with threshold 1.
- O13: the log-deviation is clamped to [-5, 2]; outside, its gradient is 0.
- O14: critics, actor, targets. The actor's step reads encoder, heads and critics and moves the heads; the targets' step
  reads critics and moves targets. Neither moves what the other reads, so both orders give the same numbers, bit for
  bit. That holds only because the actor's loss moves no encoder (O8), no target encoder follows one (O9), and equation
  27 has online critics: were any of the three otherwise, the order would matter.
- Losses are means over the minibatch; the loss of the critics is the sum of both Huber losses. min picks per sample.
- log pi is the sum of n + 1 normal log-densities at mean + exp(log-deviation) * draw: no tanh, no correction.
- LayerNorm has epsilon 1e-5 and GELU its exact form with erf, as torch does by default.

`rewards` has one number per transition. Weights are a flat dict of tensors with the names of `shapes`; Adam's state is
a dict with (steps, first moment, second moment) per trained weight, empty at the start. Nothing is changed in place.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Weights = dict[str, Tensor]
Adam = dict[str, tuple[int, Tensor, Tensor]]

LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION = -5.0, 2.0


def shapes(state_size: int, action_size: int, width: int = 128) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights."""
    layers = {
        "encoder.linear1": (width, state_size),
        "encoder.norm1": (width,),
        "encoder.linear2": (width, width),
        "encoder.norm2": (width,),
        "actor.mean": (action_size, width),
        "actor.log_deviation": (action_size, width),
    }
    for critic in ("critic1", "critic2", "target1", "target2"):
        layers |= {f"{critic}.hidden": (width, width + action_size), f"{critic}.out": (1, width)}
    made: dict[str, tuple[int, ...]] = {}
    for name, shape in layers.items():
        made |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return made


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def encode(w: Weights, states: Tensor) -> Tensor:
    """Equation 22: Linear, LayerNorm, GELU, twice."""
    x = states
    for k in (1, 2):
        x = linear(w, f"encoder.linear{k}", x)
        x = F.layer_norm(x, x.shape[-1:], w[f"encoder.norm{k}.weight"], w[f"encoder.norm{k}.bias"], 1e-5)
        x = F.gelu(x)
    return x


def draw(w: Weights, z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 23 and 24: actions from standard normal draws, and their log-densities."""
    mean = linear(w, "actor.mean", z)
    log_deviation = linear(w, "actor.log_deviation", z).clamp(LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION)
    actions = mean + log_deviation.exp() * noise
    off = (actions - mean) / log_deviation.exp()
    return actions, (-(off**2) / 2 - log_deviation - math.log(2 * math.pi) / 2).sum(-1)


def value(w: Weights, critic: str, z: Tensor, actions: Tensor) -> Tensor:
    hidden = F.relu(linear(w, f"{critic}.hidden", torch.cat([z, actions], -1)))
    return linear(w, f"{critic}.out", hidden).squeeze(-1)


def least_value(w: Weights, critics: str, z: Tensor, actions: Tensor) -> Tensor:
    """min_k Q_k(z, a) for critics "critic" or "target"."""
    return torch.minimum(value(w, f"{critics}1", z, actions), value(w, f"{critics}2", z, actions))


def adam_step(w: Weights, adam: Adam, gradients: Weights, rate: float) -> tuple[Weights, Adam]:
    """Kingma and Ba's update with 0.9, 0.999 and 1e-8 after the root, both moments bias-corrected."""
    new_w, new_adam = dict(w), dict(adam)
    for name, gradient in gradients.items():
        zero = torch.zeros_like(gradient)
        steps, first, second = adam.get(name, (0, zero, zero))
        steps, first, second = steps + 1, 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient * gradient
        unbiased, root = first / (1 - 0.9**steps), (second / (1 - 0.999**steps)).sqrt()
        new_w[name] = w[name] - rate * unbiased / (root + 1e-8)
        new_adam[name] = (steps, first, second)
    return new_w, new_adam


def leaves(w: Weights, *parts: str) -> Weights:
    """The weights of these parts, as variables to differentiate by."""
    return {k: v.detach().clone().requires_grad_() for k, v in w.items() if k.split(".")[0] in parts}


def step_of(w: Weights, adam: Adam, loss: Tensor, moved: Weights, rate: float) -> tuple[Weights, Adam]:
    gradients = torch.autograd.grad(loss, list(moved.values()))
    return adam_step(w, adam, dict(zip(moved, gradients, strict=True)), rate)


def targets_of(
    w: Weights, rewards: Tensor, next_states: Tensor, next_noise: Tensor, gamma: float, alpha: float
) -> Tensor:
    """y of equation 25 for every transition."""
    with torch.no_grad():
        z = encode(w, next_states)
        actions, log_density = draw(w, z, next_noise)
        return rewards + gamma * (least_value(w, "target", z, actions) - alpha * log_density)


def critic_step(
    w: Weights, adam: Adam, states: Tensor, actions: Tensor, y: Tensor, rate: float
) -> tuple[Weights, Adam]:
    """Equation 25, on both critics and the encoder."""
    moved = leaves(w, "encoder", "critic1", "critic2")
    z = encode(moved, states)
    loss = sum(F.huber_loss(value(moved, critic, z, actions), y, delta=1.0) for critic in ("critic1", "critic2"))
    assert isinstance(loss, Tensor)
    return step_of(w, adam, loss, moved, rate)


def actor_loss(w: Weights, z: Tensor, noise: Tensor, alpha: float) -> Tensor:
    """Equation 27 at freshly drawn actions."""
    actions, log_density = draw(w, z, noise)
    return (alpha * log_density - least_value(w, "critic", z, actions)).mean()


def actor_step(
    w: Weights, adam: Adam, states: Tensor, noise: Tensor, alpha: float, rate: float
) -> tuple[Weights, Adam]:
    """Equation 27, on the two heads."""
    moved = leaves(w, "actor")
    z = encode(w, states).detach()
    return step_of(w, adam, actor_loss({**w, **moved}, z, noise, alpha), moved, rate)


def target_step(w: Weights, tau: float) -> Weights:
    """Equation 26."""
    follow = {k: w[k.replace("target", "critic")] for k in w if k.startswith("target")}
    return {**w, **{k: (1 - tau) * w[k] + tau * online for k, online in follow.items()}}


def sac_round(
    weights: Weights,
    adam: Adam,
    states: Tensor,
    actions: Tensor,
    rewards: Tensor,
    next_states: Tensor,
    next_noise: Tensor,
    fresh_noise: Tensor,
    *,
    gamma: float = 0.99,
    alpha: float = 0.04,
    tau: float = 0.01,
    actor_rate: float = 2e-4,
    critic_rate: float = 1e-4,
) -> tuple[Weights, Adam]:
    """Weights and Adam states after one round on one minibatch; a' by `next_noise`, the actor's a by `fresh_noise`."""
    y = targets_of(weights, rewards, next_states, next_noise, gamma, alpha)
    weights, adam = critic_step(weights, adam, states, actions, y, critic_rate)
    weights, adam = actor_step(weights, adam, states, fresh_noise, alpha, actor_rate)
    return target_step(weights, tau), adam
