"""The learner that all rooms share: which updates are left, and the only way in which one becomes public.

for number, release in updates_left(ledger, method, updates, entropy):
    blocks = what each of K new users computes         # private; this part is the room's
    means  = release(blocks, radii)                    # charged on disk first, then clipped, summed and given noise
    state  = a function of the state and the means

No room charges or draws by itself, which a test holds: noise that nobody charged would be a release for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dptune.policy.aggregate import noisy_means
from dptune.policy.method import Dppg
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger

#: Makes the mean of an update public: (each block's (users, parameters) updates, each block's clip radius) -> means.
ReleaseMeans = Callable[[Sequence[torch.Tensor], Sequence[float]], list[torch.Tensor]]


def updates_left(ledger: Ledger, method: Dppg, updates: int, entropy: Entropy) -> Iterator[tuple[int, ReleaseMeans]]:
    """Numbers of the updates that are not charged yet, each with the function that releases its means.

    Charged updates that were lost with their process are not made again: their users have been met.
    """
    for number in range(ledger.releases, updates):
        yield number, partial(released_means, method, number, ledger, entropy)


def released_means(
    method: Dppg,
    number: int,
    ledger: Ledger,
    entropy: Entropy,
    updates: Sequence[torch.Tensor],
    radii: Sequence[float],
) -> list[torch.Tensor]:
    """Charge update ``number``, then draw: the noisy mean of every block, see ``aggregate.noisy_means``."""
    ledger.charge(method.release(number))
    return noisy_means(updates, radii, method.multipliers, entropy)
