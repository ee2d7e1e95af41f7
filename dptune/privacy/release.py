"""Releases: plain data that holds everything an accountant must know about one step on private records.

The mechanism makes a release, the ledger stores it, and accountants interpret it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.strategy import check_strategy, column_norm
from dptune.privacy.samplers.sampler import POISSON, Sampler

#: The count of each distinct release. No accountant here depends on their order.
Composition = Counter["Release"]

#: Families of noise on a clipped sum. "unproven" is noise that no accountant has a bound for, such as a plug-in's.
STEP_NOISES = ("gaussian", "laplace_mixture", "shared_laplace_mixture", "unproven", "none")
NOISES = (*STEP_NOISES, "token", "pure_token", "unbounded_token")
#: Families for which no bound is proven: their epsilon is infinite.
UNBOUNDED = ("none", "unproven", "unbounded_token")
#: Families that accountants have a finite price for; a family that is new to them gets none by accident. A name here
#: claims three theorems of ``mixture_bounds`` about its noise multiplier z, for independent noise on every coordinate
#: whose log-density has a slope of at most 1 / z (as for Laplace noise of scale z), and which is symmetric: the Renyi
#: curve of a Gaussian with multiplier z, its expansion under Poisson sampling at integer orders, and Gaussian DP with
#: multiplier z sqrt(2 / pi). Gaussian noise itself needs none of them; a shared scale, which leaks, has none.
LIKE_GAUSSIAN = ("gaussian", "laplace_mixture", "shared_laplace_mixture")
#: Factor on the noise multiplier that gives a Gaussian at most as private as a mixture with the same zCDP.
GDP_FACTOR = math.sqrt(2 / math.pi)
#: Those whose every coordinate is (|shift| / z, 0)-DP, so that a sum bounded in l1 has an epsilon at delta 0.
PURE = ("laplace_mixture",)
NORMS = ("l2", "l1")
#: What decides the group of a unit: its own key; or, in runs of earlier versions, its number among all units.
Dealing = Literal["key", "rank"]
#: Why nothing is certified of a run whose groups were dealt by rank. Its other epsilons are those of a weaker promise.
DEALT_BY_RANK = (
    "units dealt into groups by their rank among all, as an earlier dptune did: one that joins or leaves moves others "
    "(epsilon_noise_only holds for one that loses its records and keeps its rank)"
)
_CONSISTENT = 1e-9


@dataclass(frozen=True)
class Release:
    """A noisy sum over a sample of the units of privacy, or a sampled token.

    The sample is Poisson, under add/remove of one unit, unless ``sampler`` says otherwise.

    A token is drawn from a mixture of models, each of which belongs to one shard of the records.

    Attributes:
        sample_rate: probability q in (0, 1] with which each unit enters the batch; independently if the sampler is
            poisson.
        noise_multiplier: standard deviation of Gaussian noise in the mechanism's own normalised units,
            the number that its paper gives to an accountant. For a Laplace mixture it is 1 / score bound of its law,
            the multiplier of the Gaussian with the same zCDP; for a token, that of the Gaussian with the same Renyi
            bound; 1 / epsilon for a token that is (epsilon, 0)-DP (``pure_token``); 0 for a family without a bound
            (``UNBOUNDED``).
        sensitivity: sensitivity, in ``norm``, of the *whole* released vector in those same units; 1 when the
            paper's number is right, sqrt(n) when n groups are noised as if each were alone.
        noise: family of the noise, one of ``NOISES``.
        statistics: names of what left the step, all covered by this one noise.
        raw_inputs: names of un-noised private statistics that steered the step or left it. Leaks.
        adaptive: True when q or the noise multiplier was chosen from earlier releases, which only a
            privacy filter fixed in advance can account for.
        norm: norm in which one unit is bounded, one of ``NORMS``.
        law: law of the inverse scale, in units of a sensitivity of 1; for Laplace mixtures only.
        claims: figures that only a published accountant reads, such as the dimension of the gradient.
        renyi: (order, epsilon) of a token: the Renyi divergence at that one order is at most epsilon, whatever the
            prompt, in both directions, when one unit of privacy changes. For ``token`` only.
        part: number of the part of the units that it concerns, or None for all of them. Code that sets it must ensure
            that no unit is in two parts; releases of different parts then do not add up (parallel composition).
        coefficients: strategy (c_0 .. c_(b-1)) of correlated noise, see ``strategy``; empty for independent noise. The
            noise multiplier is then that of z, of which the noise is made, the sample rate that of a unit in the rows
            of its own group, and the part that group. A ledger holds such a release at a step of that group alone.
        dealt_by: what decides whose group that is, one of ``Dealing``. A leak if it is the unit's rank.
        sampler: how units got into the batch, and by that which data sets are neighbours (see ``samplers``).

    Example:
        >>> from dptune.privacy.release import Release
        >>> Release(sample_rate=0.01, noise_multiplier=1.0).effective_noise_multiplier
        1.0
        >>> four_groups = Release(0.01, 1.0, sensitivity=2.0)  # each noised as if it were the only one
        >>> four_groups.effective_noise_multiplier
        0.5
    """

    sample_rate: float
    noise_multiplier: float
    sensitivity: float = 1.0
    noise: str = "gaussian"
    statistics: tuple[str, ...] = ("gradient sum",)
    raw_inputs: tuple[str, ...] = ()
    adaptive: bool = False
    norm: str = "l2"
    law: InverseScale | None = None
    claims: tuple[tuple[str, float], ...] = ()
    renyi: tuple[float, float] | None = None
    part: int | None = None
    coefficients: tuple[float, ...] = ()
    dealt_by: Dealing = "key"
    sampler: Sampler = POISSON

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_rate <= 1.0:
            raise ConfigError("sample_rate", f"{self.sample_rate} is not in (0, 1]", fix="use batch / records")
        if self.noise not in NOISES:
            raise ConfigError("noise", f"unknown family {self.noise!r}", fix=f"use one of {', '.join(NOISES)}")
        if not (math.isfinite(self.sensitivity) and self.sensitivity > 0):
            raise ConfigError("sensitivity", f"{self.sensitivity} is not a positive number", fix="give the l2 bound")
        noisy = self.noise not in UNBOUNDED
        if not (math.isfinite(self.noise_multiplier) and (self.noise_multiplier > 0) == noisy):
            raise ConfigError(
                "noise_multiplier",
                f"{self.noise_multiplier} does not fit noise {self.noise!r}",
                fix="use a positive number with noise, 0 without",
            )
        if self.norm not in NORMS:
            raise ConfigError("norm", f"unknown {self.norm!r}", fix=f"use {' or '.join(NORMS)}")
        if self.part is not None and (isinstance(self.part, bool) or not isinstance(self.part, int) or self.part < 0):
            raise ConfigError("part", f"{self.part!r} is not a valid part number", fix="count parts from 0")
        self._check_together()

    def _check_together(self) -> None:
        """Raise ConfigError for law, token, strategy or sampler that does not go with the other figures."""
        if self.noise.endswith("laplace_mixture") != (self.law is not None):
            raise ConfigError("law", f"does not go with noise {self.noise!r}", fix="give it to Laplace mixtures only")
        if self.law and not abs(self.law.score_bound * self.noise_multiplier - 1) <= _CONSISTENT:
            raise ConfigError("noise_multiplier", "is not 1 / score bound of the law", fix="use law.scaled")
        if (self.noise == "token") != (self.renyi is not None):
            raise ConfigError("renyi", f"does not go with noise {self.noise!r}", fix="give it to tokens only")
        plain = self.sample_rate == self.sensitivity == 1.0 and self.norm == "l2" and not self.adaptive
        if self.noise in ("token", "pure_token") and not plain:
            problem = f"{self.noise} is priced with a sample rate and a sensitivity of 1, at one noise multiplier"
            raise ConfigError("noise", problem, fix="use of_token")
        if self.renyi is not None:
            self._check_renyi(*self.renyi)
        if self.dealt_by not in (get_args(Dealing) if self.coefficients else ("key",)):
            problem = f"{self.dealt_by!r} is not a known way to assign groups"
            raise ConfigError("dealt_by", problem, fix="use key, with coefficients")
        if self.coefficients:
            self._check_strategy()
        if not self.sampler.like_poisson and not self.fits_any_sampler:
            problem = f"{self.sampler.name} is priced for independent Gaussian noise that never moves, clipped in l2"
            raise ConfigError("sampler", problem, fix="use the mechanism static, or sampler poisson")
        self.sampler.check_rate(self.sample_rate)

    @classmethod
    def of_token(cls, order: float, epsilon: float, claims: tuple[tuple[str, float], ...] = ()) -> Release:
        """Make the release of one token with a Renyi divergence of at most ``epsilon`` at ``order``.

        An infinite order makes it (epsilon, 0)-DP. An infinite epsilon stands for no proven bound.
        """
        if not epsilon > 0:
            raise ConfigError(
                "renyi", f"{epsilon} is not positive: such a token carries no information", fix="charge nothing"
            )
        if math.isinf(epsilon):
            return cls(1.0, 0.0, noise="unbounded_token", statistics=("token",), claims=claims)
        if math.isinf(order):
            return cls(1.0, 1 / epsilon, noise="pure_token", statistics=("token",), claims=claims)
        multiplier = _renyi_multiplier(order, epsilon)
        return cls(1.0, multiplier, noise="token", statistics=("token",), claims=claims, renyi=(order, epsilon))

    def _check_renyi(self, order: float, epsilon: float) -> None:
        if not (order > 1 and epsilon > 0 and math.isfinite(order) and math.isfinite(epsilon)):
            raise ConfigError(
                "renyi",
                f"{[order, epsilon]} is not a pair of an order above 1 and an epsilon above 0",
                fix="use of_token",
            )
        if not abs(self.noise_multiplier / _renyi_multiplier(order, epsilon) - 1) <= _CONSISTENT:
            raise ConfigError("renyi", "does not fit the other figures of the token", fix="use of_token")

    def _check_strategy(self) -> None:
        check_strategy(self.coefficients)
        if (self.noise, self.norm, self.adaptive, self.law) != ("gaussian", "l2", False, None):
            problem = "needs Gaussian noise with a fixed multiplier, on sums that are bounded in l2"
            raise ConfigError("coefficients", problem, fix="use independent noise")
        if self.part is None or self.part >= len(self.coefficients):
            problem = f"{self.part} is not a valid group: there are {len(self.coefficients)} bands"
            raise ConfigError("part", problem, fix="count groups from 0 up to the bands")
        if not self.sensitivity >= column_norm(self.coefficients) * (1 - _CONSISTENT):
            problem = f"{self.sensitivity} is below the norm of the strategy, {column_norm(self.coefficients)}"
            raise ConfigError("sensitivity", problem, fix="give the clipper's sensitivity times that norm")

    @property
    def fits_any_sampler(self) -> bool:
        """Whether proofs of samplers other than Poisson cover it: fixed, independent Gaussian noise on sums in l2.

        What has no noise at all has an infinite price with every sampler.
        """
        proven = (self.noise, self.norm, self.adaptive, self.coefficients) == ("gaussian", "l2", False, ())
        return proven or self.noise == "none"

    @property
    def effective_noise_multiplier(self) -> float:
        """The noise multiplier that a sound accountant reads: noise per unit of the true joint sensitivity."""
        return self.noise_multiplier / self.sensitivity

    @property
    def gaussian_multiplier(self) -> float:
        """The noise multiplier of a Gaussian release that is at most as private; for families in ``LIKE_GAUSSIAN``."""
        return self.effective_noise_multiplier * (1.0 if self.noise == "gaussian" else GDP_FACTOR)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Reasons why this release has no finite epsilon; empty if it has one."""
        reasons = {
            "none": "gradients without noise",
            "unproven": "noise of a family for which no bound is known",
            "shared_laplace_mixture": "one random scale for all coordinates, for which no bound is proven",
            "unbounded_token": "tokens whose divergence no theorem bounds",
        }
        unfiltered = self.adaptive and self.noise in LIKE_GAUSSIAN and self.noise != "gaussian"
        moves = ("a noise multiplier that moves has a filter for Gaussian noise only",) if unfiltered else ()
        dealt = (DEALT_BY_RANK,) if self.dealt_by == "rank" else ()
        return (*self.raw_inputs, *((reasons[self.noise],) if self.noise in reasons else ()), *moves, *dealt)

    def to_dict(self) -> dict[str, Any]:
        """The release in plain JSON types, from which ``from_dict`` makes an equal one."""
        data = {key: _plain(value) for key, value in asdict(self).items()}
        if not self.coefficients:
            del data["coefficients"]  # so that ledgers of independent noise stay as they were
        if not self.coefficients or self.dealt_by == "rank":
            del data["dealt_by"]  # likewise; and rows by rank as earlier versions wrote them
        if self.sampler == POISSON:
            del data["sampler"]  # likewise
        else:
            data["sampler"] = self.sampler.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Release:
        """Make a release of what ``to_dict`` gave.

        Raises: ConfigError for missing or unknown keys and for values of the wrong type or range.
        """
        known = {field.name for field in fields(cls)}
        given = data.get("coefficients", ())
        if "coefficients" in data and not (isinstance(given, list) and given and all(map(_is_number, given))):
            raise ConfigError("coefficients", f"{given!r} is not a list of numbers", fix="write c_0 .. c_(b-1)")
        if "dealt_by" in data and not (given and data["dealt_by"] == "key"):
            raise ConfigError(
                "dealt_by", f"{data['dealt_by']!r} is not a known way to assign groups", fix="write key, or nothing"
            )
        dealt_by = "rank" if given and "dealt_by" not in data else "key"  # earlier versions wrote no word about it
        sampler = data.get("sampler", POISSON.to_dict())
        data = {**data, "coefficients": given, "dealt_by": dealt_by, "sampler": sampler}
        if set(data) != known:
            raise ConfigError("release", f"keys {sorted(set(data) ^ known)} missing or unknown", fix="use to_dict's")
        for key in ("sample_rate", "noise_multiplier", "sensitivity"):
            if not _is_number(data[key]):
                raise ConfigError(key, f"{data[key]!r} is not a number", fix="write a number")
        for key in ("statistics", "raw_inputs"):
            if not isinstance(data[key], list) or not all(isinstance(item, str) for item in data[key]):
                raise ConfigError(key, f"{data[key]!r} is not a list of names", fix="write a list")
        if not isinstance(data["adaptive"], bool):
            raise ConfigError("adaptive", f"{data['adaptive']!r} is not true or false", fix="write true or false")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        if data["renyi"] is not None and not (
            isinstance(data["renyi"], list) and len(data["renyi"]) == 2 and all(map(_is_number, data["renyi"]))
        ):
            raise ConfigError("renyi", f"{data['renyi']!r} is not [order, epsilon]", fix="write two numbers")
        law = data["law"]
        read = {"claims": _claims(data["claims"]), "law": None if law is None else _law(law)}
        return cls(**values | read | {"sampler": Sampler.from_dict(sampler)})


def _renyi_multiplier(order: float, epsilon: float) -> float:
    return math.sqrt(order / (2 * epsilon))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _claims(data: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(data, list) or not all(
        isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and _is_number(item[1]) for item in data
    ):
        raise ConfigError("claims", f"{data!r} is not a list of [name, number]", fix="write such pairs")
    return tuple((name, value) for name, value in data)


def _law(data: Any) -> InverseScale:
    known = {field.name for field in fields(InverseScale)}
    if not isinstance(data, Mapping) or set(data) != known:
        raise ConfigError("law", f"{data!r} does not have exactly the keys {sorted(known)}", fix="use to_dict's")
    pairs = {key: value if isinstance(value, list) else [value] for key, value in data.items()}
    right = {"gamma": 2, "uniform": 2}
    if not all(len(pair) == right.get(key, 1) and all(map(_is_number, pair)) for key, pair in pairs.items()):
        raise ConfigError("law", f"{data!r} does not hold numbers where they belong", fix="use to_dict's")
    values: dict[str, Any] = {key: tuple(pair) if key in right else pair[0] for key, pair in pairs.items()}
    return InverseScale(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
