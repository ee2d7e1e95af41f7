"""Energy of the machine: counters that wrap, GPUs' power over time, and machines that say nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tasks.experiment import energy
from tasks.experiment.energy import EnergyMeter


def package(folder: Path, name: str, microjoules: int, largest: int = 262_143_328_850) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{largest}\n")


def test_packages_add_up_and_a_counter_may_wrap(tmp_path: Path) -> None:
    """The core's share ("intel-rapl:0:0") is part of its package."""
    package(tmp_path, "intel-rapl:0", 5_000_000)
    package(tmp_path, "intel-rapl:0:0", 1_000_000)
    package(tmp_path, "intel-rapl:1", 90_000_000, largest=100_000_000)
    meter = EnergyMeter("cpu", tmp_path)
    assert meter.joules() == 0
    package(tmp_path, "intel-rapl:0", 12_000_000)
    package(tmp_path, "intel-rapl:0:0", 7_000_000)
    package(tmp_path, "intel-rapl:1", 4_000_000, largest=100_000_000)
    assert meter.joules() == pytest.approx(7 + 14)
    package(tmp_path, "intel-rapl:0", 13_000_000)
    assert meter.joules() == pytest.approx(22)


def test_a_machine_without_counters_says_nothing(tmp_path: Path) -> None:
    assert EnergyMeter("cpu", tmp_path / "absent").joules() is None
    package(tmp_path, "intel-rapl:0", 5)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert EnergyMeter("cpu", tmp_path).joules() is None, "counters that this user may not read"


def test_power_of_gpus_counts_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 100 and 200 watts for ten seconds, whose power then doubles within ten more."""
    power, clock = tmp_path / "power", [0.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: clock[0])
    _write_program(power, "100.0\n200.0")
    meter = EnergyMeter("cuda:1", tmp_path / "absent", (str(power),))
    clock[0] = 10
    assert meter.joules() == pytest.approx(3000)
    _write_program(power, "200.0\n400.0")
    clock[0] = 20
    assert meter.joules() == pytest.approx(3000 + 4500)
    _write_program(power, "[N/A]")
    assert meter.joules() is None
    assert EnergyMeter("cuda:1", tmp_path / "absent", ("absent-program",)).joules() is None


def _write_program(file: Path, printed: str) -> None:
    file.write_text(f"#!/bin/sh\nprintf '{printed}\\n'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
