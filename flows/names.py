"""Names of runs on Prefect's page: they say what runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect.runtime import flow_run

from tasks.settings.params import Settings
from tasks.settings.search import Search

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
