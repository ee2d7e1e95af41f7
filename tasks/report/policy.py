"""Writes the page on private reinforcement learning: each policy's return, and the epsilon of its users."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from dptune.files import write_text
from tasks.report.experiment import epsilon_text, image_data
from tasks.report.policy_plots import algorithm_of, by_label, draw_rewards, draw_study, noise_of, spread

PAGE = "policy.html"
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The runs of one label, averaged over seeds.

    Attributes:
        critic: kind of the learner's critic.
        noise: the noise multiplier z; None for a baseline that is not private.
        users: number of users of an update.
        met: number of users in all.
        mean, deviation: mean and standard deviation of the final return.
    """

    label: str
    kind: str
    critic: str
    noise: float | None
    users: int
    updates: int
    met: int
    seeds: int
    mean: float
    deviation: float
    epsilon_published: str
    epsilon_noise_only: str
    epsilon_certified: str
    leaks: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A study on the page, with its picture as text and its rows."""

    name: str
    environment: str
    picture: str
    rows: list[Row]


def write_page(results: list[Result], delta: float, extra: dict[str, Any], directory: Path) -> None:
    """Write policy.html and a picture for every study.

    Args:
        extra: results of the other parts by name; a part that is absent has no section.
    """
    sections = []
    for name in dict.fromkeys(result["study"] for result in results):
        mine = [result for result in results if result["study"] == name]
        picture = directory / f"{name}.png"
        draw_study(mine, picture)
        sections.append(Section(name, mine[0]["environment"], image_data(picture), rows_of(mine)))
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["epsilon"] = epsilon_text
    if "rlhf" in extra:
        draw_rewards(extra["rlhf"], directory / "rlhf.png")
        extra = extra | {"rlhf_picture": image_data(directory / "rlhf.png")}
    page = environment.get_template("policy.html.j2").render(sections=sections, delta=delta, **extra)
    write_text(directory / PAGE, page)


def rows_of(results: list[Result]) -> list[Row]:
    """One row for each label, ordered by mean return, the best first."""
    rows = [_row(label, mine) for label, mine in by_label(results).items()]
    return sorted(rows, key=lambda row: -row.mean)


def _row(label: str, results: list[Result]) -> Row:
    first = results[0]
    mean, deviation = spread([result["final_return"] for result in results])
    method = first["method"]
    return Row(
        label=label,
        kind=algorithm_of(first),
        critic=method["critic"] if method and first["kind"] == "dppg" else "",
        noise=noise_of(first),
        users=first["training"]["users"],
        updates=first["training"]["updates"],
        met=first["users"],
        seeds=len(results),
        mean=mean,
        deviation=deviation,
        epsilon_published=first["epsilon_published"],
        epsilon_noise_only=first["epsilon_noise_only"],
        epsilon_certified=first["epsilon_certified"],
        leaks=tuple(first["leaks"]),
    )
