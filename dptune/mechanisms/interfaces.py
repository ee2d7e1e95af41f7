"""What the parts of a mechanism promise each other: the contracts of clipper, noise and controller.

Units. Gradients come in pairs (one LoRA A and B are one pair). A clipper turns the gradients of a batch into
blocks (usually one a pair) and bounds what one unit of privacy adds to them; ``scales`` gives, per block, the
noise for a noise multiplier of 1, and ``sensitivity`` the joint sensitivity, in the clipper's ``norm``, of the blocks
divided by those scales. So the standard deviation of Gaussian noise on block j is ``noise_multiplier * scales[j]`` and
the sound multiplier is ``noise_multiplier / sensitivity``. (A Laplace mixture's multiplier is that of the Gaussian with
the same zCDP.) A controller may ask for statistics of the batch: they are one more block of the same release, and the
noise on the gradients rises so that the release as a whole costs the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.entropy import Entropy
from dptune.privacy.release import Composition

if TYPE_CHECKING:
    import torch
from dptune.mechanisms.gradient_interfaces import Federation, Geometry, Gradients, GradientSource
from dptune.mechanisms.noises.additive_noise import AdditiveNoise as AdditiveNoise


@dataclass(frozen=True)
class Knobs:
    """What a controller may move. Public: a function of the configuration and of past releases only.

    Attributes:
        radii: clip radii, one for the whole gradient or one a pair, as the clipper defines.
        noise_multiplier: the multiplier in the mechanism's own units (the paper's number).
        weights: relative noise weights of the pairs, squares summing to 1: pair i gets noise proportional to
            radius / weight. Empty leaves them to the clipper.
        geometry: coordinates to clip in, for the clipper "transformed".

    Example:
        >>> from dptune.mechanisms.registry import build
        >>> static = build("static", {"noise_multiplier": 1.0, "max_grad_norm": 0.5})
        >>> static.knobs()
        Knobs(radii=(0.5,), noise_multiplier=1.0, weights=(), geometry=None)
    """

    radii: tuple[float, ...]
    noise_multiplier: float
    weights: tuple[float, ...] = ()
    geometry: Geometry | None = None


@dataclass(frozen=True)
class Statistics:
    """A vector of every unit that is summed over the batch and released jointly with the gradients.

    Attributes:
        names: names of the statistics, as the ledger records them.
        sensitivity: l2 bound of one unit's vector.
        deviation: noise on every entry, as noise multiplier times scale: the standard deviation, if it is Gaussian.
        sum_of: the exact sum over the units of a micro-batch, (size,) float64; can be pickled.
        empty: the sum over an empty batch, zeros of the same shape.
    """

    names: tuple[str, ...]
    sensitivity: float
    deviation: float
    sum_of: Callable[[Gradients], torch.Tensor]
    empty: torch.Tensor


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its mechanism is given before the first step. Public.

    Attributes:
        pair_sizes: parameters of each pair.
        device: the device that gradients lie on.
        expected_batch_size: q times the number of units.
        sample_rate: q, the probability with which a unit enters a batch.
        steps: number of planned releases.
        epsilon: the budget's epsilon, or None without a budget.
        delta: the budget's delta.
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
    """Everything that one private step published: noisy, already charged, free to use.

    Attributes:
        gradient: per pair, the flat float32 estimate of the mean gradient (noisy sum over *expected* batch).
        blocks: the noisy sums as the clipper made them.
        statistics: the noisy sum of the controller's statistics, or None.
        knobs: the knobs of the step.
        deviations: standard deviation of the noise on each block.
    """

    gradient: list[torch.Tensor]
    blocks: list[torch.Tensor]
    statistics: torch.Tensor | None
    knobs: Knobs
    deviations: tuple[float, ...]


@dataclass(frozen=True)
class Observation:
    """All that a controller learns from a step: its release, and public figures on demand.

    Attributes:
        releases: number of releases so far, this one included.
        released: the step's noisy output.
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
    """Bounds what each unit adds to the sum. ``dptune.mechanisms.clippers.clipping`` has the usual bases.

    A subclass need only define the abstract methods. A certified epsilon is true if one unit never moves
    ``clipped_sum`` by more than ``sensitivity``, whatever the gradients.
    """

    #: Norm in which a unit is bounded: "l2", or "l1", which also bounds it in l2.
    norm: ClassVar[str] = "l2"

    @property
    def freeze_down(self) -> bool:
        """Whether only the B factors train."""
        return False

    @property
    def by_norm_alone(self) -> bool:
        """Whether a batch is asked for norms and for a weighted sum, and for nothing else.

        A model's own weights train with such a clipper alone, for no gradient of one unit is ever in memory.
        """
        return False

    @property
    def federation(self) -> Federation | None:
        """The clients whose updates are clipped; None if the gradients of the data's own units are."""
        return None

    def gradients(self, source: GradientSource) -> Iterator[Gradients]:
        """The vectors of a batch that are clipped: by default the gradients of the units' losses."""
        return source.of_losses()

    @abstractmethod
    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """The radii that a run starts with."""
        ...

    @abstractmethod
    def sensitivity(self, knobs: Knobs, pairs: int) -> float:
        """Joint sensitivity (add/remove one unit) of the blocks in ``norm``, in units of ``scales``."""
        ...

    @abstractmethod
    def scales(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        """Per block, the noise at noise multiplier 1: the standard deviation, if it is Gaussian."""
        ...

    @abstractmethod
    def empty(self, zeros: list[torch.Tensor], knobs: Knobs) -> list[torch.Tensor]:
        """The blocks of an empty batch; ``zeros`` are the flat float64 zero vectors of the pairs."""
        ...

    @abstractmethod
    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """The blocks of a micro-batch, flat float64."""
        ...

    @abstractmethod
    def restore(
        self, blocks: list[torch.Tensor], zeros: list[torch.Tensor], knobs: Knobs, expected_batch_size: float
    ) -> list[torch.Tensor]:
        """Turn noisy blocks into per-pair float32 gradients, divided by the expected batch size."""
        ...


class Noise(Protocol):
    """The noise that is added to the clipped sum. ``AdditiveNoise`` is a base that defines most of this.

    A certified epsilon is true if ``add`` draws from the family, and with the multiplier or law, that the part states.
    """

    #: Key of ``PUBLISHED_ACCOUNTANTS``: the accountant of the paper that proposed the noise.
    published_accountant: ClassVar[str]
    #: Options that fix the noise without a multiplier, so that there is none to calibrate.
    fixed_by: ClassVar[tuple[str, ...]]
    #: Whether the noise can be built without a multiplier or any of ``fixed_by``.
    own_scale: ClassVar[bool]

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier at the start, in the mechanism's own units."""
        ...

    @property
    def family(self) -> str:
        """Family of the noise, from ``dptune.privacy.release.STEP_NOISES``; accountants choose their theorem by it."""
        ...

    @property
    def dimension(self) -> int:
        """Number of trained parameters, for published accountants and memory; 0 if not known, or where neither asks."""
        ...

    @property
    def claims(self) -> tuple[tuple[str, float], ...]:
        """(name, number) pairs that only a published accountant reads."""
        ...

    @property
    def correlated(self) -> CorrelatedNoise | None:
        """The noise itself if its rows depend on one another; None if every row's noise is drawn by itself."""
        ...

    def law(self, noise_multiplier: float) -> InverseScale | None:
        """Law of a Laplace mixture's inverse scale, for a radius of 1; None for other families."""
        ...

    def deviation(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise for a radius of 1."""
        ...

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Noisy float32 sums; drawn even when every sum is zero."""
        ...


class CorrelatedNoise(Noise, Protocol):
    """Noise whose rows are correlated by a banded strategy, see ``dptune.privacy.accounting.strategy``.

    A certified epsilon is true if ``add_row`` adds noise_multiplier x scale x w_r, with w of that strategy, made of z
    that is drawn afresh for every row and kept nowhere else.
    """

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The strategy (c_0 .. c_(b-1)), b the bands; empty for one band, which is independent noise."""
        ...

    def check(self, clipper: Clipper, controller: Controller) -> None:
        """Raise ConfigError unless the clipper bounds and the controller moves nothing that the price rests on."""
        ...

    def start(self, facts: RunFacts) -> None:
        """Prepare for a run: forget all earlier rows. Raises ConfigError as ``check_memory``."""
        ...

    def check_memory(self, pair_sizes: Sequence[int]) -> None:
        """Raise ConfigError if its memory would be too large for pairs of these sizes."""
        ...

    def forget(self) -> None:
        """Drop the noise of all earlier rows, at the end of a run."""
        ...

    def bands_to_try(self, sample_rate: float, steps: int) -> tuple[int, ...]:
        """Numbers of bands to choose from, in rising order; one if it is fixed."""
        ...

    def fitted(self, sample_rate: float, steps: int, bands: int | None = None) -> Self:
        """The noise with the strategy for a run of these steps, of ``bands`` if its own number is open.

        Raises: ConfigError for more bands than steps, or so many that a unit would be drawn with a probability above 1.
        """
        ...

    def as_charged(self, noise_multiplier: float, coefficients: tuple[float, ...]) -> Self:
        """The noise with this multiplier and this strategy, which a ledger's rows were charged with."""
        ...

    def expected_error(self, steps: int) -> float:
        """The error that its strategy is chosen by, for a noise multiplier of 1, over that of independent noise."""
        ...

    def add_row(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy, row: int
    ) -> tuple[list[torch.Tensor], float]:
        """Noisy float32 sums of row ``row`` of the ledger, and the standard deviation of w in it.

        Rows from before are used only if the very last row was made here; else the recursion begins again.
        """
        ...


class Controller(Protocol):
    """Moves the knobs. ``dptune.mechanisms.controllers.control.Constant`` is a base that moves nothing.

    A certified epsilon is true if the knobs depend on the configuration and on what ``observe`` was shown, and on
    nothing else. ``peek`` is only called on a controller that declares ``raw_inputs``, for which nothing is certified.
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
        """Releases of other runs that the controller was made from; the run's epsilon includes them."""
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
        """Prepare for a run. Called once, before the first step and before ``load_state_dict``."""
        ...

    def knobs(self, initial: Knobs) -> Knobs:
        """The knobs of the next step."""
        ...

    def statistics(self, knobs: Knobs, effective_noise_multiplier: float) -> Statistics | None:
        """The statistics to release beside the gradients, or None."""
        ...

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, tokens: torch.Tensor, knobs: Knobs) -> Knobs:
        """LEAK. Read raw (units, pairs) norms, (units,) losses and token counts; return the knobs for this batch."""
        ...

    def observe(self, observation: Observation) -> None:
        """Learn from a step."""
        ...

    def metrics(self) -> dict[str, float]:
        """Figures to plot; as public as what the controller reads."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Flat table of tensors and plain JSON values, for checkpoints."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        ...
