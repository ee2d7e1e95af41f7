"""Federated DP-LoRA: P7.5, and that local training leaves nothing behind but its update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    DEVICE,
    adapted,
    close,
    each_record,
    make_header,
    make_plan,
    records,
    row_loss,
    trainable,
    weights,
)

from dptune.core.errors import ConfigError
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.training import loop
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import local_update, train
from dptune.training.losses import sequence_losses
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec


def update(model: Any, chosen: list[int], **options: Any) -> Any:
    settings = {"rows": 4, "steps": 1, "learning_rate": 0.5} | options
    return local_update(model, lora_pairs(model), records(), np.array(chosen), **settings)


def test_one_step_is_the_mean_gradient_times_the_rate() -> None:
    model = adapted(randomised=True)
    ids, mask = records().batch(np.array([0, 1, 2]), DEVICE)
    loss = sequence_losses(model(input_ids=ids, attention_mask=mask).logits, ids, mask).mean()
    gradients = torch.autograd.grad(loss, list(trainable(model).values()))
    expected = 0.5 * torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(update(model, [0, 1, 2]).matrix()[0].float(), expected, rtol=1e-4, atol=1e-7)


def test_local_training_is_plain_sgd_on_the_records_in_order() -> None:
    """Seven steps of two records on four, from the start again; padding and the order of a batch change nothing."""
    model, copy, rate = adapted(randomised=True), adapted(randomised=True), 0.3
    start = torch.cat([weight.flatten() for weight in weights(copy).values()])
    for step in range(7):
        pair = (0, 1) if step % 2 == 0 else (2, 3)
        loss = (row_loss(copy, records().rows[pair[0]]) + row_loss(copy, records().rows[pair[1]])) / 2
        moved = list(trainable(copy).values())
        with torch.no_grad():
            for weight, gradient in zip(moved, torch.autograd.grad(loss, moved), strict=True):
                weight -= rate * gradient
    expected = start - torch.cat([weight.flatten() for weight in weights(copy).values()])
    found = update(model, [0, 1, 2, 3], rows=2, steps=7, learning_rate=rate).matrix()[0].float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_model_is_left_bit_for_bit_as_it_was_even_when_a_client_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(randomised=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    update(model, [0, 1, 2], steps=3)
    calls = []

    real = loop.model_losses

    def failing(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(loop, "model_losses", failing)
    with pytest.raises(MemoryError):
        update(model, [0, 1, 2], steps=3)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_p75_a_client_moves_the_sum_by_at_most_the_radius() -> None:
    """Whatever its learning rate: an exploding client is zeroed or clipped."""
    model = adapted(randomised=True)
    mechanism = build("dp_lora_fed", {"noise_multiplier": 1.0, "max_grad_norm": 0.3, "pairs": len(lora_pairs(model))})
    knobs = mechanism.knobs()
    for rate in (1e-6, 1.0, 1e4, 1e30):
        alone = mechanism.clipper.clipped_sum(update(model, [0, 1], steps=4, learning_rate=rate), knobs)
        assert float(torch.cat(alone).norm()) <= 0.3 * (1 + 1e-6)


def test_clients_get_whole_patients_and_every_record_once() -> None:
    patients = np.array([5, 5, 7, 7, 7, 9, 11, 13, 13, 17])
    units = PrivacyUnits.clients(3, patients)
    assert (units.kind, len(units)) == ("client", 3)
    assert sorted(np.concatenate(units.members).tolist()) == list(range(10))
    homes = [set(patients[members]) for members in units.members]
    assert not homes[0] & homes[1]
    assert not homes[0] & homes[2]
    assert not homes[1] & homes[2]


def test_a_client_that_leaves_moves_no_other_clients_records() -> None:
    patients = np.random.default_rng(1).integers(0, 10**8, 2000)
    before = [set(patients[members]) for members in PrivacyUnits.clients(20, patients).members]
    assert min(map(len, before)) > 50, "dealt evenly"
    rest = patients[~np.isin(patients, list(before[7]))]
    after = [set(rest[members]) for members in PrivacyUnits.clients(20, rest).members]
    assert after == [set() if client == 7 else people for client, people in enumerate(before)]


def test_empty_clients_are_clients_that_send_nothing(tmp_path: Path) -> None:
    units = PrivacyUnits.clients(40, np.arange(len(records().rows)))
    assert min(map(len, units.members)) == 0
    run(tmp_path, units, "dp_lora_fed")
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 3


def run(directory: Path, units: PrivacyUnits, mechanism_name: str) -> None:
    model, tokens, entropy = adapted(), records(), OsEntropy()
    options = {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))}
    mechanism = build(mechanism_name, options)
    plan = make_plan(sample_rate=0.5, steps=3, expected_batch_size=0.5 * len(units))
    header = make_header(entropy, units, mechanism=mechanism.name)
    close(train(RunSpec(model, tokens, units, mechanism, plan, header), directory, entropy))


def test_a_federated_run_protects_clients_and_says_so(tmp_path: Path) -> None:
    units = PrivacyUnits.clients(3, np.arange(len(records().rows)))
    run(tmp_path, units, "dp_lora_fed")
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert (contents.header.unit, contents.header.units, contents.releases) == ("client", 3, 3)


def test_records_for_a_federated_run_and_clients_for_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.unit"):
        run(tmp_path, each_record(records()), "dp_lora_fed")
    with pytest.raises(ConfigError, match=r"data\.unit"):
        run(tmp_path, PrivacyUnits.clients(3, np.arange(len(records().rows))), "static")
    assert not list(tmp_path.iterdir())
