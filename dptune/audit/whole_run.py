"""Audit of a finished run by the gradients that an auditor planted in it: its coins against its certificate.

Everything that the audit reads must fit the ledger: the coins its first line's commitment, the file of coins and scores
the digest in its last line, the adapter its chain. So a file that was exchanged or edited is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import chi2

from dptune.audit.one_run import OneRun, SampleRate, Unseen, audited_sample_rate, one_run
from dptune.audit.refutation import Refutation, refutation, run_certificate
from dptune.core.digits import at_least, at_most, shown_above
from dptune.core.errors import ConfigError, DataError
from dptune.core.files import sha256
from dptune.job.audit_canaries import KeptCanaries
from dptune.job.delivery.verification import check_deliverable
from dptune.job.delivery.weights import read_base, weights_file
from dptune.job.path_checks import kind_of
from dptune.job.result import RunResult
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder

#: Comparisons with the ledger that may accuse a run: of its coins, of their entries into batches, and of its noise.
CHECKS = 3
#: Probability of a false alarm that those share by default.
FALSE_ALARMS = 0.001
#: Least probability of an error that the bounds are computed for: they work with 1 minus parts of it.
_LEAST_CHANCE = 1e-9
_WRONG = "the mechanism, its accountant or its data handling is wrong"


@dataclass(frozen=True)
class RunAudit:
    """What the planted gradients of one run show.

    Attributes:
        contents: the run's ledger.
        coins: the lower bound on epsilon.
        against: the comparison of the coins with the run's certificate.
        draw: the bound on the rate at which canaries entered batches.
        noise: the bound on the noise, from the coordinates of canaries that are out.
        watched: number of the releases that were scored; fewer than the ledger's where a process was killed.
        confidence: confidence of each bound that is reported.
        false_alarms: probability of an accusation if the ledger is right, which the ``CHECKS`` share.
        committed: whether the ledger holds a commitment to the coins, and the digest of the scores.
    """

    contents: LedgerContents = field(repr=False)
    coins: OneRun
    against: Refutation
    draw: SampleRate | Unseen
    noise: NoiseBound
    watched: int
    confidence: float
    false_alarms: float
    committed: bool

    @property
    def accusations(self) -> list[str]:
        """A sentence for each comparison that the run fails."""
        return list(self._accusations())

    def _accusations(self) -> Iterator[str]:
        sure = at_least(self.against.confidence, 6)
        if said := self.against.accusation:
            yield f"an attack on its canaries {said}: {_WRONG}"
        if isinstance(self.draw, SampleRate) and self.draw.alarm > self.draw.sample_rate:
            lower, charged = shown_above(self.draw.alarm, self.draw.sample_rate)
            yield (
                f"its canaries entered batches at a rate >= {lower} at confidence {sure}, but {charged} is charged: "
                f"{_WRONG}"
            )
        if self.noise.accused:
            charged, upper = shown_above(self.noise.noise_multiplier, self.noise.alarm)
            shown = f"its noise is <= {upper} times the sensitivity at confidence {sure}"
            yield f"{shown}, but {charged} is charged: {_WRONG}"

    def to_dict(self) -> dict[str, Any]:
        """The figures in plain JSON types."""
        header, draw, noise = self.contents.header, self.draw.to_dict(), self.noise.to_dict()
        return {
            "mechanism": header.mechanism,
            "data": header.data,
            "run_id": header.run_id,
            "canaries": self.coins.canaries,
            "releases": self.contents.releases,
            "releases_scored": self.watched,
            "delta": header.delta,
            "epsilon_certified": self.against.certified,
            "epsilon_audited": self.coins.epsilon_audited,
            "confidence": self.confidence,
            "could_be_shown_at_most": self.coins.most,
            "guesses": self.coins.guesses,
            "correct": self.coins.correct,
            "false_alarms": self.false_alarms,
            "alarm_confidence": self.against.confidence,
            **{name: value for name, value in self.against.to_dict().items() if name != "accusation"},
            **_named("sample_rate", draw),
            **_named("noise", noise),
            "accusations": self.accusations,
        }


def _named(about: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Figures under names that say what they are about."""
    return {name if name.startswith(about) else f"{about}_{name}": value for name, value in figures.items()}


def most_shown(canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that the coins of so many canaries can show, by an attack that is always right.

    Example:
        >>> from dptune.audit.whole_run import most_shown
        >>> most_shown(256, 1e-5) < most_shown(1000, 1e-5)
        True
    """
    coins = np.arange(canaries) % 2 == 0
    return one_run(coins.astype(float), coins, delta, confidence).most


def audit_run(run: str | Path, confidence: float = 0.95, false_alarms: float = FALSE_ALARMS) -> RunAudit:
    """Audit a finished run of ``tune``, or a finished cell of the pipeline, in its folder.

    Guarantee: each bound holds with probability ``confidence``; a run that keeps its certificate and draws as charged
    is accused with probability ``false_alarms`` at most, over its coins, draws and noise. Private: the coins; what is
    returned tells as much of the records as the released weights do.

    Raises: ConfigError for a folder that is no such run's, that is not finished, or that planted no gradients;
        DataError for coins, scores or an adapter that are missing, or not those of the run's ledger; LedgerError.
    """
    for name, share, usual in (("--confidence", confidence, 0.95), ("--false-alarms", false_alarms, 0.001)):
        if not 0 < share < 1:
            raise ConfigError(name, f"{share} is not between 0 and 1", fix=f"use {usual}, or leave it out")
    for name, chance, usual in (("--confidence", 1 - confidence, 0.95), ("--false-alarms", false_alarms, 0.001)):
        if chance < _LEAST_CHANCE:
            problem = f"leaves a chance of {chance:.2g} for an error, which is too small to compute with"
            raise ConfigError(name, problem, fix=f"use {usual}, or a chance of {_LEAST_CHANCE:g} or more")
    folder = RunFolder(Path(run))
    is_cell = _is_cell(folder)
    contents = read_ledger(folder.ledger)
    if not contents.complete:
        problem = f"{folder.path} is not finished, and more may be released"
        raise ConfigError("run", problem, fix="finish it by the command that began it, then audit it")
    canaries = _canaries_of(folder, contents, is_cell=is_cell)
    _check_adapter(folder, contents, is_cell=is_cell)
    header, alarm = contents.header, 1 - false_alarms / CHECKS
    scores, included = canaries.guesses_by, canaries.included
    charged = contents.composition
    rate, bins = max(release.sample_rate for release in charged), max(one.sampler.batches for one in charged)
    noise = min(release.effective_noise_multiplier for release in charged)
    gaussian = all(release.noise == "gaussian" for release in charged)
    # The draw's test simulates entries. Their seed is the run's random number, which depends on no coin and no score:
    # a second audit of the same run has the same figures.
    simulated = FixedSeed(int(hashlib.sha256(header.run_id.encode()).hexdigest(), 16))
    return RunAudit(
        contents=contents,
        coins=one_run(scores, included, header.delta, confidence),
        against=refutation(scores, included, run_certificate(header, contents.composition), header.delta, alarm),
        draw=audited_sample_rate(canaries.scores, included, canaries.moves, rate, confidence, alarm, simulated, bins),
        noise=audited_noise(
            canaries.squares,
            canaries.moves,
            int((~included).sum()),
            noise,
            confidence,
            alarm,
            gaussian=gaussian,
        ),
        watched=canaries.watched,
        confidence=confidence,
        false_alarms=false_alarms,
        committed=bool(header.canaries),
    )


def _is_cell(folder: RunFolder) -> bool:
    """Whether a folder is a cell's; False for a run of ``tune``. Raises: ConfigError for any other folder."""
    path, fix = folder.path, "give the folder of a run of dptune tune, or of a finished cell (data/runs/<cell>)"
    if not path.is_dir():
        raise ConfigError("run", f"{path} {'is a file' if path.exists() else 'does not exist'}", fix=fix)
    if not folder.ledger.exists():
        raise ConfigError("run", f"{path} holds no ledger", fix=fix)
    if not folder.cell.exists():
        problem = f"{path} holds a ledger and no {folder.cell.name}, as the adapter that a run delivers"
        raise ConfigError("run", problem, fix="give the run's own folder, which keeps the coins")
    if (kind := kind_of(folder)) == "search":
        raise ConfigError("run", f"{path} is a search, and no auditor's gradients are planted in candidates", fix=fix)
    return kind is None or not {"kind", "run_id"} & {*folder.settings}


def _canaries_of(folder: RunFolder, contents: LedgerContents, *, is_cell: bool) -> KeptCanaries:
    """The canaries of a run, whose coins and scores are those that its ledger names."""
    header, file = contents.header, folder.crafted if is_cell else folder.canaries
    planted = header.canaries or (RunResult.read(folder.result).crafted if is_cell else 0)
    if not planted:
        option = "canaries.crafted" if is_cell else "dptune tune --audit-canaries 256"
        problem = f"{folder.path} was trained without the gradients of an auditor, whose coins an audit guesses"
        raise ConfigError("run", problem, fix=f"plant them in a new run ({option}), which spends again")
    if not file.exists():
        back = "restore it from the run's own folder"
        if is_cell:
            moved = f"put {folder.path.name} back under its name into data/runs of the workspace where it ran"
            kept = "restore it; or give the run its own name back, if it was renamed"
            back = kept if file.parent.parent.is_dir() else moved
        problem = "is missing: nobody can audit a run without the coins of its canaries"
        raise DataError(problem, fix=back, file=file)
    found = KeptCanaries.read(folder.path, file)
    if header.canaries and (found.commitment, len(found.included)) != (header.coins, header.canaries):
        problem = f"holds other coins than {folder.ledger} was begun with"
        raise DataError(problem, fix="restore the file of this run; do not trust an audit by this one", file=file)
    if header.canaries and contents.scores != sha256(file):
        problem = f"was changed after the run ended: its SHA-256 is not that in the last line of {folder.ledger}"
        raise DataError(problem, fix="restore the file of this run; do not trust an audit by this one", file=file)
    if found.watched > contents.releases:
        problem = f"holds {found.watched} releases, and {folder.ledger} only {contents.releases}"
        raise DataError(problem, fix="restore the file of this run; do not trust an audit by this one", file=file)
    return found


def _check_adapter(folder: RunFolder, contents: LedgerContents, *, is_cell: bool) -> None:
    """Raise DataError unless the adapter in the folder is what the run of this ledger made; else as ``verify``."""
    fix, result = "restore the adapter of this run", RunResult.read(folder.result)
    if is_cell:
        weights = weights_file(folder.adapter)
        if not weights.exists() or sha256(weights) != result.adapter_sha256:
            raise DataError("is not the adapter that the run of this ledger wrote", fix=fix, file=weights)
        return
    base = read_base(folder.adapter)
    if base is not None and (base.name, base.revision) != (result.base, result.revision):
        problem = f"is of the base model {base.known_as}, and the run trained {result.base}"
        raise DataError(problem, fix=fix, file=folder.adapter)
    if check_deliverable(folder.adapter).chain != contents.chain:
        raise DataError(f"was delivered by another run than that of {folder.ledger}", fix=fix, file=folder.adapter)


# A bound on a run's true noise, from the coordinates of planted gradients that their coins left out.
#
# A bound on epsilon from one run is too weak to see that half of the charged noise was added. This measures the noise:
# a coordinate that a canary would have moved holds noise and the gradients of the records, and those only add to it.


_POWER = 0.95  # probability with which a fault must be seen to count as detectable
_ROUNDING = 1e-6  # relative error of float32, and of the grid that noisy values are rounded to


@dataclass(frozen=True)
class NoiseBound:
    """Bounds on the noise multiplier of one run, from its releases; 0 in ``detectable`` without power.

    Attributes:
        noise_multiplier: the least effective noise multiplier that the ledger is charged for.
        at_most: upper bound at the confidence that is reported; infinite without power.
        alarm: upper bound at the confidence of an alarm; below ``noise_multiplier`` it accuses the noise.
        detectable: the multiple of the charged noise below which 19 of 20 audits accuse, where records add as much to
            these coordinates as they add to this run's at most (at confidence 0.95).
        reason: reason why the audit has no power, in words; empty if it has.

    Example:
        >>> from dptune.audit.whole_run import NoiseBound
        >>> NoiseBound(noise_multiplier=1.0, at_most=0.46, alarm=0.51, detectable=0.92).accused
        True
    """

    noise_multiplier: float
    at_most: float
    alarm: float
    detectable: float
    reason: str = ""

    @property
    def accused(self) -> bool:
        """Whether the noise is less than the ledger is charged for."""
        return self.alarm < self.noise_multiplier * (1 - _ROUNDING)

    @property
    def power(self) -> str:
        """The noise that the audit could have detected, in words."""
        if self.reason:
            return f"NO POWER on the noise: {self.reason}"
        if not self.detectable:
            return "NO POWER on the noise: the gradients of the records in these coordinates would hide any lack of it"
        could = f"noise below {at_least(self.detectable)} times the charged {at_most(self.noise_multiplier)}"
        return f"could have refuted: {could}, beside what the records add here"

    def to_dict(self) -> dict[str, float | str]:
        """The result in plain JSON types, with the power in words."""
        return {**{name: value for name, value in asdict(self).items() if name != "reason"}, "power": self.power}


def audited_noise(
    squares: Sequence[float],
    moves: Sequence[float],
    absent: int,
    charged: float,
    confidence: float,
    alarm: float,
    *,
    gaussian: bool = True,
) -> NoiseBound:
    """Bound the noise multiplier of a run with Gaussian noise from above.

    Guarantee: if each release adds independent Gaussian noise of at least ``charged`` times the sensitivity, each bound
    is below ``charged`` with probability ``1 - confidence`` (or ``1 - alarm``) at most. Proof: a planted gradient moves
    its coordinate by the sensitivity at most, so that in units of a move the noise has a deviation of at least
    ``charged``. Given everything before, the sum of squares of a release is then at least noncentral chi-squared, which
    is stochastically larger than central, and so is the sum over releases. The bound is the better of two, from all
    releases together and from the one with the least squares; they share the failure probability.

    Args:
        squares: (releases,) of ``CraftedCanaries``, as is ``moves``.
        absent: number of canaries that their coins left out.
        gaussian: whether each release is charged as Gaussian noise.

    Returns: no power without an absent canary, for other noise, or where a move or a sum of squares is not known.

    Example:
        >>> from dptune.audit.whole_run import audited_noise
        >>> sound, half = [100.0] * 20, [25.0] * 20  # sums over 100 coordinates of noise 1 and of noise 0.5
        >>> audited_noise(sound, [1.0] * 20, absent=100, charged=1.0, confidence=0.95, alarm=0.999).accused
        False
        >>> audited_noise(half, [1.0] * 20, absent=100, charged=1.0, confidence=0.95, alarm=0.999).accused
        True
    """
    measured, steps = np.asarray(squares, dtype=np.float64), np.asarray(moves, dtype=np.float64)
    if not absent:
        return NoiseBound(charged, math.inf, math.inf, 0.0, "no canary was left out")
    if not gaussian:
        return NoiseBound(charged, math.inf, math.inf, 0.0, "this test is for Gaussian noise, and the run added other")
    if not len(steps) or len(measured) != len(steps) or not (np.isfinite(steps) & (steps > 0)).all():
        reason = "how much a planted gradient moves a release is not known for this mechanism"
        return NoiseBound(charged, math.inf, math.inf, 0.0, reason)
    if not np.isfinite(measured).all():  # files of earlier versions hold no squares
        reason = "the coordinates of canaries that are out were not measured in every release"
        return NoiseBound(charged, math.inf, math.inf, 0.0, reason)
    shares = measured / steps**2

    def bound(sure: float) -> float:
        failure = (1 - sure) / 2
        together = shares.sum() / chi2.ppf(failure, absent * len(shares))
        least = shares.min() / chi2.ppf(failure / len(shares), absent)
        return float(math.sqrt(min(together, least)))

    numbers = absent * len(shares)
    accused_below = chi2.ppf((1 - alarm) / 2, numbers)
    records = max(0.0, shares.sum() / charged**2 - chi2.ppf(1 - _POWER, numbers))
    return NoiseBound(charged, bound(confidence), bound(alarm), _detectable(numbers, records, accused_below))


def _detectable(numbers: int, records: float, accused_below: float) -> float:
    """The multiple f of the charged noise at which the sum of squares still is small enough in 19 of 20 runs.

    In units of the charged variance, that sum is f^2 X + 2 f sqrt(records) Z + records: X is chi-squared, Z standard
    normal. Each is taken at its own 95 % quantile.
    """
    if records >= accused_below:
        return 0.0
    square, line = chi2.ppf(_POWER, numbers), ndtri(_POWER) * math.sqrt(records)
    return float((math.sqrt(line**2 + square * (accused_below - records)) - line) / square)
