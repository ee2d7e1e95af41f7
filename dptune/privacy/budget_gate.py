"""The budget of a run: decides, without reading data, whether a release may be charged."""

from __future__ import annotations

from collections import Counter
from typing import Self

from dptune.errors import DptuneError
from dptune.privacy.filters import RenyiFilter, Spend
from dptune.privacy.parts import disjoint
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader, composition_of


class BudgetError(DptuneError):
    """The next release would pass the budget; it was neither charged nor made."""


class BudgetGate:
    """Admits releases while the epsilon that the header's ``accounting`` names keeps the budget.

    Args:
        composition: what was charged so far.
        planned: the whole run, priced once here and not at every step: any prefix of a composition that is within the
            budget is within it too.
    """

    def __init__(self, header: RunHeader, composition: Composition, planned: Composition) -> None:
        self.composition: Composition = Counter(composition)
        self._header, self._planned = header, planned.total()
        # What was charged counts against the budget together with what is still planned.
        union = composition | planned
        self.clears_plan = header.within_budget(union)
        self._cleared: Composition = Counter(union if self.clears_plan else composition)
        self._filter = _FilterGate.of(header, composition)

    @property
    def spent(self) -> float | None:
        """What was charged costs the header's filter (never too little); None without one. Costs nothing."""
        return None if self._filter is None else self._filter.mine.value

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget."""
        if self._header.epsilon is None:
            return True
        if self._filter is not None and self._filter.decides(release):
            # What was cleared did not know of the releases that come in here.
            self._cleared = Counter()
            return self._filter.admits(release)
        if self.composition[release] < self._cleared[release]:
            return True
        # Clear as many more of the same as may come, so that a price is not computed at every step.
        ahead = max(1, self._planned - self.composition.total())
        while ahead:
            wanted = self.composition + Counter({release: ahead})
            if self._header.within_budget(wanted):
                self._cleared = wanted
                return True
            ahead //= 2
        return False

    def count(self, release: Release) -> None:
        """It was charged."""
        self.composition[release] += 1
        if self._filter is not None:
            self._filter.count(release)


class _FilterGate:
    """Decides on adaptive releases by the filter's running sum, as pricing all of them would."""

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
        """None without a filter."""
        return None if header.renyi_filter is None else cls(header, header.renyi_filter, composition)

    def decides(self, release: Release) -> bool:
        """Whether the filter alone prices the run with this release; not of parts, which do not add up."""
        whole = not self._parts and release.part is None
        return release.adaptive and whole and self._header.accounting != "published"

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget."""
        if self._header.accounting == "certified" and (self._leaky or release.leaks):
            return False
        total = self.mine.with_another(release) + self._theirs
        return self._reaches and self._filter.affords(total.value)

    def count(self, release: Release) -> None:
        """It was charged."""
        self.mine.add(release)
        self._leaky |= bool(release.leaks)
        self._parts |= release.part is not None
