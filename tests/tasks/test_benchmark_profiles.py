"""Profiles of benchmarks: each passes its settings' checks, and spells out the cells that its comment promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from invented_benchmarks import write_benchmarks
from tiny_pipeline import ROOT, apply_profile

from dptune.core.errors import ConfigError
from dptune.mechanisms.registry import build, of_model
from dptune.privacy.calibration import sampling
from tasks.experiment import cells as cells_module
from tasks.experiment.cells import Cell, grid
from tasks.experiment.checks import check_models
from tasks.prediction.ensembles import scored_protocols, served_protocol
from tasks.settings.params import Settings, load_settings

SMALL = ("bench-sst2-small", "bench-e2e-small", "bench-wikitext-small")
RATES = ("bench-sst2-rates", "bench-wikitext-rates", "bench-e2e-rates")
HUB = (
    "bench-sst2",
    "bench-qnli",
    "bench-mnli",
    "bench-qqp",
    "bench-e2e",
    "bench-dart",
    "bench-wikitext",
    "bench-billion-words",
)
#: The papers' own schedules with every weight trained, on the models that install from packages.
ALL_WEIGHTS = ("plrvo-sst2", "plrvo-e2e", "lmo-sst2", "lmo-e2e")
ABLATIONS = ("bench-wikitext-ablations", "bench-wikitext-ablations-small", "bench-wikitext-alpha-small")
PROFILES = (*SMALL, *RATES, *HUB, *ABLATIONS, *ALL_WEIGHTS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the layout that the profiles name, with rows made up here."""
    return write_benchmarks(tmp_path, monkeypatch)


def settings_of(name: str, folder: Path) -> Settings:
    file = folder / "params.yaml"
    file.write_bytes((ROOT / "params.yaml").read_bytes())
    apply_profile(ROOT / "profiles" / f"{name}.yaml", file)
    return load_settings(file)


def cells_of(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.setattr(cells_module, "digests", lambda *_: {})
    return grid(settings)


@pytest.mark.parametrize("name", PROFILES)
def test_it_is_loaded_and_its_mechanisms_and_protocols_are_built(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(name, folder)
    assert settings.experiment.name == name
    for cell in cells_of(settings, monkeypatch):
        noise = {} if "theta" in cell.options or cell.epsilon is None else {"noise_multiplier": 1.0}
        build(cell.mechanism, of_model(cell.mechanism, cell.options, 4, 1000) | noise)
    for models in settings.prediction.models:
        assert scored_protocols(settings.prediction, models, settings.experiment.delta)
    served_protocol(settings.prediction.serve, settings.prediction, settings.experiment.delta)


@pytest.mark.parametrize("name", SMALL)
def test_the_small_protocol_has_every_system_at_two_budgets_and_three_seeds(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {(cell.mechanism, cell.epsilon) for cell in cells_of(settings_of(name, folder), monkeypatch)}
    systems = ("static", "plrvo", "lmo_dp", "rldp")
    private = {(mechanism, epsilon) for mechanism in systems for epsilon in (1, 8)}
    assert found == private | {("nonprivate", None)} | {(f"{mechanism}_claimed", 1) for mechanism in systems}


@pytest.mark.parametrize("name", SMALL)
def test_what_is_claimed_differs_from_what_is_certified_by_its_noise_alone(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = cells_of(settings_of(name, folder), monkeypatch)
    by_label = {cell.mechanism: cell for cell in cells if cell.epsilon in (1, None)}
    for mechanism in ("static", "plrvo", "lmo_dp", "rldp"):
        claimed, certified = by_label[f"{mechanism}_claimed"], by_label[mechanism]
        assert (claimed.accounting, certified.accounting) == ("published", "certified")
        assert claimed.training == certified.training, "at another learning rate they would not be comparable"
        assert claimed.options == {"like": mechanism} | certified.options


@pytest.mark.parametrize("name", RATES)
def test_rates_are_tried_as_the_study_trains_and_by_another_seed(name: str, folder: Path) -> None:
    rates, study = settings_of(name, folder), settings_of(name.replace("rates", "small"), folder)
    same = ("data", "canaries", "pretrain", "lora", "prediction")
    assert all(getattr(rates, section) == getattr(study, section) for section in same)
    assert rates.task == study.task.model_copy(update={"inputs": rates.task.inputs}), "rates are chosen by perplexity"
    assert replace(rates.training, learning_rate=1.0) == replace(study.training, learning_rate=1.0)
    assert not {*rates.experiment.seeds} & {*study.experiment.seeds}
    least, *_, most = study.experiment.epsilons
    assert all(least <= epsilon <= most for epsilon in rates.experiment.epsilons)
    assert rates.experiment.delta == study.experiment.delta


def test_the_small_protocols_share_their_public_model(folder: Path) -> None:
    first, *others = (settings_of(name, folder).pretrain for name in SMALL)
    assert all(other == first for other in others), "else DVC trains it once for each"


@pytest.mark.parametrize(
    ("public", "private"), [("public", "private"), ("all", "private"), ("public", "all"), ("public", "public")]
)
def test_the_public_model_has_seen_no_protected_article(public: str, private: str, folder: Path) -> None:
    file = folder / "params.yaml"
    settings_of("bench-wikitext-small", folder)
    settings = load_settings(file, {"pretrain": {"half": public}, "data": {"options": {"half": private}}})
    if (public, private) == ("public", "private"):
        check_models(settings)
        return
    with pytest.raises(ConfigError, match=r"data\.options\.half: .*Fix: use private here, and public in pretrain\.h"):
        check_models(settings)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (["chrf", "mauve"], r"task\.metrics: mauve needs a model.*`dptune score` computes it"),
        (["meteor"], r"task\.metrics: .*(need Java, which is not on the path|need pycocoevalcap)"),
        (["blue"], r"task\.metrics: 'blue' is unknown.*cider_ptb\.$"),
    ],
)
def test_a_metric_that_cannot_be_had_is_refused_before_training(
    metrics: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of("bench-e2e-small", folder)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=said):
        check_models(load_settings(folder / "params.yaml", {"task": {"metrics": metrics}}))


@pytest.mark.parametrize(
    ("name", "steps", "claimed"),
    [
        ("plrvo-sst2", 198, {"plrvo_claimed": {0.2, 0.5, 1, 2.5}}),
        ("plrvo-e2e", 124, {"plrvo_claimed": {0.2, 0.5, 1, 2.5}}),
        ("lmo-sst2", 198, {f"lmo_{total}": {None} for total in ("0.16", "0.3", "0.9", "1.4", "3")}),
        ("lmo-e2e", 410, {f"lmo_step_{epsilon}": {None} for epsilon in ("0.3", "0.7", "2", "3")}),
    ],
)
def test_the_papers_rows_train_every_weight_by_their_steps_with_the_claimed_noise_beside_the_certified(
    name: str, steps: int, claimed: dict[str, set[float | None]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMO-DP's noise is published, so its cells have no budget; PLRV-O's is calibrated to its claim."""
    settings = settings_of(name, folder)
    cells = cells_of(settings, monkeypatch)
    units = 67_349 if "sst2" in name else 42_061
    assert sampling(units, settings.training.expected_batch_size, settings.training.epochs)[1] == steps
    assert {cell.training.train for cell in cells} == {"all"}
    own = "plrvo" if name.startswith("plrvo") else "lmo_dp"
    assert {cell.epsilon for cell in cells if cell.mechanism == own} == set(settings.experiment.epsilons)
    for label, epsilons in claimed.items():
        assert {cell.epsilon for cell in cells if cell.mechanism == label} == epsilons


@pytest.mark.parametrize("name", HUB)
def test_hub_models_are_pinned(name: str, folder: Path) -> None:
    for model in settings_of(name, folder).experiment.models.values():
        assert model.revision is not None
        assert len(model.revision) == 40
