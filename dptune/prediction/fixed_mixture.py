"""The fixed mixture: PMixed with a public weight that never moves, which is what makes it provable.

The output law is, for every prompt and whatever the data::

    P = w0 p0 + (1 - w0) / N * sum over slots i of [p0 + lambda_i (p_i - p0)]

with public w0, N and p0. A slot without records holds p0; slots are never removed, so that N tells nothing. Seen
from slot i, P = s [(1-u) p0 + u (p0 + lambda_i (p_i - p0))] + (1-s) A with s = w0 + (1-w0)/N, u = ((1-w0)/N) / s and
the other slots in A, which do not see slot i's records. E_a, the exponential of (a-1) times the divergence, is jointly
convex, so that a bound on the first part bounds P (spec pmixed.md, section 5.3).

Guarantee, for one token and any prompt: the Renyi divergence at ``order`` is at most ``rdp_per_token`` in both
directions, if unit "shard": when slot i becomes p0; "record" or a column of units: when p_i becomes any p_i'. Private:
p_i and lambda_i, and which slot or branch the token came from. The weights lambda_i are those of
``dptune.prediction.mollify``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Slots:
    """The public constants of a fixed mixture.

    Attributes:
        models: N, the number of slots.
        public_weight: w0 in (0, 1), the least weight of the public model.
    """

    models: int
    public_weight: float

    @property
    def floor(self) -> float:
        """s: the weight of the part of the mixture that one slot can move."""
        return self.public_weight + (1 - self.public_weight) / self.models

    @property
    def share(self) -> float:
        """u: the slot's own weight within that part."""
        return (1 - self.public_weight) / self.models / self.floor

    def excess(self, rdp_per_token: float, order: float) -> float:
        """The amount by which E_order of that part may exceed 1: (e^((a-1) e) - 1) / s."""
        return math.expm1((order - 1) * rdp_per_token) / self.floor

    def radius(self, rdp_per_token: float, order: float) -> float:
        """The radius r*: the same bound as a Renyi divergence."""
        return math.log1p(self.excess(rdp_per_token, order)) / (order - 1)
