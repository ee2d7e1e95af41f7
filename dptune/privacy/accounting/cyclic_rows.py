"""Rules for the rows of a ledger whose price rests on more than their count.

Correlated noise: row r is about group r mod b, and all rows are made alike. A unit's visits are then b rows apart,
whatever process made which row. A sampler other than Poisson: all rows have the same one, at the same rate. Row r is
then batch r mod T of epoch r div T.
"""

from __future__ import annotations

from dataclasses import fields

from dptune.privacy.release import Release


def row_problem(last: Release | None, release: Release, row: int, units: int) -> str | None:
    """Why ``release`` may not be row ``row`` of a ledger whose row before is ``last``, as a clause; None if it may.

    Rows of independent noise and Poisson samples may follow one another in any way. With a strategy, every row has the
    same one, and the same rate, noise and sensitivity; only its group differs, which the number of the row decides.
    Samplers may differ between rows about different parts of the units, for these are priced apart.

    Args:
        units: number of units that the ledger's first line states; the chance that a batch is cut hangs on it.
    """
    if release.sampler.units not in (0, units):
        return f"is priced for {release.sampler.units} units, and the run has {units}"
    if problem := _sampler_problem(last, release):
        return problem
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


def _sampler_problem(last: Release | None, release: Release) -> str | None:
    if last is None or last.part != release.part or (last.sampler.like_poisson and release.sampler.like_poisson):
        return None
    if last.sampler != release.sampler:
        return f"is drawn by {_said(release)}, and the row before by {_said(last)}: one run has one sampler"
    if last.sample_rate != release.sample_rate:
        return f"has sample rate {release.sample_rate!r}, and the row before {last.sample_rate!r}"
    return None


def _said(release: Release) -> str:
    numbers = {name: value for name, value in release.sampler.to_dict().items() if name != "name"}
    return " ".join([release.sampler.name, *(f"({name} {value})" for name, value in numbers.items())])
