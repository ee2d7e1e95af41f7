"""Calibration: the search for the least noise whose epsilon meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError

#: Largest number of steps of a run; a larger one is taken for a typing error.
MOST_STEPS = 10**12
_LOWEST, _HIGHEST = 1e-2, 1e4
_LARGE_DELTA = 1e-2
_TOLERANCE = 1e-4  # relative error of the multiplier


def calibrate(
    epsilon_of: Callable[[float], float],
    target: float,
    *,
    roughly: Callable[[float], float] | None = None,
) -> float:
    """The smallest noise multiplier with ``epsilon_of(z) <= target``, at most 1e-4 of itself too large.

    Args:
        epsilon_of: a decreasing function of the noise multiplier; may return infinity.
        target: the epsilon to meet, above 0.
        roughly: a cheaper function close to ``epsilon_of``, for a first search.

    Raises:
        ConfigError: target not positive, or out of reach of any multiplier up to 1e4, because of a leak or too many
            steps.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import smallest_epsilon
        >>> from dptune.privacy.calibration import calibrate
        >>> from dptune.privacy.release import Release
        >>> z = calibrate(lambda z: smallest_epsilon(Counter({Release(1.0, z): 10}), 1e-5), target=2.0)
        >>> round(z, 2)
        6.3
    """
    if not (math.isfinite(target) and target > 0):
        raise ConfigError("epsilon", f"{target} is not a positive number", fix="give the privacy budget, such as 2")
    near = 1.0 if roughly is None else _search(roughly, target, 1.0, math.log(2))
    # A rough answer is so near that wide strides around it would waste calls of ``epsilon_of``.
    return _search(epsilon_of, target, near, math.log(2) if roughly is None else 4e-3)


def _search(epsilon_of: Callable[[float], float], target: float, start: float, stride: float) -> float:
    """Bracket the target around ``start`` with growing strides in log z, then approach it from the private side."""
    from scipy.optimize import brentq

    def excess(log_z: float) -> float:
        epsilon = epsilon_of(math.exp(log_z))
        return math.log(max(epsilon, 1e-12) / target) if math.isfinite(epsilon) else 1e3

    low = high = math.log(start)
    above = excess(high)
    if above > 0:
        while above > 0:
            low, high, stride = high, high + stride, 2 * stride if stride < math.log(2) else stride
            if high > math.log(_HIGHEST):
                raise _out_of_reach(epsilon_of(_HIGHEST), target)
            above = excess(high)
    else:
        while excess(low) <= 0:
            if low <= math.log(_LOWEST):
                return math.exp(low)
            high, low, stride = low, low - stride, 2 * stride if stride < math.log(2) else stride
    z = math.exp(brentq(excess, low, high, xtol=_TOLERANCE / 4))
    while epsilon_of(z) > target:
        z *= 1 + _TOLERANCE / 4
    return z


def _out_of_reach(least: float, target: float) -> ConfigError:
    """The error for a target below ``least``, the epsilon of the highest noise multiplier."""
    if math.isinf(least):
        fix = "use a mechanism without leaks, or published accounting"
        return ConfigError("epsilon", f"no noise reaches {target:g}", fix=fix)
    problem = (
        f"{target:g} is out of reach: even at a noise multiplier of {_HIGHEST:g} the accountant counts {at_most(least)}"
    )
    return ConfigError("epsilon", problem, fix="raise epsilon, or lower the steps, the epochs or the batch")


def sampling(records: int, batch: float, epochs: float) -> tuple[float, int]:
    """Poisson sample rate q = batch / records and number of steps, for a fixed expected batch.

    The number of steps is epochs times ceil(records / batch), rounded up.

    Raises: ConfigError naming the number that is out of range.

    Example:
        >>> from dptune.privacy.calibration import sampling
        >>> sampling(records=10_000, batch=100, epochs=3)
        (0.01, 300)
    """
    if records < 1:
        raise ConfigError("records", f"{records} is not positive", fix="count the training records")
    if not 0 < batch <= records:
        raise ConfigError("batch", f"{batch} is not in (0, {records}]", fix="use an expected batch below the records")
    if not epochs > 0:
        raise ConfigError("epochs", f"{epochs} is not positive", fix="use a positive number of epochs")
    batches = math.ceil(records / batch - 1e-9)  # a batch that is records / n has n batches, whatever its last digit
    steps = epochs * batches
    if steps > MOST_STEPS:
        problem = f"{epochs:g} passes are {steps:.3g} steps, and at most {MOST_STEPS:g} are priced"
        raise ConfigError("epochs", problem, fix="lower the epochs, or raise the batch")
    return batch / records, math.ceil(epochs * batches)


def check_delta(delta: float, units: int, fix: str) -> None:
    """Raise ConfigError for a delta of 1 over the units or more, which publishing one of them in full satisfies.

    Args:
        units: number of units in the training data.
        fix: what the error advises.

    Example:
        >>> from dptune.privacy.calibration import check_delta
        >>> check_delta(1e-5, 2000, fix="lower delta")
        >>> check_delta(1e-3, 2000, fix="use 1e-5")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        dptune.core.errors.ConfigError: delta: 0.001 is 1 over the 2000 units or more, ... Fix: use 1e-5.
    """
    if delta * units >= 1:
        problem = f"{delta:g} is 1 over the {units} units or more, which publishing one of them in full would satisfy"
        raise ConfigError("delta", problem, fix=fix)


def delta_warning(delta: float, units: int | None = None) -> str | None:
    """What makes a delta worthless, as one sentence; None where nothing does.

    Args:
        units: number of units in the training data; None if it is not known.

    Example:
        >>> from dptune.privacy.calibration import delta_warning
        >>> print(delta_warning(1e-3, units=2000))
        delta 0.001 is 1 over the 2000 units or more: publishing one unit in full would satisfy it; use 5e-05, say
        >>> delta_warning(1e-5, units=2000) is None
        True
    """
    if units is not None and delta * units >= 1:
        whose = f"1 over the {units} units or more: publishing one unit in full would satisfy it"
        return f"delta {delta:g} is {whose}; use {0.1 / units:.1g}, say"
    if delta > _LARGE_DELTA:
        whose = "with that probability the guarantee may not hold at all"
        return f"delta {delta:g} is large: {whose}; use less than 1 over the units"
    return None
