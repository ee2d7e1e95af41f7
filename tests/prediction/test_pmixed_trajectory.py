"""PMixED equals its transcription, token by token: the fixed mixture as answered, Algorithm 1 as scored.

Laws are hostile (a token that only a private model says, no numbers, nearly equal), and in the middle the process dies
between the charge of a token and its draw: the ledger is opened again, and that token is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transcriptions import Words

from dptune.prediction import predictor
from dptune.prediction import predictor as module
from dptune.prediction.predictor import PrivatePredictor
from dptune.prediction.protocols import PUBLISHED_ACCOUNTANT, FixedMixture, Published, planned_answers
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_header import RunHeader

MODELS, VOCABULARY, TOKENS, KILL, EPSILON, DELTA, PUBLIC_WEIGHT = 3, 6, 60, 30, 8.0, 1e-5, 0.2
#: The library stops at a relative excess of 1e-6 below the limit, or after 24 rounds.
CLOSE = 1e-5
Law = list[float]


def laws_of(number: int) -> list[Law]:
    """Log-probabilities of the public model, then of each private one, at one token."""
    rng = np.random.default_rng(number)
    logits = rng.standard_normal((1 + MODELS, VOCABULARY)) * (0.1, 1.0, 3.0)[number % 3]
    logits[:, 0] -= (0.0, 40.0)[number % 2]  # a token that the public model hardly ever says
    if number % 4 == 1:
        logits[1, 0] += 60.0  # and a private model nearly always
    if number % 5 == 2:
        logits[2] = logits[0] + 1e-9
    if number % 7 == 3:
        logits[3] = math.nan
    return [[value - math.log(math.fsum(map(math.exp, row))) for value in row] for row in logits.tolist()]


def kept(public: Law, private: Law) -> tuple[Law, Law]:
    """Both laws on the tokens to which the public one gives 2^-40, renormalised; without any mass, the public one."""
    places = [v for v in range(VOCABULARY) if public[v] >= -40 * math.log(2)]

    def on_places(law: Law) -> Law:
        total = math.fsum(math.exp(law[v]) for v in places)
        return [math.exp(law[v]) / total if v in places else 0.0 for v in range(VOCABULARY)]

    p0 = on_places(public)
    if not all(map(math.isfinite, private)) or math.fsum(math.exp(private[v]) for v in places) < 1e-200:
        return p0, p0
    return p0, on_places(private)


def moment(p: Law, q: Law, order: float) -> float:
    """E_order(p, q) - 1 = sum q ((p / q)^order - 1); infinite if only p says a token."""
    if any(x > 0 and y == 0 for x, y in zip(p, q, strict=True)):
        return math.inf
    return math.fsum(
        y * math.expm1(order * math.log(x / y)) if x > 0 else -y for x, y in zip(p, q, strict=True) if y > 0
    )


def largest(feasible: Callable[[float], bool]) -> float:
    """The largest l in [0, 1] that is feasible, by halving."""
    low, high = 0.0, 1.0
    if feasible(1.0):
        return 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if feasible(middle) else (low, middle)
    return low


def budget(order: float) -> float:
    """The Renyi epsilon of all tokens (Balle et al. 2020)."""
    return EPSILON - math.log((order - 1) / order) + (math.log(DELTA) + math.log(order)) / (order - 1)


def renyi_weight(p0: Law, p: Law, order: float, excess: float, share: float) -> float:
    """The largest l with D(p0 + share l (p - p0), p0) within its radius, in both directions."""

    def feasible(weight: float) -> bool:
        mixed = [y + share * weight * (x - y) for x, y in zip(p, p0, strict=True)]
        return moment(mixed, p0, order) <= excess and moment(p0, mixed, order) <= excess

    return largest(feasible)


def record_weight(p0: Law, p: Law, order: int, excess: float, share: float) -> float:
    """The largest l with sum_k C(order, k) (1 - u)^(1 - k) (2 u l)^k sum |p - p0|^k / p0^(k - 1) within the excess."""
    moments = [
        math.fsum(abs(x - y) ** k / y ** (k - 1) for x, y in zip(p, p0, strict=True) if y > 0)
        for k in range(2, order + 1)
    ]

    def feasible(weight: float) -> bool:
        terms = (
            math.comb(order, k) * (1 - share) ** (1 - k) * (2 * share * weight) ** k * moments[k - 2]
            for k in range(2, order + 1)
        )
        return math.fsum(terms) <= excess

    return largest(feasible)


def at(law: Law, place: float) -> int:
    """The token at a place in (0, 1) of the cumulative sum."""
    seen, total = 0.0, sum(law)
    for token, chance in enumerate(law):
        seen += chance
        if seen > place * total:
            return token
    return len(law) - 1


class Asked:
    """A model and adapters, of which only sizes are asked."""

    def eval(self) -> Asked:
        return self

    def __len__(self) -> int:
        return MODELS

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=np.zeros((VOCABULARY, 1)))


@pytest.mark.parametrize(("unit", "order"), [("shard", 2.5), ("record", 3.0)])
def test_answers_are_those_of_the_fixed_mixture(
    unit: str, order: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = FixedMixture(
        epsilon=EPSILON, delta=DELTA, alpha=order, tokens=TOKENS, models=MODELS, public_weight=PUBLIC_WEIGHT, unit=unit
    )
    header = RunHeader("pmixed", PUBLISHED_ACCOUNTANT, "certified", EPSILON, DELTA, unit, MODELS)
    ours, theirs, weights, asked = Words(3), Words(3), [], [0]

    def passed(_model: Any, _adapters: Any, _context: Any, rows: list[int]) -> torch.Tensor:
        laws = laws_of(asked[0])
        return torch.tensor([laws[1 + row] for row in rows], dtype=torch.float64)

    real = module.weights_of

    def watched(*given: Any, **named: Any) -> torch.Tensor:
        weights.append(float(real(*given, **named)))
        return torch.tensor(weights[-1])

    monkeypatch.setattr(module, "next_log_probabilities", passed)
    monkeypatch.setattr(module, "weights_of", watched)
    nothing: Any = Asked()
    ledger = Ledger.create(tmp_path / "ledger.jsonl", header, planned_answers(protocol))
    predictor = PrivatePredictor(nothing, nothing, protocol, ledger, ours)
    s = PUBLIC_WEIGHT + (1 - PUBLIC_WEIGHT) / MODELS
    u, e = (1 - PUBLIC_WEIGHT) / MODELS / s, budget(order) / TOKENS
    excess, from_private = math.expm1((order - 1) * e) / s, 0
    for number in range(TOKENS - 1):
        asked[0] = number
        if number == KILL:
            ledger.charge(protocol.release)  # and the process dies
            ledger.close()
            ledger = Ledger.resume(tmp_path / "ledger.jsonl", planned_answers(protocol))
            predictor = PrivatePredictor(nothing, nothing, protocol, ledger, ours)
        answered = predictor.answer([0])
        pick, coin, *places = (((int(word) >> 12) + 0.5) * 2.0**-52 for word in theirs.words(4))
        laws = laws_of(number)
        p0, p = kept(laws[0], laws[1 + int(pick * MODELS)])
        weight = (
            renyi_weight(p0, p, order, excess, u) if unit == "shard" else record_weight(p0, p, int(order), excess, u)
        )
        assert weight * (1 - CLOSE) <= weights[-1] <= weight * (1 + 1e-12)
        private = coin < (1 - PUBLIC_WEIGHT) * weight
        from_private += private
        assert answered.token == (at(p, places[1]) if private else at(p0, places[0]))
        assert answered.tokens_left == TOKENS - 1 - number - (number >= KILL)
    assert 5 < from_private < TOKENS - 5


@pytest.mark.parametrize("subsample", [0.4, 0.9])
def test_published_laws_are_those_of_algorithm_1(subsample: float) -> None:
    """Samples with recorded coins, the empty one among them; beta* of theorem 5.1 and its amplification, by halving."""
    order = 3
    protocol = Published(epsilon=EPSILON, delta=DELTA, alpha=order, tokens=64, models=MODELS, subsample=subsample)
    numbers = [number for number in range(40) if number % 7 != 3]  # without laws that are no numbers
    laws = torch.tensor([laws_of(number) for number in numbers], dtype=torch.float64)
    record = predictor._Record(laws[:, 0], laws[:, 1:].transpose(0, 1), torch.zeros(len(numbers), dtype=torch.long))
    by_size = predictor._published_weights(protocol, record)
    parts = predictor._sampled_parts(protocol, by_size, np.random.default_rng(5))
    coins, sizes = np.random.default_rng(5), set()
    e = budget(order) / 64
    for place, number in enumerate(numbers):
        drawn = coins.random(MODELS)
        chosen = [model for model in range(MODELS) if drawn[model] < subsample]
        sizes.add(len(chosen))
        rows = [[math.exp(value) for value in row] for row in laws_of(number)]
        p0, expected = rows[0], [0.0] * MODELS
        for model in chosen:
            excess = math.expm1((order - 1) * order * beta(e, len(chosen), order, subsample))
            expected[model] = renyi_weight(p0, rows[1 + model], order, excess, 1.0) / len(chosen)
        assert parts[:, place].tolist() == pytest.approx(expected, rel=CLOSE, abs=1e-12)
    assert sizes == set(range(MODELS + 1)) or subsample > 0.5


def test_published_laws_of_an_infinite_order_are_those_of_appendix_b() -> None:
    """All models everywhere, each with the largest weight that keeps every token within e^r of the public law."""
    protocol = Published(epsilon=EPSILON, delta=DELTA, alpha=math.inf, tokens=64, models=MODELS, subsample=1.0)
    numbers = [number for number in range(40) if number % 7 != 3]
    laws = torch.tensor([laws_of(number) for number in numbers], dtype=torch.float64)
    record = predictor._Record(laws[:, 0], laws[:, 1:].transpose(0, 1), torch.zeros(len(numbers), dtype=torch.long))
    by_size = predictor._published_weights(protocol, record)
    assert list(by_size) == [MODELS]
    r = math.log(MODELS * math.exp(EPSILON / 64) + 1 - MODELS) / 2
    for place, number in enumerate(numbers):
        rows = [[math.exp(value) for value in row] for row in laws_of(number)]
        for model in range(MODELS):

            def feasible(weight: float, p0: Law = rows[0], p: Law = rows[1 + model]) -> bool:
                return all(abs(math.log(((1 - weight) * y + weight * x) / y)) <= r for x, y in zip(p, p0, strict=True))

            assert float(by_size[MODELS][model, place]) == pytest.approx(largest(feasible), rel=CLOSE, abs=1e-12)


def beta(e: float, models: int, order: int, subsample: float) -> float:
    """beta*: the largest whose amplified epsilon is within e (theorem 5.1 and appendix C.4)."""

    def claimed(beta: float, k: int) -> float:
        if models == 1:
            return beta * k
        return math.log((models - 1) / models + math.exp((k - 1) * 4 * beta * k) / models) / (k - 1)

    def amplified(beta: float) -> float:
        total = (1 - subsample) ** (order - 1) * (1 + (order - 1) * subsample)
        for k in range(2, order + 1):
            total += (
                math.comb(order, k)
                * (1 - subsample) ** (order - k)
                * subsample**k
                * math.exp((k - 1) * claimed(beta, k))
            )
        return math.log(total) / (order - 1)

    return largest(lambda one: amplified(one) <= e)
