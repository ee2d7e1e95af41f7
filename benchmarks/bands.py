"""The noise of one step, correlated beside independent: ``python -m benchmarks.bands [--rows N]``.

CPU time, taken in turns, so that other work beside it hardly counts; everything else in a step is the same for both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dptune.mechanisms.noises.banded import BandedGaussian
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.privacy.accounting.strategy import square_root
from dptune.privacy.entropy import OsEntropy

#: Trained weights of the default model, of LoRA of rank 8 on GPT-2 small, and the bands.
CASES = ((4_096, 8), (294_912, 8), (294_912, 32))
_BYTES = 8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20, help="rows that count, after the first ones")
    rows = parser.parse_args(argv).rows
    torch.set_num_threads(1)
    print("| weights | bands | independent, ms | bands, ms | memory for past noise, MB |")
    print("| --- | --- | --- | --- | --- |")
    for weights, bands in CASES:
        alone, correlated = noise_of_a_row(weights, bands, rows)
        memory = (bands - 1) * weights * _BYTES / 1e6
        print(f"| {weights:,} | {bands} | {1e3 * alone:.2f} | {1e3 * correlated:.2f} | {memory:.2g} |")


def noise_of_a_row(weights: int, bands: int, rows: int) -> tuple[float, float]:
    """Median seconds of CPU for a row of independent and of correlated noise, the window being full."""
    entropy, sums = OsEntropy(), [torch.zeros(weights)]
    independent, banded = Gaussian(1.0), BandedGaussian(1.0, bands=bands, given=square_root(bands))
    taken: tuple[list[float], list[float]] = ([], [])
    for row in range(bands + rows):
        taken[0].append(_seconds(lambda: independent.add(sums, [1.0], 1.0, entropy)))
        taken[1].append(_seconds(lambda row=row: banded.add_row(sums, [1.0], 1.0, entropy, row)))
    return statistics.median(taken[0][bands:]), statistics.median(taken[1][bands:])


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
