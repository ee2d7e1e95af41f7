"""How soon the command line answers: ``python -m benchmarks.startup [--rounds N]``.

CPU seconds (user and system) of whole processes, in turns. The named peers are the help of two command lines that this
project uses too, MLflow's and DVC's, and for a price dp-accounting's own accountant of the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

RUN = "--delta 1e-5 --sample-rate 0.01 --steps 1000 --set noise_multiplier=1"
PRICE_OF_PEER = """
from dp_accounting import dp_event as event
from dp_accounting.pld import PLDAccountant
step = event.PoissonSampledDpEvent(0.01, event.GaussianDpEvent(1.0))
print(PLDAccountant().compose(step, 1000).get_epsilon(1e-5))
"""
BESIDE = Path(sys.executable).parent
COMMANDS: dict[str, list[str]] = {
    "dptune --help": [str(BESIDE / "dptune"), "--help"],
    "mlflow --help": [str(BESIDE / "mlflow"), "--help"],
    "dvc --help": [str(BESIDE / "dvc"), "--help"],
    "dptune mechanisms": [str(BESIDE / "dptune"), "mechanisms"],
    "dptune account static": [str(BESIDE / "dptune"), "account", "static", *RUN.split()],
    "dp-accounting's PLDAccountant": [sys.executable, "-c", PRICE_OF_PEER],
}
#: Ours, and what it is compared with.
PAIRS = (
    ("dptune --help", "mlflow --help"),
    ("dptune --help", "dvc --help"),
    ("dptune account static", "dp-accounting's PLDAccountant"),
)


def cpu_seconds(command: list[str]) -> float:
    """CPU time of a process and its children. Raises: RuntimeError if it fails."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a line for each command and each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = max(parser.parse_args(argv).rounds, 1)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        cpu_seconds(command)  # writes bytecode, and fills the disk's cache
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            seconds[name].append(cpu_seconds(command))
    for name, found in seconds.items():
        print(f"{name:32} {min(found):6.3f} s at best of {rounds}, median {statistics.median(found):6.3f} s")
    for ours, peer in PAIRS:
        ratios = sorted(a / b for a, b in zip(seconds[ours], seconds[peer], strict=True))
        print(f"{ours} / {peer}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
