"""A mechanism = clipper + noise + controller, and the one private step that they make together.

Units. Gradients come in pairs (one LoRA A and B are one pair). A clipper bounds what one unit of privacy adds
to the sum; ``noise_scales`` gives, per pair, the noise for a noise multiplier of 1; ``sensitivity`` is the
joint l2 sensitivity of the sum divided pairwise by those scales. So the standard deviation on pair p is
``noise_multiplier * noise_scales[p]`` and the sound multiplier is ``noise_multiplier / sensitivity``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dptune.errors import ConfigError
from dptune.privacy.entropy import Entropy
from dptune.privacy.release import Release

if TYPE_CHECKING:
    import torch


class Gradients(Protocol):
    """Gradients of the units in one physical micro-batch; finite (a unit that was not is all zeros)."""

    def norms(self) -> torch.Tensor:
        """(units, pairs) float64: l2 norm of each unit's gradient of each pair, A and B jointly."""
        ...

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """Per pair, the flat float64 vector sum_u factors[u, pair] * gradient[u, pair]."""
        ...


@dataclass(frozen=True)
class Knobs:
    """What a controller may move. Public: a function of the configuration and of past releases only.

    Attributes:
        radii: clip radii, one for the whole gradient or one a pair, as the clipper defines.
        noise_multiplier: in the mechanism's own units (the paper's number).
    """

    radii: tuple[float, ...]
    noise_multiplier: float


class Clipper(Protocol):
    """Bounds each unit's contribution."""

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """The radii that a run starts with."""
        ...

    def sensitivity(self, radii: Sequence[float], pairs: int) -> float:
        """Joint l2 sensitivity (add/remove one unit), in units of ``noise_scales``."""
        ...

    def noise_scales(self, radii: Sequence[float], pairs: int) -> tuple[float, ...]:
        """Per pair, the noise standard deviation at noise multiplier 1."""
        ...

    def clipped_sum(self, gradients: Gradients, radii: Sequence[float]) -> list[torch.Tensor]:
        """Per pair, the sum of the clipped gradients of a micro-batch, flat float64."""
        ...


class Noise(Protocol):
    """What is added to the clipped sum."""

    @property
    def noise_multiplier(self) -> float:
        """In the mechanism's own units."""
        ...

    @property
    def family(self) -> str:
        """One of ``dptune.privacy.release.NOISES``."""
        ...

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Noisy float32 sums; drawn even when every sum is zero."""
        ...


class Controller(Protocol):
    """Moves the knobs. Reads only what ``observe`` is given: released values."""

    @property
    def adaptive(self) -> bool:
        """Whether it moves the noise multiplier or the sample rate."""
        ...

    @property
    def raw_inputs(self) -> tuple[str, ...]:
        """The un-noised private statistics it reads: leaks. Empty when it is sound."""
        ...

    def knobs(self, initial: Knobs) -> Knobs:
        """The knobs of the next step."""
        ...

    def observe(self, released: list[torch.Tensor]) -> None:
        """Learn from a released (noisy) sum."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Public state, plain JSON types, for checkpoints."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        ...


@dataclass(frozen=True)
class Mechanism:
    """A named point in the grid clipper x noise x controller.

    Attributes:
        name: as registered, or as params.yaml calls it.
        published_accountant: how its paper counts (key of ``PUBLISHED_ACCOUNTANTS``).
        pairs: number of LoRA pairs it works on.
    """

    name: str
    clipper: Clipper
    noise: Noise
    controller: Controller
    published_accountant: str
    pairs: int = 1

    def __post_init__(self) -> None:
        if self.private and not math.isfinite(self.clipper.sensitivity(self.knobs().radii, self.pairs)):
            raise ConfigError(
                f"mechanisms.{self.name}.clipper",
                "bounds nothing, so noise cannot hide it",
                fix="clip, or add no noise",
            )

    @property
    def private(self) -> bool:
        """Whether any noise is added at all."""
        return self.noise.family != "none"

    def knobs(self) -> Knobs:
        """The knobs of the next step, fixed before its batch is drawn."""
        return self.controller.knobs(Knobs(self.clipper.initial_radii(self.pairs), self.noise.noise_multiplier))

    def release(self, knobs: Knobs, sample_rate: float) -> Release:
        """What the ledger is charged for a step with these knobs. Reads no data."""
        return Release(
            sample_rate=sample_rate,
            noise_multiplier=knobs.noise_multiplier,
            # Without noise there is no sensitivity to speak of: the release says so by its family.
            sensitivity=self.clipper.sensitivity(knobs.radii, self.pairs) if self.private else 1.0,
            noise=self.noise.family,
            raw_inputs=self.controller.raw_inputs,
            adaptive=self.controller.adaptive,
        )

    def privatise(
        self, batches: Iterable[Gradients], zeros: list[torch.Tensor], knobs: Knobs, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Clip, sum over the micro-batches of one Poisson batch, add noise once.

        Guarantee: with a sound clipper, the result is one Poisson-subsampled Gaussian release with the
        parameters of ``release(knobs, q)``. An empty batch gives noise alone. Private: ``batches``.

        Args:
            batches: micro-batches; a unit lies in exactly one.
            zeros: one flat float64 zero vector per pair, on the device of the result.
            knobs: from ``knobs()``, charged to the ledger before this call.
            entropy: the source of the noise.

        Returns: one flat float32 vector per pair, to be divided by the *expected* batch size.
        """
        sums = [zero.clone() for zero in zeros]
        for gradients in batches:
            for total, part in zip(sums, self.clipper.clipped_sum(gradients, knobs.radii), strict=True):
                total += part
        scales = self.clipper.noise_scales(knobs.radii, self.pairs)
        return self.noise.add(sums, scales, knobs.noise_multiplier, entropy)
