"""Cells with noise multipliers that no sane run has, started as the flow starts them."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, "")
from dptune.errors import DptuneError
from tasks.experiment.cells import grid
from tasks.settings.params import load_settings

bad = 0
for noise in (1e-8, 1e-300, 1e300):
    over = {
        "mechanisms": {"static": {"max_grad_norm": 1.0, "noise_multiplier": noise}},
        "experiment": {"epsilons": [2]},
    }
    try:
        (cell,) = grid(load_settings(Path("params.yaml"), over))
    except DptuneError as error:
        print(f"{noise}: refused in params.yaml: {error}")
        (cell,) = grid(load_settings(Path("params.yaml")))
        content = json.loads(cell.model_dump_json())
        content["options"]["noise_multiplier"] = noise
        cell = type(cell).model_validate(content)
    cell.directory.mkdir(parents=True, exist_ok=True)
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    ended = subprocess.run(
        [sys.executable, "-m", "tasks.experiment.finetune", str(cell.directory / "cell.json")],
        capture_output=True, text=True,
    )  # fmt: skip
    last = (ended.stderr.splitlines() or [""])[-1]
    print(f"{noise}: finetune ends with {ended.returncode}: {last}")
    said = last.startswith("error: ") and "Fix: " in last
    bad += "Traceback" in ended.stderr or ended.returncode not in (0, 2) or (ended.returncode == 2 and not said)
sys.exit(1 if bad else 0)
