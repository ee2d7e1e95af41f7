"""``sweep: {option: [values]}`` in params.yaml: one entry for every combination."""

from __future__ import annotations

import itertools
import math
from typing import Any

_MOST = 10_000


def combinations(lists: Any) -> list[dict[str, Any]]:
    """Every choice of one value from each list, by name. Raises: ValueError unless ``lists`` is a table of lists."""
    if not (isinstance(lists, dict) and all(isinstance(values, list) and values for values in lists.values())):
        raise ValueError("is not a table of options with lists of values")
    if math.prod(map(len, lists.values())) > _MOST:
        raise ValueError(f"makes more than {_MOST} entries")
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
