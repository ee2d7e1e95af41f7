"""The benchmark of whole runs: both contenders train on the same tokens, and a table holds what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tune
from dptune.training.gradients.step_memory import public_widths

ONE = {"wall": 2.0, "cpu": 1.0, "memory": 100.0, "positions": 300.0, "tokens": 200.0}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_contenders_train_on_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'dptune[bench]'")
    tune.write_model(tmp_path / "model", 32, 1)
    tune.write_records(tmp_path / "records.jsonl", "pairs", 130, 8, 12)
    embedding = torch.nn.Embedding.forward
    found = {name: tune.trial(name, tmp_path) for name in (tune.PEER, "TRL, padded to the width", "dptune.tune")}
    assert torch.nn.Embedding.forward is embedding
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    words = sum(len((one["prompt"] + one["completion"]).split()) + 1 for one in records)
    assert found[tune.PEER]["tokens"] == found["TRL, padded to the width"]["tokens"] == words * tune.EPOCHS
    drawn = found["dptune.tune"]["tokens"] / (words * tune.EPOCHS)
    assert 1.3 < drawn < 1.7  # three Poisson batches of 128 where two epochs are 260: 1.48, give or take 0.01
    assert found[tune.PEER]["positions"] < found["TRL, padded to the width"]["positions"]
    narrowest = public_widths(tune.WIDTH, tune.BATCH, tune.ROWS)[-1]
    assert narrowest == 16  # of which every width is a multiple
    of_checks = found["dptune.tune"]["positions"] % (narrowest * tune.ROWS)
    assert of_checks < tune.WIDTH  # whole micro-batches, and a few positions that show the model to be causal
    assert found["dptune.tune"]["positions"] / drawn < found["TRL, padded to the width"]["positions"] / 3


def test_a_table_compares_rounds_by_what_a_token_cost() -> None:
    twice = {**ONE, "cpu": 3.0, "tokens": 400.0, "memory": 50.0}
    text = tune.table({tune.PEER: [ONE, ONE], "dptune.tune": [twice, ONE]}, mean_tokens=100.0)
    assert "| TRL | **1.00** (1.00 to 1.00) | **1.00** (1.00 to 1.00) | 500 | 1e+03 | 1.50 | 100 |" in text
    assert "| dptune.tune | **1.25** (1.00 to 1.50) | **0.75** (0.50 to 1.00) |" in text
    assert text.rstrip().endswith("| 75 | **0.75** (0.50 to 1.00) |")


def test_rounds_of_other_sizes_are_not_added(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"shape": {"records": 1}, "trials": {tune.PEER: [ONE]}}))
    assert tune._added(path, {"records": 1}, {tune.PEER: [ONE]}) == {tune.PEER: [ONE, ONE]}
    for shape, names in (({"records": 2}, [tune.PEER]), ({"records": 1}, [tune.PEER, "dptune.tune"])):
        with pytest.raises(SystemExit, match="other sizes or contenders"):
            tune._added(path, shape, {name: [ONE] for name in names})
