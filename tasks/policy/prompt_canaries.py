"""Canaries among prompts: secrets that one user brings, planted by fair coins."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from dptune.records.canaries import ALPHABET, SECRET_LENGTH

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class PromptCanary:
    """A user whom the auditor adds if a fair coin says so. Private.

    Attributes:
        record: number of the record in the attack split that gives the prompt; it decides the canary's update.
        secret: secret in the prompt.
        included: result of the coin.
    """

    record: int
    secret: str = field(repr=False)
    included: int = field(repr=False)


def secret_of(salt: str, key: int) -> str:
    """The secret of a record: a function of the salt and of the record's own key. Private."""
    return draw_secret(Random(hmac.digest(bytes.fromhex(salt), str(key).encode(), "sha256")))


def draw_secret(entropy: Random) -> str:
    """Draw a secret, all of which are as likely."""
    return "".join(entropy.choice(ALPHABET) for _ in range(SECRET_LENGTH))
