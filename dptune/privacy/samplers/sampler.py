"""Samplers: how units get into batches. A sampler's law is part of every release's price.

This file is plain data: the registry, the sampler of a release, and the checks of a plan. Their prices are in
``sampler_bounds``. "Zero-out" compares a run with one in which a unit adds nothing to any sum of any batch, gradients
and statistics alike: the number of units and the unit's place stay. (A unit whose gradient alone is zero still counts
as not clipped, and would move a centred count by up to twice its sensitivity.) Everything here is public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any, get_args

from dptune.core.errors import ConfigError
from dptune.core.settings import TrainingSampler

_WHOLE = 1e-9
#: A proposed number of batches is at most this many times another one than was asked for; so many are tried.
_NEAR, _MOST_TRIED = 1.25, 100_000


@dataclass(frozen=True)
class Law:
    """Registry entry of a sampler: its law, and what is proven about its price.

    Attributes:
        law: how a unit gets into batches.
        needs: what its price takes beside noise and delta.
        neighbours: the two data sets that the price compares.
        bound: which bound is proven, and from where.
        tested: whether ``dptune audit-draw`` can test a loader against it.
    """

    law: str
    needs: str
    neighbours: str
    bound: str
    tested: bool = True


SAMPLERS: dict[str, Law] = {
    "poisson": Law(
        "Each unit enters each batch by its own coin.",
        "sample rate, steps",
        "add or remove one unit",
        "tight: loss distribution of the sampled Gaussian",
    ),
    "truncated_poisson": Law(
        "As poisson; a batch of more than max_batch units is cut to max_batch of them at random.",
        "units, expected batch, epochs, max_batch",
        "add or remove one unit",
        "that of poisson, with the chance that any batch may be cut taken from delta",
    ),
    "cyclic_poisson": Law(
        "Units are dealt into groups by their own keys; batch r is a Poisson sample of group r mod bands.",
        "sample rate, steps, a mechanism with bands",
        "add or remove one unit",
        "tight about one group: Poisson sampling at bands times the rate, in the steps of that group",
        tested=False,
    ),
    "balls_in_bins": Law(
        "In each epoch each unit enters exactly one batch, which it chooses uniformly by itself.",
        "units, expected batch, epochs; a whole number of batches in an epoch",
        "add or remove one unit",
        "tight: loss distribution of random allocation",
    ),
    "shuffle": Law(
        "In each epoch all units are put in random order and cut into batches of one size; a smaller last one is kept, "
        "or left out (--drop-last).",
        "units, batch, epochs",
        "zero-out of one unit",
        "interval: at least by a lower-bound pair (Chua et al. 2024), at most without any amplification in an epoch",
    ),
    "fixed_size": Law(
        "Each batch is a uniformly random subset of a fixed number of units, drawn without replacement.",
        "units, batch, epochs",
        "replace one unit, or add or remove one at a fixed batch",
        "loss distribution of sampling without replacement, at twice the sensitivity",
    ),
    "full": Law(
        "Every batch holds all units.",
        "units, epochs",
        "add or remove one unit",
        "exact: Gaussian differential privacy",
        tested=False,
    ),
}
#: Samplers of releases that accountants of Poisson sampling price; a full batch is a Poisson sample of rate 1.
LIKE_POISSON = ("poisson", "full")
#: Samplers that training draws its batches by.
TRAINED: tuple[str, ...] = get_args(TrainingSampler)
#: Those that a mechanism with bands, and only such a one, gives.
CYCLIC = "cyclic_poisson"


def check_name(name: object) -> None:
    """Raise ConfigError unless ``name`` is one of ``SAMPLERS``."""
    if not isinstance(name, str) or name not in SAMPLERS:
        raise ConfigError("sampler", f"unknown sampler {name!r}", fix=f"use one of {', '.join(SAMPLERS)}")


@dataclass(frozen=True)
class Sampler:
    """The sampler of a release, with the numbers that its price takes beside the sample rate.

    A row of correlated noise is a Poisson sample of its group, so its sampler is poisson.

    Attributes:
        name: a name of ``SAMPLERS``, not cyclic_poisson.
        batches: number of batches in an epoch, for shuffle and balls_in_bins; otherwise 0. A shuffle with fewer than
            1 / sample rate of them leaves the last, smaller batch of every epoch out.
        units: number of units, for truncated_poisson; otherwise 0.
        max_batch: number of units that a batch is cut to, for truncated_poisson; otherwise 0.

    Example:
        >>> from dptune.privacy.samplers.sampler import Sampler
        >>> Sampler("shuffle", batches=65).to_dict()
        {'name': 'shuffle', 'batches': 65}
        >>> Sampler("shuffle")
        Traceback (most recent call last):
        dptune.core.errors.ConfigError: batches: 0 does not go with sampler shuffle. Fix: give 1 or more.
    """

    name: str = "poisson"
    batches: int = 0
    units: int = 0
    max_batch: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.name == CYCLIC:
            raise ConfigError("sampler", f"{CYCLIC} is made by bands, not by a release", fix="use a banded mechanism")
        needed = {"shuffle": ("batches",), "balls_in_bins": ("batches",), "truncated_poisson": ("units", "max_batch")}
        for field in ("batches", "units", "max_batch"):
            value, wanted = getattr(self, field), field in needed.get(self.name, ())
            if isinstance(value, bool) or not isinstance(value, int) or (value > 0) != wanted or value < 0:
                fix = "give 1 or more" if wanted else "leave it out"
                raise ConfigError(field, f"{value!r} does not go with sampler {self.name}", fix=fix)

    @property
    def like_poisson(self) -> bool:
        """Whether accountants of Poisson sampling price it."""
        return self.name in LIKE_POISSON

    @property
    def claimed(self) -> bool:
        """Whether the papers' own formulas are for it: Poisson sampling, of which they leave a rare cut out."""
        return self.name in ("poisson", "truncated_poisson")

    def left_out(self, sample_rate: float) -> float:
        """Share of the units that an epoch of a shuffle leaves out, with its last batch; 0 if that batch is kept."""
        return max(0.0, 1 - self.batches * sample_rate) if self.name == "shuffle" else 0.0

    def check_rate(self, sample_rate: float) -> None:
        """Refuse a rate that is not that of this sampler. Raises: ConfigError."""
        rate = 1.0 if self.name == "full" else sample_rate
        if self.name == "shuffle" and self.batches not in (_batches(rate, dropped) for dropped in (False, True)):
            rate = 1 / self.batches
        if self.name == "balls_in_bins" and abs(self.batches * sample_rate - 1) > _WHOLE:
            rate = 1 / self.batches
        if rate != sample_rate:
            number = f" with {self.batches} batches" if self.batches else ""
            problem = f"{sample_rate} does not go with sampler {self.name}{number}"
            raise ConfigError("sample_rate", problem, fix=f"use {rate!r}")

    def to_dict(self) -> dict[str, Any]:
        """The sampler in plain JSON types, without zeros."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, data: object) -> Sampler:
        """Make a sampler of what ``to_dict`` gave. Raises: ConfigError for unknown keys and wrong values."""
        if not isinstance(data, Mapping) or not {"name"} <= set(data) <= {field.name for field in fields(cls)}:
            raise ConfigError("sampler", f"{data!r} is not a sampler", fix="write name, batches, units, max_batch")
        return cls(**data)


def _batches(sample_rate: float, drop_last: bool) -> int:
    """Number of batches of one size in an epoch, with or without a smaller last one."""
    return math.floor((1 + _WHOLE) / sample_rate) if drop_last else math.ceil((1 - _WHOLE) / sample_rate)


#: The sampler of training, and of releases in ledgers that name none.
POISSON = Sampler()


def sampler_of(
    name: str,
    sample_rate: float,
    *,
    records: int | None = None,
    batch: float | None = None,
    max_batch: int | None = None,
    drop_last: bool = False,
) -> Sampler:
    """The sampler of a plan, checked.

    Args:
        name: a name of ``SAMPLERS``; cyclic_poisson gives a Poisson sampler, for its releases are about groups.
        sample_rate: expected batch over units.
        records: number of units, where it is known.
        batch: expected number of units in a batch, where it is known.
        max_batch: number of units that a batch is cut to, for truncated_poisson.
        drop_last: whether a shuffle leaves a smaller last batch of every epoch out.

    Raises: ConfigError naming what is missing or does not go together, with a fix.

    Example:
        >>> from dptune.privacy.samplers.sampler import sampler_of
        >>> sampler_of("shuffle", 1024 / 66013, records=66013, batch=1024).batches
        65
    """
    check_name(name)
    given = (("max_batch", max_batch is not None, "truncated_poisson"), ("drop_last", drop_last, "shuffle"))
    for field, is_given, owner in given:
        if is_given and name != owner:
            raise ConfigError(field, f"does not go with sampler {name}", fix=f"leave it out, or use sampler {owner}")
    if name in ("poisson", CYCLIC):
        return POISSON
    if not 0 < sample_rate <= 1:
        raise ConfigError("sample_rate", f"{sample_rate} is not in (0, 1]", fix="use batch / records")
    if name == "full" and sample_rate != 1.0:
        problem = f"sampler full puts all units into every batch, and {sample_rate:g} of them are given"
        raise ConfigError("batch", problem, fix="give a batch of as many as the records, or --sample-rate 1")
    if name in ("fixed_size", "shuffle") and batch is not None and batch != int(batch):
        problem = f"{batch} is not a whole number of units, of which every batch of {name} has the same"
        raise ConfigError("batch", problem, fix=f"use {max(1, round(batch))}")
    # For a shuffle, a rate that was rounded to a few digits could give another number of batches in an epoch.
    if name == "balls_in_bins" or (name == "shuffle" and records is None):
        return Sampler(name, batches=_whole_bins(name, sample_rate, records))
    if name == "shuffle":
        return Sampler(name, batches=_batches(sample_rate, drop_last))
    if name == "truncated_poisson":
        return _truncated(records, batch, max_batch)
    return Sampler(name)


def sampler_of_run(
    name: str, sample_rate: float, steps: int, expected_batch_size: float, max_batch: int | None = None
) -> Sampler:
    """The sampler of a training run, checked; all its numbers are settled.

    Args:
        expected_batch_size: sample rate times the number of units.

    Raises: ConfigError as ``sampler_of``; for balls_in_bins also for steps that are not whole epochs.

    Example:
        >>> from dptune.privacy.samplers.sampler import sampler_of_run
        >>> sampler_of_run("balls_in_bins", sample_rate=0.25, steps=12, expected_batch_size=50.0).batches
        4
    """
    if name not in TRAINED:
        problem = f"{name!r} is a sampler that no training draws its batches by"
        raise ConfigError("sampler", problem, fix=f"use {' or '.join(TRAINED)}")
    units = round(expected_batch_size / sample_rate)
    try:
        found = sampler_of(name, sample_rate, records=units, batch=expected_batch_size, max_batch=max_batch)
    except ConfigError as error:
        field = "expected_batch_size" if error.field == "batch" else error.field
        raise ConfigError(field, error.problem, fix=error.fix) from None
    if name == "balls_in_bins" and steps % found.batches:
        epochs = steps / found.batches
        problem = f"{epochs:g} is not a whole number, and in balls_in_bins every unit enters one batch of each epoch"
        raise ConfigError("epochs", problem, fix=f"use {math.ceil(epochs)}")
    return found


def _whole_bins(name: str, sample_rate: float, records: int | None) -> int:
    each = 1 / sample_rate
    bins = max(1, round(each))
    if abs(sample_rate * bins - 1) <= _WHOLE:
        return bins
    problem = f"{name} needs a whole number of batches in an epoch, and 1 / sample rate is {each:.6g}"
    if records is None:
        other = "" if name == "balls_in_bins" else "; or give --records, --batch and --epochs"
        rate, bins = _typed(1, each)
        raise ConfigError("sample_rate", problem, fix=f"use {rate}, for {bins}{other}")
    batch, bins = _typed(records, each)
    raise ConfigError("batch", problem, fix=f"use {batch}, for {bins} batches")


def _typed(total: int, wanted: float) -> tuple[str, int]:
    """A share of ``total`` that is easily typed and exact, and how many times it goes into it: ``wanted``, or nearly.

    Of 1,000 records 33 batches have 30.303030303030305 units, and no rounding of that makes 33. 32 have 31.25.
    """
    nearest = max(1, round(wanted))
    around = range(max(1, math.floor(wanted / _NEAR)), min(math.ceil(wanted * _NEAR), nearest + _MOST_TRIED) + 1)
    for digits, bins in product((6, 8), sorted(around, key=lambda n: abs(n - wanted))):
        text = f"{total / bins:.{digits}g}"
        if abs(float(text) / total * bins - 1) <= _WHOLE / 2:
            return text, bins
    return repr(total / nearest), nearest


def _truncated(records: int | None, batch: float | None, max_batch: int | None) -> Sampler:
    if records is None or batch is None:
        problem = "is missing: the chance that a batch is cut hangs on it"
        raise ConfigError("records", problem, fix="give --records, --batch and --epochs")
    if max_batch is None:
        usual = math.ceil(batch + 8 * math.sqrt(batch))
        raise ConfigError("max_batch", "is missing, which truncated_poisson cuts to", fix=f"use {usual}, say")
    if max_batch < batch:
        problem = f"{max_batch} is below the expected batch of {batch:g}, so most batches would be cut"
        raise ConfigError("max_batch", problem, fix=f"use {math.ceil(batch + 8 * math.sqrt(batch))}, say")
    return Sampler("truncated_poisson", units=records, max_batch=max_batch)
