"""Compares a profile with RLDP's paper (arXiv 2507.22565, sections 2 to 4), makes a tiny copy of it, reads the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.insert(0, "")
BASELINES = {"static", "adaclip", "autoclip_published", "dc_sgd_e", "geoclip", "psac", "dp_lora"}
SOUND = {"autoclip_published": "quantile", "rldp_published": "rldp"}
TRAINING = {
    "expected_batch_size": 16, "epochs": 3, "learning_rate": 0.0005, "warmup_steps": 100, "evaluate_every": 48,
}  # fmt: skip
ROUNDS = {0.5: 4, 2: 16, 4: 8, 5: 4, 8: 8}  # B_SAC by epsilon


def compare(profile: str, accounting: str) -> None:
    from merge import merge

    from tasks.settings.params import load_settings

    over = yaml.safe_load(Path(profile).read_text())
    made = Path("data/paper.yaml")
    made.write_text(subprocess.run(["git", "show", "HEAD:params.yaml"], capture_output=True, text=True).stdout)
    merge(Path(profile), made)
    settings = load_settings(made)
    wanted = {*BASELINES, "rldp_published"}
    agent = "rldp_published"
    if accounting == "certified":
        wanted, agent = {SOUND.get(name, name) for name in wanted}, "rldp"
    one = settings.experiment
    found = {
        "mechanisms": (set(one.mechanisms), wanted),
        "accounting": (one.accounting, accounting),
        "epsilons": (set(one.epsilons), {0.5, 2.0, 4.0, 5.0, 8.0}),
        "seeds": (len(one.seeds), 3),
        "delta": (one.delta, 1e-5),
        "source": (settings.data.source, "uci"),
        "models": (set(one.models), {"gpt2", "llama-1b", "llama-3b", "mistral-7b"}),
        "pinned": (all(re.fullmatch("[0-9a-f]{40}", model.revision or "") for model in one.models.values()), True),
        "LoRA": ((settings.lora.rank, settings.lora.alpha, settings.lora.dropout), (8, 16, 0.05)),
        "canaries": (settings.canaries.extraction, 10),
        **{name: (getattr(settings.training, name), value) for name, value in TRAINING.items()},
    }
    entry = over["mechanisms"][agent]
    found |= {
        "T_RL": (entry["interval"], 112),
        "T_RL of Mistral": (entry["on_model"]["mistral-7b"]["interval"], 96),
        "warm-up": (entry["warmup"], 50),
        "K": (entry["rounds"], 2),
        "first radius": (entry["pair_radius"], 0.1),
        "largest radius": (entry["radius_cap"], 1.0),
        "B_SAC by epsilon": (entry["batch_size"], 0),
    }
    rest = over["mechanisms"]
    found["C = 1 for every baseline"] = (
        {name: (rest[name].get("max_grad_norm") or rest[name].get("start_norm")) for name in wanted - {agent}},
        dict.fromkeys(wanted - {agent}, 1.0),
    )
    wrong = [f"{name}: {have} where the paper has {want}" for name, (have, want) in found.items() if have != want]
    rounds = {epsilon: b_sac(agent, entry, epsilon) for epsilon in ROUNDS}
    if rounds != ROUNDS:
        wrong.append(f"B_SAC: {rounds} where the paper has {ROUNDS}")
    print(f"{profile}: {len(found) + 1} points compared; mechanisms {', '.join(one.mechanisms)}")
    print(
        f"B_SAC by epsilon: {rounds}; {one.accounting} accounting; "
        f"{len(one.models)} models x {len(one.epsilons)} x 3 seeds x 8"
    )
    print("\n".join(wrong) or "all as the paper has them")
    sys.exit(1 if wrong else 0)


def b_sac(agent: str, entry: dict, epsilon: float) -> int:
    """The batch of the agent's replay that `batch_size: 0` stands for at a budget."""
    from dptune.mechanisms import rl

    return rl._PUBLISHED_BATCHES[float(epsilon)] if entry["batch_size"] == 0 else entry["batch_size"]


def tiny(profile: str, out: str) -> None:
    """The same mechanisms with the same options, but for schedules that a run of 44 steps has room for."""
    over = yaml.safe_load(Path(profile).read_text())
    mechanisms = over["mechanisms"]
    for entry in mechanisms.values():
        if "interval" in entry:
            entry.update(interval=8, warmup=8, on_model={})
            entry.pop("on_model")
    made = {
        "mechanisms": mechanisms,
        "experiment": {
            "name": "tiny-paper", "mechanisms": over["experiment"]["mechanisms"], "accounting": "published",
            "epsilons": [2], "cells_together": 8,
        },
    }  # fmt: skip
    Path(out).write_text(yaml.safe_dump(made))
    print("mechanisms:", ", ".join(over["experiment"]["mechanisms"]))


def page() -> None:
    text = Path("data/report/report.html").read_text()
    plain = re.sub(r"<[^>]+>", " ", text)
    steps = json.loads(Path("data/report/steps.json").read_text())
    print("steps.json:", json.dumps(steps)[:300])
    wrong = []
    for wanted in ("auc by mean log probability", "auc by perplexity", "share of steps"):
        heads = [head for head in re.findall(r"<th[^>]*>(.*?)</th>", text, re.S) if wanted in head.lower()]
        print(
            f"columns with {wanted!r}:",
            [re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", head)).strip() for head in heads][:4],
        )
        if not heads:
            wrong.append(f"no column {wanted}")
    for name in ("static", "adaclip", "autoclip_published", "dc_sgd_e", "geoclip", "psac", "dp_lora", "rldp_published"):
        if name not in plain:
            wrong.append(f"{name} is not on the page")
    print("\n".join(wrong) or "all there")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    {"tiny": tiny, "page": page}.get(sys.argv[1], compare)(
        *(sys.argv[2:] if sys.argv[1] in ("tiny", "page") else sys.argv[1:])
    )
