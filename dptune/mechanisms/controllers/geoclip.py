"""GeoClip: clip in the basis that minimises the noise (Gilani et al., NeurIPS 2025, arXiv 2506.06549).

Algorithm 3 (rank k) as printed can never leave its starting subspace: gradients are projected on span(U) before their
release, and only released gradients update U. The sound remedy here is ``explore``: a share of the same Gaussian
budget releases the part of the gradients that lies outside the subspace.

The two algorithms centre their covariance differently, and so does this module: Algorithm 1 about the mean before the
step, a_t (equations 18 and 20, line 11), the streaming PCA of Algorithm 3 about the mean after it, a_(t+1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.transformed import check_estimator
from dptune.mechanisms.controllers.control import Constant, needs_coordinates
from dptune.mechanisms.interfaces import Knobs, Observation, RunFacts
from dptune.mechanisms.registry import controller, mechanism

if TYPE_CHECKING:
    import torch

_LARGEST_FULL = 2048  # largest number of parameters whose full covariance is kept: it is decomposed at every step


@dataclass(frozen=True)
class Basis:
    """Coordinates w = M (g - centre), clipped to the unit ball; if explored, the rest of g - centre to its own ball.

    Attributes:
        directions: U, (parameters, k), orthonormal columns.
        stretch: (k,) factors, with M = diag(stretch) U^T.
        explore: share of the budget for the part outside span(U); 0 for none.
        outer_radius: clip radius of that part.
    """

    centre: torch.Tensor
    directions: torch.Tensor
    stretch: torch.Tensor
    explore: float = 0.0
    outer_radius: float = 1.0

    @property
    def radii(self) -> tuple[float, ...]:
        """Clip radii: 1 inside the subspace, ``outer_radius`` outside."""
        return (1.0, self.outer_radius) if self.explore else (1.0,)

    @property
    def scales(self) -> tuple[float, ...]:
        """Noise scales: (radius / scale)^2 is 1 - explore inside the subspace and explore outside."""
        if not self.explore:
            return (1.0,)
        return (1 / math.sqrt(1 - self.explore), self.outer_radius / math.sqrt(self.explore))

    def forward(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Map (units, parameters) to (units, k) and, if explored, the rest, (units, parameters)."""
        centred = gradients - self.centre
        inside = centred @ self.directions
        blocks = [inside * self.stretch]
        if self.explore:
            blocks.append(centred - inside @ self.directions.T)
        return blocks

    def backward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Map the part inside the subspace back; the part outside only serves to find a better subspace."""
        return self.directions @ (blocks[0] / self.stretch) + self.centre


@controller("geoclip")
@dataclass
class GeoClip(Constant):
    """Chooses the coordinates by mean and covariance of the released gradients; costs ``explore``'s share alone.

    The paper's own algorithms take these options (h_2 is 1 or 10 there, so ``ceiling`` is):

    - Algorithm 1: rank 0, explore 0, covariance_decay 0.999, floor 1e-15, ceiling 10, start_norm sqrt(parameters).
    - Algorithm 3: rank k, explore 0, directions axes, floor 1e-15, ceiling 10, start_norm sqrt(k).

    Both listings are for batches of one unit; for others the covariance is multiplied by B, as in equation 20. One
    difference is left: Algorithm 1 begins with M = I beside Sigma = I, and here the first M is that of Sigma.

    Noise is drawn along eigenvectors. Those of equal eigenvalues, as all are at the start, hang on rounding: with one
    seed two kinds of machine release noise of one law, and other numbers.

    Attributes:
        rank: k of the streaming PCA; 0 keeps the full covariance (Algorithm 1), for small models only.
        directions: "axes" starts from the first k axes, as in the paper, "random" from a public random subspace.
        explore: share of the budget spent outside the subspace; at 0 the subspace cannot move.
        mean_decay: beta_1.
        covariance_decay: beta_2 of the full covariance, beta_3 of the streaming PCA.
        floor: h_1, smallest eigenvalue, as a multiple of the starting one.
        ceiling: h_2, largest eigenvalue, as a multiple of the starting one.
        start_norm: the run starts as DP-SGD with this radius (inside the subspace).
        outer_radius: clip radius of what lies outside the subspace.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    rank: int = 32
    directions: Literal["axes", "random"] = "random"
    explore: float = 0.2
    mean_decay: float = 0.99
    covariance_decay: float = 0.99
    floor: float = 0.01
    ceiling: float = 1.0
    start_norm: float = 1.0
    outer_radius: float = 1.0
    _mean: Any = field(default=None, init=False, repr=False)
    _subspace: Any = field(default=None, init=False, repr=False)
    _eigenvalues: Any = field(default=None, init=False, repr=False)
    _covariance: Any = field(default=None, init=False, repr=False)
    _facts: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        decays = {"mean_decay": self.mean_decay, "covariance_decay": self.covariance_decay}
        norms = {"start_norm": self.start_norm, "outer_radius": self.outer_radius}
        check_estimator(decays, norms, self.floor, self.ceiling)
        if not 0 <= self.explore < 1:
            raise ConfigError("explore", f"{self.explore} is not in [0, 1)", fix="use 0.2, or 0 for none")
        if self.rank < 0 or (self.rank == 0 and self.explore):
            raise ConfigError("rank", f"{self.rank} with explore {self.explore}", fix="use a rank, or explore=0")

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError for a clipper that would ignore the coordinates."""
        needs_coordinates("geoclip", initial)

    def start(self, facts: RunFacts) -> None:
        """Start with zero mean, and equal eigenvalues in the starting directions.

        Raises: ConfigError if the full covariance would be too large.
        """
        import torch

        size = sum(facts.pair_sizes)
        if self.rank == 0 and size > _LARGEST_FULL:
            raise ConfigError("rank", f"0 means a full covariance of {size} parameters", fix="use a rank such as 32")
        # Leave a direction outside the subspace: without any, exploring would release rounding errors.
        rank = min(self.rank or size, max(1, size - 1) if self.explore else size)
        self._facts = facts
        self._mean = torch.zeros(size, dtype=torch.float64, device=facts.device)
        self._subspace = torch.eye(size, rank, dtype=torch.float64)
        if self.rank and self.directions == "random":
            noise = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            self._subspace = torch.linalg.qr(noise).Q
        self._subspace = self._subspace.to(facts.device)
        self._start_eigenvalue = self.start_norm**2 / rank
        self._eigenvalues = torch.full_like(self._subspace[0], self._start_eigenvalue)
        self._covariance = torch.diag(self._eigenvalues) if self.rank == 0 else None

    def knobs(self, initial: Knobs) -> Knobs:
        """The coordinates of the next step; none before ``start``."""
        if self._mean is None:
            return initial
        deviations = self._eigenvalues.sqrt()
        stretch = (deviations * deviations.sum()).rsqrt()
        basis = Basis(self._mean, self._subspace, stretch, self.explore, self.outer_radius)
        return Knobs(initial.radii, initial.noise_multiplier, geometry=basis)

    def observe(self, observation: Observation) -> None:
        """Update mean and covariance by the released gradient (and by its part outside the subspace, if explored)."""
        import torch

        released, batch = observation.released, self._facts.expected_batch_size
        gradient = torch.cat([part.double() for part in released.gradient])
        mean = self.mean_decay * self._mean + (1 - self.mean_decay) * gradient
        # Algorithm 1 takes the mean before the step, a_t, Algorithm 3 the one after it.
        deviation = gradient - (self._mean if self.rank == 0 else mean)
        self._mean = mean
        if self.explore:
            deviation = deviation + released.blocks[1].double() / batch
        if self.rank == 0:
            self._update_full(deviation * math.sqrt(batch))
        else:
            self._update_subspace(deviation * math.sqrt(batch))

    def _update_full(self, deviation: torch.Tensor) -> None:
        import torch

        decay = self.covariance_decay
        self._covariance = decay * self._covariance + (1 - decay) * torch.outer(deviation, deviation)
        values, self._subspace = torch.linalg.eigh(self._covariance)
        self._eigenvalues = self._clamp(values)

    def _update_subspace(self, deviation: torch.Tensor) -> None:
        """Streaming PCA: the k leading directions of decay * U diag(lambda) U^T + (1 - decay) z z^T."""
        import torch

        old = self._subspace * (self.covariance_decay * self._eigenvalues).sqrt()
        new = deviation * math.sqrt(1 - self.covariance_decay)
        vectors, values, _ = torch.linalg.svd(torch.column_stack([old, new]), full_matrices=False)
        rank = len(self._eigenvalues)
        self._subspace = vectors[:, :rank]
        self._eigenvalues = self._clamp(values[:rank].square())

    def _clamp(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(self.floor * self._start_eigenvalue, self.ceiling * self._start_eigenvalue)

    def metrics(self) -> dict[str, float]:
        """The clip radius of DP-SGD with equal noise energy, and the spread of the eigenvalues."""
        deviations = self._eigenvalues.sqrt()
        return {
            "equivalent_radius": float(deviations.sum()) / math.sqrt(len(deviations)),
            "eigenvalue_ratio": float(self._eigenvalues.max() / self._eigenvalues.min()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The mean, and directions with eigenvalues or the full covariance."""
        state = {"mean": self._mean, "subspace": self._subspace, "eigenvalues": self._eigenvalues}
        return state if self._covariance is None else state | {"covariance": self._covariance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        for name, value in state.items():
            setattr(self, f"_{name}", value.to(self._mean))


mechanism(
    "geoclip",
    clipper="transformed",
    controller="geoclip",
    clips="the gradient in the basis of least noise (GeoClip, Gilani et al. 2025)",
    adds="Gaussian noise in k directions",
    adapts="covariance of released gradients",
    costs="the share 'explore' of the budget, which lets the subspace move (at 0 it cannot)",
)
