"""The SAC round by hand: its parts against torch's own, against plain scalars and against the specification."""

from __future__ import annotations

import math

import pytest
import torch
from sac_by_hand import (
    Adam,
    Weights,
    actor_loss,
    actor_step,
    adam_step,
    critic_step,
    draw,
    encode,
    sac_round,
    shapes,
    target_step,
    targets_of,
    value,
)
from torch import Tensor

torch.set_num_threads(1)

STATE, ACTION, BATCH = 14, 3, 4


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(seed: int = 0, width: int = 128) -> Weights:
    """Random weights of usual size; the targets differ from the critics, so that a mix-up shows."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(STATE, ACTION, width).items():
        made[name] = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
    return made


def batch(seed: int = 1) -> tuple[Tensor, ...]:
    """States, actions, rewards, next states, draws for a' and for the actor's a."""
    sizes = [(BATCH, STATE), (BATCH, ACTION), (BATCH,), (BATCH, STATE), (BATCH, ACTION), (BATCH, ACTION)]
    return tuple(numbers(10 * seed + k, *size) for k, size in enumerate(sizes))


def same(a: Weights, b: Weights, part: str) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a if k.startswith(part))


def test_number_of_parameters() -> None:  # checklist 21; section 3.6
    count = dict.fromkeys(("encoder", "actor", "critic1", "critic2", "target1", "target2"), 0)
    for name, shape in shapes(44, 13).items():
        count[name.split(".")[0]] += math.prod(shape)
    assert (count["encoder"], count["actor"]) == (22_784, 3_354)
    assert {count[c] for c in ("critic1", "critic2", "target1", "target2")} == {18_305}


def test_networks_against_plain_scalars() -> None:  # equations 22 to 25
    w, (states, actions, _, _, noise, _) = start(width=5), batch()

    def layer(name: str, x: list[float]) -> list[float]:
        rows, bias = w[f"{name}.weight"].tolist(), w[f"{name}.bias"].tolist()
        return [math.fsum(r * v for r, v in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]

    for b in range(BATCH):
        x = states[b].tolist()
        for k in (1, 2):
            x = layer(f"encoder.linear{k}", x)
            middle = math.fsum(x) / len(x)
            spread = math.sqrt(math.fsum((v - middle) ** 2 for v in x) / len(x) + 1e-5)
            gain, shift = w[f"encoder.norm{k}.weight"].tolist(), w[f"encoder.norm{k}.bias"].tolist()
            x = [(v - middle) / spread * g + h for v, g, h in zip(x, gain, shift, strict=True)]
            x = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x]
        assert encode(w, states)[b].tolist() == pytest.approx(x, rel=1e-12, abs=1e-13)

        mean = layer("actor.mean", x)
        log_deviation = [min(max(v, -5.0), 2.0) for v in layer("actor.log_deviation", x)]
        e = noise[b].tolist()
        drawn, density = draw(w, encode(w, states), noise)
        expected = [m + math.exp(s) * n for m, s, n in zip(mean, log_deviation, e, strict=True)]
        assert drawn[b].tolist() == pytest.approx(expected, rel=1e-12)
        log_pi = sum(-n * n / 2 - s - 0.5 * math.log(2 * math.pi) for s, n in zip(log_deviation, e, strict=True))
        assert density[b].item() == pytest.approx(log_pi, rel=1e-12)  # checklist 22: no tanh correction

        hidden = [max(v, 0.0) for v in layer("critic2.hidden", [*x, *actions[b].tolist()])]
        assert value(w, "critic2", encode(w, states), actions)[b].item() == pytest.approx(
            layer("critic2.out", hidden)[0], rel=1e-12
        )


def test_log_deviation_is_clamped_and_flat_outside() -> None:  # O13
    w, (states, *_, noise) = start(), batch()
    for shift, bound in ((50.0, 2.0), (-50.0, -5.0)):
        far = {**w, "actor.log_deviation.bias": w["actor.log_deviation.bias"] + shift}
        z = encode(far, states)
        drawn, _ = draw(far, z, noise)
        mean, _ = draw(far, z, torch.zeros_like(noise))
        assert torch.allclose(drawn - mean, math.exp(bound) * noise, rtol=1e-9)
        moved, _ = actor_step(far, {}, states, noise, 0.04, 2e-4)
        assert same(moved, far, "actor.log_deviation")
        assert not same(moved, far, "actor.mean")


def test_target_value_of_a_transition() -> None:  # equation 25
    w, (_, _, rewards, following, next_noise, _) = start(), batch()
    z = encode(w, following)
    actions, _ = draw(w, z, next_noise)
    mean = draw(w, z, torch.zeros_like(next_noise))[0]
    scale = draw(w, z, torch.ones_like(next_noise))[0] - mean
    density = torch.distributions.Normal(mean, scale).log_prob(actions).sum(-1)
    lower = torch.min(torch.stack([value(w, t, z, actions) for t in ("target1", "target2")]), 0).values
    expected = rewards + 0.99 * (lower - 0.04 * density)
    assert torch.allclose(targets_of(w, rewards, following, next_noise, 0.99, 0.04), expected, rtol=1e-10)


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_critic_step_is_the_gradient_of_the_huber_losses(shift: float) -> None:
    w, (states, actions, rewards, following, next_noise, _) = start(), batch()
    y = targets_of(w, rewards, following, next_noise, 0.99, 0.04) + shift

    def loss(of: Weights) -> float:
        total = 0.0
        for critic in ("critic1", "critic2"):
            off = (value(of, critic, encode(of, states), actions) - y).tolist()
            total += sum(x * x / 2 if abs(x) <= 1 else abs(x) - 0.5 for x in off) / BATCH
        return total

    # Adam's first moment after one step is 0.1 times the gradient: central differences along a random direction.
    _, adam = critic_step(w, {}, states, actions, y, 1e-4)
    assert {k.split(".")[0] for k in adam} == {"encoder", "critic1", "critic2"}  # O8
    way = {k: numbers(100 + j, *w[k].shape) for j, k in enumerate(adam)}
    slope = sum(float((10 * adam[k][1] * way[k]).sum()) for k in adam)
    ahead, behind = ({**w, **{k: w[k] + s * 1e-6 * way[k] for k in adam}} for s in (1, -1))
    assert slope == pytest.approx((loss(ahead) - loss(behind)) / 2e-6, rel=1e-5)


def test_actor_step_is_the_gradient_of_equation_27() -> None:
    w, (states, *_, noise) = start(), batch()
    z = encode(w, states)

    def loss(of: Weights) -> float:
        mean = draw(of, z, torch.zeros_like(noise))[0]
        deviation = draw(of, z, torch.ones_like(noise))[0] - mean
        actions = mean + deviation * noise
        density = torch.distributions.Normal(mean, deviation).log_prob(actions).sum(-1)
        lower = torch.min(value(of, "critic1", z, actions), value(of, "critic2", z, actions))
        return float((0.04 * density - lower).mean())

    assert loss(w) == pytest.approx(float(actor_loss(w, z, noise, 0.04)), rel=1e-12)
    _, adam = actor_step(w, {}, states, noise, 0.04, 2e-4)
    assert {k.split(".")[0] for k in adam} == {"actor"}
    way = {k: numbers(200 + j, *w[k].shape) for j, k in enumerate(adam)}
    slope = sum(float((10 * adam[k][1] * way[k]).sum()) for k in adam)
    ahead, behind = ({**w, **{k: w[k] + s * 1e-6 * way[k] for k in adam}} for s in (1, -1))
    assert slope == pytest.approx((loss(ahead) - loss(behind)) / 2e-6, rel=1e-5)


def test_adam_is_torchs() -> None:
    ours: Weights = {"x": numbers(1, 7), "y": numbers(2, 2, 3)}
    theirs = {k: v.clone().requires_grad_() for k, v in ours.items()}
    optimizer, adam = torch.optim.Adam(theirs.values(), lr=3e-3), Adam()
    for k in range(25):
        gradients = {"x": numbers(3 + k, 7) * 10.0 ** (k % 5 - 6), "y": numbers(50 + k, 2, 3)}
        for name, gradient in gradients.items():
            theirs[name].grad = gradient.clone()
        optimizer.step()
        ours, adam = adam_step(ours, adam, gradients, 3e-3)
        for name in ours:
            assert torch.allclose(ours[name], theirs[name], rtol=1e-14, atol=1e-15)


def test_round_is_critics_then_actor_then_targets() -> None:  # O14, checklist 23
    w, (states, actions, rewards, following, next_noise, fresh_noise) = start(), batch()
    w, adam = sac_round(w, {}, *batch(2))  # not the first round
    after, _ = sac_round(w, adam, *batch())
    y = targets_of(w, rewards, following, next_noise, 0.99, 0.04)
    middle, new_adam = critic_step(w, adam, states, actions, y, 1e-4)
    other, _ = actor_step(target_step(middle, 0.01), new_adam, states, fresh_noise, 0.04, 2e-4)
    assert same(after, other, "")  # Polyak before the actor: the same bits
    for k in w:
        if k.startswith("target"):
            online = after[k.replace("target", "critic")]
            assert torch.allclose(after[k], 0.99 * w[k] + 0.01 * online, rtol=1e-14, atol=0)
            assert not torch.equal(after[k], w[k])
    # The actor before the critics is another round: its critics and its z are the old ones.
    early, _ = actor_step(w, adam, states, fresh_noise, 0.04, 2e-4)
    assert not same(after, early, "actor")


def test_each_rate_moves_its_own_part() -> None:  # O8
    w = start()
    still, _ = sac_round(w, {}, *batch(), critic_rate=0.0)
    assert same(still, w, "encoder")
    assert same(still, w, "critic")
    assert not same(still, w, "actor")
    full, _ = sac_round(w, {}, *batch())
    no_actor, _ = sac_round(w, {}, *batch(), actor_rate=0.0)
    assert same(no_actor, w, "actor")
    for part in ("encoder", "critic", "target"):  # what the actor does moves nothing else
        assert same(no_actor, full, part)
        assert not same(full, w, part)
    # At the first step Adam moves by the rate itself, give or take the 1e-8.
    for part, rate in (("actor", 2e-4), ("critic", 1e-4), ("encoder", 1e-4)):
        assert max(float((full[k] - w[k]).abs().max()) for k in w if k.startswith(part)) == pytest.approx(
            rate, rel=1e-3
        )


def test_nothing_is_changed_in_place() -> None:
    w, adam = sac_round(start(), {}, *batch())
    kept = {k: v.clone() for k, v in w.items()}
    moments = {k: (s, a.clone(), b.clone()) for k, (s, a, b) in adam.items()}
    one, _ = sac_round(w, adam, *batch(3))
    two, _ = sac_round(w, adam, *batch(3))
    assert same(kept, w, "")
    assert same(one, two, "")
    assert all(torch.equal(moments[k][1], adam[k][1]) and torch.equal(moments[k][2], adam[k][2]) for k in adam)
