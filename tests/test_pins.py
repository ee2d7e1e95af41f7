"""Exact versions of constraints.txt: within the ranges of pyproject.toml, and within those of each other."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in found}


def ranges() -> Iterator[Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    yield from (Requirement(line) for lines in lists for line in lines)


def test_every_pin_is_in_its_range() -> None:
    pinned = pins()
    asked = [one for one in ranges() if canonicalize_name(one.name) in pinned]
    assert len(asked) > 40
    wrong = [
        f"{one} has {found}" for one in asked if (found := pinned[canonicalize_name(one.name)]) not in one.specifier
    ]
    assert wrong == []


def test_pins_fit_what_the_pinned_packages_ask_of_each_other() -> None:
    """pip would refuse to install them together. Read from the packages that are installed at their pinned version."""
    pinned, read, wrong = pins(), 0, []
    for name, version in pinned.items():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.version != version:
            continue
        for one in map(Requirement, package.requires or ()):
            other = canonicalize_name(one.name)
            if other in pinned and (one.marker is None or one.marker.evaluate({"extra": ""})):
                read += 1
                wrong += [] if one.specifier.contains(pinned[other], prereleases=True) else [f"{name}: {one}"]
    assert wrong == []
    assert read > 300


@pytest.mark.parametrize(("name", "broken"), [("sqlalchemy", "2.1.0"), ("fastapi", "0.151.0")])
def test_what_breaks_prefects_server_is_left_out(name: str, broken: str) -> None:
    """With SQLAlchemy 2.1 the scheduler of Prefect 3.8 raises, and no scheduled run is ever made."""
    found = [one for one in ranges() if one.name == name]
    assert found
    assert all(broken not in one.specifier for one in found)
