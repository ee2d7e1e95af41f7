"""The local loss of a user who takes one action, the whole continuation."""

from __future__ import annotations

import torch

from dptune.policy.language.policy import LanguagePolicy
from dptune.policy.local import Loss


def bandit_loss(policy: LanguagePolicy, prompt_weight: float = 0.0) -> Loss:
    """-mean over the continuation's tokens of pi / pi_old * A, and ``prompt_weight`` times the prompt's mean loss.

    Data: ids, mask, counted, log-probabilities under the old policy and advantages of one action a user.
    """

    def loss(vectors: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        ids, mask, counted, before, gains = (part[:, 0] for part in rows)
        count = ids.shape[1] - 1 if prompt_weight else counted.shape[1]
        logs = policy.log_probabilities(vectors, ids, mask, count)
        ratios = (logs[:, -counted.shape[1] :] - before).exp()
        total = -(ratios * counted).sum(dim=1) / counted.sum(dim=1) * gains
        if prompt_weight:
            # A token without one before it is no prediction.
            seen = (mask[:, 1:] * mask[:, :-1])[:, : -counted.shape[1]]
            total = total - prompt_weight * (logs[:, : seen.shape[1]] * seen).sum(dim=1) / seen.sum(dim=1).clamp(min=1)
        return total * weights[:, 0].to(total.device)

    return loss
