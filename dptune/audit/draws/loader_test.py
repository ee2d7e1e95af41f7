"""Test of somebody else's loader: batches of many epochs, compared with the sampling that is claimed.

dptune simulates the claimed sampler, and compares statistics of the loader with those of the simulations:
how many simulations lie as far out as the loader is an exact p-value, for any sampler. Nothing is assumed of its law
but that it can be drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.audit.draws.loader_claim import STATISTICS, TESTED, Entries, LoaderClaim, Numbers, simulated
from dptune.core.errors import ConfigError
from dptune.core.plugins import running
from dptune.core.progress import Meter
from dptune.privacy.entropy import Entropy

_ENTRIES, _MOST_EPOCHS, _FEWEST_EPOCHS = 20_000, 100, 4
_CALIBRATIONS, _OTHERS = 200, 20
_LEAST_ALARM = 1e-4
_ROUNDING = 1e-9
_NOTICEABLE = 4.0  # standard deviations from which on a statistic is named
_RATES = (1.05, 1.1, 1.2, 1.5, 2.0)


@dataclass(frozen=True)
class LoaderAudit:
    """The result of testing a loader.

    Attributes:
        claim: the claim that was tested.
        epochs, batches: number of epochs, and of batches in each.
        false_alarms: probability at most with which a loader that is as claimed is accused.
        p_value: share of simulated loaders that lie as far out as this one, itself among them.
        deviations: for each statistic that is noticeably off, its distance in standard deviations.
        fault: what the loader did that the claimed sampler never does, in words; empty if nothing.
        seen: errors that 19 of 20 simulated loaders with them were accused of.
        unseen: errors that this audit is too short to notice.
    """

    claim: LoaderClaim
    epochs: int
    batches: int
    false_alarms: float
    p_value: float
    deviations: dict[str, float]
    fault: str
    seen: tuple[str, ...]
    unseen: tuple[str, ...]

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence, or None."""
        claimed = f"{self.claim.sampler} at rate {self.claim.sample_rate:.4g} of {self.claim.units} units"
        if self.fault:
            return f"the batches are not {claimed}, for certain: {self.fault}"
        if self.p_value > self.false_alarms:
            return None
        found = " and ".join(_in_words(name, value) for name, value in self.deviations.items())
        return f"the batches of {self.epochs} epochs are not {claimed} (p = {self.p_value:.2g} or less): {found}"

    @property
    def power(self) -> str:
        """The errors that the audit could have noticed, in words."""
        none = f"; NO POWER on {', '.join(self.unseen)}" if self.unseen else ""
        return f"could have refuted: {', '.join(self.seen) or 'nothing'}{none}"

    def to_dict(self) -> dict[str, Any]:
        """The result in plain JSON types."""
        claim = {name: value for name, value in vars(self.claim).items() if value not in (None, False)}
        names = ("epochs", "batches", "false_alarms", "p_value", "accusation", "power")
        return claim | {name: getattr(self, name) for name in names}


def _in_words(name: str, deviation: float) -> str:
    text = STATISTICS[name]
    degree = ("too much" if deviation > 0 else "too little") if "var" in text else ("high" if deviation > 0 else "low")
    by = "where it cannot differ at all" if math.isinf(deviation) else f"by {abs(deviation):.3g} standard deviations"
    return f"{text} {degree if 'too' in degree else f'too {degree}'} ({by})"


@dataclass(frozen=True)
class _Law:
    """The law of the statistics under the claim, by simulation.

    ``far`` of any loader is independent of the simulations in ``sorted_far``: both are measured with mean and spread
    of simulations of their own. So a loader that is as claimed is exchangeable with them.
    """

    mean: NDArray[np.float64]
    spread: NDArray[np.float64]
    sorted_far: NDArray[np.float64]

    @classmethod
    def of(cls, simulate: Callable[[], Entries], alarm: float, meter: Meter) -> _Law:
        def one() -> NDArray[np.float64]:
            meter.update(meter.done + 1)
            return simulate().statistics()

        own = np.stack([one() for _ in range(_CALIBRATIONS)])
        law = cls(own.mean(axis=0), own.std(axis=0, ddof=1), np.zeros(0))
        return cls(law.mean, law.spread, np.sort([law.far(one()) for _ in range(_simulations(alarm))]))

    def deviations(self, statistics: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distances from the mean, in standard deviations; infinite where the law has none."""
        off = statistics - self.mean
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.abs(off) <= _ROUNDING * np.abs(self.mean), 0.0, off / self.spread)

    def far(self, statistics: NDArray[np.float64]) -> float:
        """The largest distance."""
        return float(np.abs(self.deviations(statistics)).max())

    def p_value(self, far: float) -> float:
        """Share of simulations that lie as far out, the loader itself among them."""
        return float(1 + (self.sorted_far >= far).sum()) / (1 + len(self.sorted_far))


def _simulations(alarm: float) -> int:
    return max(999, math.ceil(1 / alarm) - 1)


def audit_loader(
    loader: Any,
    claim: LoaderClaim,
    *,
    false_alarms: float,
    entropy: Entropy,
    epochs: int | None = None,
    name: str = "LOADER",
) -> LoaderAudit:
    """Read a loader's epochs, and test whether they are the claimed sampler's.

    Guarantee: if the epochs are independent and drawn as claimed, the loader is accused with probability
    ``false_alarms`` at most. The distance of its statistics from their means is one of exchangeable numbers then, the
    others being simulated, so that its rank is uniform (Monte Carlo test of Barnard 1963).

    Args:
        loader: LOADER: an iterable of batches of ids, read once in every epoch; or a function that returns one. A batch
            is a list, array or tensor of ids, and may be empty.
        epochs: number of epochs to read; None for some 20,000 entries.
        entropy: source of the simulations' coins.
        name: what the user named, for errors.

    Raises: ConfigError for numbers out of range; for a loader that raises, ends early, never ends or yields other ids.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.draws.loader_claim import LoaderClaim
        >>> from dptune.audit.draws.loader_test import audit_loader
        >>> from dptune.privacy.entropy import OsEntropy
        >>> coins = np.random.default_rng()
        >>> claim = LoaderClaim(sampler="poisson", sample_rate=0.25, units=40)
        >>> found = audit_loader(lambda: np.split(coins.permutation(40), 4), claim, false_alarms=0.001,
        ...                      entropy=OsEntropy(), epochs=20)
        >>> found.accusation is None
        False
    """
    if not _LEAST_ALARM <= false_alarms < 1:
        problem = f"{false_alarms} is not in [{_LEAST_ALARM:g}, 1)"
        raise ConfigError("false_alarms", problem, fix="use 0.001: a smaller one takes too many simulations")
    entries = _read(loader, claim, epochs, name)
    count, batches, _ = entries.shape
    coins = np.random.default_rng(entropy.words(4))
    wrong = _errors(claim)
    total = _CALIBRATIONS + _simulations(false_alarms) + len(wrong) * _OTHERS
    with Meter(f"audit {name}", total=total, unit="simulations") as meter:
        law = _Law.of(lambda: simulated(claim, count, batches, coins), false_alarms, meter)
        noticed = {
            error: sum(
                law.p_value(law.far(make(count, batches, coins).statistics())) <= false_alarms for _ in range(_OTHERS)
            )
            for error, make in wrong.items()
        }
    deviations = law.deviations(entries.statistics())
    order = np.argsort(-np.abs(deviations), kind="stable")
    named = [at for rank, at in enumerate(order) if rank == 0 or abs(deviations[at]) >= _NOTICEABLE]
    names = list(STATISTICS)
    return LoaderAudit(
        claim,
        count,
        batches,
        false_alarms,
        law.p_value(float(np.abs(deviations).max())),
        {names[at]: float(deviations[at]) for at in named[:3]},
        _fault(entries, claim),
        tuple(error for error, times in noticed.items() if times >= _OTHERS - 1),
        tuple(error for error, times in noticed.items() if times < _OTHERS - 1),
    )


def _errors(claim: LoaderClaim) -> dict[str, Callable[[int, int, np.random.Generator], Entries]]:
    """Loaders with one error each, by its name; the least rate that is noticed is among them."""

    def at(sampler: str, rate: float = claim.sample_rate) -> Callable[[int, int, np.random.Generator], Entries]:
        most = claim.max_batch if sampler == "truncated_poisson" else None
        other = LoaderClaim.__new__(LoaderClaim)  # unchecked: a rate of another sampler need not be 1 / batches
        vars(other).update(sampler=sampler, sample_rate=rate, units=claim.units, max_batch=most, drop_last=False)
        return lambda epochs, batches, coins: simulated(other, epochs, batches, coins)

    def without_one(epochs: int, batches: int, coins: np.random.Generator) -> Entries:
        made = simulated(claim, epochs, batches, coins)
        kept = made.ids != coins.integers(claim.units)
        return Entries(made.slots[kept], made.ids[kept], made.shape)

    def one_epoch(epochs: int, batches: int, coins: np.random.Generator) -> Entries:
        made = simulated(claim, 1, batches, coins)
        slots = (np.arange(epochs)[:, None] * batches + made.slots).ravel()
        return Entries(slots, np.tile(made.ids, epochs), (epochs, batches, claim.units))

    others = [one for one in TESTED if one not in (claim.sampler, "truncated_poisson")]
    found = {f"batches of {one}": at(one) for one in others if claim.size * claim.bins}
    if claim.sampler in ("poisson", "truncated_poisson"):
        rates = [factor for factor in _RATES if factor * claim.sample_rate < 1]
        found |= {f"{factor:g} times the rate": at(claim.sampler, factor * claim.sample_rate) for factor in rates}
    return found | {"the same batches in every epoch": one_epoch, "one unit that never comes": without_one}


def _fault(entries: Entries, claim: LoaderClaim) -> str:
    """What no batches of the claimed sampler can have, in words; empty if there is nothing."""
    epochs, batches, units = entries.shape
    if len(np.unique(entries.slots * units + entries.ids)) < len(entries.ids):
        return "a unit is in one batch twice"
    if claim.batches is not None and batches != claim.batches:
        rest = epochs * units - len(np.unique(entries.slots // batches * units + entries.ids))
        missed = f", so that {rest / epochs:.4g} units miss each of them" if rest else ""
        return f"an epoch has {batches} batches instead of {claim.batches}{missed}"
    if claim.max_batch is not None and np.bincount(entries.slots).max(initial=0) > claim.max_batch:
        return f"a batch has more than {claim.max_batch} units"
    return ""


def _read(loader: Any, claim: LoaderClaim, epochs: int | None, name: str) -> Entries:
    """The batches of all epochs. Raises: ConfigError as ``audit_loader``."""
    first = list(_epoch(loader, claim, 1, name))
    if not first:
        raise ConfigError(name, "yields no batch", fix="return an iterable of batches of ids")
    # The number of epochs follows from the claim. If it followed from the first epoch's size, a loader could steer it.
    entries = max(1, round(claim.sample_rate * claim.units * len(first)))
    wanted = epochs or max(_FEWEST_EPOCHS, min(_MOST_EPOCHS, _ENTRIES // entries))
    seen = [*first]
    for number in range(2, wanted + 1):
        batches = list(_epoch(loader, claim, number, name))
        if len(batches) != len(first):
            problem = f"epoch {number} has {len(batches)} batches, and epoch 1 had {len(first)}"
            fix = "yield as many batches in every epoch, empty ones included"
            if not batches and number == 2:
                again = "return a fresh one at each call" if callable(loader) else "name a function that returns one"
                fix = f"what gives the batches can be read only once: {again}"
            raise ConfigError(name, problem, fix=fix)
        seen += batches
    slots = np.repeat(np.arange(len(seen)), [len(one) for one in seen])
    return Entries(slots, np.concatenate(seen), (wanted, len(first), claim.units))


def _epoch(loader: Any, claim: LoaderClaim, number: int, name: str) -> Iterator[Numbers]:
    most = 10 * claim.bins + 1000
    with running(name, f"in epoch {number}"):
        made: Iterable[Any] = loader() if callable(loader) else loader
        if not isinstance(made, Iterable):
            problem = f"gives a {type(made).__name__} for an epoch, which is no iterable of batches"
            raise ConfigError(name, problem, fix="name an iterable of batches of ids, or a function that returns one")
        for at, batch in enumerate(made, start=1):
            if at > most:
                problem = f"epoch {number} has more than {most} batches, where 1 / sample_rate is {claim.bins}"
                raise ConfigError(name, problem, fix="end the iterable after one epoch")
            yield _ids(batch, claim.units, f"batch {at} of epoch {number}", name)


def _ids(batch: Any, units: int, where: str, name: str) -> Numbers:
    try:
        ids = np.asarray(batch).ravel()
    except (TypeError, ValueError):
        ids = np.array([batch, None], dtype=object)[:1]
    if not len(ids):
        return np.zeros(0, dtype=np.int64)
    if ids.dtype.kind not in "iu":
        problem = f"{where} holds a {type(ids.tolist()[0]).__name__}, and no whole numbers"
        raise ConfigError(name, problem, fix="yield batches of ids, as lists, arrays or tensors of whole numbers")
    if ids.min() < 0 or ids.max() >= units:
        other = int(ids.min() if ids.min() < 0 else ids.max())
        problem = f"{where} holds the id {other}, which is not one of the ids from 0 to {units - 1}"
        raise ConfigError(name, problem, fix="yield positions in the data set, or set --units to their number")
    return ids.astype(np.int64)
