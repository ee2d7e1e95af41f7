"""Membership: scores of texts, and their success in telling members from non-members.

Scores and labels are private; larger means "member". RMIA and the alignment score stand below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from dptune.core.errors import ConfigError, DataError
from dptune.core.plugins import Plugin, load_installed, note_registered, plugins_of
from dptune.training.data import Tokens
from dptune.training.gradients.per_sample import per_sample_gradients
from dptune.training.losses import model_losses
from dptune.training.models.own_weights import groups_of, own_weights

FALSE_POSITIVE_RATES = (1e-2, 1e-3)


@dataclass(frozen=True)
class Roc:
    """The ROC curve of an attack, from the strictest threshold to the loosest. Private.

    Attributes:
        false_positive_rate: share of non-members above each threshold, rising from 0 to 1.
        true_positive_rate: share of members above it.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.membership import roc
        >>> curve = roc(np.array([2.0, 3.0]), np.array([1.0, 2.5]))
        >>> curve.false_positive_rate.tolist(), curve.true_positive_rate.tolist()
        ([0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0])
    """

    false_positive_rate: NDArray[np.float64] = field(repr=False)
    true_positive_rate: NDArray[np.float64] = field(repr=False)


def auc(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Probability that a member scores above a non-member, ties counting one half; 0.5 is no information.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.membership import auc
        >>> auc(members=np.array([2.0, 3.0]), others=np.array([1.0, 2.5]))
        0.75
    """
    _check(members, others)
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.mean() - (len(members) + 1) / 2) / len(others))


def roc(members: NDArray[np.float64], others: NDArray[np.float64]) -> Roc:
    """The ROC curve at every threshold that the scores distinguish.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.membership import roc
        >>> roc(np.array([2.0, 3.0]), np.array([1.0, 2.5])).true_positive_rate.tolist()
        [0.0, 0.5, 0.5, 1.0, 1.0]
    """
    _check(members, others)
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    # Rates are computed from counts: 1 - 99/100 would exceed 0.01 in floating point.
    above = [
        (len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")) / len(scores)
        for scores in (members, others)
    ]
    true, false = (np.concatenate([[0.0], rates]) for rates in above)
    return Roc(false, true)


def true_positive_rate(curve: Roc, false_positive_rate: float) -> float:
    """The best true positive rate at a false positive rate of at most this.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.membership import roc, true_positive_rate
        >>> true_positive_rate(roc(np.array([2.0, 3.0]), np.array([1.0, 2.5])), false_positive_rate=0.1)
        0.5
    """
    return float(curve.true_positive_rate[curve.false_positive_rate <= false_positive_rate].max())


def true_positive_rate_by_chance(false_positive_rate: float, others: int) -> float:
    """The mean true positive rate of random scores without ties.

    A member scores above the (k + 1)-th highest of n non-members with probability (k + 1) / (n + 1), k being the number
    of false alarms that the rate allows. This exceeds the rate, because the threshold is chosen by the scores.

    Example:
        >>> from dptune.audit.text.membership import true_positive_rate_by_chance
        >>> round(true_positive_rate_by_chance(0.01, others=1000), 4)
        0.011
    """
    return (_allowed(false_positive_rate, others) + 1) / (others + 1)


def _allowed(false_positive_rate: float, others: int) -> int:
    """Number of false alarms that the rate allows, safe from rounding: 0.29 * 100 is below 29 in floating point."""
    return math.floor(false_positive_rate * others * (1 + 1e-12))


def membership_report(members: NDArray[np.float64], others: NDArray[np.float64]) -> dict[str, float]:
    """AUC and true positive rates, with those of random guesses, and the numbers of members and non-members.

    A false positive rate below 1 / non-members is left out: so few non-members cannot tell it from 0.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.membership import membership_report
        >>> membership_report(np.array([2.0, 3.0]), np.array([1.0, 2.5]))
        {'auc': 0.75, 'auc_chance': 0.5, 'auc_chance_deviation': 0.3227486121839514, 'members': 2, 'non_members': 2}
    """
    curve = roc(members, others)
    resolved = [rate for rate in FALSE_POSITIVE_RATES if _allowed(rate, len(others))]
    rates = {f"tpr_at_fpr_{rate:g}": true_positive_rate(curve, rate) for rate in resolved}
    chance = {f"tpr_at_fpr_{rate:g}_chance": true_positive_rate_by_chance(rate, len(others)) for rate in resolved}
    # Standard deviation of the AUC of random scores (Mann and Whitney 1947).
    spread = ((len(members) + len(others) + 1) / (12 * len(members) * len(others))) ** 0.5
    return {
        "auc": auc(members, others),
        "auc_chance": 0.5,
        "auc_chance_deviation": spread,
        **rates,
        **chance,
        "members": len(members),
        "non_members": len(others),
    }


def _check(members: NDArray[np.float64], others: NDArray[np.float64]) -> None:
    if len(members) == 0 or len(others) == 0:
        problem = f"{len(members)} members and {len(others)} non-members cannot be told apart"
        raise DataError(problem, fix="plant more audit canaries, or score more records", file="membership attack")
    if not (np.isfinite(members).all() and np.isfinite(others).all()):
        raise DataError("a score is not finite", fix="check the model's losses", file="membership attack")


# The likelihood-ratio attack with shadow models (Carlini et al. 2022, LiRA), computed from scores.


def lira_scores(
    target: NDArray[np.float64], shadows: NDArray[np.float64], included: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(candidates,) log-likelihood ratios of "in" against "out", from normal fits to the shadows' scores.

    Means are fitted for every candidate, and one variance for all: with few shadows the paper's per-candidate variances
    are too uncertain (its section VI-C).

    Args:
        target: (candidates,) scores of the attacked model.
        shadows: (shadows, candidates) scores of models that the attacker trained.
        included: (shadows, candidates) True if the shadow was trained on the candidate, by the attacker's coins.

    Raises: ConfigError if some candidate is in every shadow or in none.
    """
    inside, outside = included.sum(axis=0), (~included).sum(axis=0)
    if (np.minimum(inside, outside) == 0).any():
        problem = f"with {len(included)} of them some canary is in all or in none"
        raise ConfigError("audit.shadows", problem, fix="train more shadows")
    mean_in = (shadows * included).sum(axis=0) / inside
    mean_out = (shadows * ~included).sum(axis=0) / outside
    residuals = shadows - np.where(included, mean_in, mean_out)
    freedom = max(1, shadows.size - 2 * shadows.shape[1])
    variance = max(float((residuals**2).sum()) / freedom, 1e-12)
    return np.asarray(((target - mean_out) ** 2 - (target - mean_in) ** 2) / (2 * variance))


def balanced_coins(shadows: int, candidates: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """(shadows, candidates) random coins that put every candidate into half of the shadows."""
    columns = [generator.permutation(shadows) < shadows // 2 for _ in range(candidates)]
    return np.stack(columns, axis=1)


# Membership scores from plug-ins, by name: functions of losses that are larger if a text looks trained on.


Losses = NDArray[np.float64]
Score = Callable[[Losses, Losses], Losses]
#: Names of the scores that the audit computes by itself.
BUILT_IN = (
    *("likelihood", "calibrated", "rmia", "shadows", "alignment"),
    *("error_zone", "windows", "min_k", "min_k_plus"),
)
_SCORES: dict[str, Score] = {}


def score(name: str) -> Callable[[Score], Score]:
    """Register a function of the losses under the adapted and under the public model, (texts,) each.

    It returns (texts,) finite numbers, larger if the text looks like a member. Private, as the losses are.

    Raises: ConfigError if the name is taken.

    Example:
        >>> from dptune.audit.text.membership import own_scores, score
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


# RMIA score (Zarifzadeh, Liu and Shokri 2024, arXiv 2312.03262): a text's likelihood against what reference models
# give it.
#
# The paper's score is the share of public texts z with p(x) / P(x) >= gamma p(z) / P(z), where p is the likelihood
# under the attacked model and P the mean over models that were trained on the text and models that were not. Whatever
# gamma and the texts z are, that share never falls where the ratio p(x) / P(x) rises. So this is the ratio itself: it
# ranks texts as the paper's score does with infinitely many texts z, without the ties of a few
# (`tests/audit/test_rmia.py`).
#
# As in the authors' program, the likelihood of a text is the geometric mean over its tokens, which lies in [0, 1]; and
# where no reference model was trained on the text, P = ((1 + a) P_out + 1 - a) / 2 with a = 0.3.


_A = 0.3  # the default of the authors' program; no coin chooses it


def rmia(
    losses: NDArray[np.float64], references: NDArray[np.float64], included: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """(texts,) logarithms of the likelihood ratio, larger if the text looks trained on. Private.

    Args:
        losses: (texts,) mean losses of each text's tokens under the attacked model, in nats.
        references: (models, texts) the same under models of the attacker's own, such as the public model.
        included: (models, texts) whether the model was trained on the text, which each text needs of some and not of
            others; without it no model was trained on any.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.text.membership import rmia
        >>> fine_tuned, public = np.array([1.0, 2.0, 3.0]), np.array([[1.5, 2.0, 3.0]])
        >>> rmia(fine_tuned, public).round(2).tolist()
        [-0.3, -1.17, -2.04]
        >>> shadows = np.array([[1.0, 2.0, 3.5], [1.5, 2.0, 3.0]])
        >>> rmia(fine_tuned, shadows, np.array([[True] * 3, [False] * 3])).round(2).tolist()
        [0.22, 0.0, 0.22]
    """
    chances = np.exp(-references)
    if included is None:
        expected = ((1 + _A) * chances.mean(axis=0) + 1 - _A) / 2
    else:
        inside = (chances * included).sum(axis=0) / included.sum(axis=0)
        outside = (chances * ~included).sum(axis=0) / (~included).sum(axis=0)
        expected = (inside + outside) / 2
    return np.asarray(-losses - np.log(expected))


# Alignment score: how far the released weights moved along each candidate's own gradient.
#
# Training adds up clipped gradients and noise, so that the sum of a unit's share is found best by its own direction: a
# matched filter. The direction is known to whoever has the base model: the candidate's gradient at the weights that the
# run started from, at the released ones, and halfway. What other candidates' coins and records like the public ones add
# is held back as a filter against coloured noise does. The score is a function of the released weights, of public data
# and of the candidates, and of no coin, as the bounds from one run ask for.


_SHARES = (0.0, 0.5, 1.0)  # of the way from the run's start to the released weights
_FAIR = 0.25  # variance of a fair coin


def alignment_scores(
    model: Any, released: Any, candidates: Tokens, public: Tokens, *, rows: int
) -> NDArray[np.float64]:
    """(candidates,) scores, larger if the candidate looks trained on. Private.

    Args:
        model: the model as the run started to train it (``start_training``), in evaluation mode. It is left as it was.
        released: the same model with the released weights.
        candidates: one row each, as training would have read them.
        public: public records like the private ones.
        rows: physical batch size.

    Raises: ConfigError if the two models do not train the same weights.
    """
    known = dict(released.named_parameters())
    names = {id(weight): name for name, weight in model.named_parameters()}
    weights = [weight for group in groups_of(model) for weight in group.parameters]
    if any(names[id(weight)] not in known for weight in weights):
        raise ConfigError("adapter", "trains other weights than the run started from", fix="attack the run's own")
    start = [weight.detach().clone() for weight in weights]
    end = [known[names[id(weight)]].detach().to(weight) for weight in weights]
    directions = common = torch.zeros((), device=weights[0].device)
    try:
        for share in _SHARES:
            _put(weights, [torch.lerp(*way, share) for way in zip(start, end, strict=True)])
            directions = directions + _directions(model, candidates, rows) / len(_SHARES)
            common = common + _directions(model, public, rows) / len(_SHARES)
    finally:
        _put(weights, start)
    moved = -torch.cat([(after - before).reshape(-1) for before, after in zip(start, end, strict=True)]).float()
    # Matched filter s = D K^-1 moved with K = I + D'D / 4 + P'P, by the Woodbury identity: K has a row a parameter.
    others = torch.cat([directions * _FAIR**0.5, common])
    gram = (others @ others.T).double()
    gram.diagonal().add_(1.0)
    inner = torch.linalg.solve(gram, (others @ moved).double())
    return ((directions @ moved).double() - (directions @ others.T).double() @ inner).cpu().numpy()


def _put(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


def _directions(model: Any, tokens: Tokens, rows: int) -> torch.Tensor:
    """(records, parameters) float32 gradients of each record, each of norm 1.

    Those of a model's own weights are made one record at a time: the engine of training holds no record's whole one.
    """
    groups, own, found = groups_of(model), own_weights(model) is not None, []
    weights = [weight for group in groups for weight in group.parameters]
    rows = 1 if own else rows
    for first in range(0, len(tokens.rows), rows):
        ids, mask = tokens.compact(np.arange(first, min(first + rows, len(tokens.rows))), weights[0].device)
        if own:
            gradients = torch.autograd.grad(model_losses(model, ids, mask).sum(), weights)
            table = torch.cat([one.reshape(-1) for one in gradients])[None]
        else:
            table = per_sample_gradients(model, groups, ids, mask, None, len(ids)).matrix()
        found.append(torch.nn.functional.normalize(table, dim=1).float())
    return torch.cat(found)
