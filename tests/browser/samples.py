"""Pages with several models, mechanisms, seeds and epsilons, from figures that are made up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register
from tasks.report import policy, prediction
from tasks.report.claims import GUARANTEE
from tasks.report.experiment import write_report
from tasks.report.page import write_index

_LONG = "a_label_of_ones_own_that_is_far_too_long_for_a_column_of_a_table"
#: Perplexity at epsilon 1 of each mechanism; the learning rate does not matter here.
MECHANISMS = {"static": 2.45, "quantile": 2.40, "rldp": 2.405, "rldp_published": 2.31, _LONG: 2.5, "nonprivate": 2.19}
_LEAKS = ["raw medians of gradient norms (warm-up radii)", "raw quartiles and moments of gradient norms (state)"]


def result(mechanism: str, budget: float | None, seed: int, model: str = "small", **changes: Any) -> dict[str, Any]:
    """The result of a cell; those of "rldp_published" have no certified epsilon."""
    leaks = _LEAKS if mechanism == "rldp_published" else ["gradients without noise"] if budget is None else []
    found = MECHANISMS[mechanism] + 0.004 * seed - 0.02 * ((budget or 1) - 1) ** 0.5
    epsilon: Any = "inf" if leaks else (budget or 0) * 0.99992
    published: Any = "inf" if budget is None else 0.45 * budget
    prices = {"epsilon_published": published, "epsilon_noise_only": epsilon, "epsilon_certified": epsilon}
    history = [
        {"step": n, "releases": n, "public_perplexity": 2.8 + n / 1000, "eval_sample_perplexity": 2.6 - n * 0.002}
        | {key: value if value == "inf" else value * n / 100 for key, value in prices.items()}
        for n in (25, 50, 75, 100)
    ]
    knobs = [
        {"releases": n, "noise_multiplier": 1 + n / 1000, "controller_reward": n % 7 / 7}
        | {f"radius_{pair}": 0.1 + (n + pair) % 5 for pair in range(4)}
        for n in range(0, 100, 8)
    ]
    made = {
        "label": f"{model}.{mechanism}.{'' if budget is None else f'eps{budget:g}.'}seed{seed}",
        "model": model,
        "mechanism": mechanism,
        "budget_epsilon": budget,
        "seed": seed,
        "unit": "record",
        "units": 4559,
        "delta": 1e-5,
        "accounting": "published" if mechanism == "rldp_published" else "certified",
        "telemetry": "research",
        "guarantee": f"No guarantee: {'; '.join(leaks)}." if leaks else GUARANTEE["research"],
        "data": "SYNTHETIC private cohort (made up for a test); no real patient",
        "synthetic": True,
        "noise_multiplier": 1.1 if budget else 0.0,
        "sample_rate": 0.014,
        "releases": 100,
        "planned_releases": 100,
        **prices,
        "leaks": leaks,
        "before": {"public_perplexity": 2.8, "eval_perplexity": 2.584},
        "after": {"public_perplexity": 2.9, "eval_perplexity": found},
        "history": history,
        "pairs": [f"model.{n}.attention.c_attn" for n in range(4)],
        "knobs": knobs if mechanism == "rldp" else knobs[:1],
        "agent": mechanism == "rldp",
        "seconds": 12.3,
        "learning_rate": 0.005,
    }
    return made | changes


def grid(
    epsilons: tuple[float, ...] = (1.0, 2.0, 8.0), seeds: tuple[int, ...] = (0, 1, 2), **changes: Any
) -> list[Any]:
    """A cell of every mechanism, epsilon and seed."""
    return [
        result(mechanism, budget, seed, **changes)
        for mechanism in MECHANISMS
        for budget in ((None,) if mechanism == "nonprivate" else epsilons)
        for seed in seeds
    ]


def audit(one: dict[str, Any]) -> dict[str, Any]:
    """An audit of a cell that found nothing."""
    rates = [0.0, 0.05, 0.2, 0.6, 1.0]
    score = {"auc": 0.52, "auc_chance_deviation": 0.03, "members": 100, "non_members": 100}
    score |= {"roc": {"false_positive_rate": rates, "true_positive_rate": [0.0, 0.06, 0.25, 0.6, 1.0]}}
    power = "an epsilon of 3.3 or more is refuted in 19 of 20 audits at best"
    prices = {key: one[key] for key in ("epsilon_published", "epsilon_noise_only", "epsilon_certified")}
    step = {"mu_audited": 1.2, "mu_certified": 1.29, "epsilon_audited": 2.2, "epsilon_certified": 5.9}
    step |= {"mu_detectable": 1.36, "epsilon_refutable": 6.23}
    return prices | {
        "label": one["label"],
        "telemetry": "research",
        "confidence": 0.95,
        "alarm_confidence": 0.9999,
        "delta": 1e-5,
        "violations": [],
        "one_run": {
            "epsilon_audited": 0.12,
            "most": 4.05,
            "correct": 140,
            "guesses": 256,
            "epsilon_refutable": 3.88,
            "power": power,
        },
        "canaries": {"calibrated": score},
        "membership": {"likelihood": score, "calibrated": score},
        "exposure": {"mean": 2.1, "chance": 1.4, "most": 7.0, "possible": 7.0},
        "extraction": {"verbatim": 0, "recited": 0}
        | {f"jaccard_{n}{chance}": 0.1 for n in (1, 2) for chance in ("", "_chance")},
        "step": step | {"epsilon_published": 10.3, "power": power},
    }


def write_pages(data: Path) -> None:
    """A report, a page on prediction, one on policies, and the index, in folders of ``data``."""
    results = grid()
    audits = [audit(one) for one in results if one["seed"] == 0]
    names = {one["label"]: f"{one['label']}-0a1b2c3d" for one in results}
    write_report(results, data / "report", "made up", audits, cells=names)
    (data / "prediction").mkdir()
    prediction.write_page(_prediction(), data / "prediction")
    (data / "policy").mkdir()
    policy.write_page(
        [_policy(label, seed) for label in ("l2", "kl", "ppo") for seed in (0, 1)], 1e-5, {}, data / "policy"
    )
    header = RunHeader("static", "gdp_clt", "certified", 8.0, 1e-5, "patient_nbr", 4559, data=str(results[0]["data"]))
    Register(data / "spent.jsonl").add_run("made up", header, Counter({Release(0.014, 0.8): 72}))
    write_index(data)


def _prediction() -> dict[str, Any]:
    epsilons = {"epsilon_published": 2.0, "epsilon_noise_only": 2.0, "epsilon_certified": 2.0}
    scores: dict[str, float] = {"perplexity_per_block": 2.6, "private_weight": 0.3}
    rows: list[dict[str, Any]] = [
        {"label": f"pmixed.{unit}.eps{epsilon}.T{tokens}", "kind": "answers", "unit": unit, "delta": 1e-5}
        | {"tokens": tokens, "models": 8, "alpha": 4, "budget_epsilon": epsilon, "public_weight": 0.2}
        | dict.fromkeys(epsilons, epsilon)
        | scores
        | {"perplexity_pooled": 2.6 - epsilon / 50 - tokens / 20000 + 0.02 * (unit == "shard"), "leaks": []}
        | {"private_weight": 0.2 + epsilon / 40 + tokens / 20000 - 0.05 * (unit == "shard")}
        for unit in ("record", "shard")
        for epsilon in (2.0, 8.0)
        for tokens in (256, 1024)
    ]
    rows.append(
        {"label": "public model", "kind": "public", "unit": "record", **epsilons, **scores, "perplexity_pooled": 2.6}
    )
    for label, perplexity in (("small.nonprivate.seed0", 2.45), ("average of 8", 2.448)):  # lines close together
        open_one = {"label": label, "kind": "nonprivate", "unit": "record", **dict.fromkeys(epsilons, "inf")}
        rows.append({**open_one, **scores, "perplexity_pooled": perplexity})
    training = {"label": "small.static.eps2.seed0", "kind": "training", "unit": "record", "delta": 1e-5}
    rows.append({**training, **epsilons, **scores, "perplexity_pooled": 2.45})
    told = {"name": "made up", "data": "SYNTHETIC", "synthetic": True, "telemetry": "research", "delta": 1e-5}
    serve = {"epsilon": 8, "tokens": 1024, "models": 8, "public_weight": 0.2, "unit": "record"}
    return told | {"records": 8, "served": "data/ensembles/x", "serve": serve, "rows": rows}


def _policy(label: str, seed: int) -> dict[str, Any]:
    private = label != "ppo"
    points = [{"users": 8 * n, "update": n, "mean_return": 20.0 + n * (1 + seed) + len(label)} for n in range(1, 6)]
    epsilon: Any = 4.38 if private else "inf"
    return {
        "study": "cartpole",
        "environment": "CartPole-v1",
        "options": {},
        "label": label,
        "group": label,
        "kind": "dppg" if private else "ppo",
        "training": {
            "algorithm": "l2" if label == "l2" else "kl",
            "users": 8,
            "steps": 200,
            "updates": 5,
            "seed": seed,
        },
        "method": {"critic": "none", "noise_multiplier": 1.0} if private else None,
        "extra": {},
        "users": 40,
        "points": points,
        "final_return": points[-1]["mean_return"],
        "epsilon_published": epsilon,
        "epsilon_noise_only": epsilon,
        "epsilon_certified": epsilon,
        "leaks": [],
    }
