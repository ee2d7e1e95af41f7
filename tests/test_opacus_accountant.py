"""Opacus can use the tight accountant like its own."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("opacus")

import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from torch.utils.data import DataLoader, TensorDataset

import dptune.opacus_accountant
from dptune.core.errors import ConfigError
from dptune.privacy.accountants import pld_epsilon
from dptune.privacy.release import Release

NAME = dptune.opacus_accountant.PLDAccountant.mechanism()


def test_it_is_registered_and_equals_the_tight_epsilon() -> None:
    accountant = create_accountant("dptune_pld")
    for _ in range(30):
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    for _ in range(10):
        accountant.step(noise_multiplier=2.0, sample_rate=0.02)
    composition = Counter({Release(0.01, 1.0): 30, Release(0.02, 2.0): 10})
    assert accountant.get_epsilon(1e-5) == pld_epsilon(composition, 1e-5)
    assert len(accountant) == 40


def test_noise_that_returns_to_an_earlier_value_counts_every_time() -> None:
    accountant = create_accountant(NAME)
    for noise in (1.0, 2.0, 1.0):
        accountant.step(noise_multiplier=noise, sample_rate=1.0)
    assert accountant.get_epsilon(1e-5) == pld_epsilon(Counter({Release(1.0, 1.0): 2, Release(1.0, 2.0): 1}), 1e-5)


def test_nothing_costs_nothing() -> None:
    assert create_accountant(NAME).get_epsilon(1e-5) == 0.0


def test_state_survives_its_round_trip() -> None:
    first, second = create_accountant(NAME), create_accountant(NAME)
    first.step(noise_multiplier=1.0, sample_rate=0.01)
    second.load_state_dict(first.state_dict())
    for accountant in (first, second):
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    assert second.history == first.history == [(1.0, 0.01, 2)]
    assert second.get_epsilon(1e-5) == first.get_epsilon(1e-5)


@pytest.mark.parametrize(("noise", "rate"), [(0.0, 0.1), (-1.0, 0.1), (1.0, 0.0), (1.0, 1.5)])
def test_a_step_that_cannot_be_priced_is_refused_and_not_counted(noise: float, rate: float) -> None:
    accountant = create_accountant(NAME)
    with pytest.raises(ConfigError):
        accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert len(accountant) == 0


def test_a_private_run_through_the_engine() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(20, 4), torch.zeros(20, dtype=torch.long)), batch_size=5)
    engine = PrivacyEngine(accountant=NAME)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.5, max_grad_norm=1.0
    )
    for features, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    assert len(engine.accountant) == 4
    assert engine.get_epsilon(1e-5) == pld_epsilon(Counter({Release(0.25, 1.5): 4}), 1e-5)


def test_opacus_calibrates_with_it() -> None:
    noise = get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=0.05, steps=50, accountant=NAME, epsilon_tolerance=0.05
    )
    assert 1.9 < pld_epsilon(Counter({Release(0.05, noise): 50}), 1e-5) <= 2.0
