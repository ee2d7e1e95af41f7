"""Time and memory of a whole ``dptune.tune`` beside TRL's non-private ``SFTTrainer``: ``python -m benchmarks.tune``.

Both read the same file and the same folder of a small Llama-shaped model with random weights, and leave an adapter.
Every trial is a process of its own with one thread, and contenders take turns. Tables and JSON go to data/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measure import machine, quiet, status
from dptune.core.files import write_text

WIDTH, VOCABULARY, ROWS, BATCH, EPOCHS = 128, 2048, 16, 128, 2
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
PEER = "TRL"


# --------------------------------------------------------------------------------------------- what both are given


def write_model(folder: Path, width: int, layers: int) -> None:
    """A folder with random weights, and a tokenizer that knows words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *_words()]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=WIDTH,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_records(path: Path, kind: str, count: int, least: int, most: int) -> None:
    """Records of ``least`` to ``most`` words; a prompt is a third of its record."""
    chance, words = random.Random(0), _words()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            said = chance.choices(words, k=chance.randint(least, most))
            third = len(said) // 3
            pair = {"prompt": " ".join(said[:third]), "completion": " " + " ".join(said[third:])}
            file.write(json.dumps(pair if kind == "pairs" else {"text": " ".join(said)}) + "\n")


def _words() -> list[str]:
    return [f"w{number}" for number in range(VOCABULARY - 2)]


# ---------------------------------------------------------------------------------------------------- contenders


def private(folder: Path, out: Path, **settings: Any) -> None:
    """A whole run of ours."""
    import dptune

    asked = {
        "eval_share": 0.0,
        "expected_batch_size": BATCH,
        "epochs": EPOCHS,
        "physical_batch_size": ROWS,
        "max_length": WIDTH,
        **settings,
    }
    lora = {"rank": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": tuple(LORA["target_modules"])}
    records = folder / "records.jsonl"
    result = dptune.tune(str(folder / "model"), records, epsilon=4, out=out / "run", **lora, **asked)
    result.save(out / "adapter")


def plain(folder: Path, out: Path, **settings: Any) -> None:
    """The same with TRL's trainer, as its documentation shows it."""
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = load_dataset("json", data_files=str(folder / "records.jsonl"), split="train", cache_dir=str(out / "cache"))
    asked = {"gradient_checkpointing": False, **settings}
    config = SFTConfig(
        str(out / "run"),
        max_length=WIDTH,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=BATCH // ROWS,
        num_train_epochs=EPOCHS,
        learning_rate=0.02,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **asked,
    )
    lora = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **LORA)
    trainer = SFTTrainer(str(folder / "model"), args=config, train_dataset=data, peft_config=lora)
    trainer.train()
    trainer.save_model(str(out / "adapter"))


#: What is compared, by name; ``PEER`` comes first.
CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    PEER: plain,
    "TRL, padded to the width": lambda folder, out: plain(folder, out, pad_to_multiple_of=WIDTH),
    "dptune.tune": private,
    "dptune.tune, with perplexity of a held-out tenth": lambda folder, out: private(folder, out, eval_share=0.1),
    "TRL, its own gradient checkpointing": lambda folder, out: plain(folder, out, gradient_checkpointing=True),
}


# ------------------------------------------------------------------------------------------------------ one trial


def trial(name: str, folder: Path) -> dict[str, float]:
    """Wall and CPU seconds of a whole run, its peak of memory beyond the imports, and the tokens it trained on."""
    import datasets
    import peft  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401 (imports count for nobody)

    import dptune.job.run  # noqa: F401

    torch.set_num_threads(1)
    quiet()
    datasets.disable_progress_bars()
    before = status("VmRSS")
    with TemporaryDirectory() as out, _counted() as tokens:
        started, busy = time.perf_counter(), _cpu()
        CONTENDERS[name](folder, Path(out))
        wall, cpu = time.perf_counter() - started, _cpu() - busy
        if not list((Path(out) / "adapter").glob("adapter_model.safetensors")):
            raise SystemExit(f"{name} left no adapter")
    return {"wall": wall, "cpu": cpu, "memory": status("VmHWM") - before, **tokens}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def _counted() -> Iterator[dict[str, float]]:
    """Count the positions, and the tokens among them, that pass an embedding where gradients are made."""
    counts, original = {"positions": 0.0, "tokens": 0.0}, torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            counts["positions"] += ids.numel()
            counts["tokens"] += float((ids != 0).sum())
        return original(self, ids)

    torch.nn.Embedding.forward = forward
    try:
        yield counts
    finally:
        torch.nn.Embedding.forward = original


# ---------------------------------------------------------------------------------------------------- all of them


def rounds(names: list[str], folder: Path, count: int, minutes: float) -> dict[str, list[dict[str, float]]]:
    """Trials of every contender; nobody is always first. A round that does not fit into the time is not begun."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    end, longest = time.monotonic() + 60 * minutes, 0.0
    for turn in range(count):
        if time.monotonic() + longest > end:
            print(f"{turn} of {count} rounds: no time for more (--minutes)")
            break
        started, first = time.monotonic(), turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(_alone(name, folder))
            print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found[name][-1].items()), flush=True)
        longest = max(longest, time.monotonic() - started)
    return found


def _alone(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.tune", "--trial", name, "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _added(path: Path, shape: dict[str, Any], found: dict[str, list[dict[str, float]]]) -> Any:
    """The rounds of a file and these. Exits if they are of other sizes or contenders."""
    known = json.loads(path.read_text(encoding="utf-8"))
    if known["shape"] != shape or list(known["trials"]) != list(found):
        raise SystemExit(f"{path} is of other sizes or contenders")
    return {name: [*known["trials"][name], *trials] for name, trials in found.items()}


def table(found: dict[str, list[dict[str, float]]], mean_tokens: float) -> str:
    """Ratios over the peer in the same round, and what a thousand records cost; median (least to most)."""

    def each(name: str, key: str) -> list[float]:
        return [one[key] / one["tokens"] * mean_tokens * 1000 for one in found[name]]

    def over(name: str, values: Callable[[str], list[float]]) -> str:
        pairs = zip(values(name), values(PEER), strict=True)
        return _spread([ours / theirs for ours, theirs in pairs])

    columns = ["who", "CPU time / TRL", "wall time / TRL", "s of CPU a thousand records", "s of wall"]
    columns += ["positions / token", "peak MB", "memory / TRL"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name, trials in found.items():
        cpu, wall = (over(name, lambda who, key=key: each(who, key)) for key in ("cpu", "wall"))
        memory = over(name, lambda who: [one["memory"] for one in found[who]])
        peak = statistics.median(one["memory"] for one in trials)
        padded = statistics.median(one["positions"] / one["tokens"] for one in trials)
        seconds = " | ".join(f"{statistics.median(each(name, key)):.3g}" for key in ("cpu", "wall"))
        lines.append(f"| {name} | {cpu} | {wall} | {seconds} | {padded:.2f} | {peak:.0f} | {memory} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"**{statistics.median(values):.2f}** ({min(values):.2f} to {max(values):.2f})"


def main(argv: list[str] | None = None) -> None:
    """Measure all, or one trial for the process that asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="when to begin no other round")
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--least", type=int, default=WIDTH // 2, help="words of the shortest record")
    parser.add_argument("--most", type=int, default=WIDTH - 3, help=f"words of the longest, in a width of {WIDTH}")
    parser.add_argument("--kind", choices=("pairs", "text"), default="pairs")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("data/benchmarks"))
    parser.add_argument("--add", action="store_true", help="to the rounds that the output holds of the same sizes")
    parser.add_argument("--trial", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.trial:
        print(json.dumps(trial(asked.trial, asked.folder)))
        return
    with TemporaryDirectory() as made:
        folder = Path(made)
        write_model(folder / "model", asked.width, asked.layers)
        write_records(folder / "records.jsonl", asked.kind, asked.records, asked.least, asked.most)
        names = [name for name in CONTENDERS if name == PEER or name in asked.only]
        found = rounds(names, folder, asked.rounds, asked.minutes)
    if not any(found.values()):
        raise SystemExit("nothing was measured")
    shape = {key: getattr(asked, key) for key in ("kind", "records", "least", "most", "width", "layers")}
    asked.output.mkdir(parents=True, exist_ok=True)
    name = f"tune-{asked.kind}-{asked.least}-{asked.most}"
    if asked.add:
        found = _added(asked.output / f"{name}.json", shape, found)
    data = {"machine": machine(torch.device("cpu")), "shape": shape, "trials": found}
    write_text(asked.output / f"{name}.json", json.dumps(data, indent=1) + "\n")
    text = table(found, found[PEER][0]["tokens"] / (asked.records * EPOCHS))
    write_text(asked.output / f"{name}.md", text)
    print(text)


if __name__ == "__main__":
    main()
