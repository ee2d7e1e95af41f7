"""A template of texts: which columns it names."""

from __future__ import annotations

from string import Formatter

from dptune.core.errors import ConfigError

#: What stands in a template for the column that ``RecordSource.text`` names.
TEXT = "text"


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, in order.

    Raises: ConfigError if it is malformed, names no column, or gives a column a format such as ``{age:d}``.
    """
    fix = "write columns in braces, as in 'age is {age}', and double other braces"
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError("data.template", f"is malformed ({error})", fix=fix) from None
    columns = tuple(name for _, name, _, _ in parts if name is not None)
    if not columns or "" in columns or any(form or turned for _, name, form, turned in parts if name):
        raise ConfigError("data.template", "names no columns, or gives one a format", fix=fix)
    return columns


def make_same_texts(one: str, other: str) -> bool:
    """Whether two templates make the same texts of rows whose columns may have other names."""
    if {*template_columns(one)} == {*template_columns(other)}:
        return one == other
    return _by_number(one) == _by_number(other)


def _by_number(template: str) -> list[tuple[str, int | None]]:
    """The template's pieces of text, each with the number of the column behind it, in order of first appearance."""
    seen = dict[str, int]()
    parts = Formatter().parse(template)
    return [(before, None if name is None else seen.setdefault(name, len(seen))) for before, name, _, _ in parts]
