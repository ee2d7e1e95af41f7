"""Whatever a profile calls its mechanisms, models and runs reaches params.yaml through DVC's parser, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from dvc.utils.hydra import apply_overrides

from dptune.core.errors import ConfigError
from tasks.profile import PARAMS, _merged, overrides

NAMED = {
    "a mechanism with a dot": "mechanisms: {a0.2: {like: static}}\nexperiment: {mechanisms: [a0.2]}",
    "and others changed beside it": "mechanisms: {static: {max_grad_norm: 0.5}, static.b: {like: static}}",
    "a model with dots": "experiment: {models: {qwen2.5-0.5b: {source: data/models/public}}}",
    "a model that begins with a digit": "experiment: {models: {7b: {source: data/models/public}}}",
    "a run of a policy with a dot": "policy: {studies: {cartpole: {runs: {x0.1: {noise_multiplier: 1}}}}}",
    "layers by expressions": 'lora: {rank_pattern: {"layers\\\\.0\\\\..*q_proj": 16, down_proj: 4}}',
    "an ordinary one": "training: {epochs: 0.15}\nmechanisms: {static: {max_grad_norm: 0.2}}",
}


@pytest.mark.parametrize("case", NAMED)
def test_names_survive_dvcs_parser(case: str, tmp_path: Path) -> None:
    profile, params = tmp_path / "profile.yaml", tmp_path / "params.yaml"
    profile.write_text(NAMED[case])
    shutil.copy(PARAMS, params)
    before = yaml.safe_load(params.read_text())
    apply_overrides(params, overrides(profile))
    assert yaml.safe_load(params.read_text()) == _merged(before, yaml.safe_load(NAMED[case]), "")


@pytest.mark.parametrize("name", ["2", "0.2", "1e3"])
def test_a_name_that_is_a_number_is_refused(name: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(f"mechanisms: {{'{name}': {{like: static}}}}\nexperiment: {{mechanisms: ['{name}']}}")
    with pytest.raises(ConfigError, match=f"the name '{name}' would be read as a number or a truth.*begin it with a"):
        overrides(profile)
