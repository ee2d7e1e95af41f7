"""The budget of a run: decides, without reading data, whether a release may be charged."""

from __future__ import annotations

from collections import Counter
from typing import Self

from dptune.core.errors import DptuneError
from dptune.privacy.accounting.parts import disjoint
from dptune.privacy.accounting.renyi_filter import RenyiFilter, Spend
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader, composition_of


class BudgetError(DptuneError):
    """The next release would exceed the budget; it was neither charged nor made."""


class BudgetGate:
    """Admits releases while the epsilon that the header's ``accounting`` names stays within the budget.

    Args:
        composition: the releases that were charged so far.
        planned: the releases of the whole run. They are priced once, here, instead of at every step: if a composition
            is within the budget, so is every prefix of it.
    """

    def __init__(self, header: RunHeader, composition: Composition, planned: Composition) -> None:
        self.composition: Composition = Counter(composition)
        self._header, self._planned = header, planned.total()
        # The union prices charged and planned releases together: a plan alone would ignore charges that are not in it.
        union = composition | planned
        self.clears_plan = header.within_budget(union)
        self._cleared: Composition = Counter(union if self.clears_plan else composition)
        self._filter = _FilterGate.of(header, composition)

    @property
    def spent(self) -> float | None:
        """The cost of the charged releases to the header's filter, rounded up; None without a filter. Fast to read."""
        return None if self._filter is None else self._filter.mine.value

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget."""
        if self._header.epsilon is None:
            return True
        if self._filter is not None and self._filter.decides(release):
            # The cleared composition lacks the releases that the filter admits, so it no longer holds.
            self._cleared = Counter()
            return self._filter.admits(release)
        if self.composition[release] < self._cleared[release]:
            return True
        # Clear all releases of this kind that may still come: pricing at every step would be slow.
        ahead = max(1, self._planned - self.composition.total())
        while ahead:
            wanted = self.composition + Counter({release: ahead})
            if self._header.within_budget(wanted):
                self._cleared = wanted
                return True
            ahead //= 2
        return False

    def count(self, release: Release) -> None:
        """Count a release that was charged."""
        self.composition[release] += 1
        if self._filter is not None:
            self._filter.count(release)


class _FilterGate:
    """Decides on adaptive releases by the filter's running sum, with the same result as pricing all releases."""

    def __init__(self, header: RunHeader, renyi_filter: RenyiFilter, composition: Composition) -> None:
        self._header, self._filter = header, renyi_filter
        self.mine = Spend(renyi_filter, composition)
        theirs = [Spend(renyi_filter, part) for part in disjoint(composition_of(header.inherited))]
        self._theirs = max(theirs, key=lambda spend: spend.value)
        self._reaches = header.epsilon is not None and renyi_filter.limit(header.delta) <= header.epsilon
        inherited = composition_of(header.inherited)
        self._leaky = bool(header.leaks_of(composition))
        self._parts = any(release.part is not None for release in composition + inherited)

    @classmethod
    def of(cls, header: RunHeader, composition: Composition) -> Self | None:
        """The gate of the header's filter; None without a filter."""
        return None if header.renyi_filter is None else cls(header, header.renyi_filter, composition)

    def decides(self, release: Release) -> bool:
        """Whether the filter alone prices the run with this release. It cannot for parts, which do not add up."""
        whole = not self._parts and release.part is None
        return release.adaptive and whole and self._header.accounting != "published"

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget."""
        if self._header.accounting == "certified" and (self._leaky or release.leaks):
            return False
        total = self.mine.with_another(release) + self._theirs
        return self._reaches and self._filter.affords(total.value)

    def count(self, release: Release) -> None:
        """Count a release that was charged."""
        self.mine.add(release)
        self._leaky |= bool(release.leaks)
        self._parts |= release.part is not None
