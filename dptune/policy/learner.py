"""Loop over a run's updates that ``environments``, ``language`` and ``tenants`` share, and the release of each update.

for number, release in updates_left(ledger, method, updates, users, entropy):
    blocks = what each new user computes, about K      # private; this part differs between the three packages
    means  = release(blocks, radii)                    # charged on disk first, then clipped, summed and given noise
    state  = a function of the state and the means

A test checks that none of the three charges the ledger or draws noise by itself: a release that no charge precedes
would be missing from the run's epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dptune.policy.aggregate import noisy_means
from dptune.policy.method import Dppg
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger

#: Function that releases one update: (updates of each block, clip radius of each block) -> noisy mean of each block.
ReleaseMeans = Callable[[Sequence[torch.Tensor], Sequence[float]], list[torch.Tensor]]


def updates_left(
    ledger: Ledger, method: Dppg, updates: int, users: int, entropy: Entropy
) -> Iterator[tuple[int, ReleaseMeans]]:
    """Yield the number of every update that is not charged yet, with the function that releases its means.

    An update that was charged, and then lost when its process died, is skipped: its users have taken part already, and
    a second update with them would cost more than the guarantee states.

    Args:
        users: K, by which every sum is divided.
    """
    for number in range(ledger.releases, updates):
        yield number, partial(release_means, method, number, users, ledger, entropy)


def release_means(
    method: Dppg,
    number: int,
    users: int,
    ledger: Ledger,
    entropy: Entropy,
    updates: Sequence[torch.Tensor],
    radii: Sequence[float],
) -> list[torch.Tensor]:
    """Charge update ``number`` to the ledger, and only then draw its noise.

    Returns: the noisy mean of every block, see ``dptune.policy.aggregate.noisy_means``.
    """
    ledger.charge(method.release(number))
    return noisy_means(updates, radii, method.multipliers, users, entropy)
