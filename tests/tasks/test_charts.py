"""What charts show: the right points at the right places, no empty panels, and labels that a reader can use."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import altair as alt
import pytest
import vl_convert
from PIL import Image
from test_report import moved, private, result

from tasks.charts.audits import run_profiles, step_profiles
from tasks.charts.canvas import BAD, SHADE, Figure, Panel, for_page, program, save, values
from tasks.charts.curves import controller, curves, spent
from tasks.charts.looks import BLUE, INK, looks
from tasks.charts.seed_groups import EPSILONS, cell_names
from tasks.charts.utility import utility
from tasks.report.prediction import METRIC, prediction, protocol_looks

LEAKY: dict[str, Any] = {"budget_epsilon": 2.0, "epsilon_published": 2.0, "leaks": ["raw norms"]}
RESULTS = [
    *(result("static", 1.99984, seed=seed, label=f"static{seed}") for seed in (0, 1)),
    result("quantile", 1.9998),
    result("rldp_published", "inf", **LEAKY),
    result("nonprivate", "inf"),
]
#: A second epsilon, without which there are no columns.
FURTHER = result("auto_s", 8.0)


def drawn(results: list[dict[str, Any]], **options: Any) -> Figure:
    figure = utility(results, looks(one["mechanism"] for one in results), **options)
    assert figure is not None
    return figure


def rows(figure: Figure, panel: int = 0) -> list[dict[str, Any]]:
    """The points of mechanisms in a panel."""
    found = for_page(figure)[panel]["datasets"].values()
    return next(data for data in found if data and "seeds" in data[0])


def labels(figure: Figure, tmp_path: Path) -> str:
    """All that a figure says, as its renderer writes it."""
    spec = for_page(figure)[0]
    return str(vl_convert.vegalite_to_svg(json.dumps(spec | {"width": 600})))


def test_epsilon_is_one_tick_of_few_digits_and_infinity_another(tmp_path: Path) -> None:
    """The axis used to read 1.99984 five times."""
    text = labels(drawn([*RESULTS, FURTHER]), tmp_path)
    assert ">2</text>" in text
    assert ">∞</text>" in text
    assert "no guarantee" in text
    assert "1.999" not in text.replace('aria-label="', "").split("<title")[0].split("aria-roledescription")[0]


def test_an_epsilon_on_an_axis_is_rounded_up_as_in_tables(tmp_path: Path) -> None:
    """The axis said 2.68 where the table below it said 2.69."""
    text = labels(drawn([result("static", 2.6807), result("quantile", 4.0)]), tmp_path)
    assert ">2.69</text>" in text
    assert ">2.68</text>" not in text


def test_a_cells_name_has_no_more_than_tells_it_from_the_others() -> None:
    static, other = result(), result("quantile", 4.0)
    assert list(cell_names([static, result("nonprivate", "inf")]).values()) == ["static", "nonprivate"]
    seeds = [result(seed=seed, label=f"s{seed}") for seed in (0, 1)]
    assert cell_names([*seeds, other]) == {
        "s0": "static ε 2 seed 0",
        "s1": "static ε 2 seed 1",
        other["label"]: "quantile ε 4 seed 0",
    }
    alike = [result(label="a"), result(label="b")]
    assert cell_names(alike) == {"a": "a", "b": "b"}, "names that do not tell two cells apart are none"


def test_points_of_one_epsilon_stand_beside_each_other_in_the_order_of_the_legend() -> None:
    places = {row["mechanism"]: row["x"] for row in rows(drawn([*RESULTS, FURTHER]))}
    assert places["static"] < places["quantile"] < places["rldp_published"]
    assert (places["static"] + places["quantile"]) / 2 == pytest.approx(1, abs=1e-3), "around log2 of 2"


def test_one_epsilon_is_a_line_for_each_mechanism_the_best_first_and_those_without_a_guarantee_last(
    tmp_path: Path,
) -> None:
    leaky = result("rldp_published", "inf", after={"public_perplexity": 7.0, "eval_perplexity": 4.0}, **LEAKY)
    figure = drawn([*RESULTS[:3], leaky, RESULTS[4]])
    assert figure.title.startswith("Held-out perplexity by mechanism")
    text = labels(figure, tmp_path)
    # quantile has 5, static 6; the best of all has no guarantee
    assert text.index(">quantile</text>") < text.index(">static</text>") < text.index(">rldp_published</text>")
    assert "no guarantee" in text
    assert "without privacy: 5" in text
    two = drawn([*RESULTS, FURTHER])
    assert two.title.startswith("Held-out perplexity against epsilon")
    assert figure.panels[0].height < two.panels[0].height


def test_where_all_meet_at_one_epsilon_they_are_ranked_there_beside_a_curve_of_those_with_more(tmp_path: Path) -> None:
    """The default study: plain DP-SGD at several budgets, beside every mechanism at one of them."""
    one_seed = [result("static", 1.99984), *RESULTS[2:]]
    more = [result("static", epsilon, label=f"static{epsilon}") for epsilon in (1.0, 4.0, 8.0)]
    figure = drawn([*one_seed, *more])
    assert figure.title.startswith("Held-out perplexity by mechanism and against epsilon")
    ranked, curve = figure.panels
    assert (ranked.title, curve.title) == ("ε = 2", "static against ε")
    assert [row["mechanism"] for row in rows(figure)].count("static") == 1
    assert {row["mechanism"] for row in rows(figure)} == {"static", "quantile", "rldp_published"}
    assert [row["mechanism"] for row in rows(figure, 1)] == ["static"] * 4
    apart = drawn([result("static", 1.981), result("quantile", 1.9998), *more])
    assert apart.panels[0].title == "ε = 2", "the largest of those that it ranks"
    assert "One seed has no bars" in figure.note
    assert "One seed has no bars" not in drawn([*RESULTS, *more]).note
    # Two budgets where mechanisms meet, or one mechanism that never meets the others: columns show them all.
    for other in (result("quantile", 4.0, label="q4"), result("auto_s", 8.5)):
        (panel,) = drawn([*one_seed, *more, other]).panels
        assert panel.title == ""


def test_bars_are_one_deviation_over_seeds() -> None:
    spread = [result(seed=0), result(seed=1, after={"public_perplexity": 7.0, "eval_perplexity": 8.0})]
    (row,) = rows(drawn(spread))
    assert (row["perplexity"], row["seeds"]) == (7.0, 2)
    assert (row["low"], row["high"]) == (pytest.approx(7 - 2**0.5, abs=1e-4), pytest.approx(7 + 2**0.5, abs=1e-4))


def measured(mechanism: str, epsilon: float | str, losses: list[float], **changes: Any) -> dict[str, Any]:
    """The result of a cell whose records lie in groups of ten tokens: ``losses`` has the mean loss of each group."""
    after = {name: math.exp(sum(losses) / len(losses)) for name in ("public_perplexity", "eval_perplexity")}
    kept = {name: [[loss * 10, 10] for loss in losses] for name in after}
    return result(mechanism, epsilon, after=after, loss_groups=kept, label=f"{mechanism}{epsilon}", **changes)


def test_one_seeds_bars_are_the_error_over_records_of_what_privacy_costs() -> None:
    plain = [1.5, 1.7, 1.6, 1.4, 1.8]
    gaps = [[0.03, 0.05, 0.01, 0.04, 0.02], [0.01, 0.0, 0.02, 0.005, 0.01]]
    private = [
        measured("static", epsilon, [a + b for a, b in zip(plain, gap, strict=True)])
        for epsilon, gap in zip((2.0, 8.0), gaps, strict=True)
    ]
    figure = drawn([measured("nonprivate", "inf", plain), *private])
    shown = sorted(rows(figure), key=lambda row: -row["perplexity"])
    for row, gap in zip(shown, gaps, strict=True):
        # The error of a mean of equal groups, in perplexity: a gap of losses is a relative gap of perplexities.
        error = row["perplexity"] * statistics.stdev(gap) / math.sqrt(len(gap))
        assert row["high"] - row["perplexity"] == pytest.approx(error, abs=2e-4)
        assert row["perplexity"] - row["low"] == pytest.approx(error, abs=2e-4)
    assert "one standard error, over held-out records, of the difference to training without privacy" in figure.note
    assert "one seed does not show how far" in figure.note
    assert "One seed has no bars" in drawn(private).note, "nothing to differ from"


def test_training_without_privacy_is_a_line_and_no_point() -> None:
    figure = drawn(RESULTS)
    assert {row["mechanism"] for row in rows(figure)} == {"static", "quantile", "rldp_published"}
    texts = json.dumps(for_page(figure), ensure_ascii=False)
    assert "without privacy" in texts
    assert "public model, untuned" in texts


@pytest.mark.parametrize(("before", "far"), [(8.0, False), (40.0, True)])
def test_a_far_worse_public_model_is_named_and_squeezes_no_points(before: float, far: bool, tmp_path: Path) -> None:
    """The axis leaves out an untuned perplexity far above the others, which it would draw as one flat line."""
    known = {"public_perplexity": before, "eval_perplexity": before}
    found = [result(before=known, after={"public_perplexity": 7.0, "eval_perplexity": 5.0 + seed}) for seed in (0, 1)]
    text = labels(drawn(found), tmp_path)
    assert (f"untuned: {before:.2f}, far above" in text) is far
    assert (">40</text>" in text or ">35</text>" in text) is False


def test_what_is_not_there_has_no_figure_no_panel_and_no_explanation() -> None:
    shown = looks(["static", "nonprivate"])
    assert utility([result("nonprivate", "inf")], shown) is None
    assert spent([result("nonprivate", "inf", history=[])], shown) is None
    assert curves([result(history=[])], shown) is None
    assert drawn([result()]).note == ""
    still = [{"releases": releases, "noise_multiplier": 1.1} for releases in (1, 2)]
    assert [panel.title for panel in controller(result(knobs=still), shown["static"]).panels] == ["epsilon"]


def test_what_a_controller_did_is_drawn_in_the_colour_of_its_mechanism_alone() -> None:
    """The lines of every mechanism once had the blue of ``quantile``, and its epsilon the black of ``static``."""
    shown = looks(["static", "quantile", "rldp"])
    others = {one.light for name, one in shown.items() if name != "rldp"}
    texts = json.dumps([spec | {"config": {}} for spec in for_page(controller(moved(), shown["rldp"]))])
    assert shown["rldp"].light in texts
    assert not [colour for colour in others if colour in texts]


def test_held_out_curves_are_no_panel_under_private_telemetry() -> None:
    open_one, shut = (curves([one], looks(["static"])) for one in (result(), private(result())))
    assert open_one is not None
    assert shut is not None
    assert [panel.title for panel in open_one.panels] == ["held-out perplexity (sample)", "public-set perplexity"]
    assert [panel.title for panel in shut.panels] == ["public-set perplexity"]


def test_models_and_units_have_panels_of_their_own() -> None:
    results = [*RESULTS, result("static", 2.0, model="large"), result("dp_lora_fed", 2.0, unit="client")]
    titles = [panel.title for panel in drawn(results).panels]
    assert sorted(titles) == ["large, one record", "small, one client", "small, one record"]
    assert len(drawn(RESULTS, keys=list(EPSILONS)).panels) == 3


def test_a_name_with_quotes_is_drawn(tmp_path: Path) -> None:
    """Vega would read an expression that is glued together from names."""
    evil = "a'b\"c\\d </script>"
    for figure in (drawn([result(evil)]), spent([result(evil)], looks([evil])), curves([result(evil)], looks([evil]))):
        assert figure is not None
        save(figure, tmp_path / "x.png")
        assert Image.open(tmp_path / "x.png").size[0] > 400
        assert evil in {
            one for spec in for_page(figure) for data in spec["datasets"].values() for one in data[0].values()
        }


def test_numbers_that_are_not_finite_are_left_out() -> None:
    data = values([{"x": 1.0}, {"x": float("inf")}, {"x": float("nan")}, {"x": 3}])
    assert data.to_dict() == {"values": [{"x": 1.0}, {"x": 3}]}


def test_epsilon_begins_at_zero_for_those_alone_that_have_one_at_the_end() -> None:
    """Before any release every epsilon is 0, that of training without privacy too."""
    zero = {"step": 0, "releases": 0} | dict.fromkeys(EPSILONS, 0.0)
    begun = [one | {"history": [zero, *one["history"]]} for one in (result("static"), result("nonprivate", "inf"))]
    figure = spent(begun, looks(["static", "nonprivate"]))
    assert figure is not None
    points = [row for spec in for_page(figure) for data in spec["datasets"].values() for row in data]
    assert {row["mechanism"] for row in points} == {"static"}
    assert min(row["releases"] for row in points) == 0


def test_the_lines_of_private_prediction_have_their_names_beside_each_other() -> None:
    """Lines may lie on each other or nearly so; then each name must be readable, and no line may go through one."""
    near = [("nonprivate", f"average of {number}", 2.6 + number / 1000) for number in (2, 4, 8)]
    kinds = (*near, ("public", "public model", 9))
    lines = [{"kind": kind, "label": label, METRIC: height} for kind, label, height in kinds]
    answers = [
        {"kind": "answers", "unit": "record", "budget_epsilon": epsilon, METRIC: 2.5, "private_weight": 0.5}
        for epsilon in (2.0, 8.0)
    ]
    figure = prediction([*answers, *lines], {"epsilon": 8}, synthetic=True)
    layers = for_page(figure)[0]["layer"]
    names = [layer["mark"] for layer in layers if "text" in layer["encoding"]]
    lefts = [name["x"] for name in names[::2]]
    assert lefts == [name["x"] for name in names[1::2]]
    assert [name["baseline"] for name in names[::2]] == ["top", "bottom", "bottom", "bottom"], (
        "the lowest under its line"
    )
    assert lefts[2] >= lefts[1] + 5.5 * len("average of 2"), "the third begins where the second has ended"
    assert lefts[3] == lefts[1] == lefts[0], "a line that is far from the others begins at the left again"
    assert [name.get("stroke") for name in names] == ["#ffffff", None] * 4, "a ground below each name"
    marks = [layer["mark"]["type"] for layer in layers]
    assert marks == ["rule"] * 4 + ["line"] + ["text"] * 8 + ["point"]


def test_private_prediction_has_one_colour_and_a_marker_for_each_unit() -> None:
    rows = [{"kind": kind, "unit": unit} for kind in ("answers", "published") for unit in ("patient", "record")]
    shown = protocol_looks(rows)
    every = looks(["static", "quantile", "rldp", "pmixed"])
    assert {look.light for look in shown.values()} == {every["pmixed"].light}
    assert {name: look.shape for name, look in shown.items() if look.hollow} == {
        "pmixed_published, patient": "square",
        "pmixed_published, record": "circle",
    }
    assert len({(look.light, look.shape) for look in every.values()}) == len(every)


def test_altair_finds_every_chart_valid() -> None:
    """Its check is slow, so that pages go without."""
    shown = looks(one["mechanism"] for one in RESULTS)
    drawings = (drawn(RESULTS), spent(RESULTS, shown), curves(RESULTS, shown), controller(moved(), shown["static"]))
    for figure in drawings:
        assert figure is not None
        for panel in figure.panels:
            panel.chart.to_dict(validate=True)


def test_a_page_can_hold_the_program() -> None:
    assert "</script" not in program()
    assert "vegaEmbed" in program()
    assert len(program()) < 1_200_000


def test_what_a_page_draws_is_as_wide_as_its_place() -> None:
    figure = Figure("x", "X", (Panel(alt.Chart(values([{"x": 1}])).mark_point().encode(x="x:Q"), ""),))
    (spec,) = for_page(figure)
    assert spec["width"] == "container"
    assert spec["autosize"]["type"] == "fit-x"


def marks_of(panel: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows that each layer of a panel draws, by its kind of mark and its colour."""
    found: dict[str, list[dict[str, Any]]] = {}
    for layer in panel["layer"]:
        mark = layer["mark"]
        rows = panel["datasets"].get(layer["data"].get("name", ""), [])
        found.setdefault(f"{mark['type']} {mark['color']}", []).extend(rows)
    return found


CURVE = [(4.0, 1e-10), (2.0, 1e-5), (0.0, 0.1)]


def test_a_run_is_drawn_with_what_is_proved_shown_and_could_have_been_refuted() -> None:
    from tests.browser.samples import audit

    made = audit(result("static", 2.0)) | {"epsilon_published": 1.5}
    figure = run_profiles([made], {made["label"]: CURVE}, synthetic=True, names={made["label"]: "static"})
    (panel,) = for_page(figure)
    found = marks_of(panel)
    assert [(row["epsilon"], row["delta"]) for row in found[f"line {BLUE[0]}"]] == CURVE
    (corner,) = found[f"rect {BAD[0]}"]
    assert (corner["epsilon"], corner["delta"], corner["zero"]) == (0.12, 1e-5, 0.0)
    (reach,) = found[f"rule {BAD[0]}"]
    assert (reach["from"], reach["epsilon"]) == (0.12, 3.88)
    assert [row["epsilon"] for row in found[f"tick {INK[0]}"]] == [1.5]
    assert [row["shown"] for row in found[f"point {BLUE[0]}"]] == ["2"]
    assert panel["layer"][0]["encoding"]["x"]["scale"]["domain"][1] > 3.88, "all of it has room"
    assert "SYNTHETIC" in figure.title
    assert figure.panels[0].title == "static"


def test_a_run_without_a_guarantee_has_grey_ground_and_no_proof() -> None:
    from tests.browser.samples import audit

    made = audit(result("nonprivate", "inf"))
    (panel,) = for_page(run_profiles([made], {}, synthetic=False))
    found = marks_of(panel)
    assert found[f"rect {SHADE[0]}"]
    assert not any(name.endswith(BLUE[0]) for name in found)
    assert f"tick {INK[0]}" not in found, "it claims nothing finite"
    assert "no guarantee" in json.dumps(panel)


def test_a_step_is_drawn_with_both_gaussians_and_cells_left_out_are_counted() -> None:
    from tests.browser.samples import audit

    made = [audit(result("static", 2.0, label=f"cell{number}")) for number in range(26)]
    made[0]["step"] = made[0]["step"] | {"mu_certified": 1.0, "mu_audited": 0.0}
    figure = step_profiles(made, synthetic=False)
    assert figure is not None
    assert len(figure.panels) == 24
    assert figure.note.endswith("2 more cells are in the table only.")
    first, second = (marks_of(panel) for panel in for_page(figure)[:2])
    at_zero = next(row["delta"] for row in first[f"line {BLUE[0]}"] if row["epsilon"] == 0)
    assert at_zero == pytest.approx(0.3829, abs=1e-4), "total variation of mu 1: 2 Phi(1/2) - 1"
    assert f"line {BAD[0]}" not in first, "an attack that shows nothing has no curve"
    assert second[f"line {BAD[0]}"]
    assert step_profiles([{"label": "x"}], synthetic=False) is None
