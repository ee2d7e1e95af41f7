"""The table of families in docs/findings/models.md, measured: ``python tests/training/families_table.py --write``.

Each family is a tiny model of random weights. It goes the way of a run: default layers by PEFT's mapping, adapters, the
rehearsal; then per-sample gradients of four records are compared with a loop over them.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from test_per_sample import computed, error, looped
from tiny_families import BIDIRECTIONAL, CAUSAL, tiny
from tiny_models import records, trainable

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.models.causal import check_causal, check_configuration
from dptune.training.models.model import attach_lora

PAGE = Path(__file__).parents[2] / "docs" / "findings" / "models.md"
START, END = "<!-- families: generated -->", "<!-- families: end -->"
#: Layers to name in families where neither the default nor all-linear is right.
NAMED: dict[str, tuple[str, ...]] = {
    "bart": ("self_attn.q_proj", "self_attn.v_proj"),
    "bigbird_pegasus": ("self_attn.q_proj", "self_attn.v_proj"),
    "deepseek_v4": ("q_a_proj", "q_b_proj"),
    "falcon_mamba": ("in_proj", "x_proj"),
    "jamba": ("in_proj", "x_proj"),
    "mamba": ("in_proj", "x_proj"),
    "mbart": ("self_attn.q_proj", "self_attn.v_proj"),
    "olmoe": ("q_proj", "v_proj"),
    "phimoe": ("q_proj", "v_proj"),
    "qwen3_moe": ("q_proj", "v_proj"),
}


@dataclass(frozen=True)
class Outcome:
    """Names of adapted layers and the relative error of their gradients; or why the family is refused."""

    layers: tuple[str, ...] = ()
    error: float | None = None
    refusal: str = ""

    def __str__(self) -> str:
        return self.refusal or ", ".join(f"`{name}`" for name in self.layers)


def outcome(family: str, modules: tuple[str, ...] | str | None) -> Outcome:
    """Of the family with these layers, as a run would meet them."""
    try:
        model = attach_lora(tiny(family, **CAUSAL[family]), Lora(2, 4, 0.0, modules), 0)  # type: ignore[arg-type]
        pairs = lora_pairs(model)
        rehearse(model, pairs)
    except ConfigError as refused:
        return Outcome(refusal=_told(refused))
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = records(4)
    return Outcome(
        tuple(sorted({pair.name.rpartition(".")[2] for pair in pairs})),
        error(computed(model, tokens), looped(model, tokens)),
    )


def _told(refused: ConfigError) -> str:
    """The first sentence of the problem, without what follows the machine's rounding and PEFT's prefixes."""
    sentence = refused.problem.partition(" (relative error")[0].partition(". ")[0]
    return sentence.replace("base_model.model.", "").replace("[PEFT:PeftType.LORA] ", "")


def whole_tensors(family: str) -> bool:
    """Whether experts lie in one tensor, which no adapter of a linear layer reaches."""
    weights = tiny(family, **CAUSAL[family]).named_parameters()
    return any("experts" in name and weight.dim() == 3 for name, weight in weights)


def causal_row(family: str) -> list[str]:
    """One family: what it gets by default, what all-linear gives, and what else is to be known."""
    usual, every = outcome(family, None), outcome(family, "all-linear")
    notes = []
    if family in NAMED:
        named = outcome(family, NAMED[family])
        notes.append(f"name {', '.join(f'`{name}`' for name in NAMED[family])}: {_figure(named)}")
    if whole_tensors(family):
        notes.append("experts stay frozen: one tensor holds them all")
    known = "none known" if usual.refusal.startswith("not known") else str(usual)
    return [family, known, _figure(usual), str(every), _figure(every), "; ".join(notes)]


def _figure(found: Outcome) -> str:
    return "refused" if found.error is None else f"{found.error:.0e}"


def refused_row(family: str) -> list[str]:
    """One family that is not a causal language model: its class and the sentence that refuses it."""
    model: Any = tiny(family)
    return [family, type(model).__name__, refusal(family, model)]


def refusal(family: str, model: Any) -> str:
    """What a run says of it, without the numbers of these random weights."""
    try:
        check_configuration(family, model.config)
        check_causal(family, model)
    except ConfigError as refused:
        return refused.problem.partition(") ")[2].partition(" by ")[0]
    raise AssertionError(f"{family} is taken for a causal model")


def table() -> str:
    """Both tables, in Markdown."""
    causal = [["family", "layers by default", "error", "`all-linear`", "error", "remarks"], ["---"] * 6]
    refused = [["refused", "as", "because it"], ["---"] * 3]
    causal += [causal_row(family) for family in sorted(CAUSAL)]
    refused += [refused_row(family) for family in BIDIRECTIONAL]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in (causal, refused))


def main() -> None:
    warnings.simplefilter("ignore")
    measured = table()
    if "--write" not in sys.argv:
        print(measured)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{measured}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
