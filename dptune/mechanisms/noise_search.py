"""Search for noise parameters, and files that say what was found: a profile, its provenance and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import minimize

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import jsonable, replacing, write_json, write_text
from dptune.mechanisms.noises.laplace_noise import LmoDp, Plrvo, at_multiplier
from dptune.mechanisms.planning import Schedule, calibrated, planned, price
from dptune.mechanisms.published_search import LARGEST_SHAPE, SMALLEST_SHAPE, USEFUL, PlrvoProblem, lmo_dp_search
from dptune.mechanisms.registry import build
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.mixture_figures import gaussian_of_equal_epsilon, mixture_figures
from dptune.privacy.accounting.published_accountants import lmo_dp_step_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MODES = ("published", "published_usefulness", "certified")
_POINTS = 2001
#: Options that a cell computes for itself: the scale, and the dimension of its model.
_SCALE = ("theta", "noise_multiplier", "dimension")


@dataclass(frozen=True)
class Request:
    """Description of a search for noise. Public.

    Attributes:
        mechanism: "plrvo" or "lmo_dp".
        mode: "published": the paper's own search under the paper's own accountant; "published_usefulness": LMO-DP's
            second mode; "certified": the best noise that is proven to keep the budget.
        epsilon: budget of the whole run, as the mode counts it.
        schedule: schedule of the run.
        objective: aim of the certified search, a key of ``dptune.mechanisms.noise_search.OBJECTIVES``.
        dimension: number of trainable parameters, for PLRV-O's accountant.
        max_grad_norm: the clip radius.
        moments: largest moment of PLRV-O's published search.
    """

    mechanism: str
    mode: str
    epsilon: float
    schedule: Schedule
    objective: str = "variance"
    dimension: int = 0
    max_grad_norm: float = 1.0
    moments: int = 200

    def __post_init__(self) -> None:
        schedule = self.schedule
        if self.mode not in MODES:
            raise ConfigError("mode", f"unknown {self.mode!r}", fix=f"use {' or '.join(MODES)}")
        if self.objective not in OBJECTIVES:
            raise ConfigError("objective", f"unknown {self.objective!r}", fix=f"use {' or '.join(OBJECTIVES)}")
        if not 0 < schedule.delta < 1:
            raise ConfigError("delta", f"{schedule.delta} is not in (0, 1)", fix="use 1e-5, say")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError("epsilon", f"{self.epsilon} is not a positive number", fix="give the budget")
        if self.dimension < 0:
            raise ConfigError("dimension", f"{self.dimension} is negative", fix="count the trainable parameters")
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigError("max_grad_norm", f"{self.max_grad_norm} is not positive", fix="give the clip radius")


@dataclass(frozen=True)
class Found:
    """The noise that was found, and the Gaussian of equal certified epsilon.

    Attributes:
        entry: the mechanism as an entry of params.yaml.
        law: law of the noise, at a clip radius of 1.
        gaussian_multiplier: noise multiplier of the Gaussian.
        figures: the three epsilons and what else to know of the noise.
    """

    request: Request
    entry: dict[str, Any]
    law: InverseScale
    gaussian_multiplier: float
    figures: dict[str, float]


def search_noise(request: Request) -> Found:
    """Search, price what was found, and calibrate the Gaussian of equal certified epsilon.

    Raises: ConfigError for a mechanism, mode or objective that is unknown, or if nothing meets the budget.
    """
    noise = _noise(request)
    entry = {"like": request.mechanism, **_options(noise), "max_grad_norm": request.max_grad_norm}
    if request.mechanism == "plrvo" and request.dimension:
        entry["dimension"] = request.dimension
    mechanism, schedule = build(request.mechanism, entry), request.schedule
    releases, prices = planned(mechanism, schedule), price(mechanism, schedule)
    gaussian = gaussian_of_equal_epsilon(releases, schedule.delta)
    law = noise.law(noise.noise_multiplier)
    figures = {
        "epsilon_published": prices.published,
        "epsilon_certified": prices.certified,
        **mixture_figures(releases, schedule.delta),
        "gaussian_multiplier_at_equal_certified_epsilon": gaussian,
        "variance_over_that_gaussian": law.variance / gaussian**2,
    }
    return Found(request, entry, law, gaussian, figures)


def write_found(result: Found, directory: Path) -> None:
    """Write profile.yaml (for ``make repro PROFILE=``), search.json and density.png; each whole or not at all."""
    request = result.request
    provenance = {
        "request": _request(request),
        "entry": result.entry,
        "figures": jsonable(result.figures),
        "versions": {name: version(name) for name in ("dptune", "numpy", "scipy", "dp-accounting")},
    }
    profile = _profile(result)
    write_json(directory / "search.json", provenance)
    write_text(directory / "profile.yaml", profile)
    with replacing(directory / "density.png") as temporary:
        draw_densities(result, temporary)


def check_drawable() -> None:
    """Raises ConfigError if matplotlib is not installed; call it before a search, which may take minutes."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("matplotlib", "is not there to draw with", fix="pip install 'dptune[pipeline]'") from None


def draw_densities(result: Found, path: Path) -> None:
    """The density of the noise and of the Gaussian of equal certified epsilon, and their tails on a log axis."""
    check_drawable()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    deviation = result.gaussian_multiplier
    _densities(axes[0], result, np.linspace(-4 * deviation, 4 * deviation, _POINTS))
    _densities(axes[1], result, np.linspace(0, 12 * deviation, _POINTS))
    axes[1].set(yscale="log", ylim=(1e-9 / deviation, 10 * result.law.mean), title="tail")
    axes[0].set(title=f"{result.request.mechanism}, {result.request.mode}: epsilon {result.request.epsilon:g}")
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def _densities(axis: Axes, result: Found, x: np.ndarray) -> None:
    deviation, certified = result.gaussian_multiplier, result.figures["epsilon_certified"]
    gaussian = np.exp(-0.5 * (x / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
    spread = np.sqrt(result.figures["noise_variance"])
    axis.plot(x, np.exp(result.law.log_density(x)), label=f"{result.request.mechanism}, deviation {spread:.3g}")
    axis.plot(x, gaussian, "--", label=f"Gaussian of equal certified epsilon {at_most(certified)}: {deviation:.3g}")
    axis.set(xlabel="noise on one coordinate, clip radius 1", ylabel="density")
    axis.grid(alpha=0.3)


def _noise(request: Request) -> Plrvo | LmoDp:
    schedule, kind = request.schedule, (request.mechanism, request.mode)
    if kind == ("plrvo", "published"):
        budget = (request.epsilon, schedule.delta, schedule.sample_rate, schedule.steps)
        return PlrvoProblem(*budget, request.dimension, request.max_grad_norm, request.moments).solve()
    if request.mechanism == "lmo_dp" and request.mode != "certified":
        step = lmo_dp_step_target(request.epsilon, schedule.delta, schedule.sample_rate, schedule.steps)
        return lmo_dp_search(step, schedule.delta, "usefulness" if "usefulness" in request.mode else "largest_epsilon")
    if kind in (("plrvo", "certified"), ("lmo_dp", "certified")):
        return certified_search(request.mechanism, request.epsilon, schedule, request.objective, request.max_grad_norm)
    raise ConfigError(
        "mechanism, mode", f"{' '.join(kind)} is not a noise search", fix="search plrvo or lmo_dp; see --help"
    )


def _options(noise: Plrvo | LmoDp) -> dict[str, Any]:
    """The options that differ from their defaults, and no figure that follows from the others."""
    tunable = [item for item in fields(noise) if item.init]
    options = {item.name: value for item in tunable if (value := getattr(noise, item.name)) != item.default}
    if isinstance(noise, Plrvo) and noise.theta:
        del options["noise_multiplier"]
    return options


def _request(request: Request) -> dict[str, Any]:
    """The request in plain JSON types; its batches are Poisson samples, as those of all searches."""
    found = asdict(request)
    del found["schedule"]["sampler"]
    return found


def _profile(result: Found) -> str:
    request, schedule = result.request, result.request.schedule
    claimed, certified = (result.figures[f"epsilon_{kind}"] for kind in ("published", "certified"))
    head = (
        f"# Found by `dptune search {request.mechanism} --mode {request.mode}` for epsilon {request.epsilon:g}:\n"
        f"# sample rate {schedule.sample_rate:.6g}, {schedule.steps} steps, delta {schedule.delta:g}. Published "
        f"epsilon {at_most(claimed, 4)}, certified {at_most(certified, 4)}; more in search.json.\n"
        "# The shape of that noise: every cell calibrates its scale to the cell's own epsilon.\n"
    )
    accounting = "certified" if request.mode == "certified" else "published"
    entry = {key: value for key, value in result.entry.items() if key not in _SCALE} | {"accounting": accounting}
    label = f"{request.mechanism}_{request.mode}"
    experiment = {"name": label, "mechanisms": ["static", label], "epsilons": [request.epsilon]}
    mechanisms = {"static": {"max_grad_norm": request.max_grad_norm, "accounting": accounting}, label: entry}
    return head + yaml.safe_dump({"mechanisms": mechanisms, "experiment": experiment}, sort_keys=False)


# The search for the best noise of a family at equal certified epsilon.


Bounds = list[tuple[float, float]]
#: Functions to minimise, of the noise at a clip radius of 1.
OBJECTIVES: dict[str, Callable[[InverseScale], float]] = {
    "variance": lambda law: law.variance,
    "mean_absolute": lambda law: law.mean_absolute,
    "usefulness": lambda law: float(np.exp(law.log_tail(USEFUL))),  # 1 - P(|z| <= 0.9)
}
_PRECISE = {"ftol": 1e-14, "gtol": 1e-10}
_LOG_SHAPE: Bounds = [(math.log(SMALLEST_SHAPE), math.log(LARGEST_SHAPE))]
#: Bounds, from the authors' grid, of: the uniform part's share of the mean, the Gamma part's share of the rest, the log
#: of its shape, and low / high of the uniform part.
_LMO_DP: Bounds = [(0.01, 1.0), (0.0, 1.0), (math.log(0.5), math.log(2.0)), (0.01, 8 / 9)]


def certified_search(
    family: str, epsilon: float, schedule: Schedule, objective: str = "variance", max_grad_norm: float = 1.0
) -> Plrvo | LmoDp:
    """Find the noise of a family that is best by ``objective`` and (epsilon, delta)-DP on the schedule.

    Guarantee: the run is (epsilon, delta)-DP, see ``dptune.mechanisms.planning.calibrated`` with certified accounting.

    Args:
        family: "plrvo" or "lmo_dp".
        objective: a key of ``OBJECTIVES``.
        max_grad_norm: the clip radius of the run, which is an option of PLRV-O's noise.
    """
    probe = calibrated(lambda noise: build(family, {"noise_multiplier": noise}), epsilon, schedule, "certified")
    multiplier = probe.mechanism.knobs().noise_multiplier

    def least(shape_of: Callable[..., InverseScale], bounds: Bounds) -> InverseScale:
        middle = [(low + high) / 2 for low, high in bounds]

        def cost(x: NDArray[np.float64]) -> float:
            shape = shape_of(*x.tolist())  # plain numbers: laws are cached by their values, and written to files
            return math.log(OBJECTIVES[objective](at_multiplier(shape, multiplier)))

        best = minimize(cost, middle, bounds=bounds, options=_PRECISE).x.tolist()
        return at_multiplier(shape_of(*best), multiplier)

    if family == "plrvo":
        law = least(lambda log_k: InverseScale(gamma=(math.exp(log_k), 1.0)), _LOG_SHAPE)
        return Plrvo(k=law.gamma[0], noise_multiplier=multiplier, max_grad_norm=max_grad_norm)
    law = least(_lmo_shape, _LMO_DP)
    return LmoDp(
        preset="none",
        gamma_weight=float(any(law.gamma)),
        gamma_shape=law.gamma[0] or 1.0,
        gamma_scale=law.gamma[1] or 1.0,
        exponential_weight=float(law.exponential > 0),
        exponential_rate=1 / law.exponential if law.exponential else 1.0,
        uniform_weight=1.0,
        uniform_low=law.uniform[0],
        uniform_high=law.uniform[1],
        noise_multiplier=multiplier,
    )


def _lmo_shape(uniform: float, gamma: float, log_k: float, ratio: float) -> InverseScale:
    k, rest = math.exp(log_k), 1 - uniform
    return InverseScale(
        gamma=(k, rest * gamma / k) if rest * gamma > 0 else (0.0, 0.0),
        exponential=rest * (1 - gamma),
        uniform=(2 * uniform * ratio / (1 + ratio), 2 * uniform / (1 + ratio)),
    )
