"""Sums of own weights' gradients in float32: what one unit can move them by, rounding included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import CPU, gpt2, records

from dptune.core.errors import ConfigError
from dptune.mechanisms.registry import build
from dptune.training.gradients import layer_kinds
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.layer_gradients import FLOAT32_MARGIN, layer_gradients
from dptune.training.gradients.layer_kinds import Products, Units, sizes_of, square_norms, within_float32
from dptune.training.gradients.parameter_groups import layer_groups


@pytest.mark.parametrize("kind", ["random", "opposed"])
@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e6])
def test_a_unit_moves_a_sum_in_float32_by_no_more_than_the_radius_however_much_its_tokens_cancel(
    ratio: float, kind: str
) -> None:
    """Rounding is a share of what cancels: without a limit on that, one unit moves the sum by more than its radius."""
    generator, (units, tokens, width) = torch.Generator().manual_seed(0), (256, 8, 128)
    left, right = (torch.randn(units, tokens, width, generator=generator) for _ in range(2))
    if kind == "opposed":  # all units have the same tokens, with one sign or the other
        left, right = left[:1].expand(units, -1, -1), right[:1] * torch.tensor([1.0, -1.0]).repeat(128)[:, None, None]
    off = 1 + torch.randn(units, tokens, 1, generator=generator) / ratio
    products = Products(torch.cat([left, left], dim=1), torch.cat([right, -right * off], dim=1))
    norms = square_norms([products], (width, width), Units.of(None, units, units)).sqrt()[:, None]
    factors = within_float32((1 - FLOAT32_MARGIN) / norms, norms, sizes_of(products)[:, None])[:, 0]
    sums = []
    for first in (1.0, 0.0):
        order = torch.arange(units).roll(-1 if first == 0.0 else 0)  # who comes after it moves up
        kept = factors * torch.where(torch.arange(units) == 0, first, 1.0)
        sums.append(torch.zeros(width, width))
        Products(products.left[order], products.right[order]).add_weighted_to(sums[-1], kept[order], None)
    assert 0.0 < float((sums[0].double() - sums[1].double()).norm()) <= 1.0


@pytest.mark.parametrize(("left", "right"), [(1e-24, 1e30), (1e-22, 1e28), (1e20, 1e-14), (1e-30, 1e36)])
def test_parts_whose_squares_leave_the_range_of_float32_cancel_under_the_same_limit(left: float, right: float) -> None:
    """Sizes of 0 times infinity were no number, and the limit was off: this unit moved the sum by 52 radii."""
    one, other = torch.randn(2, 1, 8, 256, generator=torch.Generator().manual_seed(0))
    products = Products(torch.cat([one, -one], dim=1) * left, torch.cat([other, other], dim=1) * right)
    norms = square_norms([products], (256, 256), Units.of(None, 1, 1)).sqrt()[:, None]
    factors = within_float32((1 / norms.clamp(min=1e-300)).clamp(max=1.0), norms, sizes_of(products)[:, None])[:, 0]
    total = torch.zeros(256, 256)
    products.add_weighted_to(total, factors, None)
    assert float(total.double().norm()) <= 1.0


def test_a_group_of_factor_0_and_infinite_size_takes_the_limit_from_no_other_group() -> None:
    factors, norms = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[1.0, 1e-6]]).double()
    kept = within_float32(factors, norms, torch.tensor([[torch.inf, 1.0]]).double())
    assert kept.flatten().tolist() == pytest.approx([0.0, 1e-4])


def test_a_unit_whose_factor_float32_would_round_up_counts_as_zeros() -> None:
    factors = torch.tensor([[1.0], [0.75 * 2.0**-149]], dtype=torch.float64)
    assert float(factors[1].float()) == 2.0**-149  # a third more
    ones = torch.ones_like(factors)
    assert within_float32(factors, ones, ones).flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", ["static", "per_pair", "auto_s", "psac"])
def test_every_clipper_keeps_the_margin_of_sums_in_float32(name: str) -> None:
    model = gpt2().requires_grad_(True)
    groups, (ids, mask) = layer_groups(model), records(1).batch(np.arange(1), CPU)
    mechanism = replace(build(name, {"noise_multiplier": 1.0, "max_grad_norm": 1e-3}), pairs=len(groups))
    found = layer_gradients(model, groups, ids, mask, None, 1)
    norms = found.norms()[0]
    length = float(torch.cat(mechanism.clipper.clipped_sum(found, mechanism.knobs())).double().norm())
    unclipped = {"auto_s": norms.norm() / (norms.norm() + 0.01), "psac": 1.0, "static": 1.0}
    most = unclipped.get(name, (norms.clamp(max=1e-3 / len(groups) ** 0.5) / 1e-3).norm())
    assert length == pytest.approx(1e-3 * (1 - FLOAT32_MARGIN) * float(most), rel=1e-4 if name != "psac" else 1e-2)
    assert length <= 1e-3 * (1 - 0.9 * FLOAT32_MARGIN)


def test_products_that_torch_may_round_further_are_refused() -> None:
    model = gpt2().requires_grad_(True)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ConfigError, match=r"^train: adds gradients up in float32, .*Fix: call torch\.set_float32"):
            rehearse(model, layer_groups(model))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_sum_counts_units_whose_tokens_cancel_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that every text exceeds: what is left of a unit is at most half its norm."""
    model = gpt2().requires_grad_(True)
    found = layer_gradients(model, layer_groups(model), *records(1).batch(np.arange(1), CPU), None, 1)
    monkeypatch.setattr(layer_kinds, "_MOST_CANCELLED", 0.5)
    length = float(torch.cat(found.weighted_sum(torch.ones_like(found.norms()))).double().norm())
    assert 0.1 < length / float(found.norms().norm()) <= 0.5
