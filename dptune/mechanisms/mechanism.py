"""A mechanism = clipper + noise + controller, and the one private step that they make together.

Units. Gradients come in pairs (one LoRA A and B are one pair). A clipper turns the gradients of a batch into
blocks (usually one a pair) and bounds what one unit of privacy adds to them; ``scales`` gives, per block, the
noise for a noise multiplier of 1, and ``sensitivity`` the joint l2 sensitivity of the blocks divided by those
scales. So the standard deviation of Gaussian noise on block j is ``noise_multiplier * scales[j]`` and the sound
multiplier is ``noise_multiplier / sensitivity``. (A Laplace mixture's multiplier is that of the Gaussian with the same
zCDP.) A controller may ask for statistics of the batch: they are one more block of the same release, and the noise on
the gradients rises so that the release as a whole costs the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dptune.errors import ConfigError
from dptune.privacy.entropy import Entropy
from dptune.privacy.laplace_mixtures import InverseScale
from dptune.privacy.release import Composition, Release

if TYPE_CHECKING:
    import torch

    from dptune.mechanisms.local_updates import LocalUpdates


class Gradients(Protocol):
    """Gradients of the units in one physical micro-batch; finite (a unit that was not is all zeros)."""

    def norms(self) -> torch.Tensor:
        """(units, pairs) float64: l2 norm of each unit's gradient of each pair, A and B jointly."""
        ...

    def losses(self) -> torch.Tensor:
        """(units,) float64, finite: mean loss of each unit's records."""
        ...

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """Per pair, the flat float64 vector sum_u factors[u, pair] * gradient[u, pair]."""
        ...

    def matrix(self) -> torch.Tensor:
        """(units, parameters) float64: every unit's whole gradient, pair after pair."""
        ...


class Geometry(Protocol):
    """A public change of coordinates, made from past releases, in which gradients are clipped and noised."""

    @property
    def radii(self) -> tuple[float, ...]:
        """Clip radius of each block."""
        ...

    @property
    def scales(self) -> tuple[float, ...]:
        """Noise of each block at noise multiplier 1; the squared ratios radius / scale sum to 1."""
        ...

    def forward(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """(units, parameters) to one (units, size) matrix a block."""
        ...

    def backward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Averaged noisy blocks to a (parameters,) gradient: the inverse of ``forward``."""
        ...


@dataclass(frozen=True)
class Knobs:
    """What a controller may move. Public: a function of the configuration and of past releases only.

    Attributes:
        radii: clip radii, one for the whole gradient or one a pair, as the clipper defines.
        noise_multiplier: in the mechanism's own units (the paper's number).
        weights: relative noise weights of the pairs, squares summing to 1: pair i gets noise proportional to
            radius / weight. Empty leaves them to the clipper.
        geometry: coordinates to clip in, for the clipper "transformed".
    """

    radii: tuple[float, ...]
    noise_multiplier: float
    weights: tuple[float, ...] = ()
    geometry: Geometry | None = None


@dataclass(frozen=True)
class Statistics:
    """One vector per unit, summed over the batch and released jointly with the gradients.

    Attributes:
        names: what it tells, for the ledger.
        sensitivity: l2 bound of one unit's vector.
        deviation: noise on every entry, as noise multiplier times scale: the standard deviation, if it is Gaussian.
        sum_of: the exact sum over the units of a micro-batch, (size,) float64; can be pickled.
        empty: the sum over no unit.
    """

    names: tuple[str, ...]
    sensitivity: float
    deviation: float
    sum_of: Callable[[Gradients], torch.Tensor]
    empty: torch.Tensor


@dataclass(frozen=True)
class RunFacts:
    """What a run tells its mechanism before the first step. Public.

    Attributes:
        pair_sizes: parameters of each pair.
        device: where gradients live.
        expected_batch_size: q times units.
        sample_rate: q.
        steps: planned releases.
        epsilon: the budget, if there is one.
        delta: of the budget.
    """

    pair_sizes: tuple[int, ...]
    device: torch.device
    expected_batch_size: float
    sample_rate: float
    steps: int
    epsilon: float | None
    delta: float


@dataclass(frozen=True)
class Released:
    """What left a step: noisy, charged, free to use.

    Attributes:
        gradient: per pair, the flat float32 estimate of the mean gradient (noisy sum over *expected* batch).
        blocks: the noisy sums as the clipper made them.
        statistics: the noisy sum of the controller's statistics, or None.
        knobs: with which it was made.
        deviations: standard deviation of the noise on each block.
    """

    gradient: list[torch.Tensor]
    blocks: list[torch.Tensor]
    statistics: torch.Tensor | None
    knobs: Knobs
    deviations: tuple[float, ...]


@dataclass(frozen=True)
class Observation:
    """All that a controller learns from a step: releases, and public figures on demand.

    Attributes:
        releases: made so far, this one included.
        released: what the step gave.
        spent: share of the budget that the ledger holds, in [0, 1].
        public_loss: mean token loss of the current model on public records; costs a forward pass.
        adapter_figures: per pair, norms of B A and of the optimiser's two moments, by name.
    """

    releases: int
    released: Released
    spent: float
    public_loss: Callable[[], float]
    adapter_figures: Callable[[], dict[str, list[float]]]


class Clipper(Protocol):
    """Bounds each unit's contribution. ``dptune.mechanisms.clipping`` has the usual base."""

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """The radii that a run starts with."""
        ...

    def sensitivity(self, knobs: Knobs, pairs: int) -> float:
        """Joint l2 sensitivity (add/remove one unit) of the blocks, in units of ``scales``."""
        ...

    def scales(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        """Per block, the noise at noise multiplier 1: the standard deviation, if it is Gaussian."""
        ...

    def empty(self, zeros: list[torch.Tensor], knobs: Knobs) -> list[torch.Tensor]:
        """The blocks of an empty batch; ``zeros`` are the flat float64 zero vectors of the pairs."""
        ...

    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """The blocks of a micro-batch, flat float64."""
        ...

    def restore(
        self, blocks: list[torch.Tensor], zeros: list[torch.Tensor], knobs: Knobs, expected_batch_size: float
    ) -> list[torch.Tensor]:
        """Noisy blocks to per-pair float32 gradients, divided by the expected batch size."""
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

    @property
    def claims(self) -> tuple[tuple[str, float], ...]:
        """What only a published accountant reads."""
        ...

    def law(self, noise_multiplier: float) -> InverseScale | None:
        """Of a Laplace mixture, the law of the inverse scale for a radius of 1."""
        ...

    def deviation(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise for a radius of 1."""
        ...

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Noisy float32 sums; drawn even when every sum is zero."""
        ...


class Controller(Protocol):
    """Moves the knobs. ``dptune.mechanisms.control`` has a base that moves nothing.

    A controller whose ``raw_inputs`` is empty is shown released values only: ``peek`` is never called on it.
    """

    @property
    def adaptive(self) -> bool:
        """Whether it moves the noise multiplier or the sample rate."""
        ...

    @property
    def noise_range(self) -> tuple[float, float]:
        """Least and most noise that it may choose, as multiples of the start."""
        ...

    @property
    def raw_inputs(self) -> tuple[str, ...]:
        """The un-noised private statistics it reads: leaks. Empty when it is sound."""
        ...

    @property
    def inherited(self) -> Composition:
        """Releases of other runs that it was made from; the run's epsilon includes them."""
        ...

    @property
    def inherited_unit(self) -> str | None:
        """The unit of privacy of those releases, which must be the run's; None if there are none."""
        ...

    @property
    def releases_statistics(self) -> bool:
        """Whether it may ever ask for statistics of the batch."""
        ...

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError if it cannot move these knobs."""
        ...

    def start(self, facts: RunFacts) -> None:
        """Called once, before the first step and before ``load_state_dict``."""
        ...

    def knobs(self, initial: Knobs) -> Knobs:
        """The knobs of the next step."""
        ...

    def statistics(self, knobs: Knobs, effective_noise_multiplier: float) -> Statistics | None:
        """What to release beside the gradients."""
        ...

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, knobs: Knobs) -> Knobs:
        """LEAK. Read raw (units, pairs) norms and (units,) losses of the batch; return the knobs to use on it."""
        ...

    def observe(self, observation: Observation) -> None:
        """Learn from a step."""
        ...

    def metrics(self) -> dict[str, float]:
        """Figures to plot; as public as what it reads."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Flat table of tensors and plain JSON values, for checkpoints."""
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
        self.controller.check(self._initial, self.pairs)
        if self.private and not math.isfinite(self.clipper.sensitivity(self._initial, self.pairs)):
            raise ConfigError(
                f"mechanisms.{self.name}.clipper",
                "bounds nothing, so noise cannot hide it",
                fix="clip, or add no noise",
            )
        self._refuse_statistics_without_noise()
        if self.norm != "l2" and self.controller.releases_statistics:
            problem = "releases statistics bounded in l2, beside gradients clipped in l1"
            raise ConfigError(f"mechanisms.{self.name}.controller", problem, fix="use clipper: flat, or constant")

    @property
    def _initial(self) -> Knobs:
        return Knobs(self.clipper.initial_radii(self.pairs), self.noise.noise_multiplier)

    def _refuse_statistics_without_noise(self) -> None:
        # Asked at the start too: before it, most controllers cannot tell what they will release.
        if not self.private and self.controller.statistics(self._initial, 1.0) is not None:
            raise ConfigError(
                f"mechanisms.{self.name}.controller", "releases statistics, which need noise", fix="use constant"
            )

    @property
    def freezes_down(self) -> bool:
        """Whether only the B factors train."""
        return bool(getattr(self.clipper, "freeze_down", False))

    @property
    def local(self) -> LocalUpdates | None:
        """The clipper, if what it clips is a client's update and not a gradient."""
        from dptune.mechanisms.local_updates import LocalUpdates

        return self.clipper if isinstance(self.clipper, LocalUpdates) else None

    def start(self, facts: RunFacts) -> None:
        """Tell the controller about the run, and check that its first step can be made.

        Raises: ConfigError, before anything is charged.
        """
        self.controller.start(facts)
        self.scales(self.knobs())
        self._refuse_statistics_without_noise()

    def most_noise(self) -> float:
        """The largest effective multiplier that the controller may choose."""
        return self.effective_noise_multiplier(self._initial) * self.controller.noise_range[1]

    @property
    def private(self) -> bool:
        """Whether any noise is added at all."""
        return self.noise.family != "none"

    @property
    def norm(self) -> str:
        """In which the clipper bounds a unit: "l2", or "l1" if it says so."""
        return str(getattr(self.clipper, "norm", "l2"))

    def knobs(self) -> Knobs:
        """The knobs of the next step, fixed before its batch is drawn."""
        return self.controller.knobs(self._initial)

    def effective_noise_multiplier(self, knobs: Knobs) -> float:
        """Noise per unit of joint sensitivity, statistics included."""
        return knobs.noise_multiplier / self.clipper.sensitivity(knobs, self.pairs)

    def at_effective_noise_multiplier(self, knobs: Knobs, effective: float) -> Knobs:
        """The same knobs with another noise multiplier."""
        return replace(knobs, noise_multiplier=effective * self.clipper.sensitivity(knobs, self.pairs))

    def statistics(self, knobs: Knobs) -> Statistics | None:
        """What a step with these knobs releases beside the gradients. Reads no data."""
        if not self.private:
            return None
        return self.controller.statistics(knobs, self.effective_noise_multiplier(knobs))

    def release(self, knobs: Knobs, sample_rate: float) -> Release:
        """What the ledger is charged for a step with these knobs. Reads no data."""
        statistics = self.statistics(knobs)
        return Release(
            sample_rate=sample_rate,
            noise_multiplier=knobs.noise_multiplier,
            # Without noise there is no sensitivity to speak of: the release says so by its family.
            sensitivity=self.clipper.sensitivity(knobs, self.pairs) if self.private else 1.0,
            noise=self.noise.family,
            statistics=("gradient sum", *(statistics.names if statistics else ())),
            raw_inputs=self.controller.raw_inputs,
            adaptive=self.controller.adaptive,
            norm=self.norm,
            law=self.noise.law(knobs.noise_multiplier),
            claims=self.noise.claims,
        )

    def scales(self, knobs: Knobs) -> tuple[float, ...]:
        """Per block, statistics last, the noise at noise multiplier 1.

        One unit moves the statistics by at most their sensitivity D, so with noise s on them and
        z the effective multiplier of the whole release, the gradients get z_T = (z^-2 - (D/s)^2)^(-1/2).

        Raises: ConfigError if the statistics alone cost more than the whole release may.
        """
        scales, statistics = self.clipper.scales(knobs, self.pairs), self.statistics(knobs)
        if statistics is None:
            return scales
        effective = self.effective_noise_multiplier(knobs)
        left = effective**-2 - (statistics.sensitivity / statistics.deviation) ** 2
        if left <= 0:
            raise ConfigError(
                f"mechanisms.{self.name}",
                f"its statistics have noise {statistics.deviation:.4g} for a sensitivity of "
                f"{statistics.sensitivity:.4g}, which alone exceeds a release with multiplier {effective:.4g}",
                fix="give the statistics more noise",
            )
        raised = left**-0.5 / effective
        return (*(scale * raised for scale in scales), statistics.deviation / knobs.noise_multiplier)

    def exact_sums(self, batches: Iterable[Gradients], zeros: list[torch.Tensor], knobs: Knobs) -> list[torch.Tensor]:
        """The clipped sums and, last, the statistics of one Poisson batch. Private: noise must be added.

        Guarantee: one unit more or less moves them, divided by ``scales(knobs)`` block by block, by at most
        the sensitivity of ``release(knobs, q)`` in l2, whatever it is, if ``knobs`` are public.
        """
        return clipped_sums(self.clipper, self.statistics(knobs), batches, zeros, knobs)

    def privatise(
        self,
        batches: Iterable[Gradients],
        zeros: list[torch.Tensor],
        knobs: Knobs,
        expected_batch_size: float,
        entropy: Entropy,
        total: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
    ) -> Released:
        """Clip, sum over the micro-batches of one Poisson batch, add noise once.

        Guarantee: with a sound clipper and controller, the result is one Poisson-subsampled release
        with the parameters of ``release(knobs, q)``. An empty batch gives noise alone. Private: ``batches``.

        Args:
            batches: micro-batches; a unit lies in exactly one.
            zeros: one flat float64 zero vector per pair, on the device of the result.
            knobs: from ``knobs()``, charged to the ledger before this call.
            expected_batch_size: public divisor.
            entropy: the source of the noise.
            total: from the exact sums of these micro-batches to those of the whole batch, if others have parts of it.
        """
        if self.controller.raw_inputs:
            batches = list(batches)
            knobs = self._peek(batches, zeros, knobs)
        scales = self.scales(knobs) if self.private else self.clipper.scales(knobs, self.pairs)
        sums = total(self.exact_sums(batches, zeros, knobs))
        noisy = self.noise.add(sums, scales, knobs.noise_multiplier, entropy)
        statistics = noisy.pop() if self.statistics(knobs) else None
        return Released(
            gradient=self.clipper.restore(noisy, zeros, knobs, expected_batch_size),
            blocks=noisy,
            statistics=statistics,
            knobs=knobs,
            deviations=tuple(self.noise.deviation(knobs.noise_multiplier) * scale for scale in scales[: len(noisy)]),
        )

    def _peek(self, batches: list[Gradients], zeros: list[torch.Tensor], knobs: Knobs) -> Knobs:
        import torch

        norms = torch.cat([zeros[0].new_zeros(0, self.pairs), *(batch.norms() for batch in batches)])
        losses = torch.cat([zeros[0].new_zeros(0), *(batch.losses() for batch in batches)])
        return self.controller.peek(norms, losses, knobs)


def clipped_sums(
    clipper: Clipper,
    statistics: Statistics | None,
    batches: Iterable[Gradients],
    zeros: list[torch.Tensor],
    knobs: Knobs,
) -> list[torch.Tensor]:
    """See ``Mechanism.exact_sums``; for a process that has no controller. Private: noise must be added."""
    import torch

    sums = list(torch._foreach_add(clipper.empty(zeros, knobs), 0.0))  # new tensors, by one call: there are dozens
    if statistics:
        sums.append(statistics.empty.to(device=zeros[0].device, dtype=zeros[0].dtype, copy=True))
    for gradients in batches:
        parts = clipper.clipped_sum(gradients, knobs)
        if statistics:
            parts = [*parts, statistics.sum_of(gradients)]
        torch._foreach_add_(sums, parts)
    return sums
