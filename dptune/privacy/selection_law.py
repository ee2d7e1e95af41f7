"""Laws of the number of candidates of a private selection (Liu and Talwar 2019; Papernot and Steinke 2022).

A fixed number of candidates would tell, by its maximum alone, more than any one candidate. So the number K is random,
at least 1, drawn once and kept secret. A law is public. Each is conditioned on K <= ``most`` (one draws again above
that), so it is a finite list of probabilities, which is all that ``selection`` reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.privacy.entropy import Entropy, uniform

Array = NDArray[np.float64]

#: The shape that is cheapest at an equal chance to try a good candidate at all.
DEFAULT_SHAPE = 2.0
#: The least mean: closer to 1 the rate of a law is lost in rounding, and there is nothing to choose.
_LEAST_MEAN = 1.001
#: Probability of the uncapped law that the default cap leaves out.
_BEYOND = 1e-3
#: Largest cap; a law that needs more has too heavy a tail to run.
MOST_CANDIDATES = 100_000
_LARGEST_SHAPE = 1e4
_NAMES = ("shape", "rate", "most")


@dataclass(frozen=True)
class SelectionLaw:
    """The law of the number K of candidates: on 1 .. ``most``, public.

    Attributes:
        shape: eta >= 0 of the truncated negative binomial law (0 is logarithmic, 1 geometric; definition 1 of
            Papernot and Steinke); infinity is Poisson conditioned on K >= 1.
        rate: gamma in (0, 1) of that law; of Poisson's its parameter lambda > 0.
        most: the cap, at least 2.

    Example:
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> law = SelectionLaw.of(candidates=10)
        >>> law.most, round(law.mean, 2), round(law.hit(0.1), 3)
        (48, 9.96, 0.563)
    """

    shape: float
    rate: float
    most: int

    def __post_init__(self) -> None:
        if not (_is_number(self.shape) and self.shape >= 0) or _LARGEST_SHAPE < self.shape < math.inf:
            problem = f"{self.shape!r} is neither a number from 0 to {_LARGEST_SHAPE:g} nor inf"
            raise ConfigError("shape", problem, fix="use 2; 0 is logarithmic, 1 geometric, inf Poisson")
        high = math.inf if self.shape == math.inf else 1.0
        if not (_is_number(self.rate) and 0 < self.rate < high):
            raise ConfigError("rate", f"{self.rate!r} is not in (0, {high:g})", fix="make the law by SelectionLaw.of")
        if type(self.most) is not int or not 2 <= self.most <= MOST_CANDIDATES:
            problem = f"{self.most!r} is not a whole number from 2 to {MOST_CANDIDATES}"
            raise ConfigError("most", problem, fix="leave it out, or give a larger cap")

    @classmethod
    def of(cls, candidates: float, shape: float = DEFAULT_SHAPE, most: int | None = None) -> SelectionLaw:
        """The law whose mean is ``candidates`` before it is capped.

        Args:
            candidates: expected number of candidates, 1.001 or more.
            most: the cap; None takes the least that leaves out at most a thousandth.

        Raises: ConfigError naming ``candidates``, ``shape`` or ``most``.
        """
        if not (_is_number(candidates) and _LEAST_MEAN <= candidates < math.inf):
            problem = f"{candidates!r} is not a number of {_LEAST_MEAN} or more"
            raise ConfigError("candidates", problem, fix="give how many to try on average, such as 10")
        cls(shape, 0.5, 2)  # checks the shape before the rate is looked for
        rate = _rate_of(float(candidates), float(shape))
        if most is None:
            most = max(2, _cap_of(float(shape), rate))
        elif type(most) is int and most < candidates:
            raise ConfigError("most", f"{most} is below the mean, {candidates:g}", fix="raise it, or leave it out")
        return cls(float(shape), rate, most)

    @cached_property
    def probabilities(self) -> Array:
        """(most,) P(K = 1), .., P(K = most), which add up to 1."""
        found = _uncapped(self.shape, self.rate, self.most)
        return found / math.fsum(found)

    @property
    def mean(self) -> float:
        """The expected number of candidates under the cap."""
        return math.fsum(self.probabilities * np.arange(1, self.most + 1))

    @property
    def uncapped_mean(self) -> float:
        """The expected number of candidates without the cap."""
        return _mean_of(self.shape, self.rate)

    def generating(self, x: Array | float) -> Array:
        """E[x^K] for x in [0, 1]; the shape of ``x``."""
        return np.asarray(np.polynomial.polynomial.polyval(x, np.append(0.0, self.probabilities)))

    def slope(self, x: Array | float) -> Array:
        """The derivative of ``generating``: sum over k of k P(K = k) x^(k - 1)."""
        return np.asarray(np.polynomial.polynomial.polyval(x, self.probabilities * np.arange(1, self.most + 1)))

    def hit(self, share: float) -> float:
        """Probability that a candidate among the best ``share`` of the space is tried at all."""
        return 1.0 - float(self.generating(1.0 - share))

    def draw(self, entropy: Entropy) -> int:
        """Draw K. Private: only the winner leaves, never the number that it was chosen from."""
        place = float(uniform(entropy, 1)[0])
        return min(int(np.searchsorted(np.cumsum(self.probabilities), place, side="right")) + 1, self.most)

    def to_dict(self) -> dict[str, Any]:
        """The law in plain JSON types; Poisson's shape is the text "inf"."""
        return asdict(self) | {"shape": self.shape if math.isfinite(self.shape) else "inf"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SelectionLaw:
        """Make a law of what ``to_dict`` gave. Raises: ConfigError."""
        if set(data) != set(_NAMES):
            raise ConfigError("law", f"has the keys {sorted(data)}", fix=f"give {', '.join(_NAMES)}")
        return cls(**{**data, "shape": math.inf if data["shape"] == "inf" else data["shape"]})


def _uncapped(shape: float, rate: float, count: int) -> Array:
    """(count,) The first probabilities of the law without its cap, by their ratios."""
    before = np.arange(1, count, dtype=np.float64)
    if shape == math.inf:
        first, ratios = math.log(rate) - rate - math.log(-math.expm1(-rate)), np.log(rate / (before + 1))
    elif shape == 0:
        first = math.log1p(-rate) - math.log(-math.log(rate))
        ratios = np.log1p(-rate) + np.log(before / (before + 1))
    else:
        # P_1 = eta (1 - g) / (g^-eta - 1)
        first = math.log1p(-rate) + math.log(shape) - _log_expm1(-shape * math.log(rate))
        ratios = np.log1p(-rate) + np.log((before + shape) / (before + 1))
    return np.asarray(np.exp(first + np.append(0.0, np.cumsum(ratios))))


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _mean_of(shape: float, rate: float) -> float:
    """Mean of the law without its cap."""
    if shape == math.inf:
        return rate / -math.expm1(-rate)
    if shape == 0:
        return (1 / rate - 1) / -math.log(rate)
    return shape * (1 - rate) / (rate * -math.expm1(shape * math.log(rate)))


def _rate_of(mean: float, shape: float) -> float:
    """The rate with which the law has this mean."""
    from scipy.optimize import brentq

    if shape == math.inf:
        return float(brentq(lambda rate: _mean_of(shape, rate) - mean, 1e-12, mean, xtol=1e-14, rtol=1e-14))

    def excess(log_rate: float) -> float:
        return math.log(_mean_of(shape, math.exp(log_rate)) / mean)

    return math.exp(float(brentq(excess, -50.0, -1e-12, xtol=1e-14, rtol=1e-14)))


def _cap_of(shape: float, rate: float) -> int:
    """The least n with P(K > n) <= ``_BEYOND`` without a cap. Raises: ConfigError if it is too large to run."""
    count = 64
    while count <= MOST_CANDIDATES:
        within = np.cumsum(_uncapped(shape, rate, count))
        if within[-1] >= 1 - _BEYOND:
            return int(np.searchsorted(within, 1 - _BEYOND)) + 1
        count *= 2
    problem = f"more than {MOST_CANDIDATES} candidates are too likely with this shape"
    raise ConfigError("candidates", problem, fix="lower candidates, or raise shape")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
