"""Local loss of a user whose one action is the whole continuation of a prompt."""

from __future__ import annotations

import torch

from dptune.policy.language.policy import LanguagePolicy
from dptune.policy.local import Loss


def bandit_loss(policy: LanguagePolicy, prompt_weight: float = 0.0) -> Loss:
    """Make the loss: minus the mean over a continuation's tokens of pi / pi_old * A, plus the prompt's weighted loss.

    The loss takes the fields ``ids``, ``mask``, ``continuation_mask`` and ``old_log_probabilities`` of ``Rollouts``,
    and advantages A; each has a dimension of length 1 after the users', for their one action.

    Args:
        prompt_weight: weight of the mean negative log-likelihood of the prompt's own tokens.
    """

    def loss(vectors: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        ids, mask, continuation, old_logs, gains = (part[:, 0] for part in rows)
        new = continuation.shape[1]
        logs = policy.log_probabilities(vectors, ids, mask, ids.shape[1] - 1 if prompt_weight else new)
        ratios = (logs[:, -new:] - old_logs).exp()
        total = -(ratios * continuation).sum(dim=1) / continuation.sum(dim=1) * gains
        if prompt_weight:
            # The first token is left out: nothing precedes it, so the model does not predict it.
            prompt = (mask[:, 1:] * mask[:, :-1])[:, :-new]
            likelihoods = (logs[:, : prompt.shape[1]] * prompt).sum(dim=1)
            total = total - prompt_weight * likelihoods / prompt.sum(dim=1).clamp(min=1)
        return total * weights[:, 0].to(total.device)

    return loss
