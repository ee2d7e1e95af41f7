"""Energy that the machine uses, where it says: processors by RAPL's counters, GPUs by the power that nvidia-smi reads.

All work of the machine counts, not a cell's alone: nothing tells them apart.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: Folder of the counters of Linux, in microjoules; other systems and most containers show none.
COUNTERS = Path("/sys/class/powercap")
#: Prints the power of each GPU in watts, a line each.
POWER = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
_SECONDS = 10  # limit for nvidia-smi, which hangs where a driver does


class EnergyMeter:
    """Sum of energy since its start.

    Between two readings a GPU's power counts as the mean of both, and a processor's counter may wrap once.

    Args:
        device: where a cell trains; GPUs count for "cuda" devices alone.
        counters: folder of RAPL's counters.
        power: command that prints each GPU's watts.
    """

    def __init__(self, device: str, counters: Path = COUNTERS, power: Sequence[str] = POWER) -> None:
        self._power = power if device.startswith("cuda") else ()
        self._packages = [path for path in counters.glob("intel-rapl:*") if path.name.count(":") == 1]
        self._total, self._time = 0.0, time.monotonic()
        self._counts, self._watts = self._counted(), self._drawn()

    def joules(self) -> float | None:
        """The energy so far in joules; None where the machine does not say it of the device."""
        counts, watts, now = self._counted(), self._drawn(), time.monotonic()
        if self._power and (watts is None or self._watts is None):
            return None
        if not self._power and (not counts or counts.keys() != self._counts.keys()):
            return None
        for package, (count, largest) in counts.items():
            passed = count - self._counts.get(package, (count, 0))[0]
            self._total += (passed if passed >= 0 else passed + largest) / 1e6
        if watts is not None and self._watts is not None:
            self._total += (watts + self._watts) / 2 * (now - self._time)
        self._counts, self._watts, self._time = counts, watts, now
        return self._total

    def _counted(self) -> dict[str, tuple[int, int]]:
        """Each package's counter, and the value at which it wraps; those that this user may read."""
        found = {}
        for package in self._packages:
            with suppress(OSError, ValueError):
                count, largest = ((package / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                found[package.name] = (int(count), int(largest))
        return found

    def _drawn(self) -> float | None:
        """The power of all GPUs in watts; None without any, or where one does not say it."""
        if not self._power:
            return None
        try:
            told = subprocess.run(self._power, capture_output=True, text=True, timeout=_SECONDS, check=True)
            return sum(map(float, told.stdout.split())) if told.stdout.split() else None
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
