"""Audit canaries of a run: gradients that an auditor plants, with coins and scores in a private file, and their price.

The ledger's first line holds a commitment to the coins, before anything is released, and its last line the digest of
the file with the scores. So coins that are chosen afterwards, and scores that are edited, do not fit the ledger.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError, DataError
from dptune.core.files import private_directory, read_json, write_json
from dptune.job.run_spec import TuneSchedule
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.certificate import commitment_of
from dptune.privacy.ledger import Booked
from dptune.privacy.run_folder import fresh_start
from dptune.training.crafted_canaries import CraftedCanaries
from dptune.training.spec import RunSpec

#: Setting and, in the messages, option of the number of canaries.
SETTING = "audit_canaries"
_LEAST = 10  # fewer fair coins fall alike in more than one run of 512
_FIGURES = ("scores", "ratios", "moves", "squares")
_SALT = 16  # bytes: so many that nobody who has the ledger finds the coins of a commitment by trying


@dataclass
class KeptCanaries(CraftedCanaries):
    """Canaries whose coins and scores lie in a file, and outlive this process. Private.

    Attributes:
        run: folder of the run.
        file: the file, of mode 0600.
        salt: salt of the commitment, in hexadecimal digits; empty in files of earlier versions, whose ledgers hold no
            commitment.
    """

    run: Path = field(default=Path(), repr=False)
    file: Path = field(default=Path(), repr=False)
    salt: str = field(default="", repr=False)

    @classmethod
    def new(cls, count: int, run: Path, file: Path) -> KeptCanaries:
        """Canaries with new coins. Nothing is written yet. Raises: ConfigError for fewer than 2."""
        tossed = CraftedCanaries.toss(count)
        return cls(tossed.included, tossed.scores, run=run, file=file, salt=secrets.token_hex(_SALT))

    @classmethod
    def read(cls, run: Path, file: Path) -> KeptCanaries:
        """The canaries in a file. Raises: DamagedFileError for a file that cannot be read, or holds none."""
        return read_json(file, lambda stored: _of_stored(stored, run, file))

    @property
    def commitment(self) -> str:
        """Salted SHA-256 of the coins, which tells nothing of them; empty without a salt."""
        coins = {"coins": self.included.astype(int).tolist()}
        return commitment_of(bytes.fromhex(self.salt), coins) if self.salt else ""

    @property
    def in_header(self) -> dict[str, Any]:
        """The fields of the run's header."""
        return {"canaries": len(self.included), "coins": self.commitment} if self.salt else {}

    def planted_in(self, spec: RunSpec) -> RunSpec:
        """The run with slots for the canaries, and with the commitment to their coins in its header."""
        units, header = spec.units.with_slots(self.included), replace(spec.header, **self.in_header)
        return replace(spec, units=units, header=header, auditor=self, booked=partial(self.kept, spec.booked))

    def write(self) -> None:
        """Write the file, whole or not at all. What is not finite, in a run that diverges, is written as null."""
        private_directory(self.file.parent)
        stored = {
            **({"salt": self.salt} if self.salt else {}),
            "included": self.included.astype(int).tolist(),
            "rated": self.rated,
            **{name: [one if math.isfinite(one) else None for one in getattr(self, name)] for name in _FIGURES},
        }
        write_json(self.file, stored)

    @contextmanager
    def kept(self, booked: Booked) -> Iterator[None]:
        """Context in which the ledger of a new run gets its first line: the coins are on disk before.

        The caller holds the ledger's lock, so that no other process replaces the file.
        """
        self.write()
        with booked():
            yield

    def on_open(self, releases: int) -> None:
        """Check that the file holds these coins. Raises: DataError if it holds others, or none."""
        if not self.file.exists() or not np.array_equal(KeptCanaries.read(self.run, self.file).included, self.included):
            raise _other_coins(self.run, self.file)

    def on_save(self) -> None:
        """Write the scores so far."""
        self.write()


def canaries_of(run: Path, file: Path, count: int, committed: str | None) -> KeptCanaries:
    """The canaries of a run: new ones for a new run, and those in its file for one that goes on.

    Args:
        run: the folder of the run.
        committed: the commitment in the header of the run's ledger; None if the ledger has none yet. Without a ledger
            the run is new, and a file that lies there is of a run that was set aside.

    Raises: DataError if the file is missing, or its coins are not those that the ledger was begun with.
    """
    if committed is None:
        return KeptCanaries.new(count, run, file)
    if not file.exists() or (found := KeptCanaries.read(run, file)).commitment != committed:
        raise _other_coins(run, file)
    return found


def check_count(count: int, units: int, pair_sizes: Sequence[int], *, has_head: bool, own: bool = False) -> None:
    """Raise ConfigError for a number of canaries that the units or the adapter's coordinates do not allow.

    Args:
        units: number of units without canaries.
        pair_sizes: numbers of parameters of the groups that train: each canary has a coordinate of its own in each.
        has_head: whether the last group is a classifier's head, whose size no rank changes.
        own: whether the groups are layers of a model, whose sizes no rank changes either.
    """
    if count < _LEAST:
        problem = f"{count} is too few: their coins may all fall alike, and then nothing can be audited"
        raise ConfigError(SETTING, problem, fix="use hundreds, or 0 for none")
    if count > units:
        problem = f"{count} is more than the {units} units, which would be the smaller part of each batch"
        raise ConfigError(SETTING, problem, fix=f"use {min(units, *pair_sizes)} or fewer, or add records")
    if count > min(pair_sizes):
        least, fix = min(pair_sizes), f"use {min(pair_sizes)} or fewer"
        is_head = has_head and least == pair_sizes[-1]
        group = (
            "the classifier's head" if is_head else "the smallest layer that trains" if own else "the smallest adapter"
        )
        problem = f"{count} is more than the {least} parameters of {group}, and each canary needs one of its own"
        raise ConfigError(SETTING, problem, fix=fix if is_head or own else f"{fix}, or a larger rank")


def price_of(
    count: int, schedule: TuneSchedule, mechanism: Mechanism, alone: Mechanism, batch_alone: float, parameters: int
) -> str:
    """What canaries are and cost a run, as a sentence of public facts.

    Args:
        count: number of canaries, which count among the units.
        mechanism: the run's.
        alone: the mechanism of the same run without canaries.
        batch_alone: expected batch of that run.
        parameters: number of parameters that train.
    """
    noise, without = (one.effective_noise_multiplier(one.knobs()) for one in (mechanism, alone))
    batch, planted = schedule.expected_batch_size, schedule.sample_rate * count
    # Each gradient that is in has the norm of one clipped unit, in coordinates that it shares with no other.
    share = planted / 2 / (noise**2 * parameters)
    return (
        f"{count} crafted gradients of an auditor, each in by a fair coin; they count as units. Of an expected batch "
        f"of {batch:g} units {at_least(batch - planted, 4)} are of the records; the noise multiplier is "
        f"{at_most(noise, 4)}, without canaries {at_most(without, 4)} for a batch of {batch_alone:g}; canaries add "
        f"about {100 * share:.2g} % to the variance of the noise"
    )


def _of_stored(stored: dict[str, Any], run: Path, file: Path) -> KeptCanaries:
    included, scores = np.array(stored["included"]), np.array(stored["scores"], dtype=np.float64)
    moves = _read_floats(stored["moves"])
    squares = _read_floats(stored.get("squares", [None] * len(moves)))  # earlier versions kept none
    ratios, rated = np.array(stored.get("ratios", []), dtype=np.float64), int(stored.get("rated", 0))
    if not (included.ndim == scores.ndim == 1 and len(included) == len(scores) and set(included.tolist()) <= {0, 1}):
        raise ValueError("coins and scores are not two lists of one length")
    if len(squares) != len(moves):
        raise ValueError("squares are not one for each release")
    if any(one < 0 for one in squares):
        raise ValueError("a sum of squares is negative")
    if rated and ratios.shape != scores.shape:
        raise ValueError("ratios are not one for each coin")
    salt = str(stored.get("salt", ""))
    bytes.fromhex(salt)
    return KeptCanaries(included.astype(bool), scores, moves, squares, ratios, rated, run=run, file=file, salt=salt)


def _read_floats(stored: list[float | None]) -> list[float]:
    return [math.nan if one is None else float(one) for one in stored]


def _other_coins(run: Path, file: Path) -> DataError:
    problem = "does not hold the coins that this run's releases were made with"
    return DataError(problem, fix=f"restore it; or {fresh_start(run)}", file=file)
