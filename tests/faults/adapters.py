"""dptune.tune on a loaded model, prepared in one of a user's ways; prints the refusal and what was charged."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import peft
from transformers import AutoModelForCausalLM, AutoTokenizer

import dptune
from dptune.errors import DptuneError


def main(kind: str, folder: str, records: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    elif kind == "adalora":
        chosen = peft.AdaLoraConfig(target_modules=["c_attn"], total_step=10, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, chosen)
    elif kind == "alora":
        chosen = peft.LoraConfig(target_modules=["c_attn"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, chosen)
    with tempfile.TemporaryDirectory() as out:
        try:
            dptune.tune(model, records, epsilon=4, tokenizer=tokenizer, out=f"{out}/run", epochs=0.5, max_length=96)
            print(f"{kind}: supported")
        except DptuneError as error:
            print(f"error: {error}")
            status = 2
        else:
            status = 0
        ledger = Path(out, "run", "ledger.jsonl")
        print(f"charged={ledger.read_bytes().count(b'release') if ledger.exists() else 0}")
    sys.exit(status)


def library(kind: str, folder: str) -> None:
    """The library's train(): adapters of kinds that dptune does not attach, and a mechanism for another model."""
    import numpy as np
    import torch

    from dptune.mechanisms.registry import build, of_model
    from dptune.privacy.entropy import OsEntropy
    from dptune.training.data import PrivacyUnits, Tokens
    from dptune.training.loop import train
    from dptune.training.model import Lora, ModelSource, attach_lora, load_base
    from dptune.training.per_sample import lora_pairs
    from dptune.training.spec import RunSpec, TrainingPlan, header_of

    base = load_base(ModelSource(folder), torch.device("cpu"))
    status = 0
    with tempfile.TemporaryDirectory() as out:
        try:
            if kind in ("adalora", "alora"):
                chosen = (
                    peft.AdaLoraConfig(target_modules=["c_attn"], total_step=10, task_type="CAUSAL_LM")
                    if kind == "adalora"
                    else peft.LoraConfig(
                        target_modules=["c_attn"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"
                    )
                )
                model = peft.get_peft_model(base, chosen)
            else:
                model = attach_lora(base, Lora(rank=2, dropout=0.0), 0)
                if kind == "checkpointing":
                    model.gradient_checkpointing_enable()
            options = {"noise_multiplier": 1.0}
            if kind == "unbuilt":
                mechanism = build("static", options)
            else:
                pairs = lora_pairs(model)
                size = sum(pair.size for pair in pairs)
                mechanism = build("static", of_model("static", options, len(pairs), size))
            rows = [np.arange(5, 20, dtype=np.int32)] * 16
            units = PrivacyUnits.of("record", np.arange(16), 1)
            header = header_of(mechanism, units, OsEntropy(), delta=1e-5)
            plan = TrainingPlan(
                sample_rate=0.5, expected_batch_size=8, steps=2, learning_rate=1e-3, warmup_steps=1, checkpoint_every=1
            )
            tokens = Tokens(rows=rows, padding=0, width=24)
            spec = RunSpec(model=model, tokens=tokens, units=units, mechanism=mechanism, plan=plan, header=header)
            train(spec, Path(out, "run"), OsEntropy())
            print(f"{kind}: supported")
        except DptuneError as error:
            print(f"error: {error}")
            status = 2
        ledger = Path(out, "run", "ledger.jsonl")
        print(f"charged={ledger.read_bytes().count(b'release') if ledger.exists() else 0}")
    sys.exit(status)


if __name__ == "__main__":
    (library if sys.argv[1] == "library" else main)(*sys.argv[2 if sys.argv[1] == "library" else 1 :])
