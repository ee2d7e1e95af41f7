"""Rehearsal: the space is searched on public records, and the private records see the chosen settings alone.

Each candidate trains on public records with the noise, batch and number of steps that it would have on the private
ones within the whole budget, and is scored on further public records. That reads no private record, so it costs
nothing, and the number of candidates is neither random nor secret. It is worth what the public records have in common
with the private ones; a public score of privately trained models is not the same, and can be worse than none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError, DivergedError
from dptune.core.files import read_json, write_json
from dptune.job.base_model import Base
from dptune.job.estimate import rows_of
from dptune.job.preparation import calibrate_mechanism
from dptune.job.run_spec import schedule_of
from dptune.job.search.kinds import candidate_schedule, check_kinds, settings_of
from dptune.job.search.plan import changes
from dptune.job.search.settings import SearchSettings
from dptune.job.search.space import Configuration
from dptune.job.settings import FREE, TuneSettings
from dptune.job.suggest import read_public, trial
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.run_folder import RunFolder
from dptune.records.reading.source import RecordSource


@dataclass(frozen=True)
class Rehearsed:
    """What was tried on public records. Public.

    Attributes:
        settings: the private run's settings.
        tried: each configuration, and its perplexity on held-out public records; infinite where it diverged.
    """

    settings: TuneSettings
    tried: tuple[tuple[Configuration, float], ...]


def rehearsal_file(out: Path) -> Path:
    """Where the rehearsal of the run in ``out`` is kept, so that a resumed run trains what was chosen. Public."""
    return out.with_name(f"{out.name}.rehearsal.json")


def rehearsed(
    source: RecordSource,
    base: Base,
    settings: TuneSettings,
    search: SearchSettings,
    units: int,
    out: Path,
    on_trial: Callable[[Configuration, float], None] = lambda configuration, perplexity: None,
    unit: str | None = None,
    told: Mapping[str, Any] | None = None,
    *,
    keep: bool = True,
) -> Rehearsed:
    """The rehearsal for the run in ``out``: the one on disk, if the same was asked, else a new one. See below.

    Args:
        told: what else names the public records, so that others are rehearsed on anew.
        keep: whether a new one is put on disk, for the run that is to follow.

    Raises: ConfigError if another one was asked, and its choice was run already: what is drawn again would not be what
        that run is of, and taking the settings back would not bring it back.
    """
    path = rehearsal_file(out)
    asked = {"settings": asdict(settings), "search": search.to_json(), "units": units} | dict(told or {})
    asked = json.loads(json.dumps(asked))
    if path.exists():
        known = read_json(path, fix="restore it, or give another folder")
        changed = changes(_decisive(known["asked"]), _decisive(asked))
        if not changed:
            tried = tuple((dict(configuration), float(found)) for configuration, found in known["tried"])
            return Rehearsed(settings_of(settings, known["chosen"]), tried)
        if RunFolder(out).ledger.exists():
            problem = f"{out} is a run whose settings were rehearsed for something else ({changed})"
            raise ConfigError("out", problem, fix="restore them, or give another folder, which spends again")
    found = rehearse_space(source, base, settings, search, units, on_trial, unit)
    chosen = min(found.tried, key=lambda one: one[1])[0]
    shown = [[configuration, str(perplexity)] for configuration, perplexity in found.tried]
    if keep:
        write_json(path, {"asked": asked, "chosen": chosen, "tried": shown})
    return found


def _decisive(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What of a rehearsal's file decides its result, in one table."""
    found = {**asked, **asked["settings"], **asked["search"]}
    return {name: value for name, value in found.items() if name not in ("settings", "search", *FREE)}


def rehearse_space(
    source: RecordSource,
    base: Base,
    settings: TuneSettings,
    search: SearchSettings,
    units: int,
    on_trial: Callable[[Configuration, float], None] = lambda configuration, perplexity: None,
    unit: str | None = None,
) -> Rehearsed:
    """Choose the settings of a run on ``units`` private units by public records alone.

    Args:
        source: the run's source, of which only ``public`` is read.
        unit: the column of the public records that names their units; None: each is a unit of its own.

    Raises: ConfigError without public records, with fewer than a batch, or for a point that cannot be trained;
        DivergedError if every candidate diverged.
    """
    if source.public is None:
        raise ConfigError("public", "is missing, and score: rehearsal trains on public records", fix="give them")
    if settings.task == "classify":
        raise ConfigError("task", "classify has no rehearsal yet", fix="use score: noisy")
    public = replace(source, data=source.public, public=None, unit=unit, id=None)
    records = read_public(public, base, settings)
    check_kinds(search, settings, base, units)  # so that no late candidate fails by its settings
    weights, entropy, tried = base.load(), OsEntropy(), []
    calibrated: dict[Any, Any] = {}
    for _ in range(search.rehearsals):
        number, configuration = search.space.draw(entropy)
        own = settings_of(settings, configuration)
        if number not in calibrated:  # ranges decide no noise
            calibrated[number] = calibrate_mechanism(own, base, candidate_schedule(own, base, units))
        bands = calibrated[number].mechanism.bands
        schedule = schedule_of(own, units, base.parameters, base.positions, bands)
        own = replace(own, physical_batch_size=rows_of(own, base, schedule, records.units.most))
        found = trial(base, weights, own, schedule, calibrated[number], records, schedule.learning_rate)
        tried.append((configuration, found))
        on_trial(configuration, found)
    best = min(tried, key=lambda one: one[1])
    if not math.isfinite(best[1]):
        raise DivergedError("every candidate diverged. Fix: lower the learning rates of the space.")
    return Rehearsed(settings_of(settings, best[0]), tuple(tried))
