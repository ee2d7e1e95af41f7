"""RLDP as provable: the same agent and the same actions on the radii, but it sees past releases only.

Under a constant global multiplier every step is dominated by the same pair of distributions, whatever radii and
weights the agent picked, so the tight accountant stays valid and control costs nothing: that is design A. In design AB
the agent also sees two statistics of the private batch, the shares of clipped gradients and the mean loss. They are
released with the gradients, under noise, and take a share of the budget. Moving sigma needs the Renyi filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.rl import LearnedControl, moved_noise
from dptune.mechanisms.clippers.groupwise_clipping import normalised
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs, Observation, Statistics
from dptune.mechanisms.registry import controller, mechanism

if TYPE_CHECKING:
    import torch

_SMOOTHING = 0.9
_SMALLEST_WEIGHT = 0.25  # least weight, as a share of the mean weight: bounds the noise that one pair may get


@controller("rldp")
@dataclass
class Rldp(LearnedControl):
    """An agent that moves radii, noise weights and, if asked, sigma by what was released.

    Guarantee: radii, weights and sigma of a step are functions of earlier releases and of public data.

    The agent acts when release ``warmup`` is made and every ``interval`` releases after it. Until then radii stay
    where they start and weights are equal: sound medians would cost budget. A decision has the order of Algorithm 1,
    and states are normalised as the published agent's.

    An action has n numbers for the radii, n for the noise weights and, with ``move_noise``, one that moves sigma. It
    sets C_i = min(max(C_0 exp(a_i), floor), cap), C_0 the starting radius, and w_i with squares in proportion to
    softmax(a)_i + 0.0625 / n, so that no weight is below 0.24 / sqrt(n). (Equation 10 has no C_0: an untrained agent
    then starts near C_i = 1, far above the gradient norms that the paper's own start of 0.1 suggests; ``centre`` "one"
    gives that back.)

    The state of agent "sac", n numbers for each but the last four: signals and directions of releases (see
    ``released_features``), which are averaged as 0.9 old + 0.1 new from the first release on; logarithms of the radii
    and weights of this release; logarithms of each adapter's ||m||, ||B A|| and ||v|| + 1e-12, m and v being the
    moments of AdamW; log sigma; releases made over releases planned; the share of the budget that is spent; the public
    loss. Design AB adds its n + 1 statistics, over the expected batch and averaged likewise, after the directions.

    The reward is the fall of a loss per epsilon spent, which is the share spent times the budget: of the public loss
    after the update in design A, and in design AB of the private batches' loss as it was released, with noise,
    averaged over the interval.

    Attributes:
        agent: "sac" learns inside the run, from nothing or from ``init_from``. "linear" does not learn: it has 18
            parameters, the same for every pair, trained over tenants by DP policy gradient, and fits any model.
        design: what the agent sees. "A": noisy gradients, adapters, public loss and the ledger. "AB": also the shares
            of clipped gradients and the batch loss, which are released jointly with the gradients.
        statistics_share: share of the inverse variance that design AB spends on its statistics.
        loss_bound: bound, in nats, to which the loss of a unit minus the public loss is clipped.
        move_noise: let sigma move within [1/2, 2] of its start, behind the filter.
        radius_floor: smallest radius.
        centre: "initial" moves the radii around where they start, "one" around 1 as equation 10 does.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    interval: int = 16
    warmup: int = 16
    agent: Literal["sac", "linear"] = "sac"
    design: Literal["A", "AB"] = "A"
    statistics_share: float = 0.02
    loss_bound: float = 0.5
    move_noise: bool = False
    radius_floor: float = 1e-3
    centre: Literal["initial", "one"] = "initial"
    _weights: tuple[float, ...] = field(default=(), init=False)
    _smooth: Any = field(default=None, init=False, repr=False)
    _before: Any = field(default=None, init=False, repr=False)
    _public_loss: float = field(default=math.nan, init=False)
    _losses: list[float] = field(default_factory=list, init=False, repr=False)  # released since the last action

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.statistics_share < 1:
            raise ConfigError("statistics_share", f"{self.statistics_share} is not in (0, 1)", fix="use 0.02")
        if not (math.isfinite(self.loss_bound) and self.loss_bound > 0):
            raise ConfigError("loss_bound", f"{self.loss_bound} is not positive", fix="use 0.5")
        if not 0 < self.radius_floor <= self.radius_cap:
            raise ConfigError("radius_floor", f"{self.radius_floor} is not in (0, radius_cap]", fix="use 1e-3")
        if self.agent == "linear":
            self._use_linear_agent()

    def _use_linear_agent(self) -> None:
        from dptune.mechanisms.agents.linear_agent import FixedScaling

        if self.design != "A":
            raise ConfigError("design", "AB pays for statistics that agent linear does not read", fix="use design A")
        if self.move_noise:
            raise ConfigError("move_noise", "agent linear moves radii and weights only", fix="set it to false")
        self._normaliser = FixedScaling()

    def _new_agent(self) -> Any:
        if self.agent == "sac":
            return super()._new_agent()
        from dptune.mechanisms.agents.linear_agent import LinearAgent

        return LinearAgent(self.seed)

    @property
    def agent_kind(self) -> str:
        """The kind of agent, as the option ``agent`` names it."""
        return self.agent

    @property
    def adaptive(self) -> bool:
        """Whether it moves sigma."""
        return self.move_noise

    @property
    def raw_inputs(self) -> tuple[str, ...]:
        """The leaks of the hyper-policy that it starts from; it has none of its own."""
        return self.inherited_leaks

    def feature_size(self, pairs: int) -> int:
        """Length of the state: per pair signal, direction, radius, weight and three norms; 4 scalars; design AB adds
        its statistics.

        Agent linear reads one pair at a time, 8 numbers each.
        """
        if self.agent == "linear":
            return int(self._normaliser.size)
        return 7 * pairs + 4 + (pairs + 1 if self.design == "AB" else 0)

    def action_size(self, pairs: int) -> int:
        """Length of an action: a radius and a weight for each pair, and sigma if it moves."""
        return 2 * pairs + int(self.move_noise)

    def knobs(self, initial: Knobs) -> Knobs:
        """The knobs as the last action set them."""
        self._start_noise = initial.noise_multiplier
        self._start_radii = initial.radii if self.centre == "initial" else (1.0,) * len(initial.radii)
        noise = self._noise if self.move_noise and self._noise else initial.noise_multiplier
        return Knobs(self._radii or initial.radii, noise, self._weights)

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, tokens: torch.Tensor, knobs: Knobs) -> Knobs:
        """Returns the knobs unread. Called only in a run that already leaks through ``init_from``."""
        return knobs

    def statistics(self, knobs: Knobs, effective_noise_multiplier: float) -> Statistics | None:
        """What a step of design AB releases beside the gradients: for each pair how many of them were clipped, centred,
        and the batch's loss, centred and clipped. Counts and loss each have half of the squared sensitivity, 1.
        """
        if self.design == "A":
            return None
        import torch

        return Statistics(
            ("clipped fractions", "centred clipped loss"),
            1.0,
            effective_noise_multiplier / math.sqrt(self.statistics_share),
            partial(_bounded_sum, radii=knobs.radii, public_loss=self._public_loss, bound=self.loss_bound),
            torch.zeros(len(knobs.radii) + 1, dtype=torch.float64),
        )

    @property
    def first_action(self) -> int:
        """The release that ends the warm-up; without one, the interval's last."""
        return self.warmup or self.interval

    def observe(self, observation: Observation) -> None:
        """Smooth the features of every release; act every ``interval`` releases."""
        self._update_smooth(released_features(observation, self._before, self._facts.expected_batch_size, self.design))
        self._before = observation.released.blocks
        if self.design == "AB":
            self._note_loss(observation)
        if self.acts_at(observation.releases):
            self._public_loss = observation.public_loss()
            utility = -fmean(self._losses) if self._losses else -self._public_loss
            epsilon = (self._facts.epsilon or 1.0) * observation.spent
            self.act(self._features(observation), utility, epsilon, observation.spent)
            self._losses = []

    def _note_loss(self, observation: Observation) -> None:
        """Keep the released batch loss for the next reward.

        The first step releases none: a loss is released as its distance from the public loss, not known before.
        """
        released = observation.released
        assert released.statistics is not None
        if math.isnan(self._public_loss):
            self._public_loss = observation.public_loss()
        else:
            above = float(released.statistics[-1]) / self._facts.expected_batch_size * math.sqrt(2) * self.loss_bound
            self._losses.append(self._public_loss + above)

    def _update_smooth(self, fresh: torch.Tensor) -> None:
        self._smooth = fresh if self._smooth is None else _SMOOTHING * self._smooth + (1 - _SMOOTHING) * fresh

    def _features(self, observation: Observation) -> torch.Tensor:
        import torch

        knobs = observation.released.knobs
        weights = knobs.weights or (len(knobs.radii) ** -0.5,) * len(knobs.radii)
        figures = observation.adapter_figures()
        public = [
            *(math.log(radius) for radius in knobs.radii),
            *(math.log(weight) for weight in weights),
            *(math.log(value + 1e-12) for name in sorted(figures) for value in figures[name]),
            math.log(knobs.noise_multiplier),
            observation.releases / self._facts.steps,
            observation.spent,
            self._public_loss,
        ]
        return torch.cat([self._smooth.cpu(), torch.tensor(public, dtype=torch.float64)])

    def apply(self, action: list[float], spent: float) -> None:
        """Set radii within public bounds, weights by a softmax, and sigma by the damped step."""
        pairs = len(self._facts.pair_sizes)
        self._radii = tuple(
            min(max(start * math.exp(min(value, 50.0)), self.radius_floor), self.radius_cap)
            for start, value in zip(self._start_radii, action[:pairs], strict=True)
        )
        highest = max(action[pairs : 2 * pairs])
        shares = [math.exp(value - highest) for value in action[pairs : 2 * pairs]]
        least = _SMALLEST_WEIGHT**2 * sum(shares) / pairs
        self._weights = normalised([math.sqrt(share + least) for share in shares])
        if self.move_noise:
            self._noise = moved_noise(self._noise or self._start_noise, self._start_noise, action[-1], spent)

    def metrics(self) -> dict[str, float]:
        """The last reward, the weights and the last public loss."""
        figures = super().metrics() | {f"weight_{index}": weight for index, weight in enumerate(self._weights)}
        return figures if math.isnan(self._public_loss) else figures | {"controller_public_loss": self._public_loss}

    def state_dict(self) -> dict[str, Any]:
        """The state, for checkpoints. Public: a function of releases and public data."""
        state = super().state_dict() | {"weights": list(self._weights), "losses": self._losses}
        if self._smooth is not None:
            state["smooth"] = self._smooth
        if not math.isnan(self._public_loss):
            state["public_loss"] = self._public_loss
        if self._before is not None:
            state |= {f"before.{index}": block for index, block in enumerate(self._before)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        super().load_state_dict(state)
        self._weights, self._losses = tuple(state["weights"]), list(state["losses"])
        self._smooth = state.get("smooth")
        self._public_loss = state.get("public_loss", math.nan)
        blocks = sum(key.startswith("before.") for key in state)
        device = self._facts.device
        self._before = [state[f"before.{index}"].to(device) for index in range(blocks)] if blocks else None
        if self._smooth is not None:
            self._smooth = self._smooth.to(device)


mechanism(
    "rldp",
    clipper="per_pair",
    controller="rldp",
    options={"pair_radius": 0.1, "noise_unit": "pair", "stabiliser": 1e-6},
    clips="each LoRA pair to its own moving radius (RLDP as provable)",
    adds="Gaussian noise with moving weights under a constant joint multiplier sigma / sqrt(pairs)",
    adapts="a SAC agent that reads releases and public data",
    costs="nothing (design A), or the share 'statistics_share' of the budget (design AB)",
)


def bounded_statistics(
    gradients: Gradients, radii: tuple[float, ...], public_loss: float, bound: float
) -> torch.Tensor:
    """Statistics of each unit, (units, pairs + 1) float64, every row of l2 norm at most 1.

    The first entries are +-1/2 for each pair (clipped or not), scaled to a joint norm of sqrt(1/2). The last is the
    loss minus the public loss, clipped to +-bound and scaled to sqrt(1/2) at most. The spec subtracts each record's
    loss under the frozen model; the public loss needs no second forward pass. Until it is known the entry is 0.
    """
    import torch

    norms = gradients.norms()
    counts = ((norms > norms.new_tensor(radii)).double() - 0.5) * math.sqrt(2 / len(radii))
    if math.isnan(public_loss):
        loss = norms.new_zeros(len(norms))
    else:
        loss = (gradients.losses() - public_loss).clamp(-bound, bound) / bound * math.sqrt(0.5)
    return torch.cat([counts, loss[:, None]], dim=1) * (1 - 1e-12)


def _bounded_sum(gradients: Gradients, radii: tuple[float, ...], public_loss: float, bound: float) -> torch.Tensor:
    return bounded_statistics(gradients, radii, public_loss, bound).sum(dim=0)


def released_features(
    observation: Observation, before: list[torch.Tensor] | None, expected_batch_size: float, design: str
) -> torch.Tensor:
    """Features of one release, at no cost (float64): per pair, signal and direction; design AB adds its statistics.

    The signal (||G||^2 - s^2 d) / (B C)^2 is an unbiased estimate of how aligned the clipped gradients are: G is the
    pair's noisy sum, of d numbers with noise of deviation s, C the radius that it was clipped to and B the expected
    batch size. The direction is the cosine of G with that of the previous release; 0 for the first one.
    """
    import torch

    released = observation.released
    knobs, blocks = released.knobs, released.blocks
    norms = torch.stack([block.norm().double() for block in blocks])
    deviations = norms.new_tensor(released.deviations)
    sizes = norms.new_tensor([block.numel() for block in blocks])
    signal = (norms.square() - deviations.square() * sizes) / (expected_batch_size * norms.new_tensor(knobs.radii)) ** 2
    if before is None:
        direction = torch.zeros_like(norms)
    else:
        old = torch.stack([block.norm().double() for block in before])
        dots = torch.stack([(new @ past).double() for new, past in zip(blocks, before, strict=True)])
        direction = dots / (norms * old).clamp(min=1e-300)
    parts = [signal, direction]
    if design == "AB":
        assert released.statistics is not None
        parts.append(released.statistics.double() / expected_batch_size)
    return torch.cat(parts)
