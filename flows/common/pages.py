"""What a finished run shows on its page in Prefect: the answer, the table of results, and where to read more."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import artifacts, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from dptune.core.digits import at_least, at_most
from tasks.charts.seed_groups import Result, over_seeds, perplexity_metric, untuned
from tasks.metrics import title_of
from tasks.mlflow import tracking
from tasks.mlflow.experiments import remembered, server
from tasks.paths import DATA, EXPERIMENT, REPORT
from tasks.report.answer import answer_lines, further_lines, rankings
from tasks.report.experiment import PAGE, read_study
from tasks.report.numbers import could_refute, digits4, spread_text, whole_percent
from tasks.report.tables import Audit, ResultRow, result_table
from tasks.settings.params import Settings
from tasks.settings.search import Search

_HEAD = (
    "mechanism",
    "ε published",
    "ε noise only",
    "ε certified",
    "ε audited: shown (could refute)",
    "perplexity",
    "gain kept",
)
_ABSENT = "-"


def show_results(name: str, folder: Path = DATA) -> None:
    """Show the results of the cells that ``folder`` lists; audits and the report if they are there.

    Args:
        name: name of the experiment.
    """
    listed = folder / EXPERIMENT.name
    text = results_page(*read_study(listed))
    show_page(_key(name), f"{text}\n\n{_links(folder / REPORT.name / PAGE, name)}", f"The cells of {name}")


def _key(name: str) -> str:
    """The artifact's key: Prefect lists the results of one experiment, and of no other, as versions of one key.

    Example:
        >>> _key("Faults, 2nd try"), _key("大")
        ('results-faults-2nd-try', 'results')
    """
    return "-".join(["results", *re.findall("[a-z0-9]+", name.lower())])


def show_page(key: str, markdown: str, description: str) -> None:
    """Show a page of Markdown; if Prefect does not take it, the work that it is about stays finished."""
    try:
        create_markdown_artifact(markdown=markdown, key=key, description=description)
    except Exception as error:
        get_run_logger().warning("the page of results could not be shown: %s", error)


def show_file(what: str, file: Path, answer: str = "") -> None:
    """Show where the page of a flow lies, and MLflow's; after the page's answer, if there is one."""
    parts = [*([answer] if answer else []), f"The page of {what}: `{file.resolve()}`", _mlflow()]
    show_page("results", "\n\n".join(parts), f"Where {what} is reported")


def results_page(results: Sequence[Result], audits: Sequence[Audit]) -> str:
    """The report's answer and its table in Markdown; numbers in brackets lead to the notes below it."""
    found, metric = list(results), perplexity_metric(results)
    rows = result_table(over_seeds(found, metric), audits, rankings(found))
    parts = ["\n\n".join([*answer_lines(found), *further_lines(found)])]
    for section in rows.sections:
        lines = [_line(_HEAD), _line(["---"] * len(_HEAD)), *(_row(row) for row in section.rows)]
        parts.append(f"### {section.title[0].upper()}{section.title[1:]}\n\n" + "\n".join(lines))
    for model in dict.fromkeys(str(result["model"]) for result in found):
        if (before := untuned(found, model, metric)) is not None:
            parts.append(f"Model `{model}`, untuned: {title_of(metric)} {digits4(before)}. Lower is better.")
    parts += [f"{number}. {note}" for number, note in enumerate(rows.notes, start=1)]
    return "\n\n".join(parts)


def _row(row: ResultRow) -> str:
    first, group = row.group.first, row.group
    audited = _ABSENT if row.audited is None else at_least(row.audited)
    if row.refutable is not None:
        audited += f" ({could_refute(row.refutable)})"
    spread = f" ± {spread_text(group.spread, group.mean)}" if len(group.results) > 1 else ""
    prices = [at_most(first[key]) for key in ("epsilon_published", "epsilon_noise_only")]
    prices[0] += f" {first['claimed_by']}" if "claimed_by" in first else ""
    notes = "".join(f" ({remark.note})" for remark in row.warnings)
    name = (f"**`{group.mechanism}`**" if row.best else f"`{group.mechanism}`") + notes
    kept = _ABSENT if row.share is None or not math.isfinite(row.share) else f"{whole_percent(row.share)} %"
    worth = f"{digits4(group.mean)}{spread}"
    return _line([name, *prices, f"**{at_most(first['epsilon_certified'])}**", audited, worth, kept])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _links(report: Path, name: str) -> str:
    """Where the report lies, and MLflow's pages of it and of the cells."""
    lines = []
    if report.exists():
        lines.append(f"- Report: `{report.resolve()}`")
        parent = tracking.parent_run(name, {}, timed=False)
        if parent != tracking.LATER:
            number = tracking.client().get_run(parent).info.experiment_id
            address = f"{server()}/#/experiments/{number}/runs/{parent}/artifacts/report/{PAGE}"
            lines.append(f"- [The report in MLflow]({address})")
    return "\n".join([*lines, _mlflow()])


def _mlflow() -> str:
    shown = remembered()
    if shown is None:
        return f"- [MLflow]({server()})"
    return f"- [The cells in MLflow, as a table]({shown.table})\n- [The same in charts]({shown.charts})"


# How far a flow came, on its run's page in Prefect.


def progress_page(key: str) -> Callable[[float, str], None]:
    """A function that shows, on the page of the run under way, the share of its work that is done, and words for it.

    Args:
        key: name of the artifact: lower-case letters, digits and dashes.
    """
    made: list[UUID] = []

    def show(share: float, words: str) -> None:
        percent = round(100 * share, 1)
        try:
            if made:
                artifacts.update_progress_artifact(made[0], progress=percent, description=words)
            else:
                created: Any = artifacts.create_progress_artifact(progress=percent, key=key, description=words)
                made.append(created)
        except Exception as error:  # what cannot be shown must not end the work
            get_run_logger().warning("progress could not be shown: %s", error)

    return show


# Names of runs on Prefect's page: they say what runs.


_MOST = 4


def grid_words(name: str, mechanisms: Sequence[str], epsilons: Sequence[float], seeds: Sequence[int]) -> str:
    """A grid in words, such as "faults: static, rldp at epsilon 1, 4; 3 seeds"."""
    budgets = f" at epsilon {_listed(f'{epsilon:g}' for epsilon in epsilons)}" if epsilons else ""
    return f"{name}: {_listed(mechanisms)}{budgets}; {_counted(len(seeds), 'seed')}"


def grid_name(settings: Settings) -> str:
    """The name of a run of the experiment that the settings spell out."""
    chosen = settings.experiment
    return grid_words(chosen.name, chosen.mechanisms, chosen.epsilons, chosen.seeds)


def grid_form_name() -> str:
    """The name of the run under way, from its form's fields."""
    given = flow_run.parameters
    return grid_words(given["name"], given["mechanisms"], given["epsilons"], given["seeds"])


def audit_form_name() -> str:
    """The name of the audit under way, from its form's fields."""
    given = flow_run.parameters
    parts = [f"{given['generations']} generations", f"{given['records']} records"]
    parts += [f"{given['shadows']} shadows"] if given["shadows"] else []
    return f"audit: {', '.join([*parts, _counted(given['step_trials'], 'trial')])}"


def prediction_form_name() -> str:
    """The name of the prediction under way, from its form's fields."""
    given = flow_run.parameters
    budgets = _listed(f"{epsilon:g}" for epsilon in given["epsilons"])
    return f"prediction: {_listed(map(str, given['models']))} models at epsilon {budgets}"


def policy_form_name() -> str:
    """The name of the policies' run under way, from its form's fields."""
    given = flow_run.parameters
    return f"{given['name']}: {_counted(len(given['seeds']), 'seed')}"


def search_words(name: str, candidates: float, epsilon: float) -> str:
    """A search in words, such as "default: the best of 10 on average at epsilon 2"."""
    return f"{name}: the best of {candidates:g} on average at epsilon {epsilon:g}"


def search_name(section: Search) -> str:
    """The name of a run of the search that the settings spell out."""
    return search_words(section.name, section.candidates, section.epsilon)


def search_form_name() -> str:
    """The name of the search under way, from its form's fields."""
    given = flow_run.parameters
    return search_words(given["name"], given["candidates"], given["epsilon"])


def _listed(words: Iterable[str]) -> str:
    found = list(words)
    more = len(found) - _MOST
    return ", ".join(found) if more <= 0 else f"{', '.join(found[:_MOST])} and {more} more"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
