"""What a run tells its controller: releases, and the loss on public records."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_models import adapted, close, each_record, make_header, make_plan, records

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Observation
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.privacy.entropy import OsEntropy
from dptune.training.data import Tokens
from dptune.training.evaluation import mean_loss
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.spec import RunSpec


@dataclass
class Listening(Constant):
    """Notes the public loss that it is told, and what it should be."""

    model: Any
    public: Tokens | None
    told: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def observe(self, observation: Observation) -> None:
        self.told.append(observation.public_loss())
        assert self.public is not None
        self.right.append(mean_loss(self.model, self.public, 8))


def listened(directory: Path, public: Tokens | None) -> Listening:
    model, tokens = adapted(randomised=True), records()
    controller = Listening(model, public)
    mechanism = Mechanism("static", Flat(), Gaussian(1.0), controller, "gdp_clt", len(lora_pairs(model)))
    header = make_header(plugins=mechanism.plugins)
    spec = RunSpec(model, tokens, each_record(tokens), mechanism, make_plan(), header, public=public)
    close(train(spec, directory, OsEntropy()))
    return controller


def test_the_loss_that_a_controller_follows_is_that_of_public_records(tmp_path: Path) -> None:
    """Of private ones it would be a leak that nothing names."""
    found = listened(tmp_path, records(5, seed=9))
    assert found.told == pytest.approx(found.right, rel=1e-5)
    assert len(found.told) == 4
    assert mean_loss(found.model, records(), 8) != pytest.approx(found.told[-1], rel=1e-3), "private ones differ"


def test_without_public_records_there_is_no_loss_to_follow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="public records"):
        listened(tmp_path, None)
