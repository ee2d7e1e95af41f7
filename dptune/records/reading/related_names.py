"""Names that hold other names of their column: with a prefix, cut off, or several in one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise

#: The least number of names with one prefix or ending, the least share of all names, and the length that is looked at.
_LEAST, _SHARE, _LONGEST, _SHORTEST = 3, 0.02, 80, 8
_SEVERAL = re.compile(r"\s*[;,/&|+]\s*|\s+(?:and|und|et|y)\s+")


def holds_another(names: Collection[str]) -> dict[str, str]:
    """Names that hold another name of the same column, each with that name.

    A prefix or an ending counts if several names have it ("CUST-17" beside "17"), a shorter name if it is cut where
    others are, and a list if each of its parts is a name ("Ann; Bea").

    Example:
        >>> from dptune.records.reading.related_names import holds_another
        >>> holds_another(["17", "CUST-17", "18", "CUST-18", "19", "CUST-19"])
        {'CUST-17': '17', 'CUST-18': '18', 'CUST-19': '19'}
    """
    known, enough = {*names}, max(_LEAST, _SHARE * len(names))
    by_addition, by_length = defaultdict[tuple[str, str], dict[str, str]](dict), defaultdict[int, dict[str, str]](dict)
    lists = dict[str, str]()
    for name in known:
        if len(name) > _LONGEST:
            continue
        parts = _SEVERAL.split(name)
        if len(parts) > 1 and known.issuperset(parts):
            lists[name] = parts[0]
        for place in range(1, len(name)):
            if _kind(name[place - 1]) == _kind(name[place]) != "other":
                continue
            before, behind = name[:place], name[place:]
            if behind in known and len(behind) > 1 and not before.isdecimal():
                by_addition[before, ""][name] = behind
            if before in known and len(before) > 1 and not behind.isdecimal():
                by_addition["", behind][name] = before
    stems = {re.sub(r"(\.\.\.|\u2026)$", "", name): name for name in known}
    for short, long in pairwise(sorted(stems)):
        cut = len(short) >= _SHORTEST and long.startswith(short) and len(long) > len(short)
        if cut and not (short[-1].isdecimal() and long[len(short)].isdecimal() and long.isdecimal()):
            by_length[len(short)][stems[long]] = stems[short]
    groups = (*by_addition.values(), *(cuts for cuts in by_length.values() if not _are_counted(cuts)))
    found = {name: other for group in groups if len(group) >= enough for name, other in group.items()}
    return dict(sorted((found | (lists if len(lists) > 1 else {})).items()))


def _kind(letter: str) -> str:
    return "letter" if letter.isalpha() else "digit" if letter.isdecimal() else "other"


def _are_counted(cuts: dict[str, str]) -> bool:
    """Whether the longer names only have more digits behind a number: "customer-1" and "customer-10" are two."""
    return all(re.fullmatch(r"\d*\D*", long[len(short) :]) and short[-1].isdecimal() for long, short in cuts.items())
