"""Many runs over one frozen base: one forward and backward pass takes the batches of all of them.

Every row of a micro-batch is bound to its run, and passes through that run's adapters. All else is each run's own:
Poisson batch, ledger, controller, noise, optimiser, checkpoint. A run that ends or fails leaves the others alone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.functional import dropout

from dptune.core.errors import ConfigError
from dptune.core.interrupts import stop_request
from dptune.training.gradients.parameter_groups import LayerModules, PairModules
from dptune.training.gradients.per_sample import Layout, PairGradients, Taps, by_row, by_unit
from dptune.training.gradients.step_memory import MicroBatch, checkpointed, micro_batches
from dptune.training.losses import counted_tokens, model_losses
from dptune.training.models.model import set_modes, train_adapters
from dptune.training.models.trained_layers import HeadModules
from dptune.training.run import Run, Step, seed_dropout


def shared_copy(model: Any) -> Any:
    """A copy of the model whose frozen weights and buffers are the model's own tensors."""
    frozen = [tensor for tensor in chain(model.parameters(), model.buffers()) if not tensor.requires_grad]
    scales = (state for tensor in frozen if (state := getattr(tensor, "quant_state", None)) is not None)
    return copy.deepcopy(model, {id(shared): shared for shared in chain(frozen, scales)})


def train_together(base: Any, runs: Sequence[Run]) -> list[Exception | None]:
    """Train open runs to their ends; each as it would have trained alone, to rounding.

    Guarantee: each run's is that of ``train``; see there. Runs share the frozen base and the records.

    Args:
        base: the frozen causal language model, without adapters, on its device.
        runs: results of ``open_run``, for models that are adapters on a ``shared_copy`` of ``base``, with the same LoRA
            settings, ``tokens``, physical batch size and autocast.

    Returns: None for each run that ended well, with its ledger open for the caller to finish; else the error that ended
        it, with its ledger closed. An error of a run's own goes to ``spec.on_failure`` at once, for the others may
        take hours, and be killed. What computing gradients raises ends every run whose units it misses, and is none's.

    Raises: ConfigError if the runs cannot share a pass; every ledger is then closed.
    """
    errors: dict[int, Exception] = {}

    def attempt(number: int, action: Callable[..., Any], *arguments: Any) -> Any:
        """The action's result; if it fails, None, and the run ends."""
        try:
            return action(*arguments)
        except Exception as error:
            errors[number] = error
            runs[number].fail(error)
            return None

    try:
        _check(base, runs)
        stacks = _stack_pairs(runs)
        layout = _whole_layout(stacks)
        base.eval()
        seed_dropout(runs[0].entropy, runs[0].step)
        modes = [train_adapters(run.spec.model) for run in runs]
        active = list(range(len(runs)))
        with stop_request() as asked:
            while active and not asked():
                steps = {number: attempt(number, runs[number].begin) for number in active}
                for number in active:
                    if steps[number] is None and number not in errors:
                        attempt(number, runs[number].end)
                active = [number for number in active if steps[number] is not None]
                shared = _Pass(base, runs, stacks, layout, {number: steps[number] for number in active})
                for number in active:
                    set_modes(modes[number])
                    attempt(number, shared.complete, number, steps[number])
                active = [number for number in active if number not in errors]
            for number in (number for number in active if asked() and runs[number].step):
                attempt(number, runs[number].save)
    except BaseException:
        for run in runs:
            run.ledger.close()
        raise
    return [errors.get(number) for number in range(len(runs))]


def rehearse_pass(base: Any, runs: Sequence[Run]) -> None:
    """Compute a micro-batch without any record as ``train_together`` would: a pass that fails here has cost no step.

    Raises: ConfigError as ``train_together``, and whatever the pass raises, such as an error of a full GPU.
    """
    _check(base, runs)
    base.eval()
    stacks, nothing = _stack_pairs(runs), np.zeros(0, dtype=np.int64)
    _Pass(base, runs, stacks, _whole_layout(stacks), {})._compute(MicroBatch(nothing, nothing, 0), [0])


def _check(base: Any, runs: Sequence[Run]) -> None:
    if not runs:
        raise ConfigError("runs", "there are none", fix="give at least one")
    first, frozen = runs[0], {parameter.data_ptr() for parameter in base.parameters()}
    for number, run in enumerate(runs):
        if run.spec.mechanism.clipper.federation is not None:
            raise ConfigError(
                "runs", f"run {number} ({run.spec.mechanism.name}) trains locally", fix="train it by itself"
            )
        theirs = {p.data_ptr() for p in run.spec.model.parameters() if not p.requires_grad}
        if not frozen <= theirs:
            raise ConfigError("runs", f"run {number} has another base", fix="attach its adapters to a shared_copy")
        if run.spec.tokens is not first.spec.tokens:
            raise ConfigError("runs", f"run {number} has other records than run 0", fix="give all the same Tokens")
        _check_alike(number, run, first)
    head = base.get_output_embeddings()
    if any(base.get_submodule(_layer(pair)) is head for pair in _pairs(first)):
        raise ConfigError("lora.target_modules", "names the output layer", fix="train such runs one by one")


def _check_alike(number: int, run: Run, first: Run) -> None:
    if any(isinstance(pair, HeadModules) for pair in run.pairs):
        raise ConfigError("runs", f"run {number} trains a classification head", fix="train it by itself")
    if any(isinstance(pair, LayerModules) for pair in run.pairs):
        raise ConfigError("runs", f"run {number} trains the model's own weights", fix="train it by itself")
    if _shapes(_pairs(run)) != _shapes(_pairs(first)):
        raise ConfigError("lora", f"run {number} has other adapters than run 0", fix="train it by itself")
    if run.entropy.leaks != first.entropy.leaks:
        # The runs share dropout masks: those of a private run must not come from a run's fixed seed.
        raise ConfigError("entropy", f"run {number} has another value than run 0", fix="give all the same kind")
    for name in ("physical_batch_size", "autocast", "gradient_checkpointing"):
        if getattr(run.spec.plan, name) != getattr(first.spec.plan, name):
            raise ConfigError(
                f"training.{name}", f"run {number} has another value than run 0", fix="train it by itself"
            )


def _pairs(run: Run) -> list[PairModules]:
    """The run's LoRA pairs, which are all that it trains."""
    return [pair for pair in run.pairs if isinstance(pair, PairModules)]


def _layer(pair: PairModules) -> str:
    """The pair's name in a model without adapters."""
    return pair.name.removeprefix("base_model.model.")


def _shapes(pairs: Sequence[PairModules]) -> list[tuple[Any, ...]]:
    return [(p.name, p.down.weight.shape, p.up.weight.shape, p.scaling, p.dropout) for p in pairs]


@dataclass(frozen=True)
class _Stack:
    """Weights of the same pair in all runs: ``down``, A (runs, rank, width in), and ``up``, B (runs, width out, rank).

    The runs' own weights are views of these tensors, so an optimiser's step changes these too.
    """

    layer: str
    down: torch.Tensor = field(repr=False)
    up: torch.Tensor = field(repr=False)
    scaling: float
    dropout: float


def _stack_pairs(runs: Sequence[Run]) -> list[_Stack]:
    stacks = []
    for pairs in zip(*(_pairs(run) for run in runs), strict=True):
        down = torch.stack([pair.down.weight.detach() for pair in pairs])
        up = torch.stack([pair.up.weight.detach() for pair in pairs])
        for number, pair in enumerate(pairs):
            pair.down.weight.data, pair.up.weight.data = down[number], up[number]
        first = pairs[0]
        stacks.append(_Stack(_layer(first), down, up, first.scaling, first.dropout))
    return stacks


def _whole_layout(stacks: Sequence[_Stack]) -> Layout:
    """Columns for A and B of every pair, also where a run trains B alone."""
    shapes = [[(w.shape[1], w.shape[2]) for w in (stack.down, stack.up)] for stack in stacks]
    return Layout(tuple(map(tuple, shapes)))


class _Pass:
    """The gradients of one step of several runs, computed when a run asks for its own. Private.

    Micro-batches are filled with the rows of one run after the other, so that only the last one has rows to spare. When
    a run has all its gradients, no later micro-batch needs its adapters, and they may move.
    """

    def __init__(
        self, base: Any, runs: Sequence[Run], stacks: Sequence[_Stack], layout: Layout, steps: dict[int, Step]
    ) -> None:
        self._base, self._runs, self._stacks, self._layout = base, runs, stacks, layout
        units = [unit for step in steps.values() for unit in step.batch]
        owners = [number for number, step in steps.items() for _ in step.batch]
        self._parts: deque[tuple[MicroBatch, list[int]]] = deque()
        self._broken: Exception | None = None  # what ended the pass, if anything did
        taken = 0
        for part in micro_batches(units, runs[0].spec.plan.physical_batch_size):
            self._parts.append((part, owners[taken : taken + part.units]))
            taken += part.units
        self._missing = {number: len(step.batch) for number, step in steps.items()}
        self._ready: dict[int, deque[PairGradients]] = {number: deque() for number in steps}

    def complete(self, number: int, step: Step) -> None:
        """Make the step of run ``number``. Raises: what the run raises by itself, and as ``gradients``."""
        run = self._runs[number]
        run.complete(step, run.spec.mechanism.clipper.gradients(_RunGradients(self, number)))

    def gradients(self, number: int) -> Iterator[PairGradients]:
        """All of a run's units, in one or more micro-batches. If one fails, every waiting run raises; none trains on a
        part of its batch.
        """
        while self._missing[number] or self._ready[number]:
            while not self._ready[number]:
                self._advance()
            yield self._ready[number].popleft()

    def _advance(self) -> None:
        if not self._parts:
            problem = "an earlier micro-batch of this step failed, so units of this run are missing"
            raise RuntimeError(problem) from self._broken
        part, run_of_unit = self._parts.popleft()
        try:
            table, losses, tokens = self._compute(part, run_of_unit)
        except Exception as error:
            self._broken = error
            raise
        first_unit = 0
        for number in dict.fromkeys(run_of_unit):
            count = run_of_unit.count(number)
            rows = slice(*np.searchsorted(part.owners, [first_unit, first_unit + count]))
            owners = torch.from_numpy(part.owners[rows] - first_unit).to(table.device)
            own = None if np.array_equal(part.owners[rows], np.arange(first_unit, first_unit + count)) else owners
            layout = Layout.of(self._runs[number].pairs)
            trained = self._trained_columns(table[rows], layout)
            self._ready[number].append(by_unit(trained, layout, losses[rows], tokens[rows], own, count))
            self._missing[number] -= count
            first_unit += count

    def _compute(self, part: MicroBatch, run_of_unit: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The (rows, parameters) table of a micro-batch, its (rows,) losses and numbers of tokens that count."""
        run = self._runs[0]
        plan, device = run.spec.plan, self._stacks[0].up.device
        ids, mask = run.spec.tokens.batch(part.records, device, height=plan.physical_batch_size)
        # Rows that only fill the batch take any run's adapters.
        run_of_row = np.full(len(ids), run_of_unit[-1])
        run_of_row[: len(part.records)] = np.asarray(run_of_unit)[part.owners]
        table = torch.empty(len(ids), sum(self._layout.sizes), device=device)
        taps = Taps(table, self._layout, [stack.layer for stack in self._stacks], ids.shape[1])
        with (
            _apply_stacks(self._base, self._stacks, torch.from_numpy(run_of_row).to(device), taps),
            checkpointed(self._base, enabled=plan.gradient_checkpointing),
        ):
            with torch.autocast(device.type, dtype=plan.autocast_dtype, enabled=plan.autocast is not None):
                losses = model_losses(self._base, ids, mask)
            taps.backward(losses)
        return taps.table, losses.detach(), counted_tokens(mask)

    def _trained_columns(self, table: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The columns of the weights that runs train: all, or those of the B factors."""
        if layout.shapes == self._layout.shapes:
            return table
        pairs = [pair for group in layout.groups for pair in group]
        return torch.cat([self._layout.weight(table, pair, -1).flatten(1) for pair in pairs], dim=1)


@dataclass(frozen=True)
class _RunGradients:
    """The ``GradientSource`` of run ``number``; ``shared`` computes the gradients of all runs together."""

    shared: _Pass
    number: int

    def of_losses(self) -> Iterator[PairGradients]:
        """The run's gradients of the pass; see ``_Pass.gradients``."""
        return self.shared.gradients(self.number)

    def of_local_training(self, steps: int, learning_rate: float) -> Iterator[PairGradients]:
        """Raise: local training would move weights that other runs' passes need."""
        raise ConfigError("runs", f"run {self.number} trains locally", fix="train it by itself")


@contextmanager
def _apply_stacks(base: Any, stacks: Sequence[_Stack], run_of_row: torch.Tensor, taps: Taps) -> Iterator[None]:
    """Pass row j of batches inside the context through the adapters of run ``run_of_row[j]``, and tap it."""
    modules = dict(base.named_modules())

    def hook(pair: int, stack: _Stack) -> Any:
        down, up = stack.down[run_of_row].mT, stack.up[run_of_row].mT

        def add(_layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            rows = by_row(inputs[0], len(run_of_row), taps.tokens, stack.layer)
            seen = dropout(rows.to(down.dtype), stack.dropout, training=stack.dropout > 0)
            low = taps.tap(pair, 0, seen, torch.bmm(seen, down))
            high = taps.tap(pair, 1, low, torch.bmm(low, up))
            return output + (high * stack.scaling).to(output.dtype).view_as(output)

        return add

    handles = [modules[stack.layer].register_forward_hook(hook(number, stack)) for number, stack in enumerate(stacks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
