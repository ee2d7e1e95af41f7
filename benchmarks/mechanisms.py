"""What each mechanism adds to a step: ``python -m benchmarks.mechanisms [--rounds 5] [--only NAME ...] [--device D]``.

The named peer is ``static`` (vanilla DP-SGD) in the same run, interleaved: every round takes each mechanism through
the same number of steps of the default model's shape, with batches of exactly 64. Times are CPU times of one thread
(wall times on a GPU), so that neighbours on the machine hardly matter; memory is the peak of a process of its own,
without what its imports hold. What a controller takes of its own step is measured inside it, where neighbours cancel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dptune.mechanisms.registry import MECHANISMS, build
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import RunHeader
from dptune.training.data import PrivacyUnits, Tokens
from dptune.training.loop import Plan, train
from dptune.training.model import Lora, attach_lora
from dptune.training.per_sample import lora_pairs

BATCH, WIDTH, STEPS, VOCABULARY = 64, 160, 32, 1024
#: As in params.yaml and profiles/comparison.yaml.
#: Without dp_lora_fed, whose step is a round of local training.
ENTRIES: dict[str, dict[str, Any]] = {name: {} for name in MECHANISMS if name != "dp_lora_fed"} | {
    "rldp": {"interval": 8, "warmup": 8, "batch_size": 4},
    "rldp_ab": {"like": "rldp", "design": "AB", "interval": 8, "warmup": 8, "batch_size": 4},
    "rldp_published": {"interval": 8, "warmup": 8, "batch_size": 4},
}


def tokens(rows: int) -> Tokens:
    """Random records of 80 to 120 tokens."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(80, 120, size=rows)
    return Tokens([generator.integers(0, VOCABULARY, size=n).astype(np.int32) for n in lengths], 0, WIDTH)


def adapted(device: torch.device) -> Any:
    """The default public model's shape, with random weights and its adapters."""
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=192, n_embd=64, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).to(device).requires_grad_(False)
    return attach_lora(model, Lora(rank=8, alpha=16, dropout=0.0), init_seed=0)


@dataclass
class Controlled:
    """A controller that is watched: how long its methods take."""

    controller: Any
    clock: Callable[[], float]
    seconds: float = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.controller, name)
        return self._timed(value) if name in ("knobs", "observe") else value

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = self.clock()
            try:
                return method(*arguments)
            finally:
                self.seconds += self.clock() - start

        return call


def seconds_per_step(name: str, device: torch.device) -> tuple[float, float]:
    """Mean over ``STEPS`` steps, set-up and the first step left out, and the controller's share of it."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    records, entropy, model = tokens(BATCH), OsEntropy(), adapted(device)
    options = ENTRIES[name] | {"pairs": len(lora_pairs(model))}
    mechanism = build(name, options if name == "nonprivate" else options | {"noise_multiplier": 1.0})
    watched = Controlled(mechanism.controller, clock)
    mechanism = replace(mechanism, controller=watched)
    units = PrivacyUnits.of("encounter", np.arange(BATCH), 1)
    plan = Plan(1.0, float(BATCH), STEPS + 1, physical_batch_size=32, checkpoint_every=10_000)
    header = RunHeader(name, mechanism.published_accountant, "certified", None, 1e-5, "encounter", BATCH)
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        train(
            model, records, units, mechanism, plan, header, Path(directory), entropy,
            on_step=lambda _: stamps.append(clock()), public=records,
        ).close()  # fmt: skip
    step = (stamps[-1] - stamps[0]) / STEPS
    return step, watched.seconds / (STEPS + 1) / step


def peak_memory(name: str, device: str) -> float:
    """MB at the peak of a process that runs nothing else."""
    command = [sys.executable, "-m", "benchmarks.mechanisms", "--memory-of", name, "--device", device]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["mb"])


def print_memory(name: str, device: torch.device) -> None:
    """The child process of ``peak_memory``."""
    imports = _resident_peak()
    seconds_per_step(name, device)
    on_gpu = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    print(json.dumps({"mb": on_gpu or _resident_peak() - imports}))


def _resident_peak() -> float:
    """MB. (``getrusage`` would tell the parent's peak where that is larger: a child inherits it.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=sorted(ENTRIES), default=list(ENTRIES), help="beside static")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    if arguments.memory_of:
        print_memory(arguments.memory_of, device)
        return
    names = list(dict.fromkeys(["static", *arguments.only]))
    seconds_per_step("static", device)  # warm-up
    rounds, shares = [], {name: [] for name in names}
    for _ in range(arguments.rounds):
        taken = {name: seconds_per_step(name, device) for name in names}
        rounds.append({name: step for name, (step, _) in taken.items()})
        for name, (_, share) in taken.items():
            shares[name].append(share)
    memory = {name: peak_memory(name, arguments.device) for name in names}
    static = statistics.median(one["static"] for one in rounds)
    print(f"static: {1000 * static:.1f} ms a step, {memory['static']:.0f} MB at peak\n")
    print("| mechanism | time / static, median (least to most of the rounds) | in its controller | memory / static |")
    print("| --- | --- | --- | --- |")
    for name in names:
        ratios = sorted(one[name] / one["static"] for one in rounds)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        share = f"{statistics.median(shares[name]):.2%}"
        print(f"| {name} | {spread} | {share} | {memory[name] / memory['static']:.3f} |")


if __name__ == "__main__":
    main()
