"""The settings of a search: its space, the law of the number of candidates, and its score. Public."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError, first_line
from dptune.core.streams import read_input
from dptune.job.search.space import OPTION, SEARCHED, Space
from dptune.job.settings import RENAMED
from dptune.privacy.selection import BOUNDS, Bound
from dptune.privacy.selection_law import DEFAULT_SHAPE, SelectionLaw

#: What a file or mapping may say.
_KEYS = ("space", "candidates", "shape", "most", "bound", "score", "together", "keep_losers", "again")
_SCORE_KEYS = ("on", "clip", "noise_multiplier")
_BY_NAME = {"noisy": "held_out", "public": "public", "rehearsal": "rehearsal"}
_ON = ("held_out", "train", "public", "rehearsal")
#: Noise of a score over the training units: it costs 0.4 % more training noise at 102 steps and epsilon 2.
_TRAIN_NOISE = 20.0


@dataclass(frozen=True)
class ScoreSettings:
    """How candidates are compared.

    Attributes:
        on: "held_out" units, the "train" units, or "public" records; "rehearsal" trains on public records too.
        clip: bound in nats of one unit's loss difference to the base model.
        noise_multiplier: standard deviation of the score's noise over ``clip``; None is calibrated.
    """

    on: str = "held_out"
    clip: float = 1.0
    noise_multiplier: float | None = None

    @classmethod
    def of(cls, given: Any) -> ScoreSettings:
        """Read "noisy", "public", or a mapping. Raises: ConfigError naming the entry."""
        if isinstance(given, str):
            if given not in _BY_NAME:
                fix = f"use {' or '.join(_BY_NAME)}, or a mapping with on, clip and noise_multiplier"
                raise ConfigError("search.score", f"{given!r} is unknown", fix=fix)
            return cls(_BY_NAME[given])
        if not isinstance(given, Mapping):
            raise ConfigError("search.score", f"{given!r} is not a score", fix="use noisy or public")
        _check_keys("search.score", given, _SCORE_KEYS)
        found = cls(**given)
        if found.on not in _ON:
            raise ConfigError("search.score.on", f"{found.on!r} is unknown", fix=f"use {', '.join(_ON)}")
        for name in ("clip", "noise_multiplier"):
            value = getattr(found, name)
            if not (name == "noise_multiplier" and value is None) and not (_is_number(value) and value > 0):
                raise ConfigError(
                    f"search.score.{name}", f"{value!r} is not a positive number", fix="give one, such as 1"
                )
        return found

    @property
    def chosen_noise(self) -> float | None:
        """The noise multiplier that is given, or the one of a score over training units; None if it is calibrated."""
        if self.noise_multiplier is None and self.on == "train":
            return _TRAIN_NOISE
        return self.noise_multiplier


@dataclass(frozen=True)
class SearchSettings:
    """A search: K candidates from ``space``, of which the best by ``score`` is released.

    Attributes:
        law: distribution of K, the number of candidates.
        bound: the bound by which the search is priced.
        together: candidates that share a process; changes speed only.
        keep_losers: whether the working folder stays, for its owner. It holds what the guarantee does not cover.
        again: whether earlier publications from the same records are accepted; everything then adds up.
    """

    space: Space
    law: SelectionLaw
    score: ScoreSettings = ScoreSettings()
    bound: Bound = "hull"
    together: int = 4
    keep_losers: bool = False
    again: bool = False

    @classmethod
    def of(cls, given: str | Path | Mapping[str, Any], **more: Any) -> SearchSettings:
        """Read a YAML file or a mapping; ``more`` that is not None goes before it. Raises: ConfigError."""
        read = dict(given) if isinstance(given, Mapping) else _read(Path(given))
        read |= {name: value for name, value in more.items() if value is not None}
        _check_keys("search", read, _KEYS)
        if "space" not in read:
            raise ConfigError("search.space", "is missing", fix="name settings with the values to try")
        candidates = read.get("candidates")
        if candidates is None:
            raise ConfigError("search.candidates", "is missing", fix="give how many to try on average, such as 10")
        for name in ("keep_losers", "again"):
            if not isinstance(read.get(name, False), bool):
                raise ConfigError(
                    f"search.{name}", f"{read[name]!r} is neither true nor false", fix="use true or false"
                )
        together = read.get("together", 4)
        if not isinstance(together, int) or isinstance(together, bool) or together < 1:
            raise ConfigError("search.together", f"{together!r} is not a whole number above 0", fix="use 4")
        bound = read.get("bound", "hull")
        if bound not in BOUNDS:
            raise ConfigError("search.bound", f"{bound!r} is unknown", fix=f"use {' or '.join(BOUNDS)}")
        try:
            shape = read.get("shape", DEFAULT_SHAPE)
            law = SelectionLaw.of(candidates, math.inf if shape == "inf" else shape, read.get("most"))
        except ConfigError as error:
            raise ConfigError(f"search.{error.field}", error.problem, fix=error.fix) from None
        return cls(
            space=Space.of(read["space"]),
            law=law,
            score=ScoreSettings.of(read.get("score", "noisy")),
            bound=bound,
            together=together,
            keep_losers=read.get("keep_losers", False),
            again=read.get("again", False),
        )

    @property
    def rehearsals(self) -> int:
        """How many settings a rehearsal tries. Public."""
        return math.ceil(self.law.uncapped_mean - 1e-9)

    def to_json(self) -> dict[str, Any]:
        """What decides the search's result, in JSON types."""
        score = {"on": self.score.on, "clip": self.score.clip, "noise_multiplier": self.score.noise_multiplier}
        return {"space": self.space.to_json(), "law": self.law.to_dict(), "score": score, "bound": self.bound}


def _read(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe", pure=True).load(read_input(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("search", f"{path} cannot be read ({first_line(error)})", fix="check the path") from None
    except YAMLError as error:
        raise ConfigError(
            "search", f"{path} is not valid YAML ({first_line(error)})", fix="write names and values"
        ) from None
    if not isinstance(found, Mapping):
        raise ConfigError("search", f"{path} holds no mapping", fix="write `space:` with settings and their values")
    return dict(found)


def _check_keys(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name in ("time_limit", "max_time", "timeout"):
            problem = (
                "would end a search by the clock: the number of candidates that fit then reveals how long they took"
            )
            raise ConfigError(f"{where}.{name}", problem, fix="leave it out; `most` caps the number of candidates")
        if (
            name not in known
            and "space" in known
            and (RENAMED.get(name, name) in SEARCHED or str(name).startswith(OPTION))
        ):
            raise ConfigError(f"{where}.{name}", "stands outside the space", fix="indent it under `space:`")
        if name not in known:
            raise ConfigError(f"{where}.{name}", "is not a setting", fix=f"use {', '.join(known)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
