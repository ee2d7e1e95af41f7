"""What is compared, by which names, and what the page says of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pipeline import write_params

from dptune.core.errors import ConfigError
from dptune.core.files import write_text
from dptune.prediction.deployment import deploy, has_answered
from dptune.prediction.ensemble import read_manifest, write_manifest
from dptune.prediction.protocols import FixedMixture
from dptune.privacy.ledger_file import read_ledger
from dptune.training.models.model import load_tokenizer
from tasks.experiment.preparation import token_file
from tasks.mlflow import tracking
from tasks.paths import EVAL, PREDICTION
from tasks.prediction.answers import publish_answers, score
from tasks.prediction.ensembles import (
    EnsemblePlan,
    close_plan,
    open_plan,
    plans,
    scored_protocols,
    served_protocol,
    shard_tokens,
    tokens_of,
    tune,
)
from tasks.report.prediction import (
    METRIC,
    PAGE,
    PICTURE,
    _first_orders,
    _fixed_settings,
    _is_held,
    comparisons,
    prediction,
    write_page,
)
from tasks.settings.params import load_settings

DELTA = 1e-5


def test_the_repositorys_protocols_can_be() -> None:
    from tiny_pipeline import ROOT

    chosen = load_settings(ROOT / "params.yaml").prediction
    for models in chosen.models:
        protocols = scored_protocols(chosen, models, DELTA)
        assert len(protocols) == len(chosen.epsilons) * len(chosen.tokens) * (
            len(chosen.units) * len(chosen.public_weights) + len(chosen.subsamples)
        )
    assert served_protocol(chosen.serve, chosen, DELTA).unit == "record"


@pytest.mark.parametrize(("epsilon", "alpha"), [(2, 9), (4, 5), (6, 4), (8, 3), (10, 3)])
def test_alpha_follows_the_papers_rule(empty: Path, epsilon: float, alpha: float) -> None:
    write_params()
    assert load_settings().prediction.alphas_at(epsilon, DELTA) == (alpha,)
    write_params({"prediction": {"alpha": 2.5}})
    assert load_settings().prediction.alphas_at(epsilon, DELTA) == (2.5,)


def test_several_orders_are_compared_and_the_first_is_served(empty: Path) -> None:
    """The paper's ablation of alpha. Its rule gives 4 at epsilon 6 and 3 at 8; no order is scored twice."""
    write_params(
        {"prediction": {"alpha": ["auto", 3, 4, 5, 6], "epsilons": [6, 8], "tokens": [1024], "units": ["shard"]}}
    )
    chosen = load_settings().prediction
    protocols = scored_protocols(chosen, 8, DELTA)
    orders = {epsilon: [one.alpha for one in protocols.values() if one.epsilon == epsilon] for epsilon in (6, 8)}
    assert orders == {6: [4, 4, 3, 3, 5, 5, 6, 6], 8: [3, 3, 4, 4, 5, 5, 6, 6]}
    assert "pmixed.shard.eps8.T1024.N8.a4.w0.2" in protocols
    assert served_protocol(chosen.serve, chosen, DELTA).alpha == 3
    write_params({"prediction": {"alpha": ["auto", "inf"], "epsilons": [8], "tokens": [1024], "units": ["shard"]}})
    chosen = load_settings().prediction
    write_params({"prediction": {"alpha": ["auto", math.inf]}})  # DVC writes inf so
    assert load_settings().prediction.alpha == chosen.alpha
    pure = scored_protocols(chosen, 8, DELTA)["pmixed_published.eps8.T1024.N8.ainf.q1"]
    assert (pure.alpha, len(scored_protocols(chosen, 8, DELTA))) == (math.inf, 3)
    write_params({"prediction": {"alpha": [6, 3]}})
    chosen = load_settings().prediction
    assert served_protocol(chosen.serve, chosen, DELTA).alpha == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": [0]}, "models"),
        ({"models": [4]}, r"serve\.models: 8 is not one of the numbers"),
        ({"units": ["patient"]}, "patient needs partition: patient"),
        ({"serve": {"unit": "patient"}}, "patient needs partition: patient"),
        ({"alpha": 1}, "alpha"),
        ({"alpha": []}, "alpha"),
        ({"alpha": [3, 1]}, "alpha"),
        ({"tokens": []}, "tokens"),
        ({"public_weights": [1.0]}, "public_weights"),
        ({"subsamples": [0]}, "subsamples"),
        ({"partition": "house"}, "partition"),
        ({"colour": 1}, "colour"),
    ],
    ids=str,
)
def test_bad_entries_are_named(empty: Path, change: dict[str, Any], message: str) -> None:
    write_params({"prediction": change})
    with pytest.raises(ConfigError, match=message):
        load_settings()


def test_shards_hold_every_record_once_and_each_ensemble_has_its_own_salt(pipeline: Path) -> None:
    write_params({"prediction": {"models": [3, 8]}})
    first, second = plans(load_settings())
    for plan in (first, second):
        open_plan(plan)
    assert first.directory != second.directory
    assert (first.directory / "salt").read_text() != (second.directory / "salt").read_text()
    from dptune.records.parquet_file import read_records
    from tasks.paths import TRAIN

    records = read_records(TRAIN)
    present = sum(text != "" for text in records.text.to_pylist())
    tokenizer = load_tokenizer(first.model.weights)
    shards = [shard_tokens(first, tokenizer, shard) for shard in range(3)]
    assert sum(len(shard.rows) for shard in shards) == present
    salt = (first.directory / "salt").read_text()
    open_plan(first)
    assert (first.directory / "salt").read_text() == salt
    read = EnsemblePlan.model_validate_json((first.directory / "plan.json").read_text())
    assert read == first


def test_data_that_changed_since_the_plan_are_refused_and_leave_no_tokens_under_its_name(pipeline: Path) -> None:
    """Cells share the token file: it would give them other records than their names say."""
    write_params({"prediction": {"models": [3], "serve": {"models": 3}}})
    (plan,) = plans(load_settings())
    tokenizer = load_tokenizer(plan.model.weights)
    stale = plan.model_copy(update={"inputs": plan.inputs | {"data": "0" * 64}})
    with pytest.raises(ConfigError, match=r"plan\.inputs: data or model changed while they were read.*Fix"):
        tokens_of(stale, EVAL, tokenizer)
    assert not token_file(EVAL, stale.inputs, stale.max_length).exists()
    assert len(tokens_of(plan, EVAL, tokenizer).rows) > 0
    assert token_file(EVAL, plan.inputs, plan.max_length).exists()


def test_an_ensemble_that_serves_nobody_says_so_and_telemetry_is_kept(pipeline: Path) -> None:
    """``None`` once wrote an empty protocol that was read as defaults; and every ledger of answers said private."""
    write_params({"prediction": {"models": [3], "serve": {"models": 3}}})
    settings = load_settings()
    (plan,) = plans(settings)
    open_plan(plan)
    for shard in range(3):
        tune(plan, shard, "cpu")
    close_plan(plan, None, "private")
    with pytest.raises(ConfigError, match="cannot answer: no budget was set"):
        deploy(plan.directory, torch.device("cpu"))
    assert not has_answered(plan.directory)
    protocol = served_protocol(settings.prediction.serve, settings.prediction, DELTA)
    close_plan(plan, protocol, "private")
    assert read_manifest(plan.directory).telemetry == "private"
    close_plan(plan, protocol, "research")
    close_plan(plan, protocol, "private")
    assert read_manifest(plan.directory).telemetry == "research"  # its figures were published
    deploy(plan.directory, torch.device("cpu")).predictor.close()
    assert read_ledger(plan.directory / "ledger.jsonl").header.telemetry == "research"
    close_plan(plan, protocol, "private")
    write_manifest(plan.directory, replace(read_manifest(plan.directory), telemetry="private"))
    with pytest.raises(ConfigError, match=r"experiment\.telemetry.*has answered under private telemetry"):
        close_plan(plan, protocol, "research")


def test_private_telemetry_tells_prices_alone(pipeline: Path) -> None:
    """Nothing is read of the ensembles: none is tuned here."""
    write_params({"experiment": {"telemetry": "private"}})
    settings = load_settings()
    result = score(settings, plans(settings), Path("an ensemble"), "cpu")
    protocols = scored_protocols(settings.prediction, 8, DELTA)
    assert [row["label"] for row in result["rows"]] == list(protocols)
    assert not any(key.startswith(("perplexity", "sampled", "private_weight")) for row in result["rows"] for key in row)
    write_text(PREDICTION / PICTURE, "of an earlier run under research telemetry")
    write_page(result, PREDICTION)
    assert "nothing is scored" in (PREDICTION / PAGE).read_text()
    assert not (PREDICTION / PICTURE).exists()
    parent = tracking.parent_run("tiny", {})
    publish_answers(result, parent, Path("data"), {})
    runs = tracking.client().search_runs([tracking.client().get_run(parent).info.experiment_id])
    told = {name for run in runs for name in run.data.metrics}
    assert told == {"epsilon/published", "epsilon/noise_only", "epsilon/certified"}


@pytest.mark.parametrize(
    ("alphas", "epsilons", "expected"),
    [
        (["auto", 10], (2, 8), {"alpha": [9, 10], "budget_epsilon": [2, 8], "tokens": [256, 1024]}),
        (["auto", 3, 4, 5], (6, 8), {"alpha": [3, 4, 5], "budget_epsilon": [6, 8], "tokens": [256, 1024]}),
        ("auto", (2, 8), {"budget_epsilon": [2, 8], "tokens": [256, 1024]}),
    ],
)
def test_the_picture_holds_the_order_that_is_served(
    empty: Path, alphas: Any, epsilons: tuple[int, ...], expected: dict[str, list[float]]
) -> None:
    served = epsilons[0] if 2 in epsilons else epsilons[-1]
    write_params({"prediction": {"alpha": alphas, "epsilons": list(epsilons), "serve": {"epsilon": served}}})
    chosen = load_settings().prediction
    scored = [
        {"kind": "answers", "label": name, "unit": one.unit, "budget_epsilon": one.epsilon, "private_weight": 0.5}
        | {"tokens": one.tokens, "models": one.models, "alpha": one.alpha, "public_weight": 0.2, METRIC: 3.0}
        for name, one in scored_protocols(chosen, 8, DELTA).items()
        if isinstance(one, FixedMixture)
    ]
    held = _fixed_settings(scored, {**chosen.serve.model_dump(), "budget_epsilon": served})
    assert held.get("alpha") == (served_protocol(chosen.serve, chosen, DELTA).alpha if "alpha" in expected else None)
    firsts = _first_orders(scored)
    for axis, values in expected.items():
        assert sorted({row[axis] for row in scored if _is_held(row, held, axis, firsts)}) == values
    assert prediction(scored, chosen.serve.model_dump(), synthetic=True).panels


def _row(label: str, kind: str, perplexity: float, **others: Any) -> dict[str, Any]:
    row = {"label": label, "kind": kind, "unit": "record", "delta": DELTA, "perplexity_pooled": perplexity}
    row |= {"perplexity_per_block": perplexity, "epsilon_published": 1.0, "epsilon_noise_only": 2.0}
    if kind in ("answers", "published"):
        row |= {"tokens": 64, "models": 4, "budget_epsilon": 2.0, "private_weight": 0.5, "leaks": []}
        row |= {"public_weight": 0.2} if kind == "answers" else {"subsample": 0.1}
    return {**row, "epsilon_certified": 2.0, **others}


ROWS = [
    _row("public model", "public", 3.0, epsilon_certified=0.0),
    _row("plain", "nonprivate", 1.5, epsilon_certified="inf"),
    _row("good", "training", 2.0, epsilon_certified=1.9999),
    _row("elsewhere", "training", 1.9, epsilon_certified=8.0),
    _row("leaky", "training", 1.8, epsilon_certified="inf"),
    _row("by patient", "training", 1.7, unit="patient"),
    _row("mine", "answers", 2.5),
    _row("mine too", "answers", 1.75, tokens=16),
    _row("by shard", "answers", 1.6, unit="shard"),
    _row("claimed", "published", 2.4, epsilon_certified="inf"),
]


def test_only_what_is_equally_private_is_compared() -> None:
    found = [(each.answers["label"], each.training["label"], each.better) for each in comparisons(ROWS)]
    assert found == [("mine too", "good", "prediction"), ("mine", "good", "training")]


def test_the_best_of_each_is_compared() -> None:
    rows = [
        _row("more models", "answers", 2.2, models=16),
        _row("elsewhere", "answers", 1.0, budget_epsilon=8.0, epsilon_certified=8.0),
        _row("better", "training", 1.9),
    ]
    found = [(each.answers["label"], each.training["label"]) for each in comparisons([*ROWS, *rows])]
    assert found == [("mine too", "better"), ("more models", "better"), ("elsewhere", "elsewhere")]


@pytest.mark.parametrize("synthetic", [True, False])
def test_the_page_names_its_limits(tmp_path: Path, synthetic: bool) -> None:
    result = {
        "name": "tiny",
        "data": "some <records>",
        "synthetic": synthetic,
        "telemetry": "research",
        "delta": DELTA,
        "records": 4,
        "served": "data/ensembles/x",
        "serve": {"epsilon": 2.0, "tokens": 32, "models": 4, "public_weight": 0.2, "unit": "record"},
        "rows": json.loads(json.dumps(ROWS)),
    }
    write_page(result, tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "some &lt;records&gt;" in page
    assert ("SYNTHETIC" in page) == synthetic
    assert "<strong>prediction</strong>" in page
    assert "∞" in page
    assert (tmp_path / PICTURE).stat().st_size > 10_000
    assert np.frombuffer((tmp_path / PICTURE).read_bytes()[:4], np.uint8).tolist() == [137, 80, 78, 71]
