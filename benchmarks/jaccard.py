"""N-gram Jaccard of 4,000 samples with 10 secrets, n = 1 to 4: ``python -m benchmarks.jaccard``.

The named peer is the definition as a loop over pairs, in the same run.
"""

from __future__ import annotations

import time

import numpy as np

from dptune.audit.text.extraction import GRAMS, jaccard
from dptune.records.canaries import ALPHABET

ROUNDS = 5


def strings(count: int, generator: np.random.Generator) -> list[str]:
    """Random strings of 1 to 10 characters."""
    lengths = generator.integers(1, 11, size=count)
    return ["".join(generator.choice(list(ALPHABET), size=length)) for length in lengths]


def loop(one: list[str], other: list[str], n: int) -> np.ndarray:
    """Every pair by itself."""

    def grams(text: str) -> set[str]:
        return {text[index : index + n] for index in range(len(text) - n + 1)}

    return np.array(
        [[len(grams(a) & grams(b)) / max(1, len(grams(a) | grams(b))) for b in other] for a in one], dtype=np.float64
    )


def main() -> None:
    generator = np.random.default_rng(0)
    samples, secrets = strings(4000, generator), strings(10, generator)
    ours, peers = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        fast = [jaccard(samples, secrets, n) for n in GRAMS]
        middle = time.perf_counter()
        slow = [loop(samples, secrets, n) for n in GRAMS]
        ours.append(middle - start)
        peers.append(time.perf_counter() - middle)
        assert all(np.allclose(a, b) for a, b in zip(fast, slow, strict=True))
    ratios = sorted(peer / our for our, peer in zip(ours, peers, strict=True))
    print(
        f"{1000 * min(ours):.0f} ms; {ratios[len(ratios) // 2]:.1f} times faster ({ratios[0]:.1f} to {ratios[-1]:.1f})"
    )


if __name__ == "__main__":
    main()
