"""Laplace mixtures for tests, built by the specification's parameters."""

from __future__ import annotations

from hypothesis import strategies as st

from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.release import Release


def plrvo(k: float, theta: float) -> InverseScale:
    return InverseScale(gamma=(k, theta))


def lmo(a1: float, a2: float, a3: float, theta: float, k: float, rate: float, low: float, high: float) -> InverseScale:
    return InverseScale(gamma=(k, a1 * theta), exponential=a2 / rate, uniform=(a3 * low, a3 * high))


LMO = {
    "T0.3": lmo(0.1, 0.1, 0.1, 0.5, 1, 5, 1, 2),
    "T0.7": lmo(0.1, 0.1, 0.1, 0.5, 1, 5, 5, 6),
    "T2": lmo(0.1, 0.1, 0.2, 1, 2, 5, 7, 8),
    "T3": lmo(0.1, 0.1, 0.9, 1, 2, 5, 2, 3),
    "T5": lmo(0.1, 0.9, 0.7, 7.5, 1, 1, 6, 7),
}


def release(
    law: InverseScale, sample_rate: float = 1.0, *, norm: str = "l2", sensitivity: float = 1.0, **claims: float
) -> Release:
    return Release(
        sample_rate,
        1 / law.score_bound,
        sensitivity,
        noise="laplace_mixture",
        norm=norm,
        law=law,
        claims=tuple(claims.items()),
    )


def mixtures() -> st.SearchStrategy[InverseScale]:
    """Laws with a finite variance."""
    positive = st.floats(0.01, 10)
    gamma = st.tuples(st.floats(2.1, 50), st.floats(0.01, 3))
    none = st.just((0.0, 0.0))
    uniform = st.tuples(st.floats(0.01, 3), st.floats(0.01, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    one = st.builds(InverseScale, gamma=gamma)
    every = st.builds(InverseScale, gamma=gamma | none, exponential=st.just(0.0) | positive, uniform=uniform)
    constant = st.builds(InverseScale, constant=positive, gamma=gamma | none, exponential=st.just(0.0) | positive)
    return one | every | constant
