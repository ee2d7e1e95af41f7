"""A template of texts: which columns it names."""

from __future__ import annotations

from string import Formatter

from dptune.errors import ConfigError

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
