"""Every mutant, part by part of the library."""

from __future__ import annotations

from tests.mutants.lists import (
    audits,
    banded,
    checkpointing,
    classification,
    ledger,
    mechanisms,
    policy,
    prediction,
    pricing,
    randomness,
    records,
    register,
    rehearsals,
    search_runs,
    search_winners,
    selection,
    selection_price,
    shown_figures,
    telemetry,
    training,
    tuning,
    update_rules,
)
from tests.mutants.mutant import Mutant

PARTS = (
    pricing,
    ledger,
    register,
    randomness,
    mechanisms,
    banded,
    records,
    training,
    prediction,
    policy,
    audits,
    tuning,
    telemetry,
    checkpointing,
    classification,
    update_rules,
    selection_price,
    rehearsals,
    search_runs,
    search_winners,
    selection,
    shown_figures,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for part in PARTS for mutant in part.MUTANTS)
