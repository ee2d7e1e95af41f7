"""The gradients of all of a model's weights: ``python -m benchmarks.all_weights [--minutes M] [--shape WORD...]``.

Norms and one clipped sum of a batch, beside a plain backward pass and Opacus' ghost clipping; no optimiser moves a
weight. The shapes are those of MiniLM as a classifier and of SmolLM2, with random weights and records.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Deadline, Effort, Results, machine, measure, quiet
from benchmarks.report import show
from benchmarks.shapes import Setting, Shape
from benchmarks.speed import named
from benchmarks.steps import CannotRunError, Contender, Tick, opacus_around, texts_and_labels
from dptune.training.gradients import layer_gradients as engine
from dptune.training.gradients.parameter_groups import layer_groups
from dptune.training.losses import model_losses

SHAPES = (
    Shape("all-MiniLM-L6-v2", batch=64, tokens=24, physical=64),
    Shape("SmolLM2-135M", batch=4, tokens=64, physical=4),
)
_RADIUS = 1.0


def plain(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """The floor: the mean loss and its gradient, by the same loss."""
    model = _all_weights(setting)
    for _ in range(steps):
        for ids, mask in setting.micro_batches():
            with setting.autocast():
                loss = model_losses(model, ids, mask).mean()
            loss.backward()
        model.zero_grad(set_to_none=True)
        tick()
    return {}


def in_one_pass(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """dptune where enough may be kept of the norms' backward pass: the clipped sum is made of that."""
    return _private(setting, steps, tick, math.inf)


def in_two_passes(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """dptune where too much would be kept: the clipped sum comes from a second backward pass."""
    return _private(setting, steps, tick, 0)


def _private(setting: Setting, steps: int, tick: Tick, kept: float) -> dict[str, float]:
    engine._KEPT = kept
    model = _all_weights(setting)
    groups = layer_groups(model)
    dtype = torch.bfloat16 if setting.shape.autocast else None
    for _ in range(steps):
        for ids, mask in setting.micro_batches():
            gradients = engine.layer_gradients(model, groups, ids, mask, None, len(ids), autocast=dtype)
            factors = (_RADIUS / gradients.norms().norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
            gradients.weighted_sum(factors.expand(-1, len(groups)))
        tick()
    return {}


def opacus_ghost(setting: Setting, steps: int, tick: Tick) -> dict[str, float]:
    """Opacus' ghost clipping: its loss does both backward passes."""
    if not setting.shape.classifies:
        raise CannotRunError("its ghost clipping takes no tied output layer")
    wrapped, _, criterion = opacus_around(_all_weights(setting), setting, ghost=True, max_grad_norm=_RADIUS)
    for _ in range(steps):
        for ids, mask in setting.micro_batches():
            inputs, labels = texts_and_labels(ids, mask)
            # All rows share positions and types, and Opacus would take all rows' gradient of them for one record's.
            places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
            inputs |= {"position_ids": places, "token_type_ids": torch.zeros_like(ids)}
            with setting.autocast():
                loss = criterion(wrapped(**inputs).logits.float(), labels)
            loss.backward()
        wrapped.zero_grad(set_to_none=True)
        tick()
    return {}


def _all_weights(setting: Setting) -> Any:
    return setting.base().requires_grad_(True).train()


CONTENDERS = (
    Contender("plain", plain),
    Contender("dptune, one pass", in_one_pass),
    Contender("dptune, two passes", in_two_passes),
    Contender("Opacus ghost", opacus_ghost, foreign=True),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.5, help="when to stop; what is measured by then is shown")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", nargs="+", default=[], metavar="WORD", help="shapes with all these in their names")
    parser.add_argument("--output", type=Path, default=Path("data/benchmarks"))
    parser.add_argument("--cuda", action="store_true", help="measure on a GPU")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    quiet()
    device = torch.device("cuda" if given.cuda else "cpu")
    results, deadline = Results(given.output / "all_weights.json", machine(device)), Deadline(given.minutes)
    for shape in SHAPES:
        if named(shape, given.shape):
            print(f"{shape.name}: {', '.join(one.name for one in CONTENDERS)}", flush=True)
            effort = Effort(given.rounds, seconds=1.0, memory=1)
            measure("gradients", Setting(shape, device), CONTENDERS, effort, results, deadline)
    show(results, "all_weights", given.output, readme=False)


if __name__ == "__main__":
    main()
