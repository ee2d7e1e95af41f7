"""Noise for ten million coordinates: ``python -m benchmarks.noise [--rounds N] [--device cuda]``.

The named peers are ``torch.randn`` on the same device in the same run: in float32, which is what frameworks use, and in
float64, which is what ours is drawn in. Ours comes from the operating system's entropy, theirs from a generator whose
state can be worked out from its output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from dptune.mechanisms.noises.gaussian import standard_normal
from dptune.mechanisms.noises.laplace_noise import PRESETS, laplace_mixture
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.entropy import OsEntropy

COORDINATES = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device, entropy = torch.device(arguments.device), OsEntropy()

    def mixture(law: InverseScale) -> Callable[[], torch.Tensor]:
        return lambda: laplace_mixture(law, entropy, COORDINATES, device)

    ours: dict[str, Callable[[], torch.Tensor]] = {
        "gaussian": lambda: standard_normal(entropy, COORDINATES, device),
        "laplace": mixture(InverseScale(constant=1.0)),
        "plrvo (k 40)": mixture(InverseScale(gamma=(40.0, 0.01))),
        "lmo_dp (T0.3)": mixture(PRESETS["T0.3"]),
    }
    peers: dict[str, Callable[[], torch.Tensor]] = {
        "float32": lambda: torch.randn(COORDINATES, device=device),
        "float64": lambda: torch.randn(COORDINATES, device=device, dtype=torch.float64),
    }
    for draw in ours.values():
        draw()  # tables and buffers
    rounds = [{name: _seconds(draw, device) for name, draw in (peers | ours).items()} for _ in range(arguments.rounds)]
    print(f"{device}, {torch.get_num_threads()} threads, {arguments.rounds} rounds")
    for peer in peers:
        print(f"torch.randn {peer}: {1000 * min(one[peer] for one in rounds):.0f} ms at best")
    for name in ours:
        print(
            f"{name}: " + ", ".join(f"{_spread([one[name] / one[peer] for one in rounds])} of {peer}" for peer in peers)
        )


def _seconds(draw: Callable[[], torch.Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    draw()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _spread(ratios: list[float]) -> str:
    ordered = sorted(ratios)
    return f"{ordered[len(ordered) // 2]:.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


if __name__ == "__main__":
    main()
