"""The section `canaries`: secrets that are planted among the training records, for the attacks."""

from __future__ import annotations

from pydantic import field_validator

from dptune.core.bounds import Few, FewOrZero, Seed
from tasks.settings.strict import StrictModel


class Canaries(StrictModel):
    """Numbers of secrets to plant, each in a row of its own; nothing is planted if all are 0.

    Attributes:
        extraction: number of secrets that are always planted, to be extracted.
        repeats: number of rows that carry each of them.
        audit: number of secrets that a fair coin plants or leaves out; it limits the epsilon that can be shown.
        crafted: number of gradients that an auditor adds to every run, by coins; they cost utility.
        carrier_seed: seed of the public texts that carry secrets; the secrets and coins have none.
    """

    extraction: FewOrZero
    repeats: Few = 1
    audit: FewOrZero
    crafted: FewOrZero = 0
    carrier_seed: Seed

    @field_validator("crafted")
    @classmethod
    def _several(cls, count: int) -> int:
        if count == 1:
            raise ValueError("1 is too few: use 0, or hundreds")
        return count
