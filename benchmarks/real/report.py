"""Tables of what ``python -m benchmarks.real`` measured, ready for a page; what has not run says so."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.real.plan import (
    BUDGETS,
    CASES,
    DEFAULTS,
    NAMES,
    SYSTEMS,
    UNCERTIFIED,
    WEIGHTS,
    WITHOUT_PRIVACY,
    Case,
    runs_of,
)
from benchmarks.real.published import PUBLISHED
from docs.generate import weights_table

_OF_TEXTS = (("bleu_e2e", "BLEU", 1), ("nist_e2e", "NIST", 1), ("rouge_l_13a", "ROUGE-L", 1))
#: By part: names of scores, their headings, and what they are multiplied by. The first one is compared.
METRICS: Mapping[str, tuple[tuple[str, str, float], ...]] = {
    WEIGHTS: (("accuracy", "test accuracy, %", 100), ("loss", "loss, nats", 1)),
    "sst2": (("accuracy", "test accuracy, %", 100), ("loss", "loss, nats", 1)),
    "e2e": _OF_TEXTS,
    "e2e-eot": _OF_TEXTS,
    "diabetes-text": (("perplexity", "test perplexity", 1),),
    "readmission": (("accuracy", "test accuracy, %", 100), ("f1", "macro F1", 1), ("loss", "loss, nats", 1)),
}
_CALLED = {WITHOUT_PRIVACY: "without privacy, same steps", "static": "static (DP-SGD)", "rldp": "rldp, as provable",
           "rldp_published": "rldp, as published"}  # fmt: skip
Lines = Mapping[str, Mapping[str, Any]]


def report(found: Lines, parts: Sequence[str], cases: Sequence[Case] = CASES) -> list[str]:
    """Markdown lines of all results of these parts. Each figure is a mean over seeds, +- their standard deviation."""
    tables = {DEFAULTS: _grids, WEIGHTS: _weights}
    return [
        line for part in parts for line in (tables[part](found, cases) if part in tables else _part(part, found, cases))
    ]


def numbers(found: Lines, case: Case) -> dict[str, Any]:
    """What the picture of README.md shows of a case: the first score of ``static`` by epsilon, and floors."""
    score, heading, factor = METRICS[case.part][0]
    planned = [run for run in runs_of(case.part, (case,)) if run.budget in BUDGETS and not run.changes]
    own = {run.name for run in planned if run.system in (WITHOUT_PRIVACY, "static")}
    runs = [line for name, line in found.items() if name in own and "scores" in line]
    if not runs:
        raise SystemExit(f"the picture shows {case.name} by static and without privacy, and no such run is done")
    free = [factor * line["scores"][score][0] for line in runs if line["system"] == WITHOUT_PRIVACY]
    floors = {f"{statistics.mean(free):.4g}": "without privacy, same steps"} if free else {}
    floors |= {f"{factor * values[score]:.4g}": who for who, values in runs[0]["floors"].items() if score in values}
    shown = []
    for budget in sorted({line["budget"] for line in runs if line["system"] == "static"}):
        group = [line for line in runs if (line["system"], line["budget"]) == ("static", budget)]
        figures = {kind: max(float(line[f"epsilon_{kind}"]) for line in group) for kind in ("certified", "published")}
        shown.append({**figures, "scores": [round(factor * line["scores"][score][0], 2) for line in group]})
    size = f"{runs[0]['base']['parameters'] / 1e6:.1f} million parameters"
    commits = ", ".join(dict.fromkeys(line["commit"] for line in runs))
    return {case.part: {"title": f"{case.title}: {NAMES[case.model]}, {size}", "score": heading, "floors": floors,
                        "runs": shown, "commit": commits}}  # fmt: skip


def _part(part: str, found: Lines, cases: Sequence[Case]) -> Iterator[str]:
    metrics = METRICS[part]
    for case in (case for case in cases if case.part == part):
        runs = runs_of(part, (case,))
        done = [found[run.name] for run in runs if run.name in found and "scores" in found[run.name]]
        yield from _title(case, done)
        if not done:
            yield from ("Has not run.", "")
            continue
        yield from _head(
            "who", "asked epsilon", "certified epsilon", *(name for _, name, _ in metrics), "runs", "test error"
        )
        yield from _floors(done, metrics)
        groups: dict[tuple[float, int, str], list[Mapping[str, Any]]] = {}
        for line in done:
            groups.setdefault(_place(line), []).append(line)
        for place in sorted(groups):
            yield _row(groups[place], metrics)
        for line in PUBLISHED:
            if line.part == part:
                asked = "none" if line.stated is None else f"{line.stated:g} (stated)"
                rest = [""] * (len(metrics) - 1)
                yield _cells(
                    f"*{line.who}* ({line.source})", asked, line.certifies, f"{line.score:g}", *rest, "quoted", ""
                )
        yield ""
        yield from _missing(runs, found)


def _title(case: Case, done: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The case with the model's size, which a run has counted."""
    if not done:
        yield from (f"### {case.title}, {NAMES[case.model]}", "")
        return
    base, one = done[0]["base"], done[0]
    trained = dict.fromkeys((line["base"]["trained"], line["changes"].get("train")) for line in done)
    counted = ", ".join(f"{count:,} trained weights{f' ({train} alone)' if train else ''}" for count, train in trained)
    weights = f"; {base['weights']}" if base["weights"] else ""
    yield from (
        f"### {case.title}, {NAMES[case.model]} ({base['parameters'] / 1e6:.1f} million parameters{weights})",
        "",
    )
    devices = ", ".join(dict.fromkeys(line["device"] for line in done))
    yield (
        f"{one['units']:,} units ({one['unit']}), delta {one['delta']:g}; {counted}; "
        f"{one['tested']:,} test inputs, on which nobody trained; on {devices}; commit "
        f"{', '.join(dict.fromkeys(line['commit'] for line in done))}."
    )
    yield ""


def _place(line: Mapping[str, Any]) -> tuple[float, int, str]:
    """Where a run stands in its table: by budget, the largest first, then by system and by what trains."""
    budget = float("inf") if line["budget"] is None else line["budget"]
    return -budget, [WITHOUT_PRIVACY, "static", *SYSTEMS].index(line["system"]), line["changes"].get("train", "")


def _row(group: Sequence[Mapping[str, Any]], metrics: Sequence[tuple[str, str, float]]) -> str:
    system, budget = group[0]["system"], group[0]["budget"]
    certified = max(float(line["epsilon_certified"]) for line in group)
    # From above: a certified epsilon is never printed below what it is.
    said = "none" if certified == float("inf") else f"{-(-certified * 1000 // 1) / 1000:g}"
    values = [_spread([factor * line["scores"][name][0] for line in group]) for name, _, factor in metrics]
    errors = [error for line in group if (error := line["scores"][metrics[0][0]][1]) is not None]
    error = f"{metrics[0][2] * statistics.mean(errors):.2g}" if errors else ""
    asked = "none" if budget is None else f"{budget:g}{' (stated)' if system in UNCERTIFIED else ''}"
    alone = f", {train} alone" if (train := group[0]["changes"].get("train")) else ""
    return _cells(f"{_CALLED.get(system, system)}{alone}", asked, said, *values, str(len(group)), error)


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.4g}"
    return f"**{mean}** +- {statistics.stdev(values):.2g}" if len(values) > 1 else f"**{mean}**"


def _floors(done: Sequence[Mapping[str, Any]], metrics: Sequence[tuple[str, str, float]]) -> Iterator[str]:
    """A constant answer and the untuned model; of a classifier the latter is known on the dev rows alone."""
    for who, values in done[0]["floors"].items():
        shown = [f"{factor * values[name]:.4g}" if name in values else "" for name, _, factor in metrics]
        yield _cells(who, "", "0" if "untuned" in who else "", *shown, "", "")
    if (pair := done[0]["dev"].get(metrics[0][0])) and "the untuned model" not in done[0]["floors"]:
        yield _cells(
            "the untuned model (dev rows)",
            "",
            "0",
            f"{metrics[0][2] * pair[0]:.4g}",
            *[""] * (len(metrics) - 1),
            "",
            "",
        )


def _missing(runs: Sequence[Any], found: Lines) -> Iterator[str]:
    """A sentence with what has not run, and one with what diverged, by budget and system."""
    for said, names in (
        ("Has not run", [run for run in runs if run.name not in found]),
        ("Diverged", [run for run in runs if "diverged" in found.get(run.name, {})]),
    ):
        by: dict[str, list[str]] = {}
        for run in names:
            budget = "no privacy" if run.budget is None else f"epsilon {run.budget:g}"
            what = run.changes.get("train", run.system)
            by.setdefault(f"{what} at {budget}", []).append(str(run.seed))
        if by:
            each = "; ".join(f"{what} (seed {', '.join(seeds)})" for what, seeds in by.items())
            yield from (f"{said}: {each}.", "")


def _grids(found: Lines, cases: Sequence[Case]) -> Iterator[str]:
    """Of each case with a grid: how far the defaults are from the best of its settings."""
    for case in (case for case in cases if case.grid_budget):
        metrics = METRICS[case.part]
        (name, heading, factor), smaller_is_better = metrics[0], metrics[0][0] == "perplexity"
        plain, *others = runs_of(DEFAULTS, (case,))
        done = [found[run.name] for run in others if "scores" in found.get(run.name, {})]
        yield from _title(case, done)
        if not done:
            yield from (f"The grid of {len(others)} settings at epsilon {case.grid_budget:g} has not run.", "")
            continue
        done.sort(key=lambda line: line["scores"][name][0], reverse=not smaller_is_better)
        best = factor * done[0]["scores"][name][0]
        if "scores" in found.get(plain.name, {}):
            value = factor * found[plain.name]["scores"][name][0]
            plainly = f"With every default left alone: {heading} **{value:.4g}**"
        else:
            plainly = "The run with every default left alone has not run"
        yield f"{plainly}; the best of {len(done)} settings: **{best:.4g}**."
        yield f"{len(others) - len(done)} of {len(others)} settings have not run, or diverged."
        yield ""
        with_dev = any(name in line.get("dev", {}) for line in done)  # texts that are written are scored on test alone
        dev_head = ("dev rows",) if with_dev else ()
        yield from _head(
            "rate", "radius", "expected batch", "epochs", *dev_head, *(shown for _, shown, _ in metrics[1:]), heading
        )
        for line in done:
            one = line["changes"]
            numbers = (one["learning_rate"], one["options"]["max_grad_norm"], one["expected_batch_size"], one["epochs"])
            rest = [(scale, line["scores"].get(key)) for key, _, scale in metrics[1:]]
            dev = ((factor, line.get("dev", {}).get(name, [])[1:]),) if with_dev else ()
            scores = (*dev, *rest, (factor, line["scores"][name]))
            shown = (f"{scale * pair[0]:.4g}" if pair else "" for scale, pair in scores)
            yield _cells(*(f"{number:g}" for number in numbers), *shown)
        yield ""


def weights_numbers(found: Lines, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """What the table of part weights shows (``docs.generate.weights_table``): trials on the stand-in, and runs."""
    own = [case for case in cases if case.part == WEIGHTS]
    runs = runs_of(WEIGHTS, tuple(own))
    trials, finals, score = [], [], METRICS[WEIGHTS][0][0]
    for run in (run for run in runs if "scores" in found.get(run.name, {})):
        line = found[run.name]
        settings = line["settings"]
        common = {"train": run.changes["train"], "rate": settings["learning rate"]}
        # The deviation of the noise on the mean gradient of a batch, and the length of all of it in clip radii.
        relative = line["noise_multiplier"] / settings["expected batch"]
        common |= {"weights": line["base"]["trained"], "memory": line["memory"]}
        common["noise_length"] = float(f"{relative * line['base']['trained'] ** 0.5:.3g}")
        if not run.trials:
            dev = {name: line["dev"][name][1] for name in (score, "loss")}
            trials.append({**common, "accuracy": round(100 * dev[score], 2), "loss": round(dev["loss"], 4)})
            continue
        finals.append({
            **common, "radius": settings["max_grad_norm"], "budget": run.budget, "seed": run.seed,
            "certified": line["epsilon_certified"],
            "accuracy": round(100 * line["scores"][score][0], 2), "loss": round(line["scores"]["loss"][0], 4),
            "noise": float(f"{relative * settings['max_grad_norm']:.3g}"),
            "seconds": line["seconds"],
        })  # fmt: skip
    counts = {"trials": sum(not run.trials for run in runs), "runs": sum(bool(run.trials) for run in runs)}
    return {"title": own[0].title, "stand_in": own[1].title, "planned": counts, "trials": trials, "runs": finals}


def _weights(found: Lines, cases: Sequence[Case]) -> Iterator[str]:
    """What trains, side by side at equal certified epsilon, each at the best rate of its trials on the stand-in."""
    own = [case for case in cases if case.part == WEIGHTS]
    if not own:
        return
    finals = [run for run in runs_of(WEIGHTS, tuple(own)) if run.trials]
    yield from _title(own[0], [found[run.name] for run in finals if "scores" in found.get(run.name, {})])
    yield from weights_table.lines(weights_numbers(found, cases))
    yield from _missing(finals, found)


def _head(*cells: str) -> Iterator[str]:
    yield _cells(*cells)
    yield "| --- " * len(cells) + "|"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
