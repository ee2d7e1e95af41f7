"""Noise on tenants' updates: as much as is charged, and new in every training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny_models import gpt2, records

from dptune.core.settings import Lora
from dptune.mechanisms.agents.linear_agent import PARAMETERS
from dptune.policy.method import Dppg
from dptune.policy.schedules import MetaTraining
from dptune.policy.tenants import training as module
from dptune.policy.tenants.runs import Setting, Tenant
from dptune.policy.tenants.training import meta_train
from dptune.privacy.entropy import OsEntropy
from dptune.training.spec import TrainingPlan

TENANTS, UPDATES, NOISE = 2, 60, 1.5


def increments(monkeypatch: pytest.MonkeyPatch, directory: Path) -> torch.Tensor:
    """(updates, parameters) changes in a training whose tenants are all null, so that they are noise alone."""
    found, save = [], module.save_state

    def noted(path: Path, tensors: dict[str, torch.Tensor], releases: int) -> None:
        found.append(tensors["parameters"])
        save(path, tensors, releases)

    with monkeypatch.context() as patched:
        patched.setattr(module, "save_state", noted)
        patched.setattr(module, "_start_from", lambda *_: nullcontext())
        for name in ("_rehearse", "experience_or_none"):  # the entropy of fine-tuning runs, none of which takes place
            patched.setattr(module, name, lambda *_: None)
        nothing = records(0)
        plan = TrainingPlan(1.0, 0.0, 5, learning_rate=1e-2, warmup_steps=1, physical_batch_size=8)
        setting = Setting(gpt2(), Lora(4, 8, 0.0), records(2), plan, {}, 20.0, 1e-5)
        group = [Tenant(number, nothing, nothing) for number in range(TENANTS * UPDATES)]
        method, training = Dppg(noise_multiplier=NOISE, critic="none"), MetaTraining(tenants=TENANTS, updates=UPDATES)
        meta_train(setting, group, method, training, directory, OsEntropy())
    return torch.stack(found).diff(dim=0)  # saved before the first update, and after each


def test_the_noise_is_z_radii_over_the_tenants_and_nobody_can_draw_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deviation of 60 x 18 normals is within 12 % (5.6 standard errors, false alarm 2e-8)."""
    found = increments(monkeypatch, tmp_path / "one")
    radius = MetaTraining(tenants=TENANTS, updates=UPDATES).clip_radius(NOISE, PARAMETERS)
    assert found.shape == (UPDATES, PARAMETERS)
    assert float(found.std()) == pytest.approx(NOISE * radius / TENANTS, rel=0.12)
    assert not torch.isclose(found, increments(monkeypatch, tmp_path / "two"), rtol=1e-6, atol=0).all(dim=1).any()
