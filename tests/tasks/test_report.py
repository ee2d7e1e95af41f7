"""The report: one page that needs nothing else, pictures, and tables that DVC reads."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_pipeline import read_json

from dptune.core.errors import DataError
from dptune.job.result import RunResult
from tasks.charts.canvas import blank, save
from tasks.charts.looks import run_colours
from tasks.charts.seed_groups import over_seeds
from tasks.experiment.cell_list import read_results
from tasks.paths import RUNS
from tasks.report import experiment as module
from tasks.report.claims import GUARANTEE, attacked, meaning, of_one_person, proved
from tasks.report.experiment import write_report

PICTURES = ("utility.png", "perplexity.png", "epsilon.png", "curves.png")


def result(mechanism: str = "static", certified: float | str = 2.0, **changes: Any) -> dict[str, Any]:
    """What a cell's result.json says."""
    history = [
        {"step": n, "releases": n, "public_perplexity": 9.0 - n, "eval_sample_perplexity": 8.0 - n}
        | {"epsilon_published": 0.1 * n, "epsilon_noise_only": 0.2 * n, "epsilon_certified": 0.2 * n}
        for n in (1, 2)
    ]
    made = {
        "planned_releases": 2,
        "label": f"small.{mechanism}.seed0",
        "model": "small",
        "mechanism": mechanism,
        "budget_epsilon": None if certified == "inf" else certified,
        "seed": 0,
        "unit": "record",
        "units": 144,
        "delta": 1e-5,
        "accounting": "certified",
        "telemetry": "research",
        "guarantee": GUARANTEE["research"],
        "data": "SYNTHETIC private cohort; no real patient",
        "synthetic": True,
        "noise_multiplier": 1.1,
        "sample_rate": 0.1,
        "releases": 2,
        "epsilon_published": "inf" if certified == "inf" else 1.5,
        "epsilon_noise_only": certified,
        "epsilon_certified": certified,
        "leaks": ["no noise"] if certified == "inf" else [],
        "before": {"public_perplexity": 9.0, "eval_perplexity": 8.0},
        "after": {"public_perplexity": 7.0, "eval_perplexity": 6.0 if mechanism == "static" else 5.0},
        "history": history,
        "pairs": ["model.0.attn", "model.1.attn"],
        "knobs": [{"releases": 1, "noise_multiplier": 1.1, "radius_0": 1.0}],
        "seconds": 1.2,
        "device": "cpu",
        "inputs": {},
    }
    return made | changes


def private(one: dict[str, Any]) -> dict[str, Any]:
    """The same under private telemetry."""

    def stripped(point: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in point.items() if not key.startswith("eval")}

    return one | {
        "telemetry": "private",
        "guarantee": GUARANTEE["private"],
        "before": stripped(one["before"]),
        "after": stripped(one["after"]),
        "history": [stripped(point) for point in one["history"]],
    }


class Page(HTMLParser):
    """What a page shows, what it would load, where it leads, and the charts that it draws."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.charts: dict[str, Any] = {}
        self.words = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append(tag)
        self.names |= set(given)
        self._inside = given.get("id") or tag if tag in ("script", "style") else ""
        self.loaded += [given[name] or "" for name in ("src", "data", "srcset") if name in given]
        self.links += [given["href"] or ""] if "href" in given else []

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "charts":
            self.charts = json.loads(data)["specs"]
        elif not self._inside:
            self.words += data


def page(directory: Path) -> Page:
    return Page((directory / "report.html").read_text(encoding="utf-8"))


RESULTS = [result(), result("nonprivate", "inf")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    write_report(RESULTS, directory, "tiny")
    return directory


def test_the_page_needs_nothing_else(written: Path) -> None:
    """Its own head forbids it to load anything; a browser's test sees that it does not try."""
    made, text = page(written), (written / "report.html").read_text()
    assert made.loaded == []
    assert {link for link in made.links if not link.startswith("#")} == {"../report/index.html"}
    assert "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in text
    assert not re.search(r"@import|url\(", text.partition("</style>")[0])
    assert not {"link", "iframe", "object", "embed", "base"} & set(made.tags)
    assert set(made.charts) == {Path(name).stem for name in PICTURES}


def test_the_first_screen_answers_and_says_what_is_guaranteed_and_that_data_is_made_up(written: Path) -> None:
    first = " ".join(page(written).words.split("What does each claim become?")[0].split())
    assert first.index("SYNTHETIC data") < first.index("Experiment “tiny”")
    answer = "At certified ε = 2 on the synthetic cohort, plain DP-SGD (static) reaches held-out perplexity of 6.000"
    assert answer in first.replace("\u00a0", " ")
    assert GUARANTEE["research"] in first
    assert first.index("reaches held-out") < first.index(GUARANTEE["research"]) < first.index("noise only")


def test_the_table_has_every_cell_best_first(written: Path) -> None:
    words = page(written).words.split("Every cell")[1]
    assert words.index("small.nonprivate.seed0") < words.index("small.static.seed0")
    assert "small, not fine-tuned" in words
    assert "∞" in words
    assert "6.000" in words
    assert "No guarantee: no noise." in page(written).words


def test_the_pictures_are_pictures(written: Path) -> None:
    for name in PICTURES:
        picture = Image.open(BytesIO((written / "figures" / name).read_bytes()))
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        assert len(picture.getcolors(1 << 24) or []) > 10, "it is not blank"


def test_metrics_and_plots_parse(written: Path) -> None:
    metrics = read_json(written / "cells.json")
    assert set(metrics) == {"small.static.seed0", "small.nonprivate.seed0"}
    assert metrics["small.static.seed0"]["epsilon_certified"] == 2.0
    assert metrics["small.static.seed0"]["eval_perplexity"] == 6.0
    points = read_json(written / "plots" / "perplexity.json")
    assert [point["perplexity"] for point in points] == [6.0], "an infinite epsilon has no place on the axis"
    colours = run_colours(["static", "nonprivate"])
    assert [(point["mechanism"], point["colour"]) for point in points] == [("static", colours["static"])]
    with (written / "plots" / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["cell"] for row in rows} == set(metrics)
    assert {row["mechanism"]: row["colour"] for row in rows} == colours, "DVC's charts have the report's colours"
    assert [float(row["perplexity"]) for row in rows] == [7.0, 6.0, 7.0, 6.0]
    for path in (written / "cells.json", written / "plots" / "perplexity.json"):
        json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.usefixtures("quick_pictures")
def test_private_telemetry_is_said_and_shows_public_figures_alone(tmp_path: Path) -> None:
    write_report([private(one) for one in RESULTS], tmp_path, "tiny")
    words = page(tmp_path).words
    assert GUARANTEE["private"] in words
    assert GUARANTEE["research"] not in words
    assert "held-out perplexity" not in words.replace("Perplexity on held-out records is not shown", "")
    assert "Perplexity on held-out records is not shown: telemetry is private" in words
    assert "public-set perplexity" in words
    assert read_json(tmp_path / "cells.json")["small.static.seed0"].get("eval_perplexity") is None


@pytest.mark.usefixtures("quick_pictures")
def test_mixed_telemetry_says_both(tmp_path: Path) -> None:
    write_report([private(RESULTS[0]), RESULTS[1]], tmp_path, "tiny")
    words = page(tmp_path).words
    assert GUARANTEE["private"] in words
    assert GUARANTEE["research"] in words


@pytest.mark.usefixtures("quick_pictures")
def test_real_data_is_not_called_synthetic(tmp_path: Path) -> None:
    write_report(
        [one | {"synthetic": False, "data": "UCI Diabetes: real encounters"} for one in RESULTS], tmp_path, "x"
    )
    assert "SYNTHETIC" not in page(tmp_path).words


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    changes = {"label": evil, "model": evil, "mechanism": evil, "data": evil, "leaks": [evil], "unit": evil}
    write_report([result(certified="inf") | changes], tmp_path, evil)
    made = page(tmp_path)
    assert made.tags.count("script") == 3, "the charts, their program and the page's own"
    assert "alert" not in made.names
    assert made.words.count(evil) >= 4
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert evil in json.dumps(made.charts, ensure_ascii=False).replace('\\"', '"')


def test_one_private_cell_alone_is_a_report(tmp_path: Path) -> None:
    write_report([result("nonprivate", "inf")], tmp_path, "tiny")
    assert read_json(tmp_path / "plots" / "perplexity.json") == []


def moved(**changes: Any) -> dict[str, Any]:
    """A cell whose controller acted twice, on two adapters."""
    rows = [
        {"releases": n, "noise_multiplier": 1.1, "radius_0": 0.1, "radius_1": 0.2 * n, "weight_0": 0.6, "weight_1": 0.8}
        for n in (1, 2)
    ]
    rows[1]["controller_reward"] = 0.3
    return result("rldp", label="small.rldp.seed0", knobs=rows, **changes)


def test_audits_and_rates_have_the_order_of_legends(tmp_path: Path) -> None:
    """And not that of the settings, in which training without privacy comes first."""
    from tests.browser.samples import audit

    results = [
        result(name, epsilon, label=f"small.{name}", learning_rate=rate)
        for name, epsilon, rate in (("nonprivate", "inf", 0.04), ("rldp", 2.0, 0.01), ("static", 2.0, 0.02))
    ]
    write_report(results, tmp_path, "tiny", [audit(one) for one in results])
    text = (tmp_path / "report.html").read_text(encoding="utf-8").partition("Bounds on ε")[2]
    places = [text.index(f"</svg>{name}<") for name in ("static", "rldp", "nonprivate")]
    assert places == sorted(places)
    assert "`static` 0.02, `rldp` 0.01, `nonprivate` 0.04" in (tmp_path / "answer.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick_pictures")
def test_the_verdict_says_what_to_use_what_is_proved_and_what_attacks_saw(tmp_path: Path) -> None:
    from tests.browser.samples import audit

    leaky = {"budget_epsilon": 2.0, "epsilon_published": 2.0, "leaks": ["raw norms"]}
    results = [
        result("static", 1.9991),
        result("quantile", 2.0),
        result("static", 7.99, seed=1, label="eight"),
        result("rldp_published", "inf", **leaky),
    ]
    audits = [audit(one) for one in results]
    audits[3]["one_run"] = audits[3]["one_run"] | {"epsilon_audited": 3.25, "epsilon_refutable": 0.0}
    audits[2]["one_run"] = audits[2]["one_run"] | {"epsilon_refutable": 0.0}
    refuted = "75 pairs of games on its twin refute the curve"
    games = {"power": "some", "mu_audited": 0.5}
    audits[3]["whole_run"] = games | {"mechanism": "rldp_published", "claim_refuted": refuted}
    for audit_of, shown in ((audits[0], 0.1995), (audits[1], 0.2233), (audits[2], 0.0)):
        bound = {"mu_audited": shown, "mu_certified": 0.2209, "confidence": 0.95}
        audit_of["whole_run"] = games | bound | {"mechanism": "static", "claim_refuted": None}
    write_report(results, tmp_path, "tiny", audits, cells={"small.static.seed0": "small.static.seed0-0a1b"})
    words = " ".join(page(tmp_path).words.replace("\u00a0", " ").split())
    strip = words[words.index("Use ") : words.index("See each attack.")]
    assert "cannot be told apart with one seed" in strip
    assert "3 runs, each ε ≤ 2 or 7.99 at δ = 1e-05 about one record. No guarantee: rldp_published." in strip
    assert f"dptune verify {RUNS}/small.static.seed0-0a1b copy" in strip
    written = f"{RUNS}/small.static.seed0-0a1b data/delivered/small.static.seed0-0a1b"
    assert f"with card and ledger: python -m tasks.experiment.adapter_model {written} copy" in strip
    assert "Secrets were planted beside the records to attack these runs." in strip
    assert "and can be right in at most 88.1 % (ε = 2) or 99.97 % (ε = 7.99) of cases." in strip, "never in all of them"
    assert "A person with k records may lose k times that epsilon" in strip
    one = results[0] | {"epsilon_certified": 2.0}
    assert "right in at most 88.1 % (ε = 2) of cases." in meaning([one], {})
    curve = {one["label"]: [(2.0, 1e-5), (0.0, 0.1)]}
    assert "right in at most 55 % (ε = 2) of cases." in meaning([one], curve), "by the point that says most"
    assert meaning(results[3:], {}) == ""
    assert of_one_person([one | {"unit": "patient"}]) == of_one_person(results[3:]) == ""
    assert "4 audits, and no proof is refuted. One step: attacks show 93 % of the distance" in strip
    assert "that is proved (μ 1.2 of 1.29, the closest of 3)." in strip
    assert (
        "made-up records: more than the distance that is proved (μ 0.223 of 0.221, the closest of 3), as one" in strip
    )
    assert "as one such bound in 20 may be, by chance; the test that would accuse the proof does not." in strip
    assert "The claimed epsilon of rldp_published is refuted there." in strip
    assert "show ε ≥ 0.12 where a proof holds (the largest of 3) and ε ≥ 3.25 where nothing is proved. If all" in strip
    assert "If all were found, 2 of 3 proofs would be refuted." in strip
    for audit_of in audits:
        audit_of["one_run"] = audit_of["one_run"] | {"epsilon_audited": 0.0}
    assert "ε ≥ 0 on every run, even where nothing is proved: too weak an attack to be evid" in " ".join(
        attacked(audits)
    )
    audits[0]["violations"] = ["small.static.seed0: something is wrong"]
    assert attacked(audits) == ["1 violation: an attack shows more than is proved."]
    assert attacked([]) == ["Nothing was attacked."]
    planted = {**audits[1], "whole_run": None, "step": None}
    for key in ("whole_run", "step"):
        assert not any("step_trials" in said for said in attacked(audits[1:2]))
        del planted[key]
    assert "Neither a step nor a whole run was attacked (`audit.step_trials: 0`)." in attacked([planted])
    assert proved(results[3:]) == "Nothing is proved. No guarantee: `rldp_published`."


@pytest.mark.usefixtures("quick_pictures")
def test_a_study_of_one_mechanism_asks_what_privacy_costs_and_compares_nothing(tmp_path: Path) -> None:
    alone = [result("static", epsilon, label=f"static{epsilon}", budget_epsilon=epsilon) for epsilon in (1.0, 2.0, 4.0)]
    write_report(alone, tmp_path, "tiny")
    words = page(tmp_path).words
    assert "what does privacy cost?" in words
    assert "where most mechanisms were compared" not in words
    write_report([*alone, result("quantile", 2.0, budget_epsilon=2.0)], tmp_path, "tiny")
    words = page(tmp_path).words
    assert "which mechanism gives the best model" in words
    assert "ε = 2 is where most mechanisms were compared" in words


@pytest.mark.usefixtures("quick_pictures")
def test_what_attacks_could_have_refuted_is_said_once_for_all_cells_that_it_is_true_of(tmp_path: Path) -> None:
    from tests.browser.samples import audit

    results = [result("static"), result("quantile", 2.0), result("rldp_published", "inf")]
    audits = [audit(one) for one in results]
    for made, power in zip(audits, ("a limit of 3", "a limit of 3", "no limit"), strict=True):
        made["one_run"] = made["one_run"] | {"power": power}
    write_report(results, tmp_path, "tiny", audits)
    table = page(tmp_path).words.partition("What the attacks could have refuted")[2]
    assert "A limit of 3.static, quantile" in table
    assert "No limit.rldp_published" in table


def test_what_a_controller_did_is_a_picture(tmp_path: Path) -> None:
    write_report([*RESULTS, moved()], tmp_path, "tiny")
    picture = (tmp_path / "controllers" / "small.rldp.seed0.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    made = page(tmp_path)
    assert "Controller of rldp," in made.words, "no more of its label than tells it from the other cells"
    titles = ["clip radius of each LoRA pair", "relative noise weight of each LoRA pair", "Controller"]
    described = [one["description"] for one in made.charts["small.rldp.seed0"]]
    assert described[:2] == titles[:2], "and no panel for the noise, which did not move, nor for one single reward"
    assert described[2:] == ["epsilon"]
    assert [path.name for path in (tmp_path / "controllers").iterdir()] == ["small.rldp.seed0.png"]
    write_report(RESULTS, tmp_path, "tiny")
    assert not list((tmp_path / "controllers").iterdir()), "pictures of an earlier experiment are gone"


def test_a_reward_that_is_infinite_or_missing_draws(tmp_path: Path) -> None:
    one = moved()
    one["knobs"][1]["controller_reward"] = "-inf"
    write_report([one], tmp_path, "tiny")
    assert (tmp_path / "controllers" / "small.rldp.seed0.png").exists()


@pytest.mark.usefixtures("quick_pictures")
def test_several_seeds_show_mean_and_spread(tmp_path: Path) -> None:
    """Sample standard deviation of 5, 6 and 7 is 1."""
    cells = [
        result(seed=seed, label=f"small.static.seed{seed}", after={"public_perplexity": 7.0, "eval_perplexity": value})
        for seed, value in ((0, 5.0), (1, 6.0), (2, 7.0))
    ]
    write_report(cells, tmp_path, "tiny")
    words = page(tmp_path).words
    assert "mean ± standard deviation over seeds" in " ".join(words.split())
    assert "6.000 ± 1.000" in words
    write_report(cells[:1], tmp_path, "tiny")
    assert "±" not in page(tmp_path).words.partition("What does each claim")[0]


@pytest.mark.usefixtures("quick_pictures")
def test_totals_are_stated_for_each_unit_and_never_mixed(tmp_path: Path) -> None:
    write_report([result(), result(seed=1), result("dp_lora_fed", unit="client", units=9)], tmp_path, "tiny")
    words = " ".join(page(tmp_path).words.split())
    assert "at most ε = 4, δ = 2e-05 about one record" in words
    assert "at most ε = 2, δ = 1e-05 about one client" in words
    assert "cannot be compared or added" in words


@pytest.mark.usefixtures("quick_pictures")
def test_beside_an_infinite_total_stands_that_of_the_cells_with_a_certified_epsilon(tmp_path: Path) -> None:
    write_report([result(), result(seed=1), result("nonprivate", "inf")], tmp_path, "tiny")
    words = " ".join(page(tmp_path).words.split())
    assert "about one record who has all adapters has no bound (ε = ∞), because nothing is proved of some." in words
    assert "The 2 with a certified ε: someone" in words
    assert "and not the other, learns at most ε = 4, δ = 2e-05." in words
    write_report([result(), result(seed=1)], tmp_path, "tiny")
    assert "someone who has only these adapters" not in page(tmp_path).words


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize(
    ("refutable", "said"), [(3.8849, "0.12 (3.88)"), (0.0, "0.12 (cannot refute)"), (None, "0.12")]
)
def test_what_an_attack_could_have_refuted_stands_beside_what_it_shows(
    tmp_path: Path, refutable: float | None, said: str
) -> None:
    """In the first table, beside the claims and among the audits; audits of earlier versions do not say it."""
    from tests.browser.samples import audit

    one = result()
    made = audit(one)
    attack = {name: value for name, value in made["one_run"].items() if name != "epsilon_refutable"}
    made["one_run"] = attack | ({} if refutable is None else {"epsilon_refutable": refutable})
    write_report([one], tmp_path, "tiny", [made])
    verdict, _, shown = page(tmp_path).words.partition("See each attack.")
    assert ("would be refuted" in verdict) is (refutable is not None)
    shown = shown.replace("shown: ε ≥ 0.12", "")  # under the pointer on a ruler
    assert len(re.findall(re.escape(said) + r"(?! \()", shown)) == 3
    assert "4.05" not in shown, "the most that could be shown has another confidence"
    assert shown.count("shown (could refute)") == 3


@pytest.mark.usefixtures("quick_pictures")
def test_the_attack_on_a_run_without_noise_says_how_good_it_is(tmp_path: Path) -> None:
    from tests.browser.samples import audit

    results = [result(), result("nonprivate", "inf", noise_multiplier=0.0)]
    write_report(results, tmp_path / "with", "tiny", [audit(one) for one in results])
    words = " ".join(page(tmp_path / "with").words.split())
    assert "on nonprivate, which was trained without noise, planted texts show ε ≥ 0.12, by 140 of" in words
    write_report(results[:1], tmp_path / "without", "tiny", [audit(results[0])])
    assert "trained without noise, planted" not in " ".join(page(tmp_path / "without").words.split())


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize(("refutable", "said"), [(6.2345, "2.2 (5.9; 6.23)"), (5.9, "2.2 (5.9; cannot refute)")])
def test_a_steps_audit_says_what_it_could_have_refuted(tmp_path: Path, refutable: float, said: str) -> None:
    from tests.browser.samples import audit

    one = result()
    made = audit(one)
    made["step"] = made["step"] | {"epsilon_refutable": refutable, "mu_detectable": "inf"}
    write_report([one], tmp_path, "tiny", [made])
    shown = page(tmp_path).words
    assert said in shown
    assert "1.2 (1.29; ∞)" in shown


def test_cells_of_another_accounting_are_another_group() -> None:
    groups = over_seeds([result(), result(accounting="published"), result(seed=1)], "eval_perplexity")
    assert sorted(len(group.results) for group in groups) == [1, 2]


def place(directory: Path, *results: dict[str, Any]) -> Path:
    names = []
    for one in results:
        names.append(f"{one['label']}-0")
        (directory / names[-1]).mkdir()
        (directory / names[-1] / "result.json").write_text(json.dumps(one))
    (directory / "experiment.json").write_text(json.dumps({"name": "tiny", "cells": names}))
    return directory / "experiment.json"


def test_only_listed_results_are_read(tmp_path: Path) -> None:
    experiment = place(tmp_path, *RESULTS)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "result.json").write_text("{}")
    assert read_results(experiment, tmp_path) == [RunResult.of(one).to_dict() for one in RESULTS]


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_missing_or_torn_result_is_named(tmp_path: Path, content: str | None) -> None:
    experiment = place(tmp_path, *RESULTS)
    path = tmp_path / "small.static.seed0-0" / "result.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=r"small\.static\.seed0-0/result\.json.*Fix: run the experiment"):
        write_report(read_results(experiment, tmp_path), tmp_path, "tiny")


@pytest.mark.parametrize("content", [None, "", "{}", '{"cells": []}'])
def test_a_missing_or_empty_experiment_is_named(tmp_path: Path, content: str | None) -> None:
    experiment = tmp_path / "experiment.json"
    if content is not None:
        experiment.write_text(content)
    with pytest.raises(DataError, match=r"experiment\.json"):
        write_report(read_results(experiment, tmp_path), tmp_path, "tiny")


def test_nothing_is_left_of_an_interrupted_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(module, "_write_page", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_report(RESULTS, tmp_path, "tiny")
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("worth", ["inf", "nan"])
@pytest.mark.parametrize("beside", [0, 1])
def test_a_cell_that_diverged_does_not_end_the_report(tmp_path: Path, worth: str, beside: int) -> None:
    """Cells of older versions stand as finished with such figures; a page of them alone is drawn too."""
    figures = {"public_perplexity": worth, "eval_perplexity": worth}
    point = {"step": 1, "releases": 1, "public_perplexity": worth, "eval_sample_perplexity": worth}
    point |= {"epsilon_published": 1.0, "epsilon_noise_only": 1.0, "epsilon_certified": 1.0}
    diverged = [
        result(
            "quantile", before=figures, after=figures, history=[point], seed=seed, label=f"small.quantile.seed{seed}"
        )
        for seed in (0, 1)
    ]
    write_report([*diverged, *[result()] * beside], tmp_path / "report", "tiny")
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_a_picture_that_the_disk_has_no_room_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(picture: Image.Image, path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", no_room)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save(blank("curves", "nothing"), tmp_path / "curves.png")
    assert caught.value.filename == str(tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())
