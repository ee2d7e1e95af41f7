"""The rule that a ledger of correlated noise keeps: row r is about group r mod b, and all rows are made alike.

The price of such a ledger rests on it: a unit's visits are then b rows apart, whatever process made which row.
"""

from __future__ import annotations

from dataclasses import fields

from dptune.privacy.release import Release


def row_problem(last: Release | None, release: Release, row: int) -> str | None:
    """Why ``release`` may not be row ``row`` of a ledger whose row before is ``last``, as a clause; None if it may.

    Rows of independent noise may follow one another in any way. With a strategy, every row has the same one, and the
    same rate, noise and sensitivity; only its group differs, which the number of the row decides.
    """
    if not release.coefficients and (last is None or not last.coefficients):
        return None
    if last is not None:
        other = [
            item.name
            for item in fields(Release)
            if item.name != "part" and getattr(last, item.name) != getattr(release, item.name)
        ]
        if other:
            return f"differs in {', '.join(other)} from the row before, and rows of correlated noise are all alike"
    elif row:
        return "is not the first row, but the ledger holds no row before it"
    bands = len(release.coefficients)
    if release.part != row % bands:
        return f"is about group {release.part}, where row {row} of {bands} bands is about group {row % bands}"
    return None
