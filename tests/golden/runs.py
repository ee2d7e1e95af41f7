"""Golden runs: short CPU runs with a fixed seed, at least one for each part whose ``VERSION`` names results.

Each gives a few figures that a change of the part moves: norms of what was released, knobs, losses, draws, epsilons.
Gradients and weights are made by numpy, so that no library's own initialisation decides a figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch

from dptune.audit.games.step import audit_step
from dptune.audit.games.updates import audit_updates
from dptune.audit.one_run import one_run
from dptune.audit.text.membership import membership_report
from dptune.core.settings import Lora, Optimizer, Pretraining, ShardTuning, UpdateRule
from dptune.mechanisms.agents.linear_agent import PARAMETERS
from dptune.mechanisms.interfaces import Observation, RunFacts
from dptune.mechanisms.planning import Schedule, calibrated, fitted, price
from dptune.mechanisms.registry import MECHANISMS, build, takes_noise
from dptune.policy.environments.baselines import UcbVi, run_ucb_vi
from dptune.policy.environments.environment import Environment
from dptune.policy.environments.training import train as train_policy
from dptune.policy.method import NAME, Dppg
from dptune.policy.schedules import PolicyTraining
from dptune.policy.tenants.training import Experience, meta_updates
from dptune.policy.user_updates import noisy_means
from dptune.prediction.ensemble import _fit as fit_shard
from dptune.prediction.mixture import law, renyi_weights
from dptune.prediction.protocols import FixedMixture
from dptune.privacy.accountants import PUBLISHED_ACCOUNTANTS, epsilons, published_epsilon
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader
from dptune.records.reading.record import Labelled, PromptTarget, Record, Text
from dptune.training.data import Bins, Tokens, encode, truncated_sample
from dptune.training.evaluation import mean_loss
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.per_sample import PairGradients
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.models.pretrain import pretrain
from dptune.training.privacy_units import PrivacyUnits, Turn
from dptune.training.run import StepReport
from dptune.training.spec import RunSpec, TrainingPlan, header_of
from dptune.training.tokens.encoding import encode_labelled, encode_records

Figures = dict[str, float]
_SIZES, _BATCH, _STEPS = (3, 1, 4), 16.0, 12
#: Options with which an agent acts, and learns, within a few steps.
_QUICK: Mapping[str, Mapping[str, Any]] = {
    "rldp": {"interval": 1, "warmup": 2, "rounds": 2},
    "rldp_published": {"interval": 1, "warmup": 2, "rounds": 2},
    "banded": {"bands": 3},
}
#: Steps of a run, if they are fewer. GeoClip adds noise along eigenvectors, and from its second step on those of equal
#: eigenvalues hang on a machine's rounding: only with little noise are further steps equal everywhere.
_FEWER = {"geoclip": 1}
#: Further options of a mechanism that run other code than its defaults: name, what it is, options.
_BRANCHES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("rldp", "agent linear", {"agent": "linear"}),
    ("rldp", "design AB", {"design": "AB"}),
    ("rldp", "a random policy", {"policy": "random"}),
    ("quantile", "its own noise of counts", {"count_noise": 6.0}),
    ("lmo_dp", "preset T2", {"preset": "T2"}),
    ("lmo_dp", "preset T5", {"preset": "T5"}),
    ("geoclip", "many steps", {"noise_multiplier": 1e-4}),
    ("geoclip", "by axes", {"noise_multiplier": 1e-4, "directions": "axes"}),
    ("geoclip", "the whole covariance", {"noise_multiplier": 1e-4, "rank": 0, "explore": 0.0}),
    ("per_pair", "noise by pair", {"noise_unit": "pair"}),
    ("banded", "square roots", {"strategy": "sqrt"}),
)


@dataclass(frozen=True)
class GoldenRun:
    """A golden run.

    Attributes:
        uses: the parts whose change may move it, by their names in a cell.
        figures: makes the run, and returns its figures.
    """

    uses: tuple[str, ...]
    figures: Callable[[], Figures]


def parts_of(mechanism: str) -> tuple[str, ...]:
    """The names of a mechanism's three parts, such as "clipper flat"."""
    return tuple(f"{kind} {name}" for kind, name in MECHANISMS[mechanism].parts.items())


def mechanism_figures(name: str, steps: int = _STEPS, **more: Any) -> Figures:
    """Some steps of a mechanism on gradients that are made by hand, without a model."""
    options = dict(_QUICK.get(name, {})) | more
    noise = {"noise_multiplier": 0.8} if takes_noise(name, options) else {}
    mechanism = build(name, noise | {"pairs": len(_SIZES)} | options)
    mechanism = fitted(mechanism, Schedule(0.05, _STEPS, 1e-5))
    mechanism.start(RunFacts(_SIZES, torch.device("cpu"), _BATCH, 0.05, _STEPS, 2.0, 1e-5))
    zeros = [torch.zeros(size, dtype=torch.float64) for size in _SIZES]
    entropy, rng, size, norms = FixedSeed(3), np.random.default_rng(5), sum(_SIZES), []
    for step in range(steps):
        rows = 0.4 * rng.standard_normal((12, size)) * np.exp(rng.standard_normal((12, 1))) + 0.2
        pieces = torch.tensor(rows, dtype=torch.float32).split(list(_SIZES), dim=1)
        losses = torch.tensor(3 - 0.1 * step + rng.random(12))
        batches = [PairGradients(list(pieces), losses, torch.full((12,), 5.0, dtype=torch.float64))]
        knobs = mechanism.knobs()
        clipped = None if mechanism.controller.raw_inputs else mechanism.exact_sums(batches, zeros, knobs)
        released = mechanism.privatise(batches, zeros, knobs, _BATCH, entropy, row=step)
        norms.append(float(torch.cat(released.gradient).norm()))
        figures = {key: [0.5 + 0.1 * step] * len(_SIZES) for key in ("product", "momentum", "second_moment")}
        public = 3 - 0.05 * step

        def public_loss(public: float = public) -> float:
            return public

        def norms_of_adapters(figures: Any = figures) -> Any:
            return figures

        mechanism.controller.observe(Observation(step + 1, released, 0.05 * step, public_loss, norms_of_adapters))
    knobs = released.knobs
    release = mechanism.release(knobs, 0.05, row=steps - 1)
    found = {
        "first released norm": norms[0],
        "last released norm": norms[-1],
        "sum of released norms": sum(norms),
        "sum of radii": float(sum(knobs.geometry.radii if knobs.geometry else knobs.radii)),
        "noise multiplier": knobs.noise_multiplier,
        "sum of deviations": float(sum(released.deviations)),
        "charged multiplier": release.noise_multiplier,
        "charged sensitivity": release.sensitivity,
    }
    return found if clipped is None else found | {"norm of clipped sums": float(torch.cat(clipped).norm())}


def _tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **shape, **none)).requires_grad_(False)
    model = attach_lora(model, Lora(rank=4, alpha=8, dropout=0.0), init_seed=7)
    rng = np.random.default_rng(2)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            drawn = torch.from_numpy((0.3 if "lora" in name else 0.2) * rng.standard_normal(tuple(weight.shape)))
            weight.copy_(drawn + (1.0 if ".ln_" in name and name.endswith("weight") else 0.0))
    return model.train()


def _records() -> tuple[Tokens, PrivacyUnits]:
    rng = np.random.default_rng(4)
    rows = [rng.integers(1, 97, size=rng.integers(4, 13)).astype(np.int32) for _ in range(8)]
    return Tokens(rows=rows, padding=0, width=14), PrivacyUnits.of("record", np.arange(8), 1)


def training_figures(mechanism: str = "static", options: Mapping[str, Any] | None = None, **rule: Any) -> Figures:
    """Six private steps of a tiny GPT-2 by the whole training loop, ledger included."""
    (tokens, units), entropy = _records(), FixedSeed(6)
    model = _tiny_gpt2()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    made = build(mechanism, {"noise_multiplier": 0.7, "pairs": len(lora_pairs(model))} | dict(options or {}))
    clients = made.clipper.federation
    if clients is not None:
        units = PrivacyUnits.clients(clients.clients, np.arange(8) * 7919)
    expected = len(units) * 0.5
    plan = TrainingPlan(
        sample_rate=0.5,
        expected_batch_size=expected,
        steps=6,
        learning_rate=0.01,
        warmup_steps=2,
        checkpoint_every=4,
        physical_batch_size=4,
        rule=UpdateRule(**rule),
    )
    reports: list[tuple[dict[str, float], dict[str, float]]] = []

    def on_step(report: StepReport) -> None:
        reports.append((dict(report.public), dict(report.private)))

    spec = RunSpec(
        model, tokens, units, made, plan, header_of(made, units, entropy, delta=1e-5, run_id="golden"), public=tokens
    )
    with TemporaryDirectory() as folder:
        ledger = train(spec, Path(folder), entropy, on_step)
        ledger.close()
    moved = [weight.detach() - start[name] for name, weight in model.named_parameters() if name in start]
    released = [public["gradient_norm"] for public, _ in reports if "gradient_norm" in public]
    return {
        "norm of the weights' change": float(torch.cat([one.flatten() for one in moved]).norm()),
        "largest change of a weight": float(max(one.abs().max() for one in moved)),
        "loss at the end": mean_loss(model, tokens, 8),
        "sum of released norms": float(sum(released)),
        "sum of private figures": float(sum(sum(private.values()) for _, private in reports)),
        "releases": float(ledger.releases),
    }


class _Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id, pad_token_id = 0, 0

    def __call__(self, texts: str | list[str], **_: Any) -> dict[str, Any]:
        whole = [[1 + ord(letter) % 96 for letter in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": whole[0] if isinstance(texts, str) else whole}


def token_figures() -> Figures:
    """Rows of texts, of prompts with targets, and of texts with labels: ends, cuts, and what counts in the loss."""
    contents = {
        "texts": [Text("a short one"), Text("a text that is cut, for it is too long")],
        "targets": [PromptTarget("a prompt:", " its target"), PromptTarget("a prompt that is cut", " here")],
        "labels": [Labelled("good", "yes"), Labelled("not good at all, and too long", "no")],
    }
    found: Figures = {}
    for name, some in contents.items():
        records = [Record(content, 0, "golden", row) for row, content in enumerate(some)]
        if name == "labels":
            rows, cut = encode_labelled(records, _Letters(), 24, ("no", "yes"))
        else:
            rows, cut = encode_records(records, _Letters(), 24)
        weighted = [float((np.arange(1, len(row) + 1) * row).sum()) for row in rows]
        found |= {f"tokens of {name}": sum(map(len, rows)), f"sum of {name}": sum(weighted), f"cut {name}": cut.sum()}
    (texts, _) = encode([text.text for text in contents["texts"]], _Letters(), 24)  # many at a time, as the pipeline
    return {name: float(value) for name, value in found.items()} | {
        "sum of a batch": float(np.concatenate(texts).sum())
    }


def sampler_figures() -> Figures:
    """Poisson batches of records, of units of many records, of clients, and of one group of four."""
    entropy, rng = FixedSeed(8), np.random.default_rng(9)
    keys = rng.integers(0, 4000, size=20_000)
    units = {
        "records": PrivacyUnits.of("record", np.arange(20_000), 1),
        "patients": PrivacyUnits.of("patient", keys, 3),
        "clients": PrivacyUnits.clients(500, keys),
    }
    found: Figures = {}
    for name, one in units.items():
        batch = one.draw(0.13, entropy)
        records = np.concatenate(batch)
        found |= {f"units of {name}": len(one), f"drawn of {name}": len(batch), f"sum of {name}": float(records.sum())}
    turn = units["patients"].draw(0.5, entropy, Turn(1, 4, "golden"))
    return found | {"drawn of one group": len(turn), "sum of one group": float(np.concatenate(turn).sum())}


def other_sampler_figures() -> Figures:
    """A batch that was cut, and two epochs of balls in bins, with equal keys among the units'."""
    entropy = FixedSeed(10)
    cut = truncated_sample(entropy, 20_000, 0.13, 2500)
    bins = Bins.toss(16, np.arange(5000) // 2, entropy)
    epochs = [bins.of_epoch(epoch) for epoch in (0, 1)]
    found = {"units of the cut batch": len(cut), "sum of the cut batch": float(cut.sum())}
    return found | {f"epoch {n}": float(one @ np.arange(5000)) for n, one in enumerate(epochs)}


def _published_compositions() -> dict[str, Composition]:
    """For each published accountant, releases that it prices."""
    gaussian: Composition = Counter({Release(0.02, 0.9): 300, Release(0.01, 1.3, sensitivity=1.2): 100})
    plrvo = InverseScale(gamma=(4e4, 3e-5))
    lmo = InverseScale(gamma=(1.0, 0.05), exponential=0.02, uniform=(0.1, 0.2))
    token = Release.of_token(3.0, 0.01, claims=(("order", 3.0), ("renyi", 0.02)))

    def mixture(law: InverseScale, **more: Any) -> Release:
        return Release(0.01, 1 / law.score_bound, noise="laplace_mixture", law=law, **more)

    of_plrvo: Composition = Counter({mixture(plrvo, claims=(("dimension", 26010.0),)): 300})
    return {
        "gdp_clt": gaussian,
        "bandmf": gaussian,
        "dppg": Counter({Release(1.0, 4.0): 20}),
        "plrvo": of_plrvo,
        "plrvo_one_coordinate": of_plrvo,
        "lmo_dp": Counter({mixture(lmo): 50}),
        "pure": Counter({mixture(lmo, norm="l1"): 50}),
        "pmixed": Counter({token: 100}),
    }


def accountant_figures() -> Figures:
    """What some releases cost by each published accountant, and by the two that prove something."""
    found: Figures = {}
    compositions = _published_compositions()
    for accountant in PUBLISHED_ACCOUNTANTS:
        found[accountant] = published_epsilon(accountant, compositions[accountant], 1e-5)
    for name in ("gdp_clt", "plrvo", "lmo_dp", "pure", "pmixed"):
        found[f"certified, as {name}"] = epsilons(compositions[name], 1e-5).certified
    return found


def calibration_figures(mechanism: str, accounting: str, **options: Any) -> Figures:
    """The noise of a mechanism that meets a budget of 2, and what its releases then cost."""

    def build_with(noise: float) -> Any:
        return build(mechanism, options | {"noise_multiplier": noise})

    schedule = Schedule(0.02, 200, 1e-5)
    found = calibrated(build_with, 2.0, schedule, accounting)
    prices = price(found.mechanism, schedule, found.renyi_filter)
    return {"noise multiplier": found.mechanism.noise.noise_multiplier} | {
        key: value for key, value in prices.to_dict().items() if np.isfinite(value)
    }


def policy_figures() -> Figures:
    """Three updates of DP policy gradient on a pole, with a private critic, and four episodes of private UCB-VI."""
    training = PolicyTraining(users=3, steps=12, updates=3, hidden=4, critic_hidden=4, epochs=2, evaluate_every=3)
    method = Dppg(noise_multiplier=0.8)
    header = RunHeader(NAME, "dppg", "certified", None, 1e-5, "user", 9, leaks=FixedSeed(2).leaks)
    with TemporaryDirectory() as folder:
        state, points = train_policy(Environment("CartPole-v1"), method, training, header, Path(folder), FixedSeed(2))
    values = run_ucb_vi(UcbVi(4, horizon=6, noise_multiplier=0.5, bonus=0.1), FixedSeed(3))
    return {
        "norm of the policy": float(state.policy.double().norm()),
        "norm of the critic": float(state.critic.double().norm()),
        "return": points[-1].mean_return,
        "values of UCB-VI": float(np.sum(values)),
        "certified": method.price(1e-5).certified,
    }


def aggregate_figures() -> Figures:
    """The noisy means that language and tenants' policies release, and the tenants' clipped gradients."""
    rng = np.random.default_rng(11)
    updates = torch.from_numpy(rng.standard_normal((6, 20)))
    (mean,) = noisy_means([updates], (0.7,), (1.1,), 6, FixedSeed(4))
    rows = {"features": (5, 8), "actions": (5, 2), "gains": (5,)}
    own = [Experience(**{name: torch.from_numpy(rng.standard_normal(shape)) for name, shape in rows.items()}), None]
    gradients = meta_updates(torch.full((PARAMETERS,), 0.1, dtype=torch.float64), own, 40.0)
    return {
        "norm of the mean": float(mean.norm()),
        "norm of gradients": float(gradients.norm()),
        "certified": Dppg(noise_multiplier=1.1, critic="none").price(1e-5).certified,
    }


def policy_audit_figures() -> Figures:
    """A white-box audit of one update of DP policy gradient."""
    found = audit_updates(
        Dppg(noise_multiplier=1.0, critic="none"), trials=600, confidence=0.95, delta=1e-5, entropy=FixedSeed(5)
    )
    return {"mu": found.mu_audited, "epsilon": found.epsilon_audited}


def attack_figures() -> Figures:
    """Attacks on scores that are made by hand, and a white-box audit of a step of static."""
    rng = np.random.default_rng(12)
    coins = rng.random(80) < 0.5
    scores = rng.standard_normal(80) + 1.5 * coins
    run = one_run(scores, coins, 1e-5, 0.95)
    report = membership_report(scores[coins], scores[~coins])
    step = audit_step(
        build("static", {"noise_multiplier": 1.0}), trials=600, confidence=0.95, delta=1e-5, entropy=FixedSeed(6)
    )
    return {
        "mu of one run": run.mu_gaussian,
        "epsilon of one run": run.epsilon_audited,
        "area under the curve": report["auc"],
        "mu of a step": step.mu_audited,
        "epsilon of a step": step.epsilon_audited,
    }


def ensemble_figures() -> Figures:
    """The tuning of one shard."""
    (tokens, _), model = _records(), _tiny_gpt2()
    torch.manual_seed(3)
    fit_shard(model, tokens, ShardTuning(epochs=2, batch_size=4, learning_rate=0.01), 0)
    tuned = [weight.detach().flatten() for weight in model.parameters() if weight.requires_grad]
    return {"norm of the weights": float(torch.cat(tuned).norm()), "loss at the end": mean_loss(model, tokens, 8)}


def pretrain_figures() -> Figures:
    """A tiny public model of a few sentences: its tokens, and what it learned."""
    rng, words = np.random.default_rng(14), ("fever", "cough", "rest", "home", "ward")
    texts = [
        " ".join(f"The {words[row]} of day {day}." for day, row in enumerate(rng.integers(0, 5, 6))) for _ in "ab" * 20
    ]
    plan = Pretraining(vocabulary=300, layers=1, width=16, heads=2, max_length=32, epochs=2, batch_size=8)
    with TemporaryDirectory() as folder:
        return pretrain(texts, texts[:4], plan, Path(folder))


def answer_figures() -> Figures:
    """The law of a token of the fixed mixture, and what its tokens cost."""
    protocol = FixedMixture(models=3, tokens=50, epsilon=8.0, unit="shard")
    rng = np.random.default_rng(13)
    logs = torch.log_softmax(torch.from_numpy(2 * rng.standard_normal((4, 9))), -1)
    weights = renyi_weights(logs[0], logs[1:], protocol.alpha, protocol.excess, protocol.slots.share)
    answer = law(logs[0], logs[1:], weights, protocol.slots)
    return {
        "entropy of the answer": float(-(answer * answer.log()).sum()),
        "largest probability": float(answer.max()),
        "sum of weights": float(weights.sum()),
        "renyi of a token": protocol.rdp_per_token,
        "radius": protocol.figures["radius"],
    }


def _trained(**rule: Any) -> GoldenRun:
    """A run of the whole loop with this update rule."""
    named = UpdateRule(**rule)
    average = () if named.average == "none" else (f"average {named.average}",)
    uses = ("loop", "sampler", f"optimizer {named.optimizer}", *average, *parts_of("static"))
    return GoldenRun(uses, partial(training_figures, **rule))


def _loop_of(mechanism: str, **options: Any) -> GoldenRun:
    uses = ("loop", "sampler", "optimizer adamw", *parts_of(mechanism))
    return GoldenRun(uses, partial(training_figures, mechanism, options))


def _calibrated(mechanism: str, accounting: str, **options: Any) -> GoldenRun:
    return GoldenRun(
        ("accountant", *parts_of(mechanism)), partial(calibration_figures, mechanism, accounting, **options)
    )


#: Every golden run by its name in ``figures.yaml``.
RUNS: dict[str, GoldenRun] = {
    **{
        f"mechanism {name}": GoldenRun(parts_of(name), partial(mechanism_figures, name, _FEWER.get(name, _STEPS)))
        for name in MECHANISMS
    },
    **{
        f"mechanism {name}, {what}": GoldenRun(parts_of(name), partial(mechanism_figures, name, **options))
        for name, what, options in _BRANCHES
    },
    "training": _trained(),
    "training, falling rate": _trained(schedule="cosine", final_share=0.1),
    **{f"training by {name}": _trained(optimizer=name) for name in get_args(Optimizer) if name != "adamw"},
    "training by sgd": _trained(optimizer="sgd", momentum=0.5),
    "training to a moving average": _trained(average="ema", average_decay=0.8),
    "training to the mean of the tail": _trained(average="tail", average_share=0.5),
    "training per pair": _loop_of("per_pair"),
    "training with correlated noise": _loop_of("banded", bands=2),
    "training of clients": _loop_of("dp_lora_fed", clients=6, clients_per_round=3),
    "tokens": GoldenRun(("loop",), token_figures),
    "sampler": GoldenRun(("sampler",), sampler_figures),
    "other samplers": GoldenRun(("sampler",), other_sampler_figures),
    "accountant": GoldenRun(("accountant",), accountant_figures),
    "budget of static, certified": _calibrated("static", "certified"),
    "budget of static, published": _calibrated("static", "published"),
    "budget of rldp, behind a filter": _calibrated("rldp", "certified", move_noise=True),
    "budget of banded": _calibrated("banded", "certified"),
    "budget of laplace": _calibrated("laplace", "certified"),
    "budget of plrvo": _calibrated("plrvo", "certified"),
    "budget of lmo_dp": _calibrated("lmo_dp", "certified"),
    "policy gradient": GoldenRun(("policy gradient",), policy_figures),
    "means of language and tenants": GoldenRun(("rlhf", "tenants"), aggregate_figures),
    "policy audit": GoldenRun(("policy audit",), policy_audit_figures),
    "attacks": GoldenRun(("attacks",), attack_figures),
    "ensembles": GoldenRun(("ensembles",), ensemble_figures),
    "scores": GoldenRun(("scores",), answer_figures),
    "pretrain": GoldenRun(("pretrain",), pretrain_figures),
}
