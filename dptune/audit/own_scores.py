"""Membership scores from plug-ins, by name: functions of losses that are larger if a text looks trained on.

Plug-ins (``dptune.plugins``) register them: modules named by the user, and entry points ``dptune.scores``::

    @score("relative")
    def relative(adapted, public):
        return (public - adapted) / (public + 1)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dptune.errors import ConfigError, DataError
from dptune.plugins import Plugin, load_installed, note_registered, plugins_of

Losses = NDArray[np.float64]
Score = Callable[[Losses, Losses], Losses]
#: Names of the scores that the audit computes by itself.
BUILT_IN = ("likelihood", "calibrated", "perplexity", "shadows")
_SCORES: dict[str, Score] = {}


def score(name: str) -> Callable[[Score], Score]:
    """Register a function of the losses under the adapted and under the public model, (texts,) each.

    It returns (texts,) finite numbers, larger if the text looks like a member. Private, as the losses are.

    Raises: ConfigError if the name is taken.

    Example:
        >>> from dptune.audit.own_scores import own_scores, score
        >>> import numpy as np
        >>> @score("relative")
        ... def relative(adapted, public):
        ...     return (public - adapted) / (public + 1)
        >>> own_scores(np.array([1.0, 3.0]), np.array([3.0, 3.0]))["relative"].tolist()
        [0.5, 0.0]
    """

    def register(function: Score) -> Score:
        other = _SCORES.get(name)
        if name in BUILT_IN or (other is not None and other.__module__ != function.__module__):
            raise ConfigError("plugins", f"score {name!r} of {function.__module__} already exists", fix="rename it")
        _SCORES[name] = function
        note_registered(function.__module__)
        return function

    return register


def own_scores(adapted: Losses, public: Losses) -> dict[str, Losses]:
    """Every registered score of these texts, by name.

    Raises: DataError naming a score that fails, or does not give one finite number for each text.
    """
    load_installed("dptune.scores")
    return {name: _computed(name, function, adapted, public) for name, function in sorted(_SCORES.items())}


def score_plugins() -> tuple[Plugin, ...]:
    """The plug-ins that registered scores; an audit's result depends on them."""
    load_installed("dptune.scores")
    return plugins_of(function.__module__ for function in _SCORES.values())


def _computed(name: str, function: Score, adapted: Losses, public: Losses) -> Losses:
    try:
        values = np.asarray(function(adapted.copy(), public.copy()), dtype=np.float64)
    except (Exception, SystemExit) as error:  # whatever a plug-in may raise, or end the process by
        problem = f"score {name!r} failed ({type(error).__name__}: {error})"
        raise DataError(problem, fix="fix the function", file=function.__module__) from error
    if values.shape != adapted.shape or not np.isfinite(values).all():
        problem = f"score {name!r} is not one finite number for each of {len(adapted)} texts"
        raise DataError(problem, fix="return as many numbers as there are losses", file=function.__module__)
    return values
