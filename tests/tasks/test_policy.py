"""Studies of private reinforcement learning: what params.yaml may say, one run, its resumption, and the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dptune.audit.games import updates
from dptune.core.errors import ConfigError, DptuneError
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.policy.environments import training
from dptune.policy.run_files import UserReuseError
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger_file import read_ledger
from tasks.policy import audit as policy_audit
from tasks.policy.gradient import PolicyCell, check_environments, policy_cells, run_cell
from tasks.report.policy import but_for_noise, line_name, rows_of, write_page
from tasks.settings.policy import PolicySettings, Study, expanded, make_training, swept

RIVERSWIM = "dptune/Riverswim-v0"
QUICK = {"users": 2, "steps": 20, "updates": 4, "hidden": 0, "critic_hidden": 0, "evaluate_every": 2}


def settings(runs: dict[str, Any], environment: str = RIVERSWIM, **training: Any) -> PolicySettings:
    study = {"environment": environment, "training": QUICK | training, "runs": runs}
    return PolicySettings(
        name="tiny",
        delta=1e-5,
        seeds=(0, 1),
        processes=1,
        audit_trials=0,
        studies={"swim": Study.model_validate(study)},
    )


def problem(runs: dict[str, Any], **training: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        settings(runs, **training)
    return str(caught.value)


def test_a_sweep_is_one_run_for_every_combination() -> None:
    chosen = settings({"none": {"critic": "none", "sweep": {"noise_multiplier": [1, 3], "users": [2, 4]}}})
    found = expanded(chosen.studies["swim"], 1e-5)
    assert [run.label for run in found] == ["none.z1.K2", "none.z1.K4", "none.z3.K2", "none.z3.K4"]
    assert [(run.method.noise_multiplier, run.training.users) for run in found if run.method] == [
        (1, 2), (1, 4), (3, 2), (3, 4)
    ]  # fmt: skip
    assert len(policy_cells(chosen)) == 8
    assert len({cell.directory for cell in policy_cells(chosen)}) == 8
    assert swept("a", {"x": 1}) == [("a", {"x": 1})]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"a": {"noise_multiplier": 0}}, ("runs.a.noise_multiplier", "accounting: published")),
        ({"a": {"noise_multiplier": 1, "critic": "raw"}}, ("runs.a.critic", "raw trajectories")),
        ({"a": {"epsilon": 1, "critic": "raw"}}, ("no noise reaches",)),
        ({"a": {"epsilon": 1, "noise_multiplier": 1}}, ("one of the two",)),
        ({"a": {}}, ("noise_multiplier", "is required")),
        ({"a": {"noise_multiplier": 1, "users": 1}}, ("runs.a.users", "too few for ppo")),
        ({"a": {"noise_multiplier": 1, "depth": 3}}, ("runs.a.depth", "is not an option")),
        ({"a": {"baseline": "dqn"}}, ("unknown 'dqn'",)),
        ({"a": {"baseline": "ppo", "noise_multiplier": 1}}, ("ppo is not private",)),
        ({"a": {"noise_multiplier": 1, "accounting": "some"}}, ("unknown 'some'",)),
        ({"a": {"noise_multiplier": 1, "sweep": {"users": 3}}}, ("runs.a.sweep", "lists")),
    ],
)
def test_a_bad_entry_names_the_run_the_option_and_the_fix(runs: dict[str, Any], words: tuple[str, ...]) -> None:
    said = problem(runs)
    assert all(word in said for word in ("studies.swim", "Fix: ", *words))


@pytest.mark.parametrize(("options", "trust"), [({"algorithm": "kl"}, 1.75), ({"algorithm": "l2"}, 3.5)])
def test_an_option_of_earlier_versions_still_halves_the_trust_region_of_kl(
    options: dict[str, Any], trust: float
) -> None:
    with pytest.warns(FutureWarning, match="write half of trust"):
        assert make_training({**options, "users": 1, "as_printed": True}).trust == trust
    with pytest.warns(FutureWarning, match="as_printed is gone"):
        assert make_training({**options, "users": 1, "as_printed": False}).trust == 3.5


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        ("Nowhere-v0", {}, ("policy.studies.swim.environment", "unknown 'Nowhere-v0'", "use CartPole-v1")),
        (RIVERSWIM, {"stay": 3}, ("policy.studies.swim.stay", "0.6")),
    ],
)
def test_an_environment_that_cannot_be_is_named_before_anything_runs(
    environment: str, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    chosen = settings({"a": {"noise_multiplier": 1}}, environment=environment)
    study = chosen.studies["swim"].model_copy(update={"options": options})
    with pytest.raises(ConfigError) as caught:
        check_environments(chosen.model_copy(update={"studies": {"swim": study}}))
    assert all(word in str(caught.value) for word in words)


def test_published_accounting_allows_what_has_no_epsilon() -> None:
    raw = {"noise_multiplier": 1, "critic": "raw", "accounting": "published"}
    silent = {"noise_multiplier": 0, "accounting": "published"}
    assert len(policy_cells(settings({"raw": raw, "silent": silent}))) == 4


@pytest.mark.parametrize(
    "entry",
    [
        {"algorithm": "l2", "critic": "none", "epsilon": 3},
        {"algorithm": "kl", "critic": "none", "epsilon": 3, "fisher_episodes": 2},
        {"baseline": "ucb_vi", "bonus": 0.1},
        {"baseline": "ucb_vi", "epsilon": 3},
    ],
)
def test_a_run_has_a_curve_and_the_price_of_its_ledger(empty: Path, entry: dict[str, Any]) -> None:
    (cell, _) = policy_cells(settings({"a": entry}))
    result = run_cell(cell)
    assert result == json.loads((cell.directory / "result.json").read_text())
    assert [point["users"] for point in result["points"]] == [4, 8]
    assert result["final_return"] == result["points"][-1]["mean_return"]
    certified = read_ledger(cell.directory / "ledger.jsonl").epsilons.certified
    assert certified == (pytest.approx(3, rel=1e-3) if "epsilon" in entry else math.inf)
    assert float(result["epsilon_certified"]) == certified


def test_ucb_vi_is_for_tables(empty: Path) -> None:
    (cell, _) = policy_cells(settings({"a": {"baseline": "ucb_vi"}}, environment="CartPole-v1"))
    with pytest.raises(ConfigError, match="Riverswim"):
        run_cell(cell)


def test_a_run_whose_episodes_span_updates_ends_with_an_error(empty: Path) -> None:
    (cell, _) = policy_cells(
        settings({"a": {"noise_multiplier": 1, "continuing": True}}, environment="CartPole-v1", steps=3)
    )
    with pytest.raises(UserReuseError):
        run_cell(cell)
    assert not (cell.directory / "result.json").exists()


def test_an_interrupted_ucb_vi_is_charged_twice(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell, _) = policy_cells(settings({"a": {"baseline": "ucb_vi", "epsilon": 3}}))
    with monkeypatch.context() as patched:
        patched.setattr(
            "dptune.policy.environments.baselines.run_ucb_vi", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            run_cell(cell)
    assert float(run_cell(cell)["epsilon_certified"]) > 4


def test_the_page_shows_every_label_with_its_spread_and_epsilons(empty: Path) -> None:
    chosen = settings({"l2": {"algorithm": "l2", "epsilon": 3}, "ucb_vi": {"baseline": "ucb_vi"}})
    results = [run_cell(PolicyCell.model_validate(cell.model_dump())) for cell in policy_cells(chosen)]
    rows = {row.label: row for row in rows_of(results)}
    assert {label: row.seeds for label, row in rows.items()} == {"l2": 2, "ucb_vi": 2}
    finals = [result["final_return"] for result in results if result["label"] == "l2"]
    assert rows["l2"].mean == pytest.approx(sum(finals) / 2)
    assert rows["l2"].deviation == pytest.approx(abs(finals[0] - finals[1]) / 2)
    audit = {"critic": "raw", "noise_multiplier": 1.0, "steps": 2, "trials": 500, "confidence": 0.95}
    audit |= {"epsilon_published": 5.0, "epsilon_certified": "inf", "epsilon_audited": 5.4, "mu_audited": 5.0}
    audit |= {"mu_certified": "inf", "power": "nothing finite is certified, so there is nothing to refute"}
    write_page(results, 1e-5, {"audits": [audit]}, empty)
    page = (empty / "policy.html").read_text()
    assert "SIMULATED users" in page
    assert page.count("<tr><td>") == 3
    assert "<code>l2</code>" in re.sub("<svg.*?</svg>", "", page).split("</h1>")[1].split("<h2")[0]
    assert (empty / "swim.png").read_bytes().startswith(b"\x89PNG")
    assert "5.4" in page


def test_two_methods_of_equal_returns_are_said_to_have_one_return(empty: Path) -> None:
    results = [run_cell(cell) for cell in policy_cells(settings({"l2": {"algorithm": "l2", "epsilon": 3}}))]
    write_page(results + [{**result, "label": "again"} for result in results], 1e-5, {}, empty)
    said = re.search(r"cannot be told apart over 2 seeds: return ([^<]*)", (empty / "policy.html").read_text())
    assert said is not None
    assert " to " not in said[1]


def test_the_page_shows_language_models_and_tenants(empty: Path) -> None:
    attack = {"epsilon_audited": 0.25, "confidence": 0.95}
    audit = {"secrets": attack, "updates": attack, "exposure": {"mean": 1.4, "chance": 1.375}}
    curve = [{"updates": 0, "reward": -0.3}, {"updates": 2, "reward": 0.1}]
    one: dict[str, Any] = {"label": "K4.eps3.seed0", "users": 4, "prompts": 8, "noise_multiplier": 1.39, "curve": curve}
    one |= {"data": "synthetic", "parameters": 2048, "budget_epsilon": 3.0, "audit": audit, "kl": 0.2, "reward": 0.1}
    one |= {"epsilon_published": 3.5, "epsilon_certified": 3.0, "reward_before": -0.3}
    silent = one | {"label": "K4.nonprivate.seed0", "budget_epsilon": None, "epsilon_certified": "inf"}
    line = {
        "label": "DPPG-meta",
        "runs": 2,
        "epsilon_certified": 8.0,
        "noise_multiplier": 1.5,
        "gain_over_static": 0.01,
    }
    line |= {"held_out_perplexity": 2.5, "public_perplexity": 2.6, "gain_standard_error": None}
    tenants = {"data": "synthetic", "epsilon_tenant": 0.926, "epsilon_record": 1.993, "summary": [line]}
    write_page([], 1e-5, {"rlhf": [one, silent], "tenants": tenants}, empty)
    page = (empty / "policy.html").read_text()
    assert all(
        text in page
        for text in ("K4.eps3.seed0", "1.40 (1.38)", "0.926", "2 for one record", "DPPG-meta", "+0.0100", "∞")
    )
    assert (empty / "rlhf.png").exists()


def attacked() -> PolicySettings:
    return settings({"a": {"noise_multiplier": 1}}).model_copy(update={"audit_trials": 500})


def test_an_attack_that_shows_more_than_is_certified_fails(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"critic": "none", "accusation": "the attack shows mu >= 1.8, but 1 is certified"}
    monkeypatch.setattr(policy_audit, "_audit", lambda *_: row)
    with pytest.raises(DptuneError, match="critic none: the attack shows mu"):
        policy_audit.audits(attacked())
    row["accusation"] = None
    assert len(policy_audit.audits(attacked())) == 4
    monkeypatch.setattr(policy_audit, "_audit", lambda *_: pytest.fail("was kept"))
    assert len(policy_audit.audits(attacked())) == 4


def test_rows_of_an_audit_whose_own_code_was_another_are_not_kept(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_audit, "_audit", lambda *_: {"critic": "none", "accusation": None})
    policy_audit.audits(attacked())
    monkeypatch.setattr(policy_audit, "VERSION", 2)
    monkeypatch.setattr(policy_audit, "_audit", lambda *_: {"critic": "again", "accusation": None})
    assert policy_audit.audits(attacked())[0]["critic"] == "again"


@pytest.mark.parametrize(
    ("critic", "number"), [("private", 1), ("none", 1), pytest.param("public", 2, marks=pytest.mark.slow)]
)
def test_halved_noise_fails_the_study(critic: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One audit of 600 trials for each critic; its checks have their share of a false-alarm rate of 0.001."""
    monkeypatch.setattr(policy_audit, "OsEntropy", lambda: FixedSeed(1))
    chosen = attacked().model_copy(update={"audit_trials": 600})
    sound = policy_audit._audit(critic, number, chosen)
    assert sound["accusation"] is None
    assert sound["mu_certified"] == 1.0
    assert sound["alarm_confidence"] == pytest.approx(1 - 0.001 / 8)  # two checks of each of four critics
    whole = Gaussian.add
    monkeypatch.setattr(Gaussian, "add", lambda self, sums, scales, z, coins: whole(self, sums, scales, z / 2, coins))
    assert "mu" in policy_audit._audit(critic, number, chosen)["accusation"]


@pytest.mark.long
def test_a_public_critic_trained_on_users_fails_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the critic called public is fitted to what the users of the update lived through."""
    monkeypatch.setattr(policy_audit, "OsEntropy", lambda: FixedSeed(1))
    whole = training.step

    def planted(learner: Any, state: Any, number: int, streams: Any, *others: Any) -> Any:
        return whole(learner, state, number, streams | {"public": streams["users"]}, *others)

    monkeypatch.setattr(updates, "step", planted)
    assert "mu" in policy_audit._audit("public", 2, attacked())["accusation"]


def test_a_line_over_noise_joins_runs_that_differ_in_nothing_else(empty: Path) -> None:
    entry = {"algorithm": "l2", "critic": "none"}
    chosen = settings(
        {
            "l2": entry | {"sweep": {"epsilon": [1, 3]}},
            "silent": entry | {"noise_multiplier": 0, "accounting": "published"},
            "tabular": entry | {"epsilon": 3, "form": "additive"},
        }
    )
    results = [run_cell(cell) for cell in policy_cells(chosen)]
    lines: dict[str, list[Any]] = {}
    for result in results:
        lines.setdefault(but_for_noise(result), []).append(result)
    assert [line_name(mine) for mine in lines.values()] == ["l2, silent: DPPG-L2, K 2", "tabular: DPPG-L2, K 2"]
