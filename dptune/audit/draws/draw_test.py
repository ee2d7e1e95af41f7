"""Exact test of the draw: many batches of a run's own units, compared with the law of the sampler that is charged.

An attack on one run learns little about its draw, and would not notice batches of a fixed size. The draw itself is
cheap: it is repeated, with new coins, until the test would notice a single unit that never enters. This test does not
check what the training loop does with a batch; gradients planted in the run (``dptune.training.crafted_canaries``) do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import binom, chi2

from dptune.core.digits import at_most
from dptune.privacy.entropy import Entropy, uniform
from dptune.training.data import Bins, truncated_sample
from dptune.training.privacy_units import PrivacyUnits, Turn

_FEWEST_DRAWS = 100
_MOST_ENTRIES = 2_000_000  # largest number of units in all batches together, about five seconds of one core
_POWER = 0.95  # probability with which a test must succeed for a fault to count as detectable
_TESTS = {
    "rate": "units drawn in all",
    "sizes": "how batch sizes vary",
    "spread": "how often each unit was drawn",
    "unit": "the unit that was drawn least or most often",
}
#: The same for balls in bins, where a unit is drawn once in every epoch.
_TESTS_OF_BINS = {
    "rate": "units that enter the same bin in two epochs",
    "sizes": "how batch sizes vary",
    "spread": "how often each unit enters the first half of the bins",
    "unit": "the unit whose bins are the least likely",
}
_FEWEST_EPOCHS, _MOST_EPOCHS = 20, 100


@dataclass(frozen=True)
class DrawAudit:
    """The result of testing repeated draws.

    Attributes:
        draws: number of batches that were drawn.
        units: number of units that a draw can choose from, absent ones included. Public.
        sample_rate: the rate that the ledger is charged for.
        alarm: threshold below which ``p_value`` accuses the draw.
        p_values: p-value of each test by itself, by the names of ``_TESTS``.
        fault: a fault that no Poisson sample of whole units can have, in words; empty if none was found.
        rate_refutable: multiple of ``sample_rate`` from which a true rate is detected in 19 of 20 audits.
        sees_one_unit: whether one unit that is never drawn is certain to be detected.
        sampler: the sampler that is charged, "poisson" for the rows of correlated noise. Of balls_in_bins, ``draws``
            are whole epochs, and ``rate_refutable`` means nothing.
    """

    draws: int
    units: int
    sample_rate: float
    alarm: float
    p_values: dict[str, float]
    fault: str
    rate_refutable: float
    sees_one_unit: bool
    sampler: str = "poisson"

    @property
    def p_value(self) -> float:
        """The p-value of all tests together: if the draw is right, it is below any a with probability a at most."""
        return 0.0 if self.fault else min(1.0, len(_TESTS) * min(self.p_values.values()))

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence, or None."""
        if self.p_value >= self.alarm:
            return None
        bins = self.sampler == "balls_in_bins"
        tests = _TESTS_OF_BINS if bins else _TESTS
        found = self.fault or " and ".join(
            f"{tests[name]} (p = {at_most(value, 2)})"
            for name, value in self.p_values.items()
            if value < self.alarm / len(_TESTS)
        )
        law = f"{'truncated ' if self.sampler == 'truncated_poisson' else ''}Poisson samples"
        one = "epochs do not put each unit into one of their bins" if bins else f"draws are not {law}"
        return f"{self.draws} {one} of {self.units} units at rate {self.sample_rate:.4g}: {found}"

    @property
    def power(self) -> str:
        """The faults that the audit could have detected, in words."""
        one = f"one of {self.units} units that is never drawn"
        if self.sample_rate >= 1:
            return f"could have refuted: {one}"
        if self.sampler == "balls_in_bins":
            return (
                f"could have refuted, by {self.draws} epochs of its own and not by those of the run: {one}, one that "
                "is drawn twice in an epoch, bins that stay for the next epoch, batches of one size"
            )
        rest = f", {one}" if self.sees_one_unit else f"; NO POWER on {one}"
        return (
            f"could have refuted, by {self.draws} draws of its own and not by those of the run: "
            f"{self.rate_refutable:.3g} times the charged rate, batches of one size, batches that repeat{rest}"
        )

    def to_dict(self) -> dict[str, float | int | str | None]:
        """The result in plain JSON types, each test's p-value under a name of its own."""
        names = ("draws", "units", "sample_rate", "alarm", "p_value", "rate_refutable", "accusation", "power")
        tests = {f"p_value_{name}": value for name, value in self.p_values.items()}
        return {name: getattr(self, name) for name in names} | tests


def audit_draw(
    units: PrivacyUnits,
    absent: NDArray[np.bool_],
    sample_rate: float,
    charged: float,
    false_alarms: float,
    entropy: Entropy,
    turns: Sequence[Turn | None] = (None,),
    max_batch: int | None = None,
) -> DrawAudit:
    """Draw many batches and test whether each present unit enters each by a coin of its own, at the charged rate.

    Guarantee: if so, the draw is accused with probability ``false_alarms`` at most, exactly: counts are compared with
    their binomial laws, and ties are broken by coins. Each of four tests has a quarter of that probability. They test
    the number of all entries; batch sizes, and counts of units, by Fisher's combination of their two-sided p-values,
    which is too small if they vary too much and too large if too little; and the most unlikely count of one unit.

    Args:
        units: units of the run; an auditor's slots must be filled.
        absent: (records,) True for records that an auditor's coin left out. All others must belong to a unit.
        sample_rate: rate at which the run draws.
        charged: rate that its ledger holds.
        entropy: source of the draws' coins.
        turns: with correlated noise, those of as many rows as there are groups; a draw is then of all these rows
            together, which each unit must enter once at most.
        max_batch: most units of a batch of truncated_poisson. Its law is taken for Poisson's: the chance that a batch
            is cut adds to ``false_alarms``, and is below a thousandth of delta where the run chose it.
    """
    owners, fault = _owners(units, absent)
    draws = _draws_for(len(units), charged, false_alarms)
    batches = []
    for _ in range(draws):
        if max_batch is None:
            drawn = [one for turn in turns for one in units.draw(sample_rate, entropy, turn)]
        else:
            drawn = units.bring(truncated_sample(entropy, len(units), sample_rate, max_batch), entropy)
            fault = fault or ("a batch holds more than its largest size" if len(drawn) > max_batch else "")
        fault = fault or _fault(drawn, owners, units)
        batches.append(_numbers(drawn, owners, len(units.members)))
    entries, sizes = np.concatenate(batches), np.array([len(batch) for batch in batches])
    counts = np.bincount(entries, minlength=len(units))[_present(units, owners)]
    by_size = _two_sided(sizes, len(counts), charged, entropy)
    by_unit = _two_sided(counts, draws, charged, entropy)
    total = _two_sided(sizes.sum(keepdims=True), draws * len(counts), charged, entropy)
    return DrawAudit(
        draws=draws,
        units=len(units),
        sample_rate=charged,
        alarm=false_alarms,
        p_values={
            "rate": float(total[0]),
            "sizes": _fisher(by_size),
            "spread": _fisher(by_unit),
            "unit": min(1.0, float(by_unit.min(initial=1.0)) * max(1, len(by_unit))),
        },
        fault=fault,
        rate_refutable=_rate_refutable(draws * len(units), charged, false_alarms),
        sees_one_unit=_never_drawn(draws, len(units), charged) <= false_alarms,
        sampler="poisson" if max_batch is None else "truncated_poisson",
    )


def audit_bins(
    units: PrivacyUnits, absent: NDArray[np.bool_], bins: Bins, false_alarms: float, entropy: Entropy
) -> DrawAudit:
    """Draw many epochs of balls in bins, and test whether each present unit enters one bin of each by its own choice.

    Guarantee: as ``audit_draw``, if bins are uniform and independent, over units and over epochs. Tested are the size
    of one batch of each epoch; in how many epochs each unit enters the first half of the bins; and in how many pairs of
    epochs, none of which is in two pairs, it enters the same bin. Each of these is binomial, and by itself independent
    over epochs or units. That every unit enters exactly one batch of each epoch is no matter of chance.

    Args:
        units, absent, entropy: as for ``audit_draw``.
        bins: bins of these units, by a new secret.
    """
    owners, fault = _owners(units, absent)
    present = _present(units, owners)
    epochs = 2 * (max(_FEWEST_EPOCHS, min(_MOST_EPOCHS, _MOST_ENTRIES // max(1, len(units)))) // 2)
    found, sizes = np.zeros((epochs, len(present)), dtype=np.int64), np.zeros(epochs, dtype=np.int64)
    for epoch in range(epochs):
        drawn = [units.bring(bins.batch(bins.count * epoch + number), entropy) for number in range(bins.count)]
        numbers = [_numbers(batch, owners, len(units.members)) for batch in drawn]
        entered = np.concatenate(numbers)
        fault = fault or next(filter(None, (_fault(batch, owners, units) for batch in drawn)), "")
        if not np.array_equal(np.sort(entered), present):
            fault = fault or "a unit is not in exactly one batch of an epoch"
            break
        found[epoch, np.searchsorted(present, entered)] = np.repeat(np.arange(bins.count), [len(n) for n in numbers])
        sizes[epoch] = len(numbers[epoch % bins.count])
    alike, half = found[::2] == found[1::2], bins.count // 2
    rate, pairs = 1 / bins.count, len(alike)
    by_half = _two_sided((found < half).sum(axis=0), epochs, half * rate, entropy)
    by_pair = _two_sided(alike.sum(axis=0), pairs, rate, entropy)
    total = _two_sided(alike.sum(keepdims=True).ravel(), pairs * len(present), rate, entropy)
    both = np.concatenate([by_half, by_pair])
    return DrawAudit(
        draws=epochs,
        units=len(units),
        sample_rate=rate,
        alarm=false_alarms,
        p_values={
            "rate": float(total[0]),
            "sizes": _fisher(_two_sided(sizes, len(present), rate, entropy)),
            "spread": _fisher(by_half),
            "unit": min(1.0, float(both.min(initial=1.0)) * max(1, len(both))),
        },
        fault=fault,
        rate_refutable=1.0,
        sees_one_unit=True,
        sampler="balls_in_bins",
    )


def _draws_for(units: int, rate: float, false_alarms: float) -> int:
    """Number of draws that it takes to notice one unit that is never drawn, within ``_MOST_ENTRIES``."""
    wanted = math.log(2 * len(_TESTS) * units / false_alarms) / -math.log1p(-rate) if rate < 1 else 0.0
    return max(_FEWEST_DRAWS, math.ceil(min(wanted, _MOST_ENTRIES / max(1.0, rate * units))))


def _never_drawn(draws: int, units: int, rate: float) -> float:
    """The p-value of draws in which one unit never enters."""
    return 2 * len(_TESTS) * units * (1 - rate) ** draws


def _rate_refutable(coins: int, rate: float, false_alarms: float) -> float:
    """The refutable multiple of the rate, by the normal approximation for this many coins."""
    errors = ndtri(1 - false_alarms / (2 * len(_TESTS))) + ndtri(_POWER)
    return float(1 + errors * math.sqrt((1 - rate) / (rate * coins)))


def _owners(units: PrivacyUnits, absent: NDArray[np.bool_]) -> tuple[NDArray[np.int64], str]:
    """(records,) number of each record's unit, -1 for none; and a fault of the units in words, empty if none."""
    owners, fault = np.full(len(absent), -1), ""
    for number, records in enumerate(units.members):
        if (owners[records] >= 0).any():
            fault = "a record belongs to two units"
        owners[records] = number
    if (owners[absent] >= 0).any():
        fault = "a record that is absent belongs to a unit"
    elif (owners[~absent] < 0).any():
        fault = "a record belongs to no unit"
    return owners, fault


def _present(units: PrivacyUnits, owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the units that hold a present record, an auditor's slots last."""
    slots = len(units.members) + np.flatnonzero(units.planted)
    return np.concatenate([np.unique(owners[owners >= 0]), slots])


def _numbers(drawn: list[NDArray[np.int64]], owners: NDArray[np.int64], members: int) -> NDArray[np.int64]:
    """Numbers of the units in a batch."""
    first = np.array([records[0] for records in drawn], dtype=np.int64)
    return np.where(first >= 0, owners[np.maximum(first, 0)], members - 1 - first)


def _fault(drawn: list[NDArray[np.int64]], owners: NDArray[np.int64], units: PrivacyUnits) -> str:
    """A fault that no batch of whole units can have, in words; empty if there is none."""
    numbers = _numbers(drawn, owners, len(units.members))
    if len(np.unique(numbers)) < len(numbers):
        return "a unit is in one batch twice"
    if any(len(records) > units.most for records in drawn):
        return f"a unit brings more than {units.most} records"
    if any(len(np.unique(owners[records])) > 1 for records in drawn if len(records) > 1):
        return "records of several units are brought as one"
    return ""


def _two_sided(counts: NDArray[np.int64], trials: int, rate: float, entropy: Entropy) -> NDArray[np.float64]:
    """(counts,) p-values, uniform on (0, 1) if the counts are binomial: coins break ties."""
    coins, law = uniform(entropy, len(counts)), binom(trials, rate)
    here = law.pmf(counts)
    below, above = law.cdf(counts - 1) + coins * here, law.sf(counts) + (1 - coins) * here
    return np.asarray(np.minimum(1.0, 2 * np.minimum(below, above)))


def _fisher(p_values: NDArray[np.float64]) -> float:
    """Two-sided p-value of Fisher's combination of independent p-values."""
    statistic = float(-2 * np.log(np.maximum(p_values, np.finfo(np.float64).tiny)).sum())
    law = chi2(2 * len(p_values))
    return min(1.0, 2 * float(min(law.cdf(statistic), law.sf(statistic))))
