"""What pydantic found wrong with a value, in words for the user: its own speak of inputs, types and patterns."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "there is no such entry",
    "unexpected_keyword_argument": "there is no such entry",
    "float_type": "{value} is not a number",
    "float_parsing": "{value} is not a number",
    "finite_number": "{value} is not a finite number",
    "int_type": "{value} is not a whole number",
    "int_parsing": "{value} is not a whole number",
    "int_parsing_size": "{value} is too large a number",
    "int_from_float": "{value} is not a whole number",
    "bool_type": "{value} is neither true nor false",
    "bool_parsing": "{value} is neither true nor false",
    "string_type": "{value} is not a text",
    "path_type": "{value} is not a path",
    "dict_type": "{value} is not a table of entries",
    "model_type": "{value} is not a table of entries",
    "dataclass_type": "{value} is not a table of entries",
    "model_attributes_type": "{value} is not a table of entries",
    "list_type": "{value} is not a list",
    "tuple_type": "{value} is not a list",
    "greater_than": "{value} is not above {gt}",
    "greater_than_equal": "{value} is below {ge}",
    "less_than": "{value} is not below {lt}",
    "less_than_equal": "{value} is above {le}",
    "literal_error": "{value} is not {expected}",
    "string_too_short": "{value} has fewer characters than {min_length}",
    "string_too_long": "{value} has more characters than {max_length}",
    "string_pattern_mismatch": "{value} is not of the form {pattern}",
    "too_short": "has {actual_length} entries, and {min_length} is the least",
    "too_long": "has {actual_length} entries, and {max_length} is the most",
}


def problem_of(item: Mapping[str, Any]) -> str:
    """Words for an item of pydantic's ``errors()``, to follow the field's name and a colon."""
    kind, context = str(item["type"]), dict(item.get("ctx", {}))
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", item["msg"]))
    if kind not in _WORDS:
        return f"{reprlib.repr(item.get('input'))}: {item['msg']}"
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    return _WORDS[kind].format(value=reprlib.repr(item.get("input")), **shown)
