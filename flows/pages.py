"""What a finished run shows on its page in Prefect: the answer, the table of results, and where to read more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from dptune.digits import at_least, at_most
from tasks import tracking
from tasks.charts.groups import Result, over_seeds, perplexity_metric, untuned
from tasks.experiment.listed import read_results
from tasks.metrics import title_of
from tasks.page_links import remembered, server
from tasks.paths import AUDITS, DATA, EXPERIMENT, REPORT, RUNS
from tasks.report.answer import answer_lines, further_lines, rankings
from tasks.report.experiment import PAGE, read_audits
from tasks.report.numbers import could_refute, digits4, spread_text
from tasks.report.table import Audit, ResultRow, table

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
    results = read_results(listed, RUNS)
    text = results_page(results, read_audits(listed, AUDITS))
    show_page("results", f"{text}\n\n{_links(folder / REPORT.name / PAGE, name)}", f"The cells of {name}")


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
    rows = table(over_seeds(found, metric), audits, rankings(found))
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
    notes = "".join(f" ({remark.note})" for remark in row.warnings)
    name = (f"**`{group.mechanism}`**" if row.best else f"`{group.mechanism}`") + notes
    kept = _ABSENT if row.share is None or not math.isfinite(row.share) else f"{100 * row.share:.0f} %"
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
