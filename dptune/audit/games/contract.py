"""Checks that a mechanism's parts return what their interface promises: an attack on anything else shows nothing.

A release that is no number, or not the vectors that were asked for, would be read as a score that tells the worlds
apart by nothing, and a broken part would pass for a sound one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dptune.core.errors import ConfigError
from dptune.core.plugins import is_outside, plugins_of
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs, Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.entropy import Entropy

_FIX = "fix the plug-in: dptune/mechanisms/interfaces.py says what each part returns"


def check_knobs(mechanism: Mechanism, knobs: Any) -> None:
    """Raise ConfigError unless these are knobs, of numbers."""
    if not isinstance(knobs, Knobs):
        raise _broken(mechanism, mechanism.controller, "knobs", _said(knobs), "Knobs")
    numbers = [*knobs.radii, knobs.noise_multiplier, *knobs.weights]
    if not all(isinstance(one, int | float) and not math.isnan(one) for one in numbers):
        raise _broken(mechanism, mechanism.controller, "knobs", f"radii and noise {numbers}", "numbers")


def check_parts(
    mechanism: Mechanism, knobs: Knobs, batch: Sequence[Gradients], zeros: list[torch.Tensor], entropy: Entropy
) -> None:
    """Run clipper and noise on one batch, and check what each returns by itself, for the name of the one at fault.

    Args:
        mechanism: a started copy, which the draw may change.

    Raises: ConfigError naming the part, and what it returned in place of what.
    """
    clipper, noise = mechanism.clipper, mechanism.noise
    blocks, scales = clipper.empty(zeros, knobs), clipper.scales(knobs, mechanism.pairs)
    # Its sizes are the clipper's own choice; one block must be there for each noise.
    sizes = [one.numel() if isinstance(one, torch.Tensor) else 0 for one in blocks] if _listed(blocks) else []
    _check(mechanism, clipper, "empty", blocks, [zeros[0].new_zeros(size) for size in (*sizes, 1)][: len(scales)])
    for gradients in batch:
        found = clipper.clipped_sum(gradients, knobs)
        _check(mechanism, clipper, "clipped_sum", found, blocks)
        blocks = [total + one for total, one in zip(blocks, found, strict=True)]
    noisy, _ = mechanism._noised([one + 0.0 for one in blocks], scales, knobs.noise_multiplier, entropy, 0)
    _check(mechanism, noise, "add", noisy, blocks, torch.float32)
    restored = clipper.restore([one + 0.0 for one in noisy], zeros, knobs, 1.0)
    _check(mechanism, clipper, "restore", restored, zeros, torch.float32)


def check_statistics(mechanism: Mechanism, knobs: Knobs, batch: Sequence[Gradients]) -> None:
    """Raise ConfigError naming the controller whose statistics of a batch are not what it says of an empty one."""
    if (statistics := mechanism.statistics(knobs)) is not None:
        for gradients in batch:
            found = statistics.sum_of(gradients)
            _check(mechanism, mechanism.controller, "statistics", [found], [statistics.empty], statistics.empty.dtype)


def check_released(
    mechanism: Mechanism, knobs: Knobs, released: Any, zeros: list[torch.Tensor], statistics: torch.Tensor | None
) -> None:
    """Check what an attack reads of a step.

    Args:
        statistics: those of an empty batch; None where the step asks for none.

    Raises: ConfigError naming the mechanism, and what it released in place of what.
    """
    if not isinstance(released, Released):
        raise _broken(mechanism, mechanism, "privatise", _said(released), "a Released")
    like = mechanism.clipper.empty(zeros, knobs)
    _check(mechanism, mechanism, "privatise", released.blocks, like, torch.float32)
    if (released.statistics is None) != (statistics is None):
        problem = "no statistics" if released.statistics is None else "statistics that were not asked for"
        raise _broken(mechanism, mechanism.controller, "statistics", problem, "what is charged")
    if statistics is not None:
        _check(mechanism, mechanism.controller, "statistics", [released.statistics], [statistics], torch.float32)


def _check(
    mechanism: Mechanism,
    part: object,
    method: str,
    found: Any,
    like: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Raise ConfigError unless ``found`` has finite vectors of the shapes of ``like``, on their device."""
    if _listed(found) and len(found) == len(like):
        wrong = [one for one, zero in zip(found, like, strict=True) if not _fits(one, zero, dtype)]
        if not wrong and torch.isfinite(torch.cat([one.flatten() for one in found])).all():  # once: of each is slow
            return
        returned = _said(next(one for one in wrong or found if wrong or not torch.isfinite(one).all()))
    else:
        returned = f"{len(found)} vectors" if _listed(found) else _said(found)
    shapes = ", ".join(dict.fromkeys(str(tuple(zero.shape)) for zero in like))
    right = f"{len(like)} finite {str(dtype).removeprefix('torch.')} vectors of shape {shapes} on {like[0].device}"
    raise _broken(mechanism, part, method, returned, right)


def _listed(found: Any) -> bool:
    return isinstance(found, list | tuple)


def _fits(found: Any, zero: torch.Tensor, dtype: torch.dtype) -> bool:
    # No subclass: its own code could answer what is asked of it here, and leave out what an attack would see.
    plain = type(found) in (torch.Tensor, torch.nn.Parameter)
    return plain and (found.shape, found.device, found.dtype) == (zero.shape, zero.device, dtype)


def _said(value: Any) -> str:
    """What a part returned, in a few words; of made-up gradients, so it tells of no record."""
    if not isinstance(value, torch.Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    about = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} on {value.device}"
    if value.is_meta or not (value.is_floating_point() or value.is_complex()) or torch.isfinite(value).all():
        return about
    return f"{'nan' if torch.isnan(value).any() else 'infinity'} ({about})"


def _broken(mechanism: Mechanism, part: object, method: str, returned: str, right: str) -> ConfigError:
    kind = type(part)
    whose = f"{kind.__module__}.{kind.__qualname__}"
    if is_outside(kind.__module__):
        whose += f" of plug-in {plugins_of([kind.__module__])[0]}"
    elif mechanism.plugins:  # one of its parts
        whose += f" with plug-in {', '.join(mechanism.plugins)}"
    problem = f"{method} of {whose} returned {returned} instead of {right}, so there is no step to audit"
    return ConfigError(f"mechanisms.{mechanism.name}", problem, fix=_FIX)
