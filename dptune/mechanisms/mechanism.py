"""A mechanism = clipper + noise + controller, and the one private step that they make together.

``interfaces.py`` says what each of the three promises, and in which units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dptune.core.errors import ConfigError
from dptune.core.plugins import plugins_of
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Clipper, Controller, Knobs, Noise, Released, RunFacts, Statistics
from dptune.privacy.accounting.strategy import column_norm
from dptune.privacy.entropy import Entropy
from dptune.privacy.release import STEP_NOISES, UNBOUNDED, Dealing, Release

if TYPE_CHECKING:
    import torch

_ROUNDING, _ROUND_OFF = 1e-9, 1e-14


#: What decides what a noise adds: who overrides one of them has another noise.
_DRAWING = ("add", "_law_of_a_draw", "add_row", "correlated", "coefficients", "start")


@dataclass(frozen=True)
class Mechanism:
    """A named point in the grid clipper x noise x controller.

    Attributes:
        name: registered name, or the name of its entry in params.yaml.
        published_accountant: the accountant of its paper (key of ``PUBLISHED_ACCOUNTANTS``).
        pairs: number of LoRA pairs it works on.
        dealt_by: what decides the group of a unit, for correlated noise; "rank" for a run of an earlier version alone.

    Example:
        >>> from dptune.mechanisms.registry import build
        >>> static = build("static", {"noise_multiplier": 1.0})
        >>> release = static.release(static.knobs(), sample_rate=0.01)
        >>> release.noise_multiplier, release.leaks
        (1.0, ())
    """

    name: str
    clipper: Clipper
    noise: Noise
    controller: Controller
    published_accountant: str
    pairs: int = 1
    dealt_by: Dealing = "key"

    def __post_init__(self) -> None:
        self._check_noise()
        if self.noise.correlated is not None:
            self.noise.correlated.check(self.clipper, self.controller)
        self.controller.check(self._initial, self.pairs)
        if self.private and not math.isfinite(self.clipper.sensitivity(self._initial, self.pairs)):
            raise ConfigError(
                f"mechanisms.{self.name}.clipper",
                "bounds nothing, so noise cannot hide it",
                fix="clip, or add no noise",
            )
        self._refuse_statistics_without_noise()
        if self.clipper.norm != "l2" and self.controller.releases_statistics:
            problem = "releases statistics bounded in l2, beside gradients clipped in l1"
            raise ConfigError(f"mechanisms.{self.name}.controller", problem, fix="use clipper: flat, or constant")

    def _check_noise(self) -> None:
        """Raise ConfigError unless accountants know the noise's family, and the noise fits that family."""
        field, noise = f"mechanisms.{self.name}.noise", self.noise
        if noise.family not in STEP_NOISES:
            fix = f"use one of {', '.join(STEP_NOISES)}; noise of the family unproven has no certified epsilon"
            raise ConfigError(field, f"names an unknown family {noise.family!r}", fix=fix)
        # The class that draws, or one derived from it, names the family. Who overrides ``add`` of a known noise would
        # else get its finite epsilon without having claimed anything; so would who lets another object draw its rows.
        bases = type(noise).__mro__
        named = next((place for place, base in enumerate(bases) if "family" in vars(base)), 0)
        redrawn = any(name in vars(base) for base in bases[:named] for name in _DRAWING)
        if noise.family not in UNBOUNDED and redrawn:
            problem = f"{type(noise).__name__} draws its own noise and inherits the family {noise.family!r}"
            raise ConfigError(field, problem, fix="set family in the class that defines add, if the family still fits")
        multiplier = noise.noise_multiplier
        if noise.family == "gaussian" and not math.isclose(noise.deviation(multiplier), multiplier):
            problem = f"is called Gaussian, with deviation {noise.deviation(multiplier)} at multiplier {multiplier}"
            raise ConfigError(field, problem, fix="return noise_multiplier as the deviation, or leave family out")
        if noise.family.endswith("laplace_mixture") != (noise.law(multiplier) is not None):
            problem = f"names the family {noise.family!r}, which does not go with its law {noise.law(multiplier)}"
            raise ConfigError(field, problem, fix="give a law with a Laplace mixture and only there")

    @property
    def _initial(self) -> Knobs:
        return Knobs(self.clipper.initial_radii(self.pairs), self.noise.noise_multiplier)

    def _refuse_statistics_without_noise(self) -> None:
        # Checked again after ``start``: before it, most controllers cannot tell what they will release.
        if not self.private and self.controller.statistics(self._initial, 1.0) is not None:
            raise ConfigError(
                f"mechanisms.{self.name}.controller", "releases statistics, which need noise", fix="use constant"
            )

    def start(self, facts: RunFacts) -> None:
        """Tell controller and noise about the run, and check that its first step can be made.

        Raises: ConfigError, before anything is charged.
        """
        self.controller.start(facts)
        if self.noise.correlated is not None:
            self.noise.correlated.start(facts)
        self.scales(self.knobs())
        self._refuse_statistics_without_noise()

    def check_trained(self, *, head: bool, own: bool) -> None:
        """Check that the mechanism can train what is to train besides LoRA pairs.

        Args:
            head: a classification head, which to clippers is one more LoRA pair.
            own: a model's own weights, of which no unit's gradient is ever in memory.

        Raises: ConfigError for a controller that moves each LoRA pair by figures that other weights do not have; of own
            weights also for a clipper that needs more than norms and weighted sums.
        """
        others = "static, per_pair, auto_s, psac, quantile, dc_sgd_p, plrvo, lmo_dp or banded"
        if own and not self.clipper.by_norm_alone:
            needs = "clips by more than norms, and of a unit's gradient of a model's own weights no more is in memory"
            if self.clipper.federation is not None:
                needs = "clips updates of clients, which train adapters alone"
            if self.clipper.freeze_down:
                needs = "freezes the A factors of adapters (freeze_down), and a model's own weights have none"
            problem = f"{self.name} {needs}"
            raise ConfigError("mechanism", problem, fix=f"set train to lora; or use {others}, which clip by norms")
        if (head or own) and not getattr(self.controller, "takes_head", True):
            what = "a model's own weights do" if own else "a classification head does"
            problem = f"{self.name} moves each LoRA pair by figures that {what} not have"
            raise ConfigError("mechanism", problem, fix="use static, or another without a learned controller")

    def most_noise(self) -> float:
        """The largest effective multiplier that the controller may choose."""
        return self.effective_noise_multiplier(self._initial) * self.controller.noise_range[1]

    @property
    def plugins(self) -> tuple[str, ...]:
        """Name, version and digest of the code outside dptune that its parts are written in, for the run's header."""
        return tuple(map(str, plugins_of(self.modules)))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its parts are written in, and those that it was derived in itself."""
        classes = (base for part in (self, self.clipper, self.noise, self.controller) for base in type(part).__mro__)
        return tuple(dict.fromkeys(cls.__module__ for cls in classes))

    @property
    def private(self) -> bool:
        """Whether noise is added."""
        return self.noise.family != "none"

    def knobs(self) -> Knobs:
        """The knobs of the next step, fixed before its batch is drawn."""
        return self.controller.knobs(self._initial)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients of the strategy that correlates the noise of rows; empty for independent noise."""
        return self.noise.correlated.coefficients if self.noise.correlated is not None else ()

    @property
    def bands(self) -> int:
        """The number of groups that units are dealt into, each drawn in every b-th row; 1 for independent noise."""
        return len(self.coefficients) or 1

    def group_sample_rate(self, sample_rate: float) -> float:
        """Probability that a unit enters a row of its own group, where it enters ``sample_rate`` of all rows.

        Raises: ConfigError if there are so many bands that it would be above 1.
        """
        if self.bands == 1:
            return sample_rate  # a release refuses what is no rate
        rate = self.bands * sample_rate
        if rate > 1 + _ROUNDING:
            problem = f"{self.bands} bands at sample rate {sample_rate:.6g} would draw a unit with chance {rate:.4g}"
            raise ConfigError("bands", problem, fix=f"use at most {int(1 / sample_rate + _ROUNDING)} bands")
        return rate if rate < 1 - _ROUNDING else 1.0  # 49 times 1/49 is just below 1

    def sensitivity(self, knobs: Knobs) -> float:
        """Joint sensitivity of a release in units of ``scales``: the clipper's times the norm of the strategy."""
        norm = column_norm(self.coefficients)
        return self.clipper.sensitivity(knobs, self.pairs) * (1.0 if abs(norm - 1) <= _ROUND_OFF else norm)

    def effective_noise_multiplier(self, knobs: Knobs) -> float:
        """Noise per unit of joint sensitivity, statistics included."""
        return knobs.noise_multiplier / self.sensitivity(knobs)

    def at_effective_noise_multiplier(self, knobs: Knobs, effective: float) -> Knobs:
        """The same knobs with another noise multiplier."""
        return replace(knobs, noise_multiplier=effective * self.sensitivity(knobs))

    def statistics(self, knobs: Knobs) -> Statistics | None:
        """The statistics that a step with these knobs releases beside the gradients, or None. Reads no data."""
        if not self.private:
            return None
        return self.controller.statistics(knobs, self.effective_noise_multiplier(knobs))

    def release(self, knobs: Knobs, sample_rate: float, row: int = 0) -> Release:
        """What the ledger is charged for a step with these knobs. Reads no data.

        With correlated noise a release is about one group of the units, which ``row``, the number of releases before
        it, decides; a ledger refuses any other there.

        Noise that has left its start counts as adaptive even if the controller does not declare it: without a filter
        nothing is then certified.
        """
        statistics, coefficients = self.statistics(knobs), self.coefficients
        effective = self.effective_noise_multiplier
        moved = self.private and not math.isclose(effective(knobs), effective(self._initial))
        return Release(
            sample_rate=self.group_sample_rate(sample_rate),
            # An accountant that read the multiplier of unproven noise would certify a guarantee that nobody proved.
            noise_multiplier=0.0 if self.noise.family in UNBOUNDED else knobs.noise_multiplier,
            # Without noise the clipper's sensitivity may be infinite, which a release refuses; its family says enough.
            sensitivity=self.sensitivity(knobs) if self.private else 1.0,
            noise=self.noise.family,
            statistics=("gradient sum", *(statistics.names if statistics else ())),
            raw_inputs=self.controller.raw_inputs,
            adaptive=self.controller.adaptive or moved,
            norm=self.clipper.norm,
            law=self.noise.law(knobs.noise_multiplier),
            claims=self.noise.claims,
            part=row % len(coefficients) if coefficients else None,
            coefficients=coefficients,
            dealt_by=self.dealt_by if coefficients else "key",
        )

    def scales(self, knobs: Knobs) -> tuple[float, ...]:
        """Noise of each block at noise multiplier 1; the statistics' block is last.

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
                f"{statistics.sensitivity:.4g}, and this exceeds a whole release with multiplier {effective:.4g}",
                fix="give the statistics more noise",
            )
        raised = left**-0.5 / effective
        return (*(scale * raised for scale in scales), statistics.deviation / knobs.noise_multiplier)

    def exact_sums(self, batches: Iterable[Gradients], zeros: list[torch.Tensor], knobs: Knobs) -> list[torch.Tensor]:
        """The clipped sums and, last, the statistics of one Poisson batch. Private: noise must be added.

        Guarantee: if ``knobs`` are public, adding or removing any one unit moves the blocks, each divided by its
        ``scales(knobs)``, by at most the sensitivity of ``release(knobs, q)`` in l2.
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
        row: int = 0,
    ) -> Released:
        """Clip, sum over the micro-batches of one Poisson batch, add noise once.

        Guarantee: with a sound clipper and controller, the result is one Poisson-subsampled release
        with the parameters of ``release(knobs, q)``. An empty batch gives noise alone. Private: ``batches``.

        Args:
            batches: micro-batches; each unit lies in exactly one.
            zeros: one flat float64 zero vector per pair, on the device of the result.
            knobs: the result of ``knobs()``, charged to the ledger before this call.
            expected_batch_size: public divisor.
            entropy: the source of the noise.
            total: turns the exact sums of these micro-batches into those of the whole batch, if other processes hold
                parts of it.
            row: number of the release in its ledger, from 0; it matters to correlated noise alone.
        """
        if self.controller.raw_inputs:
            batches = list(batches)
            knobs = self._peek(batches, zeros, knobs)
        scales = self.scales(knobs) if self.private else self.clipper.scales(knobs, self.pairs)
        sums = total(self.exact_sums(batches, zeros, knobs))
        noisy, spread = self._noised(sums, scales, knobs.noise_multiplier, entropy, row)
        statistics = noisy.pop() if self.statistics(knobs) else None
        return Released(
            gradient=self.clipper.restore(noisy, zeros, knobs, expected_batch_size),
            blocks=noisy,
            statistics=statistics,
            knobs=knobs,
            deviations=tuple(
                spread * self.noise.deviation(knobs.noise_multiplier) * scale for scale in scales[: len(noisy)]
            ),
        )

    def _noised(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy, row: int
    ) -> tuple[list[torch.Tensor], float]:
        """Noisy sums, and the standard deviation of their noise over multiplier times scale."""
        if self.coefficients and self.noise.correlated is not None:
            return self.noise.correlated.add_row(sums, scales, noise_multiplier, entropy, row)
        return self.noise.add(sums, scales, noise_multiplier, entropy), 1.0

    def _peek(self, batches: list[Gradients], zeros: list[torch.Tensor], knobs: Knobs) -> Knobs:
        import torch

        norms = torch.cat([zeros[0].new_zeros(0, self.pairs), *(batch.norms() for batch in batches)])
        losses = torch.cat([zeros[0].new_zeros(0), *(batch.losses() for batch in batches)])
        tokens = torch.cat([zeros[0].new_zeros(0), *(batch.tokens() for batch in batches)])
        return self.controller.peek(norms, losses, tokens, knobs)


def clipped_sums(
    clipper: Clipper,
    statistics: Statistics | None,
    batches: Iterable[Gradients],
    zeros: list[torch.Tensor],
    knobs: Knobs,
) -> list[torch.Tensor]:
    """Sums as ``Mechanism.exact_sums`` gives them, in a process without controller. Private: noise must be added."""
    import torch

    sums = list(torch._foreach_add(clipper.empty(zeros, knobs), 0.0))  # new tensors, by one call for all
    if statistics:
        sums.append(statistics.empty.to(device=zeros[0].device, dtype=zeros[0].dtype, copy=True))
    for gradients in batches:
        parts = clipper.clipped_sum(gradients, knobs)
        if statistics:
            parts = [*parts, statistics.sum_of(gradients)]
        torch._foreach_add_(sums, parts)
    return sums
