"""Micro-batches of several widths: a unit's shape is its own, and no unit is lost or moves another's gradient."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import DEVICE, adapted, make_plan, row_gradient

from dptune.training.data import Tokens, by_width
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.step_memory import public_widths
from dptune.training.loop import BatchGradients

LENGTHS = st.lists(st.lists(st.integers(0, 128), min_size=1, max_size=3), max_size=12)


def drawn(lengths: list[list[int]]) -> tuple[Tokens, list[np.ndarray]]:
    """Records of these lengths, unit by unit, and a batch of all units."""
    rows = [np.ones(length, dtype=np.int32) for unit in lengths for length in unit]
    edges = np.cumsum([0, *map(len, lengths)])
    batch = [np.arange(start, end) for start, end in pairwise(edges)]
    return Tokens(rows, padding=0, width=129), batch


@example(lengths=[[65], [33], [17, 1]], newcomer=[65], at=1)  # records that just do not fit
@given(lengths=LENGTHS, newcomer=st.lists(st.integers(0, 128), min_size=1, max_size=3), at=st.integers(0, 12))
def test_a_unit_has_the_least_width_that_holds_it_whoever_else_is_drawn(
    lengths: list[list[int]], newcomer: list[int], at: int
) -> None:
    widths = (129, 65, 33, 17)

    def assigned(units: list[list[int]]) -> list[tuple[int, list[int]]]:
        tokens, batch = drawn(units)
        return sorted(
            (width, [len(tokens.rows[record]) for record in unit])
            for width, found in by_width(batch, tokens, widths)
            for unit in found
        )

    expected = [(min(width for width in widths if width > max(unit)), unit) for unit in lengths]
    assert assigned(lengths) == sorted(expected)
    among = [*lengths[:at], newcomer, *lengths[at:]]
    own = (min(width for width in widths if width > max(newcomer)), newcomer)
    assert assigned(among) == sorted([*expected, own])


@pytest.mark.parametrize("drawn_units", [1, 8])
def test_the_shapes_of_a_run_follow_from_its_plan_alone(drawn_units: int) -> None:
    """Four widths; a record of 60 tokens, or eight times as many units as another batch has, change none of them."""
    tokens = Tokens([np.ones(size, dtype=np.int32) for size in (60, 2, 3, 20, 5, 6, 40, 7)], padding=0, width=129)
    shapes: list[tuple[int, ...]] = []
    model = adapted("llama", randomised=True)
    model.get_input_embeddings().register_forward_pre_hook(lambda _layer, inputs: shapes.append(tuple(inputs[0].shape)))
    plan = make_plan(expected_batch_size=48.0, physical_batch_size=3)
    run: Any = SimpleNamespace(
        frozen=None, pairs=lora_pairs(model), spec=SimpleNamespace(model=model, tokens=tokens, plan=plan)
    )
    assert public_widths(129, 48.0, 3) == (129, 65, 33, 17)
    batch = [np.array([number]) for number in range(drawn_units)]
    list(BatchGradients(run, batch).of_losses())
    expected = [(3, 65), (3, 33), (3, 17), (3, 17)] if drawn_units == 8 else [(3, 65)]
    assert shapes == expected


@given(width=st.integers(4, 5000), parts=st.floats(0.01, 8), rows=st.integers(1, 512))
def test_widths_are_halves_and_their_last_micro_batches_cost_little(width: int, parts: float, rows: int) -> None:
    batch = parts * rows
    widths = public_widths(width, batch, rows)
    assert widths[0] == width
    assert all(after == (before + 1) // 2 for before, after in pairwise(widths))
    assert widths[-1] >= min(width, 16)
    assert rows * sum(widths[1:]) <= batch * width / 4
    half = (widths[-1] + 1) // 2
    assert half < 16 or rows * (sum(widths[1:]) + half) > batch * width / 4, "as many as that allows"


@given(lengths=st.lists(st.integers(0, 510), min_size=1, max_size=300), rows=st.integers(1, 16))
def test_more_widths_never_cost_more_than_a_quarter_of_the_expected_batch(lengths: list[int], rows: int) -> None:
    """The micro-batches of all widths have at most that many more tokens than micro-batches of the widest alone."""
    units = [np.array([number]) for number in range(len(lengths))]
    tokens = Tokens([np.ones(length, dtype=np.int32) for length in lengths], padding=0, width=512)

    def padded(widths: tuple[int, ...]) -> int:
        return sum(rows * width * -(-len(found) // rows) for width, found in by_width(units, tokens, widths))

    widths = public_widths(512, len(lengths), rows)
    assert padded(widths) <= padded((512,)) + 512 * len(lengths) / 4


def test_gradients_are_those_of_each_record_alone_and_no_newcomer_moves_them() -> None:
    """Every row is bit for bit the same when a long record joins, though it comes first; and it is the loop's."""
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, 97, size=size).astype(np.int32) for size in (31, 3, 5, 15, 7, 20, 4, 9)]
    tokens, model = Tokens(rows, padding=0, width=32), adapted("llama", randomised=True)
    plan = make_plan(expected_batch_size=64.0, physical_batch_size=3)
    assert public_widths(32, 64.0, 3) == (32, 16)
    seen: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _layer, inputs: seen.append(tuple(inputs[0].shape)))
    run: Any = SimpleNamespace(
        frozen=None, pairs=lora_pairs(model), spec=SimpleNamespace(model=model, tokens=tokens, plan=plan)
    )

    def found(chosen: list[int]) -> dict[int, torch.Tensor]:
        """The gradient of each chosen record, in the order in which widths bring them."""
        batch = [np.array([number]) for number in chosen]
        order = [int(unit[0]) for _, units in by_width(batch, tokens, (32, 16)) for unit in units]
        parts = [part.matrix() for part in BatchGradients(run, batch).of_losses()]
        return dict(zip(order, torch.cat(parts), strict=True))

    alone = {number: row_gradient(model, row) for number, row in enumerate(rows)}
    model.eval()
    seen.clear()
    without, joined = found([1, 2, 3, 4, 6, 7]), found([0, 1, 2, 3, 4, 6, 7])
    assert set(seen) == {(3, 32), (3, 16)}
    assert all(torch.equal(without[number], joined[number]) for number in without)
    for number, gradient in found(list(range(8))).items():
        torch.testing.assert_close(gradient, alone[number].double(), rtol=2e-4, atol=1e-6)


def test_a_batch_takes_the_width_that_is_asked_for() -> None:
    ids, mask = Tokens([np.array([5, 6], dtype=np.int32)], 0, 32).batch(np.array([0]), DEVICE, height=2, width=16)
    assert ids.shape == mask.shape == (2, 16)
